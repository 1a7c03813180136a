/** What a client reads: one reader for each kind of reply. All throw `EP_TRANSPORT_FAILED` for what no server sends. */

import { type Budget, type ByteQueue, malformed, type Parsing, readI64, readString, readU8, readU32 } from './bytes.js';
import { REFUSAL, secretError } from './secret.js';

export type ReplyReader<T> = (queue: ByteQueue) => Parsing<T>;

/** A server that took appends may hold more than it takes in one request. */
const MOST_REPLY_BYTES = 2 ** 30;

const budget = (): Budget => ({ stringBytes: MOST_REPLY_BYTES, items: 0, bytes: MOST_REPLY_BYTES });

export const stringReply: ReplyReader<Buffer> = (queue) => readString(queue, budget());

export const integerReply: ReplyReader<bigint> = readI64;

export function stringsReply(count: number): ReplyReader<readonly Buffer[]> {
  return function* (queue) {
    const limit = budget();
    const values: Buffer[] = [];
    while (values.length < count) values.push(yield* readString(queue, limit));
    return values;
  };
}

/** True: all there. */
export const checkReply: ReplyReader<boolean> = function* (queue) {
  const answer = yield* readU8(queue);
  if (answer > 1) throw malformed(`the answer to a check is ${answer}, expected 0 or 1`);
  return answer === 0;
};

export const deletedReply: ReplyReader<boolean> = function* (queue) {
  const answer = yield* readI64(queue);
  if (answer !== 0n && answer !== 1n) throw malformed(`the answer to a delete is ${answer}, expected 0 or 1`);
  return answer === 1n;
};

export function pingReply(nonce: number): ReplyReader<void> {
  return function* (queue) {
    const found = yield* readU32(queue);
    if (found === REFUSAL) throw secretError('it asks for the job secret, and this side has none: set EP_JOB_SECRET');
    if (found !== nonce) throw malformed(`the answer to ping ${nonce} is ${found}`);
  };
}

/** `cancelled` is set when a cancel was sent: from then on the server has one answer to that too. */
export function waitReply(state: { readonly cancelled: boolean }): ReplyReader<'arrived' | 'cancelled'> {
  return function* (queue) {
    const first = yield* readU8(queue);
    if (first === 1 && state.cancelled) return 'cancelled';
    if (first !== 0) throw malformed(`the answer to a wait is ${first}, expected 0`);
    if (!state.cancelled) return 'arrived';
    // The keys came while the cancel was on its way; its own answer follows.
    const second = yield* readU8(queue);
    if (second !== 1) throw malformed(`the answer to a cancelled wait is ${second}, expected 1`);
    return 'arrived';
  };
}
