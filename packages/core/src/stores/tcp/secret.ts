/**
 * The opening of a connection whose ends share a job secret, before PyTorch's protocol begins. Either proves to the other that it has it, the client
 * first, for two fresh nonces:
 *
 *     client   HELLO, magic, nonce of 32 bytes          server   CHALLENGE, nonce of 32 bytes, or NO_SECRET
 *     client   32 bytes of proof                        server   WELCOME, 32 bytes of proof, or WRONG
 *
 * A client that begins as PyTorch's do where a secret is asked for gets REFUSAL in place of the echo of its ping: ours knows it, torch's warns of an
 * invalid value, 1062424645, at each of its attempts. What follows the opening is neither encrypted nor authenticated.
 */
import { createHmac, randomBytes, timingSafeEqual } from 'node:crypto';
import { EpError } from '../../errors.js';
import { type ByteQueue, malformed, type Parsing, readU8, readU32 } from './bytes.js';
import type { ReplyReader } from './replies.js';

/** No request of PyTorch's begins so. */
export const HELLO = 101;
/** "EPS1": bumped with the form of the opening. */
const MAGIC = 0x31535045;
/** "EPS?" */
export const REFUSAL = 0x3f535045;

const ANSWER = { challenge: 1, noSecret: 2, welcome: 3, wrong: 4 } as const;

export const NONCE_BYTES = 32;
const PROOF_BYTES = 32;

/** What makes a server ask for the secret. */
export interface Gate {
  readonly key: Uint8Array;
  readonly nonce: () => Buffer;
}

export const gateOf = (key: Uint8Array): Gate => ({ key, nonce: () => randomBytes(NONCE_BYTES) });

/** HAZARD: the sides' proofs differ, or a client could be answered with its own. */
export function proofOf(key: Uint8Array, side: 'client' | 'server', nonces: readonly Uint8Array[]): Buffer {
  const mac = createHmac('sha256', key).update(`store ${side}\0`);
  for (const nonce of nonces) mac.update(nonce);
  return mac.digest();
}

function* readBytes(queue: ByteQueue, count: number): Parsing<Buffer> {
  while (queue.length < count) yield;
  return queue.take(count);
}

export const secretError = (what: string): EpError<'EP_SECRET'> => new EpError('EP_SECRET', what);

const u32 = (value: number): Buffer => {
  const bytes = Buffer.allocUnsafe(4);
  bytes.writeUInt32LE(value);
  return bytes;
};

/** The server's half. Returns when the client may validate; `EP_SECRET`, after an answer that says so, for one that may not. */
export function* admit(
  queue: ByteQueue,
  gate: Gate | undefined,
  send: (parts: readonly Uint8Array[]) => void,
): Parsing<void> {
  while (queue.length < 1) yield;
  if (queue.first !== HELLO) {
    if (gate === undefined) return;
    send([u32(REFUSAL)]);
    throw secretError("it began without the job secret, as PyTorch's clients do and ours without EP_JOB_SECRET");
  }
  queue.takeU8();
  const magic = yield* readU32(queue);
  if (magic !== MAGIC) throw malformed(`an opening of version ${magic.toString(16)}, expected ${MAGIC.toString(16)}`);
  const theirs = yield* readBytes(queue, NONCE_BYTES);
  if (gate === undefined) {
    send([Buffer.from([ANSWER.noSecret])]);
    throw secretError('it asked for a job secret, and this server has none');
  }
  const nonces = [theirs, gate.nonce()];
  send([Buffer.from([ANSWER.challenge]), nonces[1]!]);
  const proof = yield* readBytes(queue, PROOF_BYTES);
  if (!timingSafeEqual(proof, proofOf(gate.key, 'client', nonces))) {
    send([Buffer.from([ANSWER.wrong])]);
    throw secretError('it has another job secret');
  }
  send([Buffer.from([ANSWER.welcome]), proofOf(gate.key, 'server', nonces)]);
}

/** The client's half: what to send first, what then to read and send, and what to read at the end. */
export function openingOf(
  key: Uint8Array,
  nonce: Buffer = randomBytes(NONCE_BYTES),
): {
  readonly hello: Buffer;
  readonly challenge: ReplyReader<Buffer>;
  readonly welcome: ReplyReader<void>;
} {
  const nonces: Uint8Array[] = [nonce];
  return {
    hello: Buffer.concat([Buffer.from([HELLO]), u32(MAGIC), nonce]),
    *challenge(queue) {
      const answer = yield* readU8(queue);
      if (answer === ANSWER.noSecret)
        throw secretError(
          'it has no job secret, this side has one: give it the same EP_JOB_SECRET, or this side "none"',
        );
      if (answer !== ANSWER.challenge) throw malformed(`the answer to a hello is ${answer}, expected a challenge`);
      nonces[1] = yield* readBytes(queue, NONCE_BYTES);
      return proofOf(key, 'client', nonces);
    },
    *welcome(queue) {
      const answer = yield* readU8(queue);
      if (answer === ANSWER.wrong) throw secretError('it has another job secret');
      if (answer !== ANSWER.welcome) throw malformed(`the answer to a proof is ${answer}, expected a welcome`);
      const proof = yield* readBytes(queue, PROOF_BYTES);
      if (!timingSafeEqual(proof, proofOf(key, 'server', nonces)))
        throw secretError('it took our proof and has none of its own: it does not know the job secret');
    },
  };
}
