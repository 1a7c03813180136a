/** What a world and its ranks say to each other. */
import { inspect } from 'node:util';
import { isEpError } from '@ep/core';
import type { Mode } from '../cases/case.js';

/** An export of a module, found again in another thread or process. `module` is a file URL. */
export interface Named {
  readonly module: string;
  readonly name: string;
}

/** The export; `name` may be a path into it. */
export async function resolveNamed({ module, name }: Named): Promise<unknown> {
  let value: unknown = await import(module);
  for (const key of name.split('.')) {
    value = (value as Readonly<Record<string, unknown>> | undefined)?.[key];
    if (value === undefined) throw new Error(`${module} exports no ${name}`);
  }
  return value;
}

export interface CaseOrder {
  readonly suite: Named;
  readonly id: string;
  readonly provider: Named;
  readonly config: object;
  readonly otherConfig?: object;
  /** File of the case's own store. */
  readonly storePath: string;
  readonly limitMs: number;
  readonly seed: number;
}

export interface RankIdentity {
  readonly rank: number;
  readonly worldSize: number;
  readonly mode: Mode;
}

export interface ToRank {
  readonly kind: 'run';
  readonly order: CaseOrder;
}

export interface SentError {
  readonly name: string;
  readonly message: string;
  readonly code?: string;
  /** Rendered: it may hold anything. */
  readonly context?: string;
  readonly stack?: string;
  readonly cause?: SentError;
}

export type FromRank =
  | { readonly kind: 'ready' }
  | { readonly kind: 'report'; readonly text: string }
  | { readonly kind: 'die' }
  | { readonly kind: 'ended'; readonly error?: SentError };

/** Errors cross as plain data: a structured clone of an Error keeps neither code nor context. */
export function sendError(error: unknown, depth = 0): SentError {
  if (!(error instanceof Error)) return { name: 'thrown value', message: inspect(error) };
  return {
    name: error.name,
    message: error.message,
    ...(isEpError(error) ? { code: error.code, context: inspect(error.context, { depth: 4 }) } : {}),
    ...(error.stack === undefined ? {} : { stack: error.stack }),
    ...(error.cause === undefined || depth >= 4 ? {} : { cause: sendError(error.cause, depth + 1) }),
  };
}

export function showError(error: SentError): string {
  const lines = [error.stack ?? `${error.name}: ${error.message}`];
  if (error.code !== undefined) lines.push(`code ${error.code}, context ${error.context}`);
  if (error.cause !== undefined) lines.push(`caused by ${showError(error.cause)}`);
  return lines.join('\n');
}
