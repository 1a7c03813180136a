/** One error class, one table: `code` is the API. */

/** The largest thing that the failure destroyed, and so what the caller must rebuild. */
export type Scope = 'call' | 'operation' | 'endpoint' | 'transport' | 'process';

/** code -> scope, meaning, what the caller does. docs/errors.md is generated from this table. */
export const ERROR_TABLE = {
  EP_INVALID_ARGUMENT: {
    scope: 'call',
    meaning: 'an argument is outside of what the call documents; nothing was changed',
    remedy: 'correct the call',
  },
  EP_CLOSED: { scope: 'call', meaning: 'the object was closed before the call', remedy: 'open a new one' },
  EP_DETACHED: {
    scope: 'call',
    meaning: 'a JS buffer was detached, transferred or resized before or while it was used',
    remedy: 'keep the buffer unchanged until the operation ends',
  },
  EP_UNSUPPORTED: {
    scope: 'call',
    meaning: 'this transport, backing or build does not offer the operation',
    remedy: 'the message names an alternative; `offers()` tells beforehand',
  },
  EP_BUSY: {
    scope: 'call',
    meaning: 'a queue, pool or lease is full: back-pressure, not failure',
    remedy: 'await outstanding work or release a lease, then call again',
  },
  EP_CAPACITY: {
    scope: 'call',
    meaning: 'the work is larger than the buffers or limits that it was given; nothing was written',
    remedy: 'use the sizes that the message and `sizes()` give',
  },
  EP_INVALID_PLAN: {
    scope: 'call',
    meaning: 'a plan breaks one of its invariants; the message names which, where, expected and found',
    remedy: 'build the plan again; do not edit plans',
  },
  EP_PLAN_VERSION: {
    scope: 'call',
    meaning: 'the plan was made by another version',
    remedy: 'plan again with this version',
  },
  EP_MEMORY_LIMIT: {
    scope: 'call',
    meaning: 'the allocation does not fit MemAvailable, the cgroup or RLIMIT_AS; nothing was allocated',
    remedy: 'ask for less, or raise the limit that the message names',
  },
  EP_TIMEOUT: {
    scope: 'operation',
    meaning: 'a deadline passed; the message names who was awaited and what had arrived',
    remedy: 'find out what the named ranks do; then resync() or retry',
  },
  EP_ABORTED: {
    scope: 'operation',
    meaning:
      "the operation was cut off by close() or by another failure; a caller's own abort rejects with its reason instead",
    remedy: 'see `cause`',
  },
  EP_POISONED: {
    scope: 'operation',
    meaning: 'an earlier call of this object failed, so its counters are no longer agreed between ranks',
    remedy: 'all ranks call resync(), or close it',
  },
  EP_MISMATCH: {
    scope: 'operation',
    meaning: 'ranks called the same collective operation with different arguments; the message names the odd ranks',
    remedy: 'make the ranks agree',
  },
  EP_NOT_READY: {
    scope: 'call',
    meaning:
      'nobody is there yet: in a place of a transport, or among those who wait to be taken into a group; nothing was changed',
    remedy: 'let ranks in first (readmit(), recoverRanks()); peerState() tells when they wait in joinGroup()',
  },
  EP_EVICTED: {
    scope: 'operation',
    meaning: 'the other ranks of a group took this one out and go on without it',
    remedy: 'joinGroup() once they are to take it in again, or close the group',
  },
  EP_REMOTE_ACCESS: { scope: 'endpoint', meaning: 'the peer refused an access', remedy: 'reconnect the endpoint' },
  EP_PEER_LOST: {
    scope: 'endpoint',
    meaning: 'a peer died or closed; the message names it and what was awaited from it',
    remedy: 'go on without it or start it again',
  },
  EP_RENDEZVOUS: {
    scope: 'transport',
    meaning:
      'ranks could not agree at set-up (version, ABI, configuration, missing rank); the message names the odd one out',
    remedy: 'make the named rank run the same version and configuration',
  },
  EP_SECRET: {
    scope: 'transport',
    meaning: 'the two sides do not share one job secret, or there is none where other hosts can take part',
    remedy: 'give all ranks the same EP_JOB_SECRET; `none` switches it off by name',
  },
  EP_TRANSPORT_FAILED: {
    scope: 'transport',
    meaning: 'the transport can no longer move data',
    remedy: 'close and open it again',
  },
  EP_UNAVAILABLE: {
    scope: 'transport',
    meaning: 'the backing is not available on this machine',
    remedy: '`ep doctor` says what is missing',
  },
  EP_NATIVE_LOAD: {
    scope: 'process',
    meaning: 'the native addon could not be loaded; `context.attempts` has every path and error',
    remedy: 'the message lists remedies',
  },
  EP_ABI_MISMATCH: {
    scope: 'process',
    meaning: 'JS, addon or a device handle were built from different ABI versions; the message names both',
    remedy: 'install matching versions of all @ep packages',
  },
  EP_SYSTEM: {
    scope: 'process',
    meaning: 'a system call failed; the message names it and its errno',
    remedy: 'see the named errno',
  },
} as const satisfies Record<string, { readonly scope: Scope; readonly meaning: string; readonly remedy: string }>;

