/** Opens a dispatcher over device memory: leases and counters on the device, agreements in host memory. */
import type { Rank, SymmetricMemory } from '@ep/core';
import { type NativeGpuCalls, native } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { Agreement, agreementBytes, agreementSlots } from '../agreement.js';
import { checkTransport } from '../check-spec.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import { DeviceDispatcher } from './dispatcher.js';
import { type DeviceDispatcherOptions, resolveDeviceOptions } from './options.js';
import { deviceMemoryFor } from './own-memory.js';

/**
 * Collective, over a transport with device memory (`nvshmem.cuda`, `ibgda` with `device`). `EP_MISMATCH` names ranks with other options, or ranks that could not open it and why; `EP_INVALID_ARGUMENT` says when the
 * kernels of the ranks on this GPU could not all run at once.
 */
export async function openDeviceDispatcher(
  transport: DispatchTransport,
  options: DeviceDispatcherOptions,
): Promise<DeviceDispatcher> {
  const where = 'openDeviceDispatcher';
  checkTransport(transport, where);
  const { worldSize } = transport;
  const resolved = resolveDeviceOptions(options, worldSize, where);
  const { layout, chunkBytes, stream, timeoutMs } = resolved;
  const wait = { timeoutMs, ...(options.signal ? { signal: options.signal } : {}) };
  const control = await transport.allocate({
    byteLength: agreementBytes(worldSize),
    signalSlots: agreementSlots(worldSize),
    ...wait,
  });
  let made: SymmetricMemory | undefined;
  let calls: NativeGpuCalls | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, control, endpoints, { byteOffset: 0, slot: 0 });
    const lines = [`leases is ${layout.leases}`, `leaseBytes is ${layout.leaseBytes}`, `chunkBytes is ${chunkBytes}`];
    await agreement.same(where, lines, wait);
    made = await transport.allocate({
      byteLength: layout.leases * layout.leaseBytes,
      signalSlots: 2 * layout.leases * worldSize,
      space: 'device',
      ...wait,
    });
    // A rank that fails here still takes part: the others must hear of it instead of waiting for it.
    let memory: DeviceMemory | undefined;
    let refused: { readonly reason: unknown } | undefined;
    try {
      memory = deviceMemoryFor(stream, made, transport, where);
      calls = new (native().binding.GpuCalls)({
        memory: memory.nativeMemory(where),
        firstSlot: 0,
        leases: layout.leases,
        blocks: resolved.blocks,
        lanes: resolved.lanes,
      });
    } catch (reason) {
      refused = { reason };
    }
    // From here on the others may send: all ranks' counts are in place.
    await agreement.conclude(where, refused, ['ready'], wait);
    return new DeviceDispatcher({
      ...resolved,
      transport,
      memory: memory!,
      endpoints,
      agreement,
      calls: calls!,
      closeControl: () => control.close(),
    });
  } catch (error) {
    calls?.release();
    await made?.close();
    await control.close();
    throw error;
  }
}
