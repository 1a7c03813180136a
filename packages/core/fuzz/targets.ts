/** Everything of @ep/core that reads what others wrote: a store's file, other ranks' messages, the environment, callers' tensors. */
import { join } from 'node:path';
import { bytesTarget, type FuzzSuite, textTarget } from '@ep/fuzz';
import { decode, isDType } from '../src/dtype.js';
import { debugs, defaultTimeoutMs, readLaunchEnv } from '../src/env.js';
import { EpError, isEpError } from '../src/errors.js';
import { formatVerdict, parseVerdict } from '../src/exchange.js';
import { compareFacts, parseFacts } from '../src/rendezvous.js';
import { parseRendezvousUrl } from '../src/rendezvous-url.js';
import { resolveJobSecret } from '../src/secret.js';
import { formatRecord, parseLine } from '../src/stores/log.js';
import { entryBytes, Replica } from '../src/stores/replica.js';
import { ByteQueue } from '../src/stores/tcp/bytes.js';
import {
  checkReply,
  deletedReply,
  integerReply,
  pingReply,
  type ReplyReader,
  stringReply,
  stringsReply,
  waitReply,
} from '../src/stores/tcp/replies.js';
import { type Gate, openingOf, proofOf } from '../src/stores/tcp/secret.js';
import { Session, StoreState } from '../src/stores/tcp/session.js';
import { byteRange, rowLayout, tensor, toContiguous } from '../src/tensor.js';

const refusedWith =
  (...codes: readonly string[]) =>
  (error: unknown): boolean =>
    isEpError(error) && codes.includes(error.code);

const sameBytes = (a: Uint8Array, b: Uint8Array): boolean => Buffer.compare(a, b) === 0;

function parsed(text: string): Readonly<Record<string, unknown>> {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    value = undefined;
  }
  if (typeof value === 'object' && value !== null) return value as Record<string, unknown>;
  throw new EpError('EP_INVALID_ARGUMENT', 'the fuzz input is no JSON object');
}

/** Small, so that inputs reach them. */
const TCP_LIMITS = {
  stringBytes: 4096,
  items: 64,
  requestBytes: 8192,
  storeBytes: 32_768,
  connections: 1,
  unreadBytes: 1 << 20,
  stallMs: 1000,
};

/** What a server answers to bytes that come in pieces, up to where it drops the connection; and why it did. */
function serve(bytes: Buffer, size: number, gate?: Gate): { readonly answers: string; readonly error?: unknown } {
  const state = new StoreState(TCP_LIMITS, gate);
  const answers: Uint8Array[] = [];
  const session = new Session(state, { send: (parts) => answers.push(...parts), blocked: () => false });
  let error: unknown;
  try {
    for (let at = 0; at < bytes.length; at += size) session.receive(bytes.subarray(at, at + size));
  } catch (thrown) {
    error = thrown;
  }
  session.end();
  if (session.waiting) throw new Error('a session that ended still waits');
  if (state.map.byteLength + state.queuedBytes > TCP_LIMITS.storeBytes)
    throw new Error('the server holds more than it may');
  let held = 0;
  for (const key of state.map.keys()) held += entryBytes(key, state.map.get(key)!);
  if (held !== state.map.byteLength) throw new Error('the server lost count of what it holds');
  return { answers: Buffer.concat(answers).toString('hex'), error };
}

/** With nonces that do not change, so that inputs can hold good proofs: those of GATE for a nonce of sevens. */
const GATE: Gate = { key: Buffer.alloc(32, 5), nonce: () => Buffer.alloc(32, 9) };
const CLIENT_NONCE = Buffer.alloc(32, 7);

/** Where a server's opening ends with 32 zeros, its proof: mutations of the rest stay good ones. */
function withProof(bytes: Buffer): Buffer {
  if (bytes.length < 66 || bytes.subarray(34, 66).some((byte) => byte !== 0)) return bytes;
  const proof = proofOf(GATE.key, 'server', [CLIENT_NONCE, bytes.subarray(1, 33)]);
  return Buffer.concat([bytes.subarray(0, 34), proof, bytes.subarray(66)]);
}

/** What a client with the job secret makes of a server's bytes. */
function introduce(bytes: Buffer, size: number): { readonly sent: string; readonly error?: unknown } {
  const { challenge, welcome } = openingOf(GATE.key, CLIENT_NONCE);
  const queue = new ByteQueue();
  let sent = '';
  function* both(): Generator<void, boolean, void> {
    sent = (yield* challenge(queue)).toString('hex');
    yield* welcome(queue);
    return true;
  }
  const opening = both();
  try {
    for (let at = 0; at < bytes.length; at += size) {
      queue.push(bytes.subarray(at, at + size));
      if (opening.next().done === true) return { sent: `${sent}, welcome` };
    }
    throw new EpError('EP_TRANSPORT_FAILED', 'the bytes end before the opening does');
  } catch (error) {
    return { sent, error };
  }
}

