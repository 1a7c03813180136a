/**
 * Messages of PyTorch's TCPStore, as torch 2.13 sends them: a code, then integers in little-endian order and strings of u64 length + bytes. Neither
 * requests nor replies carry an identity: replies come in the order of the requests, and some requests have none.
 */
import {
  type Budget,
  type ByteQueue,
  malformed,
  type Parsing,
  readCount,
  readI64,
  readString,
  readU8,
  readU32,
} from './bytes.js';

export const CODE = {
  validate: 0,
  set: 1,
  compareSet: 2,
  get: 3,
  add: 4,
  check: 5,
  wait: 6,
  numKeys: 7,
  delete: 8,
  append: 9,
  multiGet: 10,
  multiSet: 11,
  cancelWait: 12,
  ping: 13,
  queuePush: 14,
  queuePop: 15,
  queueLength: 16,
  listKeys: 17,
  barrier: 18,
} as const;

/** What a client opens with, after the code of validate. */
export const MAGIC = 0x3c85f7ce;

/** Counts the clients that joined with a world size. The one key without a slash in front. */
export const JOIN_KEY = 'init/';

/** What torch's servers (libuv) take at most: longer strings and lists are not sent. */
export const MOST_STRING_BYTES = 8 * 2 ** 20;
export const MOST_ITEMS = 131_072;

/** Keys are bytes on the wire and latin1 strings in the server: one character for each byte. */
export type WireKey = string;

export type Request =
  | { readonly kind: 'validate'; readonly magic: number }
  | { readonly kind: 'ping'; readonly nonce: number }
  | { readonly kind: 'set' | 'append' | 'queuePush'; readonly key: WireKey; readonly value: Buffer }
  | { readonly kind: 'compareSet'; readonly key: WireKey; readonly expected: Buffer; readonly desired: Buffer }
  | { readonly kind: 'get' | 'delete' | 'queuePop' | 'queueLength'; readonly key: WireKey }
  | { readonly kind: 'add'; readonly key: WireKey; readonly delta: bigint }
  | { readonly kind: 'barrier'; readonly key: WireKey; readonly worldSize: bigint }
  | { readonly kind: 'check' | 'wait' | 'multiGet'; readonly keys: readonly WireKey[] }
  | { readonly kind: 'multiSet'; readonly entries: readonly (readonly [WireKey, Buffer])[] }
  | { readonly kind: 'numKeys' | 'cancelWait' | 'listKeys' };

const kinds = new Map(Object.entries(CODE).map(([kind, code]) => [code as number, kind as keyof typeof CODE]));

function* readKey(queue: ByteQueue, budget: Budget): Parsing<WireKey> {
  return (yield* readString(queue, budget)).toString('latin1');
}

/** One request. Throws `EP_TRANSPORT_FAILED` for what is none. */
export function* readRequest(queue: ByteQueue, budget: Budget): Parsing<Request> {
  const code = yield* readU8(queue);
  const kind = kinds.get(code);
  switch (kind) {
    case 'validate':
      return { kind, magic: yield* readU32(queue) };
    case 'ping':
      return { kind, nonce: yield* readU32(queue) };
    case 'set':
    case 'append':
    case 'queuePush':
      return { kind, key: yield* readKey(queue, budget), value: yield* readString(queue, budget) };
    case 'compareSet': {
      const key = yield* readKey(queue, budget);
      return { kind, key, expected: yield* readString(queue, budget), desired: yield* readString(queue, budget) };
    }
    case 'get':
    case 'delete':
    case 'queuePop':
    case 'queueLength':
      return { kind, key: yield* readKey(queue, budget) };
    case 'add':
      return { kind, key: yield* readKey(queue, budget), delta: yield* readI64(queue) };
    case 'barrier':
      return { kind, key: yield* readKey(queue, budget), worldSize: yield* readI64(queue) };
    case 'check':
    case 'wait':
    case 'multiGet': {
      const keys: WireKey[] = [];
      for (let left = yield* readCount(queue, budget); left > 0; left--) keys.push(yield* readKey(queue, budget));
      return { kind, keys };
    }
    case 'multiSet': {
      const entries: (readonly [WireKey, Buffer])[] = [];
      for (let left = yield* readCount(queue, budget); left > 0; left--)
        entries.push([yield* readKey(queue, budget), yield* readString(queue, budget)]);
      return { kind, entries };
    }
    case 'numKeys':
    case 'cancelWait':
    case 'listKeys':
      return { kind };
    case undefined:
      throw malformed(`request code ${code} is unknown`);
  }
}

const u8 = (value: number): Buffer => Buffer.from([value]);

export function u32(value: number): Buffer {
  const bytes = Buffer.allocUnsafe(4);
  bytes.writeUInt32LE(value);
  return bytes;
}

export function i64(value: bigint): Buffer {
  const bytes = Buffer.allocUnsafe(8);
  bytes.writeBigInt64LE(value);
  return bytes;
}

const count = (value: number): Buffer => i64(BigInt(value));

/** A string in parts: the value itself is not copied. */
export const stringParts = (value: Uint8Array): readonly Uint8Array[] => [count(value.byteLength), value];
export const listParts = (values: readonly Uint8Array[]): readonly Uint8Array[] => [
  count(values.length),
  ...values.flatMap(stringParts),
];

const keyParts = (key: WireKey): readonly Uint8Array[] => stringParts(Buffer.from(key, 'latin1'));

/** The bytes of a request, in parts. */
export function requestParts(request: Request): readonly Uint8Array[] {
  const code = u8(CODE[request.kind]);
  switch (request.kind) {
    case 'validate':
      return [code, u32(request.magic)];
    case 'ping':
      return [code, u32(request.nonce)];
    case 'set':
    case 'append':
    case 'queuePush':
      return [code, ...keyParts(request.key), ...stringParts(request.value)];
    case 'compareSet':
      return [code, ...keyParts(request.key), ...stringParts(request.expected), ...stringParts(request.desired)];
    case 'get':
    case 'delete':
    case 'queuePop':
    case 'queueLength':
      return [code, ...keyParts(request.key)];
    case 'add':
      return [code, ...keyParts(request.key), i64(request.delta)];
    case 'barrier':
      return [code, ...keyParts(request.key), i64(request.worldSize)];
    case 'check':
    case 'wait':
    case 'multiGet':
      return [code, count(request.keys.length), ...request.keys.flatMap(keyParts)];
    case 'multiSet': {
      const entries = request.entries.flatMap(([key, value]) => [...keyParts(key), ...stringParts(value)]);
      return [code, count(request.entries.length), ...entries];
    }
    case 'numKeys':
    case 'cancelWait':
    case 'listKeys':
      return [code];
  }
}
