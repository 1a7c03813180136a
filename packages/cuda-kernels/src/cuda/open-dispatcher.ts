/** Opens a dispatcher over device memory: leases and counters on the device, agreements in host memory. */
import { native } from '@ep/native';
import { checkTransport } from '../check-spec.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import { DeviceDispatcher } from './dispatcher.js';
import { openOnDevice } from './open-memory.js';
import { type DeviceDispatcherOptions, resolveDeviceOptions } from './options.js';

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
  const { layout, chunkBytes, stream, timeoutMs, blocks, lanes } = resolved;
  const { leases, leaseBytes } = layout;
  const { made, ...opened } = await openOnDevice(transport, where, {
    stream,
    identity: [`leases is ${leases}`, `leaseBytes is ${leaseBytes}`, `chunkBytes is ${chunkBytes}`],
    byteLength: leases * leaseBytes,
    signalSlots: 2 * leases * worldSize,
    make: (memory) =>
      new (native().binding.GpuCalls)({ memory: memory.nativeMemory(where), firstSlot: 0, leases, blocks, lanes }),
    wait: { timeoutMs, ...(options.signal ? { signal: options.signal } : {}) },
  });
  return new DeviceDispatcher({ ...resolved, ...opened, transport, calls: made });
}
