/** Opens a buffer for experts over device memory: rows and counters on the device, agreements in host memory. */
import { checkInteger, invalid, type Rank } from '@ep/core';
import { type NativeGpuMoeBuffer, native } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { Agreement, agreementBytes, agreementSlots } from '../agreement.js';
import { checkObject, checkTransport } from '../check-spec.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import { roundToPage } from '../layout.js';
import { moeForm } from '../moe/codes.js';
import { moeLines, resolveMoe } from '../moe/options.js';
import { callSlots } from '../moe/place.js';
import { DeviceMoeBuffer } from './moe-buffer.js';
import type { DeviceMoeOptions } from './moe-received.js';
import { checkBlocks, checkStream } from './options.js';
import { deviceMemoryFor } from './own-memory.js';

const DEFAULT_LANES = 256;
const MOST_LANES = 512;
const MOST_LAYOUTS = 64;

/**
 * Collective, over a transport with device memory (`nvshmem.cuda`). `EP_MISMATCH` names ranks with other options; `EP_INVALID_ARGUMENT` says when the kernels of the
 * ranks on this GPU could not all run at once.
 */
export async function openDeviceMoeBuffer(
  transport: DispatchTransport,
  options: DeviceMoeOptions,
): Promise<DeviceMoeBuffer> {
  const where = 'openDeviceMoeBuffer';
  checkTransport(transport, where);
  checkObject(options, 'options', 'an object with stream, mode, experts, maxTokens, topK and hidden', where);
  const { worldSize, rank } = transport;
  const { stream: put, blocks: wanted, lanes: given, layouts: kept, ...rest } = options;
  const stream = checkStream(put, where);
  const lanes = checkInteger(given ?? DEFAULT_LANES, 'lanes', where, 32, MOST_LANES);
  if (lanes % 32 !== 0) throw invalid('lanes', { where, expected: 'a multiple of 32', found: lanes });
  const blocks = checkBlocks(wanted, where);
  const moe = resolveMoe(rest, worldSize, where);
  const layouts = checkInteger(kept ?? 0, 'layouts', where, 0, moe.mode === 'high-throughput' ? MOST_LAYOUTS : 0);
  const wait = { timeoutMs: moe.timeoutMs, ...(options.signal ? { signal: options.signal } : {}) };
  const control = await transport.allocate({
    byteLength: agreementBytes(worldSize),
    signalSlots: agreementSlots(worldSize),
    ...wait,
  });
  let memory: DeviceMemory | undefined;
  let buffer: NativeGpuMoeBuffer | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, control, endpoints, { byteOffset: 0, slot: 0 });
    await agreement.same(where, moeLines(moe), wait);
    const made = await transport.allocate({
      byteLength: roundToPage(moe.sizes.totalBytes),
      signalSlots: callSlots(moe),
      space: 'device',
      ...wait,
    });
    // A rank that fails here still takes part: the others must hear of it instead of waiting for it.
    let opened: DeviceMoeBuffer | undefined;
    let refused: { readonly reason: unknown } | undefined;
    try {
      memory = deviceMemoryFor(stream, made, transport, where);
      buffer = new (native().binding.GpuMoeBuffer)({
        ...moeForm(moe),
        ...{ memory: memory.nativeMemory(where), blocks, lanes },
      });
      const closeControl = () => control.close();
      opened = new DeviceMoeBuffer({ rank, moe, memory, stream, native: buffer, layouts, closeControl });
    } catch (reason) {
      refused = { reason };
      await made.close();
    }
    // From here on the others may send: all ranks' tables are in place.
    await agreement.conclude(where, refused, ['ready'], wait);
    return opened!;
  } catch (error) {
    buffer?.close();
    await memory?.close();
    await control.close();
    throw error;
  }
}
