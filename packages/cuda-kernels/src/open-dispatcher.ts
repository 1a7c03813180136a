/** Opens a dispatcher: allocates its memory on all ranks and checks that they agree. */
import { EpError, type Rank } from '@ep/core';
import { Agreement } from './agreement.js';
import { Dispatcher, type DispatchTransport } from './dispatcher.js';
import { HostStream } from './host-stream.js';
import { agreementPlace, memoryBytes, signalSlots } from './layout.js';
import { type DispatcherOptions, resolveOptions } from './options.js';

/** Collective. `EP_MISMATCH` names ranks with other options, `EP_CAPACITY` says when the transport has too few signal slots. */
export async function openDispatcher(transport: DispatchTransport, options: DispatcherOptions): Promise<Dispatcher> {
  const where = 'openDispatcher';
  const { worldSize, capabilities } = transport;
  const resolved = resolveOptions(options, worldSize, where);
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
  const memory = await transport.allocate({ byteLength: memoryBytes(layout), signalSlots: slots, ...wait });
  const ownStream = options.stream === undefined;
  let stream: HostStream | undefined;
  try {
    const handle = transport.device(memory);
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const agreement = new Agreement(transport, memory, endpoints, agreementPlace(layout));
    stream = options.stream ?? new HostStream();
    const dispatcher = new Dispatcher({
      transport,
      memory,
      endpoints,
      agreement,
      stream,
      ownStream,
      handle,
      ...resolved,
    });
    await dispatcher.agree(
      where,
      `${layout.leases} leases of ${layout.leaseBytes} bytes, chunks of ${chunkBytes} bytes`,
      wait,
    );
    return dispatcher;
  } catch (error) {
    if (ownStream) await stream?.close();
    await memory.close();
    throw error;
  }
}
