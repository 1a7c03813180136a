/** Opens a dispatcher: allocates its memory on all ranks and checks that they agree. */
import { type AllocateOptions, type DeviceHandle, EpError, isEpError, type Rank } from '@ep/core';
import { Agreement } from './agreement.js';
import { checkTransport } from './check-spec.js';
import { Dispatcher } from './dispatcher.js';
import type { DispatchTransport } from './dispatcher-base.js';
import { HostStream } from './host-stream.js';
import { agreementPlace, type Layout, memoryBytes, signalSlots } from './layout.js';
import { type DispatcherOptions, resolveOptions } from './options.js';

const optionLines = (layout: Layout): readonly string[] => [
  `leases is ${layout.leases}`,
  `leaseBytes is ${layout.leaseBytes}`,
  `stagingBytes is ${layout.stagingBytes}`,
];

/** Sizes that differ are found out by the transport, which knows nothing of the options that they follow from. */
async function allocate(transport: DispatchTransport, options: AllocateOptions, layout: Layout) {
  try {
    return await transport.allocate(options);
  } catch (error) {
    if (!isEpError(error) || error.code !== 'EP_MISMATCH') throw error;
    const text = `openDispatcher: ranks gave other leases, leaseBytes or stagingBytes; on this rank ${optionLines(layout).join(', ')}: ${error.message}`;
    throw new EpError('EP_MISMATCH', text, { context: error.context, cause: error });
  }
}

/** Collective. `EP_MISMATCH` names ranks with other options, or ranks that could not open it and why, `EP_CAPACITY` says when the transport has too few signal slots. */
export async function openDispatcher(transport: DispatchTransport, options: DispatcherOptions): Promise<Dispatcher> {
  const where = 'openDispatcher';
  checkTransport(transport, where);
  const { worldSize, capabilities } = transport;
  const resolved = resolveOptions(options, transport, where);
  const { layout, chunkBytes } = resolved;
  const slots = signalSlots(layout);
  if (slots > capabilities.maxSignalSlots) {
    throw new EpError(
      'EP_CAPACITY',
      `${where}: ${layout.leases} leases over ${worldSize} ranks need ${slots} signal slots, ${transport.name} has ${capabilities.maxSignalSlots}`,
      { context: { needed: slots, available: capabilities.maxSignalSlots } },
    );
  }
  const wait = { timeoutMs: resolved.timeoutMs, ...(options.signal ? { signal: options.signal } : {}) };
  const memory = await allocate(transport, { byteLength: memoryBytes(layout), signalSlots: slots, ...wait }, layout);
  const ownStream = options.stream === undefined;
  let stream: HostStream | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, memory, endpoints, agreementPlace(layout));
    const open = (): DeviceHandle<'bundled' | 'add'> => {
      const made = transport.device(memory);
      stream = options.stream ?? new HostStream();
      return made;
    };
    const lines = [...optionLines(layout), `chunkBytes is ${chunkBytes}`];
    const handle = await agreement.concludeWith(where, open, lines, wait);
    return new Dispatcher({
      transport,
      memory,
      endpoints,
      agreement,
      stream: stream!,
      ownStream,
      handle,
      ...resolved,
    });
  } catch (error) {
    if (ownStream) await stream?.close();
    await memory.close();
    throw error;
  }
}
