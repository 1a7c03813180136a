// One rank of the walkthrough, in a worker thread: makes the plan, runs every phase, reports what it saw.
import { parentPort, workerData } from 'node:worker_threads';
import { EpError, openFileStore, type SymmetricMemory, type Tensor, tensor } from '@ep/core';
import { type DispatchTransport, type Lease, leaseBytesFor, openDispatcher } from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';
import { nvshmem, type ShmTransport } from '@ep/nvshmem';
import { digest } from '@ep/plan';
import { chunkBytes, dispatchesOf, leases, makePlans, rowElements, tokenId, worldSize } from './example.js';
import type { Counters, Facts } from './facts.js';

/** The same transport; hands out the memory that the dispatcher allocates, so that its counters can be looked at. */
function observed(transport: ShmTransport, onAllocate: (memory: SymmetricMemory) => void): DispatchTransport {
  return {
    name: transport.name,
    rank: transport.rank,
    worldSize: transport.worldSize,
    capabilities: transport.capabilities,
    failed: transport.failed,
    closed: transport.closed,
    adopt: transport.adopt,
    connect: transport.connect,
    device: transport.device,
    allocate: async (options) => {
      const memory = await transport.allocate(options);
      onAllocate(memory);
      return memory;
    },
    close: () => transport.close(),
    [Symbol.asyncDispose]: () => transport.close(),
  };
}

/** Slot 2 * lease * W + source counts arrivals; slot (2 * lease + 1) * W + destination counts grants. */
function countersOf(memory: SymmetricMemory): Counters {
  const words = (first: number) =>
    Array.from({ length: worldSize }, (_, rank) => Number(memory.signals.peek(first + rank)));
  const each = (offset: number) =>
    Array.from({ length: leases }, (_, lease) => words((2 * lease + offset) * worldSize));
  return { arrivals: each(0), credits: each(1) };
}

/** Rows in memory that kernels read in place. */
function rowsOf(ids: readonly number[]): Tensor<'f32'> {
  const data = new Float32Array(allocateHost(4 * rowElements * ids.length));
  for (const [row, id] of ids.entries()) data.fill(id, row * rowElements, (row + 1) * rowElements);
  return tensor('f32', [ids.length, rowElements], data);
}

/** One id per row; a row that is not all of one id arrived torn. */
function idsOf(rows: Tensor): number[] {
  const data = rows.data as Float32Array;
  return Array.from({ length: data.length / rowElements }, (_, row) => {
    const numbers = data.subarray(row * rowElements, (row + 1) * rowElements);
    if (numbers.some((value) => value !== numbers[0])) throw new Error(`row ${row} holds more than one id: ${numbers}`);
    return numbers[0]!;
  });
}

async function runRank(rank: number, storePath: string): Promise<Facts> {
  const plans = makePlans();
  const dispatches = dispatchesOf(plans);
  await using store = await openFileStore(storePath);
  await using transport = await nvshmem.shm.open(
    { rank, worldSize, store },
    { signal: AbortSignal.timeout(60_000), timeoutMs: 60_000 },
  );
  let memory: SymmetricMemory | undefined;
  const leaseBytes = Math.max(...Object.values(dispatches).map(leaseBytesFor));
  await using dispatcher = await openDispatcher(
    observed(transport, (made) => {
      memory = made;
    }),
    { leaseBytes, leases, chunkBytes },
  );
  const bound = await dispatcher.bind(dispatches);
  // Every look at the counters stands between two barriers: no rank is in a call.
  const look = async (): Promise<Counters> => {
    await transport.barrier();
    const counters = countersOf(memory!);
    await transport.barrier();
    return counters;
  };
  const arrived = async (lease: Lease) => ({
    ids: Object.fromEntries(Object.entries(lease.tensors).map(([name, rows]) => [name, idsOf(rows)])),
    stagedBytes: lease.stagedBytes,
    counters: await look(),
  });

  const before = await look();
  const home = Array.from({ length: plans.fwdQ.sendTokens[rank]! }, (_, token) => tokenId(rank, token));
  const sources = { q: rowsOf(home), kv: rowsOf(home) };
  const first = await bound.forward.run(sources);
  const forward = await arrived(first);

  // Stand-ins for attention: the output of a query is the query's id, the gradient of a key-value row that row's id.
  const second = await bound.output.run({ o: rowsOf(forward.ids.q!) });
  const output = await arrived(second);
  first.release();
  second.release();
  const released = await look();

  const dKv = rowsOf(forward.ids.kv!);
  const third = await bound.gradients.run({ dKv });
  const gradients = await arrived(third);
  const fourth = await bound.summed.run({ dKv });
  const summed = await arrived(fourth);
  third.release();
  fourth.release();
  await transport.barrier();

  // Rank 2 stays away. Whoever needs its rows runs into its own deadline; whoever does not is done.
  let absence: Facts['absence'] = { outcome: 'stayed away', poisoned: false, counters: before };
  let held: Lease | undefined;
  if (rank !== 2) {
    const outcome = await bound.forward.run(sources, { timeoutMs: 500 }).then(
      (lease) => {
        held = lease;
        return 'done';
      },
      (error: unknown) => {
        if (!(error instanceof EpError)) throw error;
        return `${error.code}: ${error.message}`;
      },
    );
    absence = { ...absence, outcome };
  }
  absence = { ...absence, poisoned: dispatcher.poisoned, counters: await look() };
  await dispatcher.resync({ timeoutMs: 60_000 });
  const resync = { epoch: dispatcher.epoch, revoked: held?.released };
  const again = await bound.forward.run(sources);
  const repeated = await arrived(again);
  again.release();
  await transport.barrier();
  const { bytesSent, bytesReceived } = bound.forward;
  return {
    rank,
    digests: { q: digest(plans.fwdQ), kv: digest(plans.fwdKv) },
    memory: { leaseBytes, signalSlots: memory!.signals.slots },
    forwardBytes: { bytesSent, bytesReceived },
    before,
    forward,
    output,
    released,
    gradients,
    summed,
    absence,
    resync,
    repeated,
  };
}

const { rank, storePath } = workerData as { readonly rank: number; readonly storePath: string };
parentPort!.postMessage(await runRank(rank, storePath));
