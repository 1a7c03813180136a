import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { debugs, defaultTimeoutMs, readLaunchEnv, SWITCHES } from '../src/env.js';
import { isEpError } from '../src/errors.js';

const torchrun = {
  RANK: '3',
  WORLD_SIZE: '8',
  LOCAL_RANK: '1',
  LOCAL_WORLD_SIZE: '2',
  MASTER_ADDR: '127.0.0.1',
  MASTER_PORT: '29500',
};

describe('readLaunchEnv', () => {
  it("reads torchrun's contract", () => {
    expect(readLaunchEnv(torchrun)).toEqual({
      rank: 3,
      worldSize: 8,
      localRank: 1,
      localWorldSize: 2,
      store: { kind: 'tcp', host: '127.0.0.1', port: 29500 },
    });
  });

  it.each([
    ['[::1]', '::1'],
    ['fd00::7', 'fd00::7'],
    ['node-0.ranks', 'node-0.ranks'],
  ])('meets at %s of MASTER_ADDR', (MASTER_ADDR, host) => {
    expect(readLaunchEnv({ ...torchrun, MASTER_ADDR }).store).toMatchObject({ host });
  });

  it("reads who this is from Open MPI's variables, then from Slurm's, where torchrun's are not set", () => {
    const master = { MASTER_ADDR: 'node0', MASTER_PORT: '29500' };
    const slurm = { SLURM_PROCID: '5', SLURM_NTASKS: '6', SLURM_LOCALID: '1' };
    const mpi = {
      OMPI_COMM_WORLD_RANK: '2',
      OMPI_COMM_WORLD_SIZE: '4',
      OMPI_COMM_WORLD_LOCAL_RANK: '0',
      OMPI_COMM_WORLD_LOCAL_SIZE: '2',
    };
    const store = { kind: 'tcp', host: 'node0', port: 29500 };
    expect(readLaunchEnv({ ...master, ...slurm })).toEqual({ rank: 5, worldSize: 6, localRank: 1, store });
    expect(readLaunchEnv({ ...master, ...slurm, ...mpi })).toEqual({
      rank: 2,
      worldSize: 4,
      localRank: 0,
      localWorldSize: 2,
      store,
    });
    expect(readLaunchEnv({ ...torchrun, ...slurm, ...mpi }).rank).toBe(3);
  });

  it('meets at the first host of a Slurm step, on a port of its own', () => {
    const step = { SLURM_PROCID: '5', SLURM_NTASKS: '6', SLURM_JOB_ID: '4711', SLURM_STEP_ID: '0' };
    const storeOf = (env: Record<string, string>) => readLaunchEnv({ ...step, ...env }).store;
    for (const [list, host] of [
      ['gpu[003-005,9],login', 'gpu003'],
      ['login,gpu[1-2]', 'login'],
      ['a-b.example', 'a-b.example'],
      ['rack[2]-eth0', 'rack2-eth0'],
    ] as const) {
      expect(storeOf({ SLURM_STEP_NODELIST: list, SLURM_JOB_NODELIST: 'other' })).toEqual({
        kind: 'tcp',
        host,
        port: 10_000 + ((4711 * 64) % 20_000),
      });
    }
    expect(storeOf({ SLURM_JOB_NODELIST: 'n1', SLURM_STEP_ID: '3' })).toMatchObject({
      host: 'n1',
      port: 10_003 + ((4711 * 64) % 20_000),
    });
    expect(storeOf({ SLURM_JOB_NODELIST: 'n1', MASTER_PORT: '29500' })).toMatchObject({ host: 'n1', port: 29500 });
    expect(storeOf({ SLURM_JOB_NODELIST: 'n1', MASTER_ADDR: 'n7' })).toMatchObject({ host: 'n7' });
  });

  it("knows torchrun's own store and its restarts, and a TCP store of ours", () => {
    const agent = { ...torchrun, TORCHELASTIC_USE_AGENT_STORE: 'True', TORCHELASTIC_RESTART_COUNT: '2' };
    expect(readLaunchEnv(agent)).toMatchObject({ storeOfLauncher: 'torchrun', restarts: 2 });
    const ours = readLaunchEnv({ ...agent, EP_STORE: 'tcp://[::1]:4000' });
    expect(ours.store).toEqual({ kind: 'tcp', host: '::1', port: 4000 });
    expect(ours.storeOfLauncher).toBeUndefined();
  });

  it("knows that ep run holds the store, and a pod's index and Intel MPI's variables", () => {
    const held = { ...torchrun, EP_STORE: 'tcp://h:4000', EP_STORE_HELD: '1' };
    expect(readLaunchEnv(held)).toMatchObject({ storeOfLauncher: 'ep' });
    expect(readLaunchEnv({ ...held, EP_STORE: 'file:x' }).storeOfLauncher).toBeUndefined();
    expect(() => readLaunchEnv({ ...held, EP_STORE_HELD: 'yes' })).toThrow(/EP_STORE_HELD must be "1"/);
    const meet = { MASTER_ADDR: 'job-0.ranks', MASTER_PORT: '29500' };
    const pod = { JOB_COMPLETION_INDEX: '3', WORLD_SIZE: '4', ...meet };
    expect(readLaunchEnv(pod)).toEqual({
      rank: 3,
      worldSize: 4,
      store: { kind: 'tcp', host: 'job-0.ranks', port: 29_500 },
    });
    expect(readLaunchEnv({ ...pod, RANK: '1' }).rank).toBe(1);
    expect(() => readLaunchEnv({ JOB_COMPLETION_INDEX: '3', ...meet })).toThrow(/RANK and WORLD_SIZE not set/);
    expect(() => readLaunchEnv({ ...pod, WORLD_SIZE: '3' })).toThrow(/JOB_COMPLETION_INDEX must be .* from 0 to 2/);
    // `ep run` in a pod says RANK itself; mpirun in a pod is asked before the pod.
    const intel = { PMI_RANK: '5', PMI_SIZE: '8', MPI_LOCALRANKID: '1', MPI_LOCALNRANKS: '4', ...meet };
    expect(readLaunchEnv(intel)).toMatchObject({ rank: 5, worldSize: 8, localRank: 1, localWorldSize: 4 });
    // srun's own PMI beside Slurm's variables.
    const slurm = {
      SLURM_PROCID: '0',
      SLURM_NTASKS: '2',
      SLURM_JOB_ID: '1',
      SLURM_JOB_NODELIST: 'n',
      PMI_RANK: '0',
      PMI_SIZE: '2',
    };
    expect(readLaunchEnv(slurm)).toMatchObject({ rank: 0, worldSize: 2, store: { host: 'n' } });
  });

  it('prefers EP_STORE and does without the local place', () => {
    expect(readLaunchEnv({ RANK: '0', WORLD_SIZE: '1', LOCAL_RANK: '', EP_STORE: 'file:/a b/c:d' })).toEqual({
      rank: 0,
      worldSize: 1,
      store: { kind: 'file', path: '/a b/c:d' },
    });
    expect(readLaunchEnv({ ...torchrun, EP_STORE: 'file:x' }).store).toEqual({ kind: 'file', path: 'x' });
  });

  it.each<[Record<string, string | undefined>, RegExp]>([
    [{}, /RANK and WORLD_SIZE not set: start this program with `ep run/],
    [{ WORLD_SIZE: '2' }, /^environment: RANK not set/],
    [{ RANK: '0', WORLD_SIZE: '' }, /^environment: WORLD_SIZE not set/],
    [{ ...torchrun, RANK: '8' }, /RANK must be a decimal integer from 0 to 7, found "8"/],
    [{ ...torchrun, RANK: '-1' }, /RANK must be .*found "-1"/],
    [{ ...torchrun, RANK: '1e0' }, /RANK must be .*found "1e0"/],
    [{ ...torchrun, RANK: ' 1' }, /RANK must be .*found " 1"/],
    [{ ...torchrun, WORLD_SIZE: '0' }, /WORLD_SIZE must be a decimal integer from 1/],
    [{ ...torchrun, WORLD_SIZE: '99999999999999999999' }, /WORLD_SIZE must be/],
    [{ ...torchrun, LOCAL_RANK: '2' }, /LOCAL_RANK must be a decimal integer from 0 to 1/],
    [{ ...torchrun, LOCAL_WORLD_SIZE: '9' }, /LOCAL_WORLD_SIZE must be a decimal integer from 1 to 8/],
    [{ ...torchrun, MASTER_PORT: '0' }, /MASTER_PORT must be a decimal integer from 1 to 65535/],
    [{ ...torchrun, MASTER_PORT: undefined }, /no store to meet at.*\(MASTER_PORT is not set\)/],
    [{ ...torchrun, MASTER_ADDR: '' }, /\(MASTER_ADDR is not set\)/],
    [{ ...torchrun, MASTER_ADDR: 'tcp://host' }, /MASTER_ADDR must be a host name or address/],
    [{ ...torchrun, MASTER_ADDR: 'h:5' }, /MASTER_ADDR must be .* without a port, which is MASTER_PORT, found "h:5"/],
    [{ ...torchrun, MASTER_ADDR: '[::1]:5' }, /MASTER_ADDR must be .* without a port/],
    [{ ...torchrun, MASTER_ADDR: '[h]' }, /MASTER_ADDR must be a host name or address/],
    [{ ...torchrun, EP_STORE: 'tcp:1.2.3.4' }, /EP_STORE must be `file:<path>` or `tcp:.*`, found "tcp:1.2.3.4"/],
    [{ ...torchrun, EP_STORE: 'tcp://h:0' }, /the port of EP_STORE must be .*found "0"/],
    [{ ...torchrun, EP_STORE: 'tcp://h/x:1' }, /EP_STORE must be/],
    [{ SLURM_PROCID: '1' }, /^environment: SLURM_NTASKS not set/],
    [{ SLURM_PROCID: '0', SLURM_NTASKS: '1' }, /no store to meet at/],
    [
      { SLURM_PROCID: '0', SLURM_NTASKS: '1', SLURM_JOB_ID: '1', SLURM_JOB_NODELIST: '[1-2' },
      /SLURM_JOB_NODELIST must be a host list/,
    ],
    [
      { SLURM_PROCID: '0', SLURM_NTASKS: '1', SLURM_JOB_ID: 'x', SLURM_JOB_NODELIST: 'n' },
      /SLURM_JOB_ID must be a decimal integer/,
    ],
    // mpirun within an allocation: rank 0 need not be on its first host.
    [
      { OMPI_COMM_WORLD_RANK: '0', OMPI_COMM_WORLD_SIZE: '1', SLURM_JOB_ID: '1', SLURM_JOB_NODELIST: 'n' },
      /no store to meet at/,
    ],
    [{ SLURM_NTASKS: '2' }, /RANK and WORLD_SIZE not set/],
    [{ OMPI_COMM_WORLD_RANK: '2', OMPI_COMM_WORLD_SIZE: '2' }, /OMPI_COMM_WORLD_RANK must be .* from 0 to 1/],
    [{ ...torchrun, EP_STORE: 'file:' }, /EP_STORE must be/],
  ])('refuses %o', (env, text) => {
    expect(() => readLaunchEnv(env)).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(text) }),
    );
  });

  it('gives a sound result or an EpError whatever the environment holds', () => {
    const text = fc.oneof(fc.string(), fc.integer({ min: -3, max: 70_000 }).map(String), fc.constant(undefined));
    const store = fc.oneof(
      text,
      fc.string().map((path) => `file:${path}`),
    );
    const env = fc.record({
      RANK: text,
      WORLD_SIZE: text,
      LOCAL_RANK: text,
      LOCAL_WORLD_SIZE: text,
      MASTER_ADDR: text,
      MASTER_PORT: text,
      EP_STORE: store,
    });
    let good = 0;
    fc.assert(
      fc.property(fc.oneof(env, fc.record({ ...torchrunArbitrary, EP_STORE: store })), (e) => {
        try {
          const { rank, worldSize, localRank = 0, localWorldSize = worldSize } = readLaunchEnv(e);
          good++;
          expect(Number.isSafeInteger(rank) && rank >= 0 && rank < worldSize).toBe(true);
          expect(localRank < localWorldSize && localWorldSize <= worldSize).toBe(true);
        } catch (error) {
          if (!isEpError(error)) throw error;
        }
      }),
      { numRuns: 5000 },
    );
    expect(good).toBeGreaterThan(100);
  });
});

const small = fc.integer({ min: 0, max: 9 }).map(String);
const torchrunArbitrary = {
  RANK: small,
  WORLD_SIZE: small,
  LOCAL_RANK: small,
  LOCAL_WORLD_SIZE: small,
  MASTER_ADDR: fc.string({ minLength: 1 }),
  MASTER_PORT: small,
};

describe('switches', () => {
  it('say what they do', () => {
    for (const [name, { default: value, meaning }] of Object.entries(SWITCHES)) {
      expect(name).toMatch(/^EP_[A-Z_]+$/);
      expect(value.length * meaning.length).toBeGreaterThan(0);
    }
  });

  it('EP_DEBUG lists topics', () => {
    expect(debugs('leaks', { EP_DEBUG: 'plan, leaks' })).toBe(true);
    expect(debugs('leaks', { EP_DEBUG: 'leak' })).toBe(false);
    expect(debugs('leaks', {})).toBe(false);
  });

  it('EP_TIMEOUT_MS has a default, and no limit at 0', () => {
    expect(defaultTimeoutMs({})).toBe(Number(SWITCHES.EP_TIMEOUT_MS.default));
    expect(defaultTimeoutMs({ EP_TIMEOUT_MS: '' })).toBe(300_000);
    expect(defaultTimeoutMs({ EP_TIMEOUT_MS: '20' })).toBe(20);
    expect(defaultTimeoutMs({ EP_TIMEOUT_MS: '0' })).toBe(Number.POSITIVE_INFINITY);
    expect(() => defaultTimeoutMs({ EP_TIMEOUT_MS: 'soon' })).toThrow(/EP_TIMEOUT_MS must be/);
  });
});