export type EpCode = keyof typeof ERROR_TABLE;
export type ErrorContext = Readonly<Record<string, unknown>>;

/** What native code reported, kept as it was. */
export interface NativeStatus {
  readonly status: number;
  readonly name: string;
  readonly errno?: number;
}

const BRAND = Symbol.for('@ep/error');

/** `scope` comes from the table; `context` holds the numbers and names of the message as data. */
export class EpError<C extends EpCode = EpCode> extends Error {
  override readonly name = 'EpError';
  readonly code: C;
  readonly scope: Scope;
  readonly context: ErrorContext;
  readonly native?: NativeStatus;

  constructor(
    code: C,
    message: string,
    options: { readonly context?: ErrorContext; readonly cause?: unknown; readonly native?: NativeStatus } = {},
  ) {
    super(message, 'cause' in options ? { cause: options.cause } : undefined);
    this.code = code;
    this.scope = ERROR_TABLE[code].scope;
    this.context = options.context ?? {};
    if (options.native) this.native = options.native;
    Object.defineProperty(this, BRAND, { value: true });
  }
}

/** True for errors of any copy of @ep/core and of @ep/plan (which has no dependencies): they share a brand, not a class. */
export function isEpError(error: unknown): error is EpError {
  return typeof error === 'object' && error !== null && (error as Record<PropertyKey, unknown>)[BRAND] === true;
}

/** A short rendering of an offending value: never its whole content. */
function describe(value: unknown): string {
  if (typeof value === 'string') return JSON.stringify(value.length > 80 ? `${value.slice(0, 80)}…` : value);
  if (typeof value === 'bigint') return `${value}n`;
  if (typeof value === 'function') return 'a function';
  if (typeof value !== 'object' || value === null) return String(value);
  if (ArrayBuffer.isView(value)) return `${value.constructor.name} of ${value.byteLength} bytes`;
  if (Array.isArray(value)) {
    const items = value.slice(0, 8).map((item) => (typeof item === 'object' ? '…' : describe(item)));
    return `[${items.join(', ')}${value.length > 8 ? `, … ${value.length} in all` : ''}]`;
  }
  return `an object of ${value.constructor?.name ?? 'no class'}`;
}

/** The one form of argument errors: `<where>: <what> must be <expected>, found <found>`. */
export function invalid(
  what: string,
  details: { readonly where: string; readonly expected: string; readonly found: unknown },
): EpError<'EP_INVALID_ARGUMENT'> {
  const found = describe(details.found);
  return new EpError('EP_INVALID_ARGUMENT', `${details.where}: ${what} must be ${details.expected}, found ${found}`, {
    context: { where: details.where, what, expected: details.expected, found },
  });
}

/** Returns `value` if it is a safe integer in `min..max` (both included), else throws `EP_INVALID_ARGUMENT`. */
export function checkInteger(
  value: unknown,
  what: string,
  where: string,
  min = 0,
  max: number = Number.MAX_SAFE_INTEGER,
): number {
  if (typeof value === 'number' && Number.isSafeInteger(value) && value >= min && value <= max) return value;
  const expected =
    max === Number.MAX_SAFE_INTEGER ? `a safe integer of at least ${min}` : `an integer from ${min} to ${max}`;
  throw invalid(what, { where, expected, found: value });
}

/** Throws `EP_INVALID_ARGUMENT` unless it is an object; an array is none. */
export function checkObject(value: unknown, what: string, expected: string, where: string): void {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw invalid(what, { where, expected, found: value });
  }
}