const REPLIES: readonly ReplyReader<unknown>[] = [
  stringReply,
  integerReply,
  stringsReply(2),
  checkReply,
  deletedReply,
  pingReply(0x3c2a),
  waitReply({ cancelled: false }),
  waitReply({ cancelled: true }),
];

/** What a client makes of a server's bytes: the first says how many replies it awaits, the next of which kinds. */
function hear(bytes: Buffer, size: number): { readonly values: string; readonly error?: unknown } {
  const expected = (bytes[0] ?? 0) % 16;
  const readers = [...bytes.subarray(1, 1 + expected)].map((kind) => REPLIES[kind % REPLIES.length]!);
  const queue = new ByteQueue();
  const values: unknown[] = [];
  const pending = readers.map((read) => read(queue));
  const show = (): string => JSON.stringify(values, (_, value) => (typeof value === 'bigint' ? `${value}n` : value));
  try {
    for (let at = 1 + expected; at < bytes.length; at += size) {
      queue.push(bytes.subarray(at, at + size));
      for (let first = pending[0]; first !== undefined; first = pending[0]) {
        const step = first.next();
        if (step.done !== true) break;
        values.push(step.value);
        pending.shift();
      }
    }
    if (pending.length === 0 && queue.length > 0)
      throw new EpError('EP_TRANSPORT_FAILED', 'bytes that nobody asked for');
    return { values: show() };
  } catch (error) {
    return { values: show(), error };
  }
}

/** What `decode` takes. */
const FLOATS: readonly string[] = ['f64', 'f32', 'f16', 'bf16', 'f8e4m3', 'f8e5m2', 'ue8m0'];

