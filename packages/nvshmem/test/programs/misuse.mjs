/** Calls every public function with each argument replaced by each of the odd values: an EpError, or a value where it is a valid one. */
import assert from 'node:assert/strict';
import { isEpError } from '@ep/core';
import { shmemInit, shmemOn } from '@ep/nvshmem';
import { runRank } from './rank.mjs';

const detached = new Uint32Array(4);
structuredClone(detached.buffer, { transfer: [detached.buffer] });

const ODD = {
  null: null,
  undefined: undefined,
  object: {},
  list: ['list'],
  function: () => {},
  symbol: Symbol('odd'),
  true: true,
  NaN: Number.NaN,
  Infinity: Number.POSITIVE_INFINITY,
  '-1': -1,
  1.5: 1.5,
  '2**53': 2 ** 53,
  '2n**64n': 2n ** 64n,
  99: 99,
  text: 'x',
  detached,
  'Object.prototype name': 'constructor',
};
const ODD_OPTIONS = {
  'signal {}': { signal: {} },
  'signal 5': { signal: 5 },
  'timeoutMs NaN': { timeoutMs: Number.NaN },
  'timeoutMs text': { timeoutMs: 'x' },
  'timeoutMs -1': { timeoutMs: -1 },
  'timeoutMs null': { timeoutMs: null },
  'timeoutMs 2**60': { timeoutMs: 2 ** 60 },
  'peers 5': { peers: 5 },
  'peers null': { peers: null },
  'peers [99]': { peers: [99] },
  'peers [text]': { peers: ['x'] },
};

/** What may be accepted, by the kind of argument; everything else must be refused. */
const ACCEPTED = {
  symmetric: [],
  local: [],
  pe: [],
  index: ['undefined', '99'],
  count: ['99'],
  stride: ['99'],
  word: ['-1', '99'],
  word64: ['-1', '99'],
  number: ['NaN', 'Infinity', '-1', '1.5', '2**53', '99'],
  dtype: [],
  team: [],
  cmp: [],
  operation: [],
  // A bag of options that holds none of them says nothing.
  options: ['null', 'undefined', 'object', 'list', 'detached', 'timeoutMs null', 'timeoutMs 2**60', 'peers null'],
  selection: Object.keys(ODD),
  end: ['undefined', '99'],
  word64orNumber: ['99'],
  slot: [],
  signal: ['undefined'],
  putOptions: [...Object.keys(ODD), ...Object.keys(ODD_OPTIONS).filter((label) => !label.startsWith('signal'))],
  start: [],
  list: [],
  bytes: ['99'],
};

/** Whether the calls refuse what they must, one function after the other; collects what they did otherwise. */
class Misuse {
  wrong = [];
  calls = 0;

  async call(name, body, kinds, args) {
    for (const [at, kind] of kinds.entries()) {
      const odd = kind.toLowerCase().includes('options') ? { ...ODD, ...ODD_OPTIONS } : ODD;
      for (const [label, value] of Object.entries(odd)) {
        const given = args();
        given[at] = value;
        await this.#one(`${name}(argument ${at}, a ${kind}: ${label})`, () => body(...given), {
          accepted: ACCEPTED[kind].includes(label),
        });
      }
    }
    await this.#one(`${name}()`, () => body(), {
      accepted: kinds.every((kind) => ACCEPTED[kind].includes('undefined')),
    });
    // Still good, or the calls above proved nothing.
    await body(...args());
  }

  async #one(what, body, { accepted }) {
    this.calls++;
    let timer;
    const late = new Promise((resolve) => {
      timer = setTimeout(() => resolve('hangs'), 10_000);
    });
    const outcome = await Promise.race([
      (async () => body())().then(
        () => 'accepted',
        (error) => error,
      ),
      late,
    ]);
    clearTimeout(timer);
    if (outcome === 'hangs' || (outcome === 'accepted' && !accepted)) this.wrong.push(`${what}: ${outcome}`);
    else if (outcome !== 'accepted') {
      const fine = isEpError(outcome) && (outcome.code !== 'EP_SYSTEM' || accepted) && /^[a-z]/.test(outcome.message);
      if (!fine) this.wrong.push(`${what}: ${outcome?.stack?.split('\n').slice(0, 3).join(' ') ?? outcome}`);
      else if (
        !['EP_INVALID_ARGUMENT', 'EP_CAPACITY', 'EP_DETACHED', 'EP_MEMORY_LIMIT', 'EP_TIMEOUT'].includes(outcome.code)
      )
        this.wrong.push(`${what}: ${outcome.code} ${outcome.message}`);
    }
  }
}

