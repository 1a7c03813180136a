/** The device memory of a transport, as what runs on a stream needs it. */
import { EpError, type SymmetricMemory } from '@ep/core';
import { DeviceMemory } from '@ep/native/ranks';
import type { DispatchTransport } from '../dispatcher-base.js';
import type { CudaStream } from './stream.js';

/** Throws `EP_UNSUPPORTED` for memory that native code does not know, `EP_INVALID_ARGUMENT` for that of another GPU than the stream's. */
export function deviceMemoryFor(
  stream: CudaStream,
  memory: SymmetricMemory,
  { name }: DispatchTransport,
  where: string,
): DeviceMemory {
  if (!(memory instanceof DeviceMemory)) {
    throw new EpError('EP_UNSUPPORTED', `${where}: the device memory of ${name} is not in native hands`);
  }
  if (memory.device === stream.device.index) return memory;
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `${where}: the stream is of GPU ${stream.device.index}, ${name} was opened for GPU ${memory.device}`,
  );
}
