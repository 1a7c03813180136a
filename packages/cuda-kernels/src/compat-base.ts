/** What per-token dispatchers of all devices share: what ranks agree on, one call at a time behind a barrier, and no way back from a failure. */
import {
  checkInteger,
  checkTimeout,
  defaultTimeoutMs,
  EpError,
  isEpError,
  linkSignals,
  Resource,
  type WaitOptions,
} from '@ep/core';
import { type CompatPlan, type CompatRoute, codeOfStatus, type Outcome } from '@ep/native';
import { digest } from '@ep/plan';
import type { Agreement } from './agreement.js';
import { type PartSpec, rowBytesOf } from './binding-spec.js';
import { checkObject, checkParts, checkSizedParts } from './check-spec.js';
import { checkCompatParts, gradientMetadata, sendMetadata, sendReplicas } from './compat-metadata.js';
import { refusal } from './difference.js';
import type { DispatchTransport } from './dispatcher-base.js';
import { roundToPage } from './layout.js';
import { checkRunOptions, type DispatcherOptions, type RunOptions } from './options.js';

export interface CompatSizes {
  /** Bytes of the send and of the receive buffer of queries, outputs and gradients: `compatBytesFor`. The same on all ranks. */
  readonly queryBytes: number;
  /** The same for key-value rows. 0 unless given: calls without them. */
  readonly keyValueBytes?: number;
}

/** Sizes in whole pages. Buffers lie first in symmetric memory: of queries to send, to receive, then those of key-values. */
export interface ResolvedCompat {
  readonly queryBytes: number;
  readonly keyValueBytes: number;
  /** Of all buffers. */
  readonly byteLength: number;
  /** Of all counters, which lie first, too: of queries by source rank, then of key-values. */
  readonly signalSlots: number;
  readonly timeoutMs: number;
  /** What must be the same on all ranks. */
  readonly identity: readonly string[];
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveCompat(
  options: CompatSizes & Pick<DispatcherOptions, 'timeoutMs'>,
  worldSize: number,
  where: string,
): ResolvedCompat {
  checkObject(options, 'options', 'an object with queryBytes', where);
  const given: CompatSizes & Pick<DispatcherOptions, 'timeoutMs'> = options;
  const queryBytes = roundToPage(checkInteger(given.queryBytes, 'queryBytes', where));
  const keyValueBytes = roundToPage(checkInteger(given.keyValueBytes ?? 0, 'keyValueBytes', where));
  return {
    queryBytes,
    keyValueBytes,
    byteLength: 2 * (queryBytes + keyValueBytes),
    signalSlots: 2 * worldSize,
    timeoutMs: checkTimeout(given.timeoutMs ?? defaultTimeoutMs(), where),
    identity: [`queryBytes is ${queryBytes}`, `keyValueBytes is ${keyValueBytes}`],
  };
}

/** One tensor of a dispatch at this rank. */
export interface CompatPart {
  readonly spec: PartSpec;
  readonly sendRows: number;
  readonly receiveRows: number;
  readonly route: CompatRoute;
}

/** A dispatch at this rank, in the shapes that the kernel takes. */
export interface CompatSpec {
  /** Queries, then key-values; or one tensor. */
  readonly parts: readonly CompatPart[];
  readonly shards: Pick<CompatPlan, 'seqLen' | 'gradient'>;
}

/** What is there for each part, by the names that the addon has for them. */
export const byRole = <T>([query, keyValue]: readonly T[]): { readonly query: T; readonly keyValue?: T } => ({
  query: query!,
  ...(keyValue === undefined ? {} : { keyValue }),
});

/** A call that nothing speaks against any more. */
export interface CompatCall<Result> {
  /** Once all ranks have come. Negative: no deadline. */
  readonly launch: (timeoutMs: number, signal: AbortSignal) => Promise<Outcome>;
  readonly result: Result;
}

export interface CompatInit {
  readonly transport: DispatchTransport;
  readonly agreement: Agreement;
  readonly resolved: ResolvedCompat;
}

const mostOf = (rows: Int32Array): number => rows.reduce((most, count) => Math.max(most, count), 0);
const bufferBytesOf = (spec: PartSpec): number =>
  Math.max(mostOf(spec.plan.sendTokens), mostOf(spec.plan.recvTokens)) * rowBytesOf(spec);

/** Bytes that calls of these parts need of `queryBytes` and `keyValueBytes`. */
export function compatBytesFor(parts: readonly PartSpec[]): {
  readonly queryBytes: number;
  readonly keyValueBytes: number;
} {
  checkSizedParts(parts, ['sendTokens', 'recvTokens'], 'compatBytesFor');
  const [query, keyValue] = parts;
  return {
    queryBytes: query === undefined ? 0 : bufferBytesOf(query),
    keyValueBytes: keyValue === undefined ? 0 : bufferBytesOf(keyValue),
  };
}

/** `Bound`: a dispatch that all ranks have agreed on. */
export abstract class CompatBase<Bound> extends Resource {
  readonly #init: CompatInit;
  #busy = false;
  #poison: { readonly reason: unknown } | undefined;

