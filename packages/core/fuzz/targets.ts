/** Everything of @ep/core that reads what others wrote: a store's file, other ranks' messages, the environment, callers' tensors. */
import { join } from 'node:path';
import { bytesTarget, type FuzzSuite, textTarget } from '@ep/fuzz';
import { decode, isDType } from '../src/dtype.js';
import { debugs, defaultTimeoutMs, readLaunchEnv } from '../src/env.js';
import { EpError, isEpError } from '../src/errors.js';
import { formatVerdict, parseVerdict } from '../src/exchange.js';
import { compareFacts, parseFacts } from '../src/rendezvous.js';
import { formatRecord, parseLine } from '../src/stores/log.js';
import { Replica } from '../src/stores/replica.js';
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
      if (!(defaultTimeoutMs(env) > 0)) throw new Error('a timeout of nothing');
      const { rank, worldSize, localRank, localWorldSize, store } = readLaunchEnv(env);
      if (!(rank >= 0 && rank < worldSize)) throw new Error('a rank outside of the world');
      if (localRank !== undefined && localRank >= (localWorldSize ?? worldSize))
        throw new Error('a local rank outside of the host');
      if (store.kind === 'tcp' && !(store.port >= 1 && store.port <= 65535)) throw new Error('a port that is none');
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
