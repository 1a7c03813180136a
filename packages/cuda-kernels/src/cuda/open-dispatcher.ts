/** Opens a dispatcher over device memory: leases and counters on the device, agreements in host memory. */
import { EpError, type Rank } from '@ep/core';
import { type NativeGpuCalls, native } from '@ep/native';
import { DeviceMemory } from '@ep/native/ranks';
import { Agreement, agreementBytes, agreementSlots } from '../agreement.js';
import { checkTransport } from '../check-spec.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import { DeviceDispatcher } from './dispatcher.js';
import { type DeviceDispatcherOptions, resolveDeviceOptions } from './options.js';

/**
 * Collective, over a transport with device memory (`nvshmem.cuda`, `ibgda` with `device`). `EP_MISMATCH` names ranks with other options; `EP_INVALID_ARGUMENT` says when the kernels of
 * the ranks on this GPU could not all run at once.
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
  let memory: DeviceMemory | undefined;
  let calls: NativeGpuCalls | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, control, endpoints, { byteOffset: 0, slot: 0 });
    const lines = [`leases is ${layout.leases}`, `leaseBytes is ${layout.leaseBytes}`, `chunkBytes is ${chunkBytes}`];
    await agreement.same(where, lines, wait);
    const made = await transport.allocate({
      byteLength: layout.leases * layout.leaseBytes,
      signalSlots: 2 * layout.leases * worldSize,
      space: 'device',
      ...wait,
    });
    if (!(made instanceof DeviceMemory)) {
      await made.close();
      throw new EpError('EP_UNSUPPORTED', `${where}: the device memory of ${transport.name} is not in native hands`);
    }
    memory = made;
    if (memory.device !== stream.device.index) {
      throw new EpError(
        'EP_INVALID_ARGUMENT',
        `${where}: the stream is of GPU ${stream.device.index}, ${transport.name} was opened for GPU ${memory.device}`,
      );
    }
    calls = new (native().binding.GpuCalls)({
      memory: memory.nativeMemory(where),
      firstSlot: 0,
      leases: layout.leases,
      blocks: resolved.blocks,
      lanes: resolved.lanes,
    });
    const dispatcher = new DeviceDispatcher({
      ...resolved,
      transport,
      memory,
      endpoints,
      agreement,
      calls,
      closeControl: () => control.close(),
    });
    // From here on the others may send: all ranks' counts are in place.
    await dispatcher.agree(where, ['ready'], wait);
    return dispatcher;
  } catch (error) {
    calls?.release();
    await memory?.close();
    await control.close();
    throw error;
  }
}