  protected constructor(init: CompatInit, label: string) {
    super(label);
    this.#init = init;
  }

  /** Makes a dispatch of what all ranks have bound. */
  protected abstract bound(name: string, spec: CompatSpec): Bound;

  /** Collective, as `Dispatcher.bind`: a dispatch is a query part, or a query and a key-value part, or a gradient. */
  async bind<const K extends string>(
    specs: Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions = {},
  ): Promise<Record<K, Bound>> {
    return this.guard('bind', async () => {
      checkRunOptions(options, 'bind');
      this.#checkUsable();
      let bound: (readonly [name: string, spec: CompatSpec, dispatch: Bound])[] = [];
      let refused: { readonly reason: unknown } | undefined;
      try {
        checkObject(specs, 'specs', 'an object with a list of parts for each dispatch', 'bind');
        bound = Object.entries<readonly PartSpec[]>(specs).map(([name, parts]) => {
          const spec = this.#bindParts(name, parts);
          return [name, spec, this.bound(name, spec)];
        });
      } catch (reason) {
        refused = { reason };
      }
      const lines = refused ? refusal(refused.reason) : bound.flatMap(([name, spec]) => identityOf(name, spec));
      try {
        await this.#agree('bind', lines, options);
      } catch (error) {
        if (refused === undefined) throw error;
      }
      // Where all ranks refuse alike there is no mismatch.
      if (refused !== undefined) throw refused.reason;
      return Object.fromEntries(bound.map(([name, , dispatch]) => [name, dispatch])) as Record<K, Bound>;
    });
  }

