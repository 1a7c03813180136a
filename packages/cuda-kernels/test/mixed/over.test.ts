/** Memory of one transport that a NIC of another registers, too. Ranks of one thread. */
import {
  byCapability,
  compose,
  formatRoutes,
  type Member,
  memoryStore,
  prefixStore,
  type Rank,
  type SymmetricMemory,
  type Transport,
  tensor,
} from '@ep/core';
import { type EfaNeeds, efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { native } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { afterEach, describe, expect, it } from 'vitest';
import { hardware as efaHardware } from '../../../efa-gda/test/shim-provider.mjs';
import { hardware as ibgdaHardware } from '../../../ibgda/test/shim-provider.mjs';
import { openMoeBuffer } from '../../src/index.js';

const signal = new AbortController().signal;
const SIZE = { byteLength: 4096, signalSlots: 4, timeoutMs: 20_000 };
const loopback = { provider: 'tcp;ofi_rxm', address: '127.0.0.1' };
const fabricProbe = await nvshmem.fabric.probe(loopback);
const fabricMissing = fabricProbe.available ? '' : fabricProbe.reason;
const fabric = {
  open: (member: Member, options: { readonly signal: AbortSignal }) =>
    nvshmem.fabric.open(member, { ...options, config: { ...loopback, timeoutMs: 20_000 } }),
};
/** Those of hardware over the shims. */
const NICS = { ibgda: ibgda.soft, ibgdaHardware, efa: efaGda.soft, efaHardware, fabric } as const;
type Nic = keyof typeof NICS;

let closing: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const close of closing.reverse()) await close();
  closing = [];
});

/** Each rank's pair of transports; all of one thread, so calls that are collective are made together. */
async function openBoth(worldSize: number, nic: Nic) {
  const store = memoryStore();
  const members = (name: string): Member[] =>
    Array.from({ length: worldSize }, (_, rank) => ({ rank, worldSize, store: prefixStore(store.handle(), name) }));
  const keep = <T extends { close(): Promise<void> }>(opened: T[]): T[] => {
    closing.push(async () => void (await Promise.all(opened.map((one) => one.close()))));
    return opened;
  };
  const shm = keep(await Promise.all(members('shm').map((member) => nvshmem.shm.open(member, { signal }))));
  const openFar: (member: Member) => Promise<Transport<EfaNeeds>> = (member) => NICS[nic].open(member, { signal });
  const far = keep(await Promise.all(members('nic').map(openFar)));
  return { shm, far };
}

type Both = Awaited<ReturnType<typeof openBoth>>;

async function allocateBoth({ shm, far }: Both, near: (rank: Rank) => readonly Rank[] = () => []) {
  const bases = await Promise.all(shm.map((one) => one.allocate(SIZE)));
  const overs = await Promise.all(
    far.map((one, rank) => one.allocate({ ...SIZE, over: bases[rank]!, near: near(rank) })),
  );
  return { bases, overs };
}

const allocateOne = async (transports: readonly Transport<never>[]): Promise<SymmetricMemory> =>
  (await Promise.all(transports.map((one) => one.allocate(SIZE))))[0]!;

const skipped = (nic: Nic): string => (nic === 'fabric' && fabricMissing ? ` (skipped: ${fabricMissing})` : '');

