/** How dispatchers over device memory are opened: agreements in host memory, what they agree on, then memory of the device and what this rank makes of it. */
import type { Endpoint, Rank, SymmetricMemory, WaitOptions } from '@ep/core';
import type { DeviceMemory } from '@ep/native/ranks';
import { Agreement, agreementBytes, agreementSlots } from '../agreement.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import { deviceMemoryFor } from './own-memory.js';
import type { CudaStream } from './stream.js';

export interface DeviceOpening<Made> {
  readonly stream: CudaStream;
  /** What must be the same on all ranks. */
  readonly identity: readonly string[];
  /** Of the device memory. */
  readonly byteLength: number;
  readonly signalSlots: number;
  /** What this rank keeps on its device. */
  readonly make: (memory: DeviceMemory) => Made;
  readonly wait: WaitOptions;
}

export interface OpenedOnDevice<Made> {
  readonly memory: DeviceMemory;
  readonly made: Made;
  readonly endpoints: readonly Endpoint<'bundled' | 'add'>[];
  readonly agreement: Agreement;
  /** Of the agreements, in host memory. */
  readonly closeControl: () => Promise<void>;
}

/** Collective. `EP_MISMATCH` names ranks with another identity, or ranks that failed in their own part and why. Nothing stays open where it rejects. */
export async function openOnDevice<Made extends { release(): void }>(
  transport: DispatchTransport,
  where: string,
  { stream, identity, byteLength, signalSlots, make, wait }: DeviceOpening<Made>,
): Promise<OpenedOnDevice<Made>> {
  const { worldSize } = transport;
  const control = await transport.allocate({
    byteLength: agreementBytes(worldSize),
    signalSlots: agreementSlots(worldSize),
    ...wait,
  });
  let allocated: SymmetricMemory | undefined;
  let made: Made | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, control, endpoints, { byteOffset: 0, slot: 0 });
    await agreement.same(where, identity, wait);
    const there = await transport.allocate({ byteLength, signalSlots, space: 'device', ...wait });
    allocated = there;
    const open = (): DeviceMemory => {
      const memory = deviceMemoryFor(stream, there, transport, where);
      made = make(memory);
      return memory;
    };
    // From here on the others may send: all ranks' parts are in place.
    const memory = await agreement.concludeWith(where, open, ['ready'], wait);
    return { memory, made: made!, endpoints, agreement, closeControl: () => control.close() };
  } catch (error) {
    made?.release();
    await allocated?.close();
    await control.close();
    throw error;
  }
}