  /** Collective. `prepare` refuses what is wrong with this rank's arguments, before the others count on it. */
  protected async call<Result>(name: string, options: RunOptions, prepare: () => CompatCall<Result>): Promise<Result> {
    const letGo = this.hold(name);
    try {
      this.#checkUsable();
      if (this.#busy) throw new EpError('EP_BUSY', `${name}: a compat dispatcher runs one call at a time`);
      checkRunOptions(options, name);
      options.signal?.throwIfAborted();
      const { launch, result } = prepare();
      this.#busy = true;
      await this.#launch(name, options, launch);
      return result;
    } finally {
      letGo();
    }
  }

  /** The barrier that each call needs, too: nobody passes it before all ranks are here. */
  async #agree(where: string, lines: readonly string[], options: WaitOptions): Promise<void> {
    const linked = linkSignals(options.signal, this.closing);
    try {
      const wait = { timeoutMs: this.#init.resolved.timeoutMs, ...options, signal: linked.signal };
      await this.#init.agreement.same(`compat ${where}`, lines, wait);
    } catch (reason) {
      if (!isEpError(reason) || reason.code !== 'EP_MISMATCH') this.#poison ??= { reason };
      throw reason;
    } finally {
      linked.unlink();
    }
  }

  #checkUsable(): void {
    if (this.#poison === undefined) return;
    const { reason } = this.#poison;
    const text = reason instanceof Error ? reason.message : String(reason);
    throw new EpError(
      'EP_POISONED',
      `an earlier compat call failed (${text}): it cannot resync, close it and open another on all ranks`,
      { cause: reason },
    );
  }

  #bindParts(name: string, parts: readonly PartSpec[]): CompatSpec {
    const { transport, resolved } = this.#init;
    const { rank, worldSize } = transport;
    checkParts(parts, worldSize, `bind ${name}`);
    checkCompatParts(parts);
    const first = parts[0]!.plan;
    const sent = parts.map(({ plan }) => sendMetadata(plan, rank));
    const places = [
      ['queryBytes', 0],
      ['keyValueBytes', 2 * resolved.queryBytes],
    ] as const;
    return {
      shards: {
        seqLen: sent[0]!.seqLen,
        ...(first.kind === 'rev-kv'
          ? { gradient: { ...gradientMetadata(first, rank), replicas: first.replicas } }
          : {}),
      },
      parts: parts.map((spec, i) => {
        const needed = bufferBytesOf(spec);
        const [knob, sendOffset] = places[i]!;
        const available = resolved[knob];
        if (needed > available) {
          throw new EpError(
            'EP_CAPACITY',
            `bind ${name}: ${spec.name} needs buffers of ${needed} bytes, this compat dispatcher has ${available} (${knob})`,
            { context: { needed, available } },
          );
        }
        const rowBytes = rowBytesOf(spec);
        const { dstRank, dstRow, counts } = sent[i]!;
        return {
          spec,
          sendRows: spec.plan.sendTokens[rank]!,
          receiveRows: spec.plan.recvTokens[rank]!,
          route: {
            rowBytes,
            sendOffset,
            recvOffset: sendOffset + available,
            recvRows: Math.floor(available / rowBytes),
            signalSlot: i * worldSize,
            replicas: sendReplicas(spec.plan),
            dstRank,
            dstRow,
            counts,
          },
        };
      }),
    };
  }

  async #launch(name: string, options: RunOptions, launch: CompatCall<unknown>['launch']): Promise<void> {
    const { signal, timeoutMs = this.#init.resolved.timeoutMs } = options;
    const linked = linkSignals(signal, this.closing);
    try {
      await this.#agree(name, [], { timeoutMs, ...(signal ? { signal } : {}) });
      const outcome = await launch(Number.isFinite(timeoutMs) ? timeoutMs : -1, linked.signal);
      if (outcome.status !== 0) throw callError(name, outcome);
    } catch (reason) {
      this.#poison ??= { reason };
      throw reason;
    } finally {
      linked.unlink();
      this.#busy = false;
    }
  }
}

function callError(name: string, { status, rank, expected, found, message }: Outcome): EpError {
  const text = message ?? `compat waited for rank ${rank}: expected exactly ${expected} rows, found ${found}`;
  return new EpError(codeOfStatus(status), `${name}: ${text}`, { context: { rank, expected, found } });
}

function identityOf(name: string, { parts }: CompatSpec): string[] {
  return parts.map(
    ({ spec }) =>
      `${name}: ${spec.name} is ${spec.dtype} [${spec.rowShape.join(', ')}] by ${spec.plan.kind} ${digest(spec.plan)}`,
  );
}

/** Throws `EP_UNSUPPORTED` for rows with gaps between them. */
export function checkPacked({ spec, sendRows, route }: CompatPart, strideBytes: number): void {
  if (sendRows <= 1 || strideBytes === route.rowBytes) return;
  throw new EpError(
    'EP_UNSUPPORTED',
    `compat: source ${spec.name}: expected packed rows of ${route.rowBytes} bytes, found rows ${strideBytes} bytes apart; openDispatcher and openDeviceDispatcher read them in place`,
  );
}