for (const nic of ['ibgda', 'ibgdaHardware', 'efa', 'efaHardware', 'fabric'] as const) {
  describe.skipIf(skipped(nic))(`${nic} over memory of shm${skipped(nic)}`, () => {
    it('puts into it, and wakes who waits there, whichever memory is waited on', async () => {
      const both = await openBoth(2, nic);
      const { bases, overs } = await allocateBoth(both);
      const endpoint = await both.far[0]!.connect(1);
      const stores = await both.shm[0]!.connect(1);
      bases[0]!.view('u8', 0, 8).fill(7);
      let sum = 0n;
      for (const add of [1n, 5n]) {
        for (const memory of [bases[1]!, overs[1]!] satisfies SymmetricMemory[]) {
          sum += add + 2n;
          const woken = memory.signals.until(2, { cmp: 'ge', value: sum }, { timeoutMs: 10_000 });
          // What stores add and what the NIC adds comes to one sum.
          await stores.signal(bases[0]!, { slot: 2, op: 'add', value: 2n });
          await endpoint.put(overs[0]!.local(0, 8), overs[0]!.remote(1, 100, 8), {
            signal: { slot: 2, op: 'add', value: add },
          });
          expect(await woken).toBe(sum);
        }
      }
      expect([...bases[1]!.view('u8', 99, 10)]).toEqual([0, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
      expect(overs[1]!.signals.peek(2)).toBe(sum);
      // Stores and the NIC read what the other wrote.
      await stores.put(bases[0]!.local(0, 4), bases[0]!.remote(1, 200, 4));
      await endpoint.get(overs[0]!.remote(1, 198, 8), overs[0]!.local(1000, 8));
      expect([...bases[0]!.view('u8', 1000, 8)]).toEqual([0, 0, 7, 7, 7, 7, 0, 0]);
    });

    it('goes on when the memory below was closed, and leaves nothing behind', async () => {
      const before = native().binding.leaks().segments;
      const both = await openBoth(2, nic);
      const { bases, overs } = await allocateBoth(both);
      await Promise.all(bases.map((base) => base.close()));
      const endpoint = await both.far[0]!.connect(1);
      await endpoint.signal(overs[0]!, { slot: 0, op: 'inc' });
      expect(await overs[1]!.signals.until(0, { cmp: 'ge', value: 1n }, { timeoutMs: 10_000 })).toBe(1n);
      expect(() => bases[0]!.view('u8', 0, 1)).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
      await Promise.all(overs.map((over) => over.close()));
      await Promise.all(both.far.map((one) => one.close()));
      await Promise.all(both.shm.map((one) => one.close()));
      expect(native().binding.leaks().segments).toBeLessThanOrEqual(before);
    });

    it('ends waits with the transport that the memory is of', async () => {
      const both = await openBoth(2, nic);
      const { overs } = await allocateBoth(both);
      const wait = overs[1]!.signals.until(0, { cmp: 'ge', value: 1n });
      const ended = expect(wait).rejects.toMatchObject({ code: expect.stringMatching(/EP_CLOSED|EP_ABORTED/) });
      await both.shm[1]!.close();
      await ended;
    });

    it('refuses by name what cannot be, and can go on', async () => {
      const both = await openBoth(2, nic);
      const other = await openBoth(3, nic);
      const [shm, far] = [both.shm[0]!, both.far[0]!];
      const [base, twin, third] = await Promise.all([
        both.shm[0]!.allocate(SIZE),
        both.shm[1]!.allocate(SIZE),
        ...other.shm.map((one) => one.allocate(SIZE)),
      ]);
      const own = (await Promise.all(both.far.map((one) => one.allocate(SIZE))))[0]!;
      const refused = (options: object) => far.allocate({ ...SIZE, ...options } as never);
      const bad = (message: RegExp) => ({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) });
      await expect(refused({ over: own })).rejects.toMatchObject(bad(/over must be a memory of another transport/));
      await expect(refused({ over: twin })).rejects.toMatchObject(bad(/memory of rank 0 of 2.*memory of rank 1 of 2/));
      await expect(refused({ over: third })).rejects.toMatchObject(bad(/memory of rank 0 of 2.*memory of rank 0 of 3/));
      await expect(refused({ over: 5 })).rejects.toMatchObject(bad(/over must be a memory of another transport/));
      await expect(refused({ over: base, byteLength: 64 })).rejects.toMatchObject(bad(/64 bytes and 4 signal slots/));
      await expect(refused({ over: base, near: [2] })).rejects.toMatchObject(bad(/near/));
      await expect(refused({ over: base, near: 1 })).rejects.toMatchObject(bad(/near must be a list/));
      await expect(refused({ near: [1] })).rejects.toMatchObject(bad(/near must be absent without over/));
      await expect(refused({ over: { space: 'host' } })).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
      await expect(shm.allocate({ ...SIZE, over: own })).rejects.toMatchObject({
        code: 'EP_UNSUPPORTED',
        message: expect.stringMatching(/put it first in compose/),
      });
      await base!.close();
      await expect(refused({ over: base })).rejects.toMatchObject({ code: 'EP_CLOSED' });
      const { overs } = await allocateBoth(both);
      expect(overs.map((over) => over.byteLength)).toEqual([4096, 4096]);
    });

    it('tells all ranks of a pair that does not choose alike', async () => {
      const both = await openBoth(3, nic);
      const bases = await Promise.all(both.shm.map((one) => one.allocate(SIZE)));
      const before = native().binding.leaks().segments;
      const near = [[1], [], []];
      const ended = await Promise.allSettled(
        both.far.map((one, rank) => one.allocate({ ...SIZE, over: bases[rank]!, near: near[rank]! })),
      );
      for (const end of ended) {
        expect(end).toMatchObject({
          status: 'rejected',
          reason: { code: 'EP_MISMATCH', message: expect.stringMatching(/rank 0 stores to rank 1/) },
        });
      }
      expect(native().binding.leaks().segments).toBeLessThanOrEqual(before);
    });
  });
}

for (const nic of ['ibgda', 'efa', 'fabric'] as const) {
  describe.skipIf(skipped(nic))(`kernels over shm and ${nic}${skipped(nic)}`, () => {
    it('store to those of their node, and leave the NIC to the others', { timeout: 60_000 }, async () => {
      const both = await openBoth(3, nic);
      const node = (rank: Rank): number => Math.floor(rank / 2);
      const transports = both.shm.map((near, rank) => {
        const far = both.far[rank]!;
        return compose([near, far], (peer) => (node(peer) === node(rank) ? near : far));
      });
      closing.push(async () => void (await Promise.all(transports.map((one) => one.close()))));
      const [hidden, tokens] = [4096, 4];
      const shape = { mode: 'high-throughput', experts: 3, maxTokens: tokens, topK: 1, hidden, dtype: 'f32' } as const;
      const buffers = await Promise.all(transports.map((transport) => openMoeBuffer(transport, shape)));
      expect(buffers[0]!.routes().map(({ via }) => via)).toEqual([
        'own memory',
        'nvshmem:shm',
        expect.stringMatching(/^(ibgda:soft|efa-gda:soft|nvshmem:fabric)$/),
      ]);
      const kind = `memory:load-store+${nic === 'fabric' ? 'proxy' : nic}`;
      expect(transports[0]!.device(await allocateOne(transports)).kind).toBe(kind);

      /** Bytes that the NIC of rank 0 moves, or writes of the fabric, while all tokens of that rank go to one expert and come back. */
      const moved = async (expert: number): Promise<number> => {
        const counted = both.far[0] as unknown as { counts(): { readonly bytes?: number; readonly writes?: number } };
        const count = (): number => {
          const { bytes, writes } = counted.counts();
          return bytes ?? writes!;
        };
        const before = count();
        await Promise.all(
          buffers.map(async (buffer, rank) => {
            const rows = rank === 0 ? tokens : 0;
            const x = new Float32Array(rows * hidden).fill(expert + 1);
            const choices = new Int32Array(rows).fill(expert);
            const received = await buffer.dispatch(tensor('f32', [rows, hidden], x), choices);
            expect(received.x.shape[0]).toBe(rank === expert ? tokens : 0);
            const weights = new Float32Array(rows).fill(1);
            const { y } = await buffer.combine(received.x, received.handle, { weights });
            expect([...y.data.slice(0, 2)]).toEqual(rank === 0 ? [expert + 1, expert + 1] : []);
          }),
        );
        return count() - before;
      };
      const much = nic === 'fabric' ? 1 : tokens * hidden * 4;
      expect(await moved(1)).toBeLessThan(nic === 'fabric' ? 1 : much / 8);
      expect(await moved(2)).toBeGreaterThanOrEqual(much);
      await Promise.all(buffers.map((buffer) => buffer.close()));
    });
  });
}

describe.skipIf(fabricMissing)(`shm of two hosts, and fabric between them${skipped('fabric')}`, () => {
  const hosts = [0, 0, 2, 2];

  async function openHosts() {
    const store = memoryStore();
    const member = (rank: Rank, name: string): Member => ({
      rank,
      worldSize: hosts.length,
      store: prefixStore(store.handle(), name),
    });
    const transports = await Promise.all(
      hosts.map(async (_, rank) => {
        const far = await fabric.open(member(rank, 'fabric'), { signal });
        const near = await nvshmem.shm.open(member(rank, 'shm'), { signal, config: { hosts } });
        return compose([near, far]);
      }),
    );
    closing.push(async () => void (await Promise.all(transports.map((one) => one.close()))));
    return transports;
  }

  it('is routed by host, and says where ranks are', async () => {
    const transports = await openHosts();
    expect(transports[3]!.hosts).toEqual(hosts);
    expect(formatRoutes(transports[1]!.routes())).toBe('nvshmem:shm     ranks 0-1\nnvshmem:fabric  ranks 2-3');
  });

  it('tells all ranks what those of one host could not do, and can go on', { timeout: 30_000 }, async () => {
    const transports = await openHosts();
    const before = native().binding.leaks().segments;
    const began = performance.now();
    const ended = await Promise.allSettled(
      transports.map((one, rank) => one.allocate({ ...SIZE, byteLength: rank === 1 ? 128 : 4096 })),
    );
    expect(performance.now() - began).toBeLessThan(5000);
    for (const [rank, end] of ended.entries()) {
      const odd = rank === 1 ? [0] : [1];
      expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_MISMATCH' } });
      expect((end as PromiseRejectedResult).reason.context.odd, `rank ${rank}`).toEqual(expect.arrayContaining(odd));
    }
    expect(native().binding.leaks().segments).toBeLessThanOrEqual(before);
    await allocateOne(transports);
  });

  it('refuses a way to another host by stores', async () => {
    const transports = await openHosts();
    const shape = { mode: 'low-latency', experts: 4, maxTokens: 1, topK: 2, hidden: 64, dtype: 'f32' } as const;
    const buffers = await Promise.all(transports.map((transport) => openMoeBuffer(transport, shape)));
    expect(buffers[2]!.routes().map(({ via }) => via)).toEqual([
      'nvshmem:fabric',
      'nvshmem:fabric',
      'own memory',
      'nvshmem:shm',
    ]);
    await Promise.all(buffers.map((buffer) => buffer.close()));
    const store = memoryStore();
    const member = (rank: Rank): Member => ({ rank, worldSize: 2, store: store.handle() });
    const nears = await Promise.all(
      [0, 1].map((rank) => nvshmem.shm.open(member(rank), { signal, config: { hosts: [0, 1] } })),
    );
    // By a policy that knows better.
    const alone = nears.map((near) => compose([near], () => near));
    closing.push(async () => void (await Promise.all(alone.map((one) => one.close()))));
    const memory = await alone[0]!.allocate(SIZE);
    await expect(alone[0]!.connect(1)).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
    expect(() => alone[0]!.device(memory)).toThrow(expect.objectContaining({ code: 'EP_UNSUPPORTED' }));
  });
});

describe('kernels over shm and two kinds of NIC', () => {
  it('go by the one that keeps order, and by both not at all', { timeout: 60_000 }, async () => {
    const [ordered, unordered] = [await openBoth(3, 'ibgda'), await openBoth(3, 'efa')];
    const { shm, far: mlx5 } = ordered;
    const { far: efa } = unordered;
    const usual = byCapability([0, 0, 1]);
    const composed = (apart: (rank: Rank, peer: Rank) => boolean) =>
      shm.map((stores, rank) =>
        compose([stores, efa[rank]!, mlx5[rank]!], (peer, all) => (apart(rank, peer) ? efa[rank]! : usual(peer, all))),
      );
    const transports = composed(() => false);
    closing.push(async () => void (await Promise.all(transports.map((one) => one.close()))));
    expect(formatRoutes(transports[0]!.routes())).toBe('nvshmem:shm  ranks 0-1\nibgda:soft   rank 2');

    const hidden = 64;
    const shape = { mode: 'low-latency', experts: 3, maxTokens: 1, topK: 2, hidden, dtype: 'f32' } as const;
    const buffers = await Promise.all(transports.map((transport) => openMoeBuffer(transport, shape)));
    const sums = await Promise.all(
      buffers.map(async (buffer, rank) => {
        const x = tensor('f32', [1, hidden], new Float32Array(hidden).fill(rank + 1));
        const { x: rows, handle } = await buffer.dispatch(x, Int32Array.of((rank + 1) % 3, (rank + 2) % 3));
        return (await buffer.combine(rows, handle)).y.data[hidden - 1];
      }),
    );
    expect(sums).toEqual([2, 4, 6]);
    await Promise.all(buffers.map((buffer) => buffer.close()));

    // Rank 2 reaches rank 0 by one, and rank 1 by the other.
    const pair = new Set([1, 2]);
    const both = composed((rank, peer) => rank !== peer && pair.has(rank) && pair.has(peer));
    const ended = await Promise.allSettled(both.map((transport) => openMoeBuffer(transport, shape)));
    expect(ended.map(({ status }) => status)).toEqual(['rejected', 'rejected', 'rejected']);
    expect(ended[2]).toMatchObject({
      reason: {
        code: 'EP_UNSUPPORTED',
        message: expect.stringMatching(/transports reach the peers, one handle cannot/),
      },
    });
    for (const transport of both) closing.push(() => transport.close());
  });
});
