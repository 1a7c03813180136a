/** One rank of ours in the benchmark of collectives; started by ours.ts. */
import { createHash } from 'node:crypto';
import { createConnection } from 'node:net';
import { createInterface } from 'node:readline';
import { openFileStore, type Store, type Tensor, tensor } from '@ep/core';
import { type CollectiveWork, initProcessGroup, type ProcessGroup } from '../src/index.js';
import { Copies } from './copies.js';
import { NativeLoop } from './native-loop.js';
import type { RankTask } from './ours.js';
import {
  expectation,
  fillInput,
  isInPlace,
  mostCallsInPlace,
  poison,
  resultLength,
  type Shape,
  sampleStep,
  type Values,
} from './pattern.js';
import { type BenchDType, type Command, parseCommand, type Run, type Target } from './protocol.js';

const task = JSON.parse(process.argv[2]!) as RankTask;
const { rank, size, timeoutMs } = task;

type Memory = 'group' | 'typed';

/** Two buffers of the largest size, of which calls use the beginning. */
class Room {
  readonly #of: (bytes: number) => Float32Array;
  #made: readonly [Float32Array, Float32Array] | undefined;
  /** The target whose values lie in the buffers, and how many calls have been made on them. */
  filled = '';
  callsMade = 0;

  constructor(of: (bytes: number) => Float32Array) {
    this.#of = of;
  }

  values(dtype: BenchDType, which: 0 | 1, length: number): Values {
    this.#made ??= [this.#of(task.mostBytes), this.#of(task.mostBytes)];
    const { buffer, byteOffset } = this.#made[which];
    return dtype === 'f32' ? new Float32Array(buffer, byteOffset, length) : new Uint16Array(buffer, byteOffset, length);
  }
}

/** A target with everything at hand that calls need, so that the rows that are timed consist of calls. */
interface Bound {
  readonly key: string;
  readonly shape: Shape;
  readonly room: Room;
  readonly input: Values;
  readonly result: Values;
  readonly step: number;
  readonly call: () => CollectiveWork;
  readonly compare: (result: Values, step: number, callsInPlace: number) => void;
}

const operandOf = (dtype: BenchDType, data: Values): Tensor | Float32Array =>
  data instanceof Float32Array ? data : tensor(dtype, [data.length], data);

class Rank {
  readonly #group: ProcessGroup;
  readonly #rooms: Readonly<Record<Memory, Room>>;
  readonly #mostCalls = mostCallsInPlace(size);
  readonly #store: Store;
  #copies: Copies | undefined;
  #loop: NativeLoop | undefined;
  #bound: Bound | undefined;

