/**
 * A transport that keeps the promises of `Transport<'bundled' | 'inc' | 'add'>` and no others, so that an algorithm which assumes more fails on any
 * machine: puts land in pieces and overtake each other, requests lie around until a random moment or a flush, all by seed. Ranks of one machine, as
 * threads or as processes; the store must live as long as the transport.
 */
import {
  checkOpening,
  EpError,
  exchange,
  type Member,
  type OpenOptions,
  rendezvous,
  type TransportProvider,
} from '@ep/core';
import { native } from '@ep/native';
import { type HostileConfig, resolveConfig } from './config.js';
import { type HostileNeeds, probeHostile } from './probe.js';
import { HostileTransport, SEGMENT_HANDLE_BYTES } from './transport.js';

export type { HostileConfig } from './config.js';
export type { HostileNeeds } from './probe.js';
export { HostileTransport } from './transport.js';

const VERSION = '0.0.0';

async function openHostile(member: Member, options: OpenOptions<HostileConfig>): Promise<HostileTransport> {
  checkOpening(member, options, 'hostile:engine');
  const { rank, worldSize, store } = member;
  const config = resolveConfig(options.config);
  const limits = { signal: options.signal, timeoutMs: options.timeoutMs ?? config.timeoutMs };
  const { binding } = native();
  await rendezvous(
    store,
    {
      rank,
      worldSize,
      facts: { agree: { transport: 'hostile:engine', version: VERSION, abi: binding.abi, seed: config.seed } },
      key: 'hostile/rendezvous',
    },
    limits,
  );
  const context = new binding.RankContext(rank, worldSize, worldSize);
  try {
    const parts = await exchange(
      store,
      { rank, worldSize, key: 'hostile/control', bytes: new Uint8Array(context.handle()) },
      limits,
    );
    const handles = new Uint8Array(worldSize * SEGMENT_HANDLE_BYTES);
    for (const [peer, bytes] of parts.entries()) {
      if (bytes.byteLength !== SEGMENT_HANDLE_BYTES) {
        throw new EpError(
          'EP_RENDEZVOUS',
          `rank ${peer} published a handle of ${bytes.byteLength} bytes, expected ${SEGMENT_HANDLE_BYTES}`,
        );
      }
      handles.set(bytes, peer * SEGMENT_HANDLE_BYTES);
    }
    context.connect(handles);
    await exchange(store, { rank, worldSize, key: 'hostile/connected', bytes: new Uint8Array(0) }, limits);
    const seed = BigInt(config.seed) * 1_000_003n + BigInt(rank);
    const engine = new binding.HostileEngine(context, seed, config.maxDelayUs, config.ringCapacity);
    return new HostileTransport({ rank, worldSize, store, context, engine, config });
  } catch (error) {
    context.close();
    throw error;
  }
}

/** Offers as little as a transport may. */
export const hostile = {
  name: 'hostile:engine',
  probe: probeHostile,
  open: openHostile,
} satisfies TransportProvider<HostileNeeds, HostileConfig> & { open: typeof openHostile };
