/** Two ranks of one thread, so that a test sees both sides. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { openFileStore } from '@ep/core';
import type { RankMemory } from '@ep/native/ranks';
import { type DeviceIbgdaConfig, type IbgdaTransport, ibgda, type SoftIbgdaConfig } from '../src/index.js';

export interface Pair {
  readonly transports: readonly [IbgdaTransport, IbgdaTransport];
  close(): Promise<void>;
}

type Config = SoftIbgdaConfig & DeviceIbgdaConfig;

/** Opens both; a list gives each rank a configuration of its own. */
export async function openPair(
  config: Config | readonly [Config, Config] = {},
  provider: typeof ibgda.soft | typeof ibgda.hardware = ibgda.soft,
): Promise<Pair> {
  const folder = mkdtempSync(join(tmpdir(), 'ep-ibgda-'));
  const configs = Array.isArray(config) ? config : [config, config];
  const stores = await Promise.all([0, 1].map(() => openFileStore(join(folder, 'store'))));
  const opened = await Promise.allSettled(
    stores.map((store, rank) =>
      provider.open(
        { rank, worldSize: 2, store },
        { signal: new AbortController().signal, config: { timeoutMs: 20_000, ...configs[rank] } },
      ),
    ),
  );
  const close = async (): Promise<void> => {
    await Promise.all(
      opened.map((one) => (one.status === 'fulfilled' ? one.value.close().catch(() => {}) : undefined)),
    );
    await Promise.all(stores.map((store) => store.close()));
    rmSync(folder, { recursive: true, force: true });
  };
  const failed = opened.find((one) => one.status === 'rejected');
  if (failed?.status === 'rejected') {
    await close();
    throw failed.reason;
  }
  const transports = opened.map((one) => (one as PromiseFulfilledResult<IbgdaTransport>).value);
  return { transports: [transports[0]!, transports[1]!], close };
}

/** A memory of both ranks and this rank's endpoint to the other. */
export async function openSides(pair: Pair, byteLength = 4096, signalSlots = 8) {
  const [a, b] = await Promise.all(
    pair.transports.map(async (transport) => {
      const memory = (await transport.allocate({ byteLength, signalSlots })) as RankMemory;
      const endpoint = await transport.connect(1 - transport.rank);
      return { transport, memory, endpoint, peer: 1 - transport.rank };
    }),
  );
  return [a!, b!] as const;
}