  constructor(group: ProcessGroup, store: Store) {
    this.#group = group;
    this.#store = store;
    this.#rooms = {
      group: new Room((bytes) => group.allocate('f32', bytes / 4).data),
      typed: new Room((bytes) => new Float32Array(bytes / 4)),
    };
  }

  async obey(command: Command): Promise<readonly (string | number)[]> {
    const { verb, variant, elements } = command;
    if (variant === 'copy' || variant === 'copy-non-temporal') {
      return verb === 'run' ? this.#runCopies(command) : [];
    }
    if (variant === 'native' || variant === 'exchange')
      return this.#runNative(verb === 'run' ? command : { ...command, ...NATIVE_CHECK });
    if (verb === 'bitwise') return this.#digests(command);
    if (verb === 'run') return this.#run(command);
    return command.op === 'barrier' ? this.#checkBarrier(elements) : this.#check(command);
  }

  close(): void {
    this.#loop?.close();
    this.#copies?.close();
  }

  #bind({ variant, op, dtype, elements }: Target): Bound {
    const memory: Memory = variant === 'typed' ? 'typed' : 'group';
    const key = `${memory} ${op} ${dtype} ${elements}`;
    if (this.#bound?.key === key) return this.#bound;
    const shape: Shape = { op, dtype, elements, rank, size };
    const room = this.#rooms[memory];
    const length = resultLength(shape);
    const input = room.values(dtype, 0, elements);
    const result = isInPlace(op) ? input : room.values(dtype, 1, length);
    const bound = {
      key,
      shape,
      room,
      input,
      result,
      step: sampleStep(shape),
      call: this.#caller(shape, input, result),
      compare: expectation(shape),
    };
    this.#bound = bound;
    return bound;
  }

  #caller({ op, dtype, elements }: Shape, input: Values, result: Values): () => CollectiveWork {
    const group = this.#group;
    const from = operandOf(dtype, input);
    const to = operandOf(dtype, result);
    switch (op) {
      case 'all-reduce':
        return () => group.allReduce(from, { op: 'sum' });
      case 'broadcast':
        return () => group.broadcast(from, { root: 0 });
      case 'all-gather': {
        const block = operandOf(dtype, input.subarray(0, elements / size) as Values);
        return () => group.allGatherIntoTensor(to, block);
      }
      case 'reduce-scatter':
        return () => group.reduceScatterTensor(to, from, { op: 'sum' });
      case 'all-to-all':
        return () => group.allToAllSingle(to, from);
      case 'barrier':
        return () => group.barrier();
    }
  }

  /** Values to start from, and elements of the result that only a call can make right. */
  #prepare({ key, shape, room, input, result }: Bound, calls: number, poisonStep: number): void {
    const grows = shape.op === 'all-reduce';
    if (room.filled !== key || (grows && room.callsMade + calls > this.#mostCalls)) {
      fillInput(input, shape);
      room.filled = key;
      room.callsMade = 0;
    }
    room.callsMade += calls;
    if (!grows && !(shape.op === 'broadcast' && rank === 0)) poison(result, shape, poisonStep);
  }

  async #run(command: Run): Promise<readonly number[]> {
    const bound = this.#bind(command);
    const { variant, calls, warm, batches } = command;
    const took: number[] = [];
    for (let batch = -warm; batch < batches; batch++) {
      this.#prepare(bound, calls, bound.step);
      await this.#group.barrier();
      const nanoseconds = await (variant === 'awaited' ? awaitedCalls : inlineCalls)(bound.call, calls);
      // HAZARD: where ranks share a core, one that compares keeps it from another whose row has not ended: each single call seemed to take as long as that, 1 ms.
      await this.#group.barrier();
      bound.compare(bound.result, bound.step, bound.room.callsMade);
      if (batch >= 0) took.push(nanoseconds);
    }
    return took;
  }

  /** Every element of the last timed call, then of one more call whose result was overwritten throughout. */
  async #check(target: Target): Promise<readonly number[]> {
    const bound = this.#bind(target);
    if (bound.room.filled === bound.key) bound.compare(bound.result, 1, bound.room.callsMade);
    bound.room.filled = '';
    this.#prepare(bound, 1, 1);
    await this.#group.barrier();
    await bound.call();
    bound.compare(bound.result, 1, bound.room.callsMade);
    return [];
  }

  /** When this rank came to each barrier and when it left, by the clock that all processes of a machine share. */
  async #checkBarrier(rounds: number): Promise<readonly number[]> {
    const times: number[] = [];
    for (let round = 0; round < rounds; round++) {
      const late = performance.now() + 0.1 * ((rank + round) % size);
      while (performance.now() < late);
      times.push(Number(process.hrtime.bigint()));
      await this.#group.barrier();
      times.push(Number(process.hrtime.bigint()));
    }
    return times;
  }

  /** The loop checks its own sums. */
  async #runNative(command: Run): Promise<readonly number[]> {
    this.#loop ??= await NativeLoop.open(this.#store, rank, size, timeoutMs);
    const took: number[] = [];
    for (let batch = -command.warm; batch < command.batches; batch++) {
      await this.#group.barrier();
      const nanoseconds = this.#loop.row(command);
      if (batch >= 0) took.push(nanoseconds);
    }
    return took;
  }

  async #runCopies({ variant, elements, calls, warm, batches }: Run): Promise<readonly number[]> {
    const bytes = 4 * elements;
    this.#copies ??= new Copies(task.mostBytes);
    const copies = this.#copies;
    copies.renew(bytes);
    const took: number[] = [];
    for (let batch = -warm; batch < batches; batch++) {
      await this.#group.barrier();
      const begin = performance.now();
      for (let i = 0; i < calls; i++) await copies.copy(bytes, variant === 'copy-non-temporal');
      if (batch >= 0) took.push((performance.now() - begin) * 1e6);
    }
    copies.check(bytes);
    return took;
  }

  /** Digests of the first elements of the sum, and of all of them. */
  async #digests({ variant, elements }: Target): Promise<readonly string[]> {
    const room = this.#rooms[variant === 'typed' ? 'typed' : 'group'];
    room.filled = '';
    const data = room.values('f32', 0, elements) as Float32Array;
    for (let i = 0; i < elements; i++) data[i] = scattered(i);
    await this.#group.allReduce(data, { op: 'sum' });
    return [data.subarray(0, FIRST), data].map((part) => createHash('sha256').update(part).digest('hex'));
  }
}

const FIRST = 1000;
const NATIVE_CHECK = { calls: 100, warm: 0, batches: 1 } as const;

/** Floats of both signs and many exponents, other ones on every rank: their sum depends on the order. */
function scattered(i: number): number {
  let bits = Math.imul(i + 1, 0x9e3779b1) ^ Math.imul(rank + 1, 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 15), 0x2c1b3c6d);
  bits ^= bits >>> 12;
  return (bits / 2 ** 31) * 2 ** ((bits & 31) - 16);
}

/** Awaits only what has not ended when its call returns. Nanoseconds of all calls. */
async function inlineCalls(call: () => CollectiveWork, calls: number): Promise<number> {
  const begin = performance.now();
  for (let i = 0; i < calls; i++) {
    const work = call();
    if (work.status !== 'done') await work;
  }
  return (performance.now() - begin) * 1e6;
}

async function awaitedCalls(call: () => CollectiveWork, calls: number): Promise<number> {
  const begin = performance.now();
  for (let i = 0; i < calls; i++) await call();
  return (performance.now() - begin) * 1e6;
}

const store = await openFileStore(task.store);
const group = await initProcessGroup({ backend: 'shm', store, rank, worldSize: size, timeoutMs });
const me = new Rank(group, store);
await group.barrier();

const socket = createConnection(task.socketPath);
// Without the benchmark there is nothing to do, and the other ranks end alike: nothing that this one would have to close in order.
socket.on('close', () => process.exit(1));
socket.write(`rank ${rank}\n`);
const onEnd = async (): Promise<void> => {
  socket.removeAllListeners('close');
  socket.destroy();
  me.close();
  await group.destroy();
  await store.close();
};
createInterface({ input: socket }).on('line', (line) => {
  if (line === 'end') return void onEnd();
  const answer = me.obey(parseCommand(line)).then(
    (words) => ['ok', ...words].join(' '),
    (error: unknown) => `failed ${(error instanceof Error ? error.message : String(error)).replaceAll('\n', ' ')}`,
  );
  void answer.then((text) => socket.write(`${text}\n`));
});