/** No tensor of the fuzzer has more elements: it is looking for slips, not for memory. */
const MOST_ELEMENTS = 4096;

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    bytesTarget('file-store', refusedWith('EP_INVALID_ARGUMENT'), (bytes) => {
      const replica = new Replica();
      let known = 0;
      for (const line of bytes.toString('utf8').split('\n')) {
        const record = parseLine(line, 'file');
        if (record === undefined) continue;
        known++;
        const again = parseLine(formatRecord(record).toString('utf8').trim(), 'file');
        if (JSON.stringify(again) !== JSON.stringify(record))
          throw new Error('a record does not survive writing and reading');
        replica.apply(record.operation);
      }
      if (replica.size > known) throw new Error('the store holds more keys than there were records');
    }),
    bytesTarget('tcp-server', refusedWith('EP_TRANSPORT_FAILED'), (bytes) => {
      const whole = serve(bytes, bytes.length + 1);
      const pieces = serve(bytes, 1);
      if (whole.answers !== pieces.answers || String(whole.error) !== String(pieces.error))
        throw new Error('the answers depend on how the bytes came');
      if (whole.error !== undefined) throw whole.error;
    }),
    bytesTarget('tcp-secret-server', refusedWith('EP_TRANSPORT_FAILED', 'EP_SECRET'), (bytes) => {
      const whole = serve(bytes, bytes.length + 1, GATE);
      const pieces = serve(bytes, 1, GATE);
      if (whole.answers !== pieces.answers || String(whole.error) !== String(pieces.error))
        throw new Error('the answers depend on how the bytes came');
      // A challenge, a refusal or one byte: whoever gets more has proved that it knows the secret.
      const [hello, proof] = [bytes.subarray(0, 37), bytes.subarray(37, 69)];
      const admitted = proof.equals(proofOf(GATE.key, 'client', [hello.subarray(5), GATE.nonce()]));
      if (!admitted && whole.answers.length > 2 * (33 + 1)) throw new Error('a stranger was served');
      if (whole.error !== undefined) throw whole.error;
    }),
    bytesTarget('tcp-secret-client', refusedWith('EP_TRANSPORT_FAILED', 'EP_SECRET'), (input) => {
      const bytes = withProof(input);
      const whole = introduce(bytes, bytes.length + 1);
      const pieces = introduce(bytes, 1);
      if (whole.sent !== pieces.sent || String(whole.error) !== String(pieces.error))
        throw new Error('the opening depends on how the bytes came');
      if (whole.error !== undefined) throw whole.error;
    }),
    bytesTarget('tcp-client', refusedWith('EP_TRANSPORT_FAILED'), (bytes) => {
      const whole = hear(bytes, bytes.length + 1);
      const pieces = hear(bytes, 1);
      if (whole.values !== pieces.values || String(whole.error) !== String(pieces.error))
        throw new Error('the replies depend on how the bytes came');
      if (whole.error !== undefined) throw whole.error;
    }),
    bytesTarget('verdict', refusedWith('EP_RENDEZVOUS'), (bytes) => {
      const verdict = parseVerdict(bytes);
      const again = parseVerdict(formatVerdict(verdict));
      if ('parts' in verdict) {
        const same = 'parts' in again && again.parts.every((part, i) => sameBytes(part, verdict.parts[i]!));
        if (!same) throw new Error('parts do not survive writing and reading');
      } else if (JSON.stringify(again) !== JSON.stringify(verdict)) {
        throw new Error('a failure does not survive writing and reading');
      }
    }),
    textTarget('facts', refusedWith('EP_RENDEZVOUS'), (text) => {
      const peers = text.split('\n').flatMap((line, rank) => {
        const facts = parseFacts(Buffer.from(line));
        return facts === undefined ? [] : [{ rank, ...facts }];
      });
      compareFacts(peers);
      const tables = new Set(peers.map(({ agree }) => JSON.stringify(Object.entries(agree).sort())));
      if (tables.size > 1) throw new Error('facts that differ were taken for the same');
    }),
    textTarget('environment', refusedWith('EP_INVALID_ARGUMENT'), (text) => {
      const env = Object.fromEntries(
        text.split('\n').map((line) => [line.split('=', 1)[0]!, line.slice(line.indexOf('=') + 1)]),
      );
      debugs('leaks', env);
      if (env.EP_JOB_SECRET_FILE === undefined) resolveJobSecret(undefined, env);
      if (!(defaultTimeoutMs(env) > 0)) throw new Error('a timeout of nothing');
      const { rank, worldSize, localRank, localWorldSize, store } = readLaunchEnv(env);
      if (!(rank >= 0 && rank < worldSize)) throw new Error('a rank outside of the world');
      if (localRank !== undefined && localRank >= (localWorldSize ?? worldSize))
        throw new Error('a local rank outside of the host');
      if (store.kind === 'tcp' && !(store.port >= 1 && store.port <= 65535)) throw new Error('a port that is none');
    }),
    textTarget('rendezvous-url', refusedWith('EP_INVALID_ARGUMENT'), (text) => {
      const env = { RANK: '1', WORLD_SIZE: '2', MASTER_ADDR: 'host', MASTER_PORT: '1' };
      const { rank, worldSize, store } = parseRendezvousUrl(text.trimEnd(), { env });
      if (!(rank >= 0 && rank < worldSize)) throw new Error('a rank outside of the world');
      if (store.kind === 'tcp' && (store.host === '' || !(store.port >= 1 && store.port <= 65535)))
        throw new Error('an address that is none');
      if (store.kind === 'file' && !store.path.startsWith('/')) throw new Error('a path that is not absolute');
    }),
    textTarget('tensor', refusedWith('EP_INVALID_ARGUMENT', 'EP_CAPACITY', 'EP_MEMORY_LIMIT'), (text) => {
      const { dtype, shape, strides, length } = parsed(text);
      // Absent data is allocated: only where the shape is small, or no shape at all.
      const product = Array.isArray(shape) ? shape.reduce((a: number, b: unknown) => a * Number(b), 1) : 0;
      const given = typeof length === 'number' && length >= 0 && length <= MOST_ELEMENTS;
      if (!given && (strides !== undefined || !(product <= MOST_ELEMENTS)))
        throw new EpError('EP_CAPACITY', 'too large for the fuzzer');
      const data = given && isDType(dtype) ? tensor(dtype, [Math.floor(length)]).data : undefined;
      const made = tensor(
        dtype as 'f32',
        shape as number[],
        data as Float32Array | undefined,
        strides as number[] | undefined,
      );
      const { byteOffset, byteLength } = byteRange(made);
      if (byteOffset + byteLength > made.data.buffer.byteLength)
        throw new Error('a tensor that reaches beyond its data');
      if (product > MOST_ELEMENTS) return;
      const packed = toContiguous(made);
      if (packed.data.length !== product) throw new Error('packing changed the number of elements');
      const layout = rowLayout(made);
      if (
        layout !== undefined &&
        product > 0 &&
        (layout.rows - 1) * layout.strideBytes + layout.rowBytes > Math.max(byteLength, layout.rowBytes)
      )
        throw new Error('rows that reach beyond the tensor');
      if (FLOATS.includes(made.dtype)) decode(made.dtype, packed.data);
    }),
  ],
};
