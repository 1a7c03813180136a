/** What `ep wqe decode` is given: bytes in hexadecimal, or the trace of a software NIC. */
import { readFileSync } from 'node:fs';
import { EpError } from '@ep/core';
import { fileError } from '../failure.js';

/** Of a file, or of standard input for `-`. */
export function readInput(path: string): string {
  try {
    return readFileSync(path === '-' ? 0 : path, 'utf8');
  } catch (error) {
    throw fileError('read', path === '-' ? 'standard input' : path, error);
  }
}

/** Digits in any grouping; `0x` before a group, offsets before a colon and commas are let through, as other tools print them. */
export function parseHex(text: string): Uint8Array {
  const digits = text
    .replace(/^\s*(?:0x)?[0-9a-f]+:\s/gim, '')
    .replace(/0x/gi, '')
    .replace(/[\s,:_]+/g, '');
  const stray = /[^0-9a-f]/i.exec(digits)?.[0];
  if (stray !== undefined) {
    throw new EpError('EP_INVALID_ARGUMENT', `expected hexadecimal digits, found ${JSON.stringify(stray)}`);
  }
  if (digits.length % 2 !== 0 || digits.length === 0) {
    const found = `${digits.length} digits`;
    throw new EpError('EP_INVALID_ARGUMENT', `expected whole bytes, two hexadecimal digits each, found ${found}`);
  }
  return Uint8Array.from(Buffer.from(digits, 'hex'));
}

/** A line of a trace. Numbers of the NIC's clock are nanoseconds. */
export interface TraceLine {
  readonly line: number;
  readonly fields: Readonly<Record<string, unknown>>;
  /** First block of a work request, where the line has one. */
  readonly wqe: Uint8Array | undefined;
}

export function parseTrace(text: string): TraceLine[] {
  return text.split('\n').flatMap((content, index) => {
    if (content.trim() === '') return [];
    const line = index + 1;
    let fields: unknown;
    try {
      fields = JSON.parse(content);
    } catch (error) {
      throw new EpError('EP_INVALID_ARGUMENT', `line ${line} is no JSON: ${(error as Error).message}`);
    }
    if (typeof fields !== 'object' || fields === null || Array.isArray(fields)) {
      throw new EpError('EP_INVALID_ARGUMENT', `line ${line}: expected an object of a trace`);
    }
    const { wqe } = fields as { readonly wqe?: unknown };
    if (wqe !== undefined && typeof wqe !== 'string') {
      throw new EpError('EP_INVALID_ARGUMENT', `line ${line}: expected wqe in hexadecimal, found ${typeof wqe}`);
    }
    return [{ line, fields: fields as Record<string, unknown>, wqe: wqe === undefined ? undefined : parseHex(wqe) }];
  });
}