await runRank(async (member) => {
  const shmem = await shmemInit(member, { heapBytes: 1 << 20, timeoutMs: 100 });
  const u32 = await shmem.calloc('u32', 128);
  const i64 = await shmem.calloc('i64', 128);
  const u64 = await shmem.calloc('u64', 128);
  const f32 = await shmem.calloc('f32', 128);
  const other = await shmem.calloc('u32', 128);
  const team = shmem.teamWorld;
  const misuse = new Misuse();
  const local = () => new Uint32Array(4);
  const bind =
    (name) =>
    (...args) =>
      shmem[name](...args);
  const covered = new Set();
  const call = async (names, kinds, args) => {
    for (const name of names.split(' ')) {
      covered.add(name);
      await misuse.call(name, bind(name), kinds, args);
    }
  };

  await call('put putNbi', ['symmetric', 'local', 'pe'], () => [u32, local(), 0]);
  await call('get getNbi', ['local', 'symmetric', 'pe'], () => [new Uint32Array(128), u32, 0]);
  await call('iput', ['symmetric', 'local', 'stride', 'stride', 'count', 'pe'], () => [
    u32,
    new Uint32Array(128),
    1,
    1,
    1,
    0,
  ]);
  await call('iget', ['local', 'symmetric', 'stride', 'stride', 'count', 'pe'], () => [
    new Uint32Array(128),
    u32,
    1,
    1,
    1,
    0,
  ]);
  await call('p', ['symmetric', 'number', 'pe', 'index'], () => [u32, 1, 0, 0]);
  await call('g', ['symmetric', 'pe', 'index'], () => [u32, 0, 0]);
  await call('ptr', ['symmetric', 'pe'], () => [u32, 0]);
  await call('peAccessible', ['pe'], () => [0]);
  await call('putSignal putSignalNbi', ['symmetric', 'local', 'symmetric', 'word64', 'operation', 'pe'], () => [
    u32,
    local(),
    u64,
    1n,
    'add',
    0,
  ]);
  await call('atomicFetch', ['symmetric', 'pe', 'index'], () => [u32, 0, 0]);
  await call('atomicInc atomicFetchInc', ['symmetric', 'pe', 'index'], () => [u32, 0, 0]);
  for (const array of [u32, i64]) {
    await call(
      'atomicSet atomicSwap atomicAdd atomicFetchAdd atomicAnd atomicFetchAnd atomicOr atomicFetchOr atomicXor atomicFetchXor',
      ['symmetric', 'word', 'pe', 'index'],
      () => [array, 1, 0, 0],
    );
    await call('atomicCompareSwap', ['symmetric', 'word', 'word', 'pe', 'index'], () => [array, 1, 1, 0, 0]);
  }
  await call('atomicSet atomicSwap', ['symmetric', 'number', 'pe', 'index'], () => [f32, 1, 0, 0]);

  await call('malloc calloc', ['dtype', 'count', 'options'], () => ['u8', 8, undefined]);
  await call('align', ['bytes', 'dtype', 'count', 'options'], () => [64, 'u8', 8, undefined]);
  covered.add('free');
  for (const [label, value] of Object.entries(ODD)) {
    await assert.rejects(async () => shmem.free(value), isEpError, `free(${label})`);
  }

  u32.local.fill(0);
  u64.local.fill(0n);
  await call('waitUntil waitUntilAll waitUntilAny waitUntilSome', ['symmetric', 'cmp', 'word', 'options'], () => [
    u32,
    'ge',
    0,
    undefined,
  ]);
  await call(
    'waitUntilAllVector waitUntilAnyVector waitUntilSomeVector',
    ['symmetric', 'cmp', 'word', 'options'],
    () => [u32, 'ge', new Uint32Array(128), undefined],
  );
  await call('test testAll testAny testSome', ['symmetric', 'cmp', 'word'], () => [u32, 'ge', 0]);
  await call('testAllVector testAnyVector testSomeVector', ['symmetric', 'cmp', 'word', 'selection'], () => [
    u32,
    'ge',
    new Uint32Array(128),
    undefined,
  ]);
  await call('signalWaitUntil', ['symmetric', 'cmp', 'word64', 'options'], () => [u64, 'ge', 0n, undefined]);
  await call('signalFetch', ['symmetric'], () => [u64]);

  await call('barrierAll syncAll finalizeNot'.replace(' finalizeNot', ''), ['options'], () => [undefined]);
  await call('sync', ['team', 'options'], () => [team, undefined]);
  await call('broadcast', ['team', 'symmetric', 'symmetric', 'count', 'pe', 'options'], () => [
    team,
    u32,
    other,
    1,
    0,
    undefined,
  ]);
  await call(
    'fcollect collect alltoall sumReduce prodReduce minReduce maxReduce andReduce orReduce xorReduce',
    ['team', 'symmetric', 'symmetric', 'count', 'options'],
    () => [team, u32, other, 1, undefined],
  );
  await call('alltoalls', ['team', 'symmetric', 'symmetric', 'stride', 'stride', 'count', 'options'], () => [
    team,
    u32,
    other,
    1,
    1,
    1,
    undefined,
  ]);

  const context = team.createContext();
  await misuse.call('context put', context.put, ['symmetric', 'local', 'pe'], () => [u32, local(), 0]);
  await misuse.call('context g', context.g, ['symmetric', 'pe', 'index'], () => [u32, 0, 0]);
  await misuse.call(
    'subarray',
    (...args) => u32.subarray(...args),
    ['start', 'end'],
    () => [0, 4],
  );
  await misuse.call(
    'translatePe',
    (...args) => team.translatePe(...args),
    ['pe', 'team'],
    () => [0, team],
  );
  await misuse.call(
    'team sync',
    (...args) => team.sync(...args),
    ['options'],
    () => [undefined],
  );
  await misuse.call(
    'splitStrided',
    (...args) => team.splitStrided(...args),
    ['pe', 'word', 'start', 'options'],
    () => [0, 1, 1, undefined],
  );
  await misuse.call(
    'split2d',
    (...args) => team.split2d(...args),
    ['count', 'options'],
    () => [1, undefined],
  );

  const { transport } = shmem;
  const memory = await transport.allocate({ byteLength: 4096, signalSlots: 4 });
  const endpoint = await transport.connect(0);
  await misuse.call(
    'shmemOn',
    (...args) => shmemOn(...args).then((made) => made.close()),
    ['symmetric', 'symmetric'],
    () => [transport, { heapBytes: 64 }],
  );
  await misuse.call(
    'allocate',
    (options) => transport.allocate(options).then((made) => made.close()),
    ['symmetric'],
    () => [{ byteLength: 64, signalSlots: 1 }],
  );
  await misuse.call(
    'allocate byteLength',
    (byteLength) => transport.allocate({ byteLength, signalSlots: 1 }).then((made) => made.close()),
    ['bytes'],
    () => [64],
  );
  await misuse.call('connect', transport.connect, ['pe'], () => [0]);
  await misuse.call(
    'barrier',
    (...args) => transport.barrier(...args),
    ['options'],
    () => [undefined],
  );
  await misuse.call('device', transport.device, ['symmetric'], () => [memory]);
  await misuse.call(
    'createTeam',
    (...args) => transport.createTeam(...args),
    ['list', 'team', 'options'],
    () => [[0], transport.world, undefined],
  );
  await misuse.call(
    'local',
    (...args) => memory.local(...args),
    ['bytes', 'bytes'],
    () => [0, 8],
  );
  await misuse.call(
    'remote',
    (...args) => memory.remote(...args),
    ['pe', 'bytes', 'bytes'],
    () => [0, 0, 8],
  );
  await misuse.call(
    'view',
    (...args) => memory.view(...args),
    ['dtype', 'bytes', 'bytes'],
    () => ['u8', 0, 8],
  );
  await misuse.call(
    'write',
    (...args) => memory.write(...args),
    ['local', 'symmetric'],
    () => [new Uint8Array(8), memory.local(0, 8)],
  );
  await misuse.call(
    'peek',
    (slot) => memory.signals.peek(slot),
    ['pe'],
    () => [0],
  );
  await misuse.call(
    'until',
    (...args) => memory.signals.until(...args),
    ['pe', 'symmetric', 'options'],
    () => [0, { cmp: 'ge', value: 0n }, undefined],
  );
  await misuse.call(
    'until value',
    (value) => memory.signals.until(0, { cmp: 'ge', value }),
    ['symmetric'],
    () => [0n],
  );
  await misuse.call(
    'endpoint put',
    (...args) => endpoint.put(...args),
    ['symmetric', 'symmetric', 'putOptions'],
    () => [memory.local(0, 8), memory.remote(0, 8, 8), undefined],
  );
  await misuse.call(
    'endpoint put signal',
    (signal) => endpoint.put(memory.local(0, 8), memory.remote(0, 8, 8), { signal }),
    ['signal'],
    () => [{ slot: 0, op: 'inc' }],
  );
  await misuse.call(
    'endpoint putValue',
    (...args) => endpoint.putValue(...args),
    ['symmetric', 'word64orNumber', 'putOptions'],
    () => [memory.remote(0, 8, 8), 1n, undefined],
  );
  await misuse.call(
    'endpoint get',
    (...args) => endpoint.get(...args),
    ['symmetric', 'symmetric'],
    () => [memory.remote(0, 8, 8), memory.local(0, 8)],
  );
  await misuse.call(
    'endpoint signal',
    (...args) => endpoint.signal(...args),
    ['symmetric', 'symmetric'],
    () => [memory, { slot: 0, op: 'inc' }],
  );
  await misuse.call(
    'endpoint submit',
    async (batch) => Promise.all(endpoint.submit(batch)),
    ['list'],
    () => [[{ kind: 'signal', memory, signal: { slot: 0, op: 'inc' } }]],
  );
  await misuse.call(
    'endpoint submit request',
    async (request) => Promise.all(endpoint.submit([request])),
    ['symmetric'],
    () => [{ kind: 'signal', memory, signal: { slot: 0, op: 'inc' } }],
  );
  await misuse.call('endpoint flush', endpoint.flush, ['options'], () => [undefined]);

  // A new function of the library must be added above.
  const plain = [
    'myPe',
    'nPes',
    'infoGetVersion',
    'infoGetName',
    'fence',
    'quiet',
    'finalize',
    'constructor',
    'teamWorld',
    'teamShared',
    'transport',
    'release',
  ];
  const names = [...Object.keys(shmem), ...Object.getOwnPropertyNames(Object.getPrototypeOf(shmem))];
  const missed = names.filter(
    (name) => typeof shmem[name] === 'function' && !covered.has(name) && !plain.includes(name),
  );
  await shmem.close();
  return { wrong: misuse.wrong, calls: misuse.calls, missed };
});
