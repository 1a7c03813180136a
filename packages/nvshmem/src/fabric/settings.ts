/**
 * What libfabric takes from the environment only, read when it is first used in a process. `ofi_rxm` over TCP (1.17) makes room for 4096 messages of 16 KiB at once otherwise, clears it,
 * and keeps it: 94 MB of a rank, of which messages of the engine, 1 KiB each and taken as they come, need next to nothing. 128 is what it makes for each connection over verbs.
 */
const SETTINGS = { FI_OFI_RXM_MSG_RX_SIZE: '128' } as const;

/**
 * Calls `use`, which uses libfabric, with these settings in the environment where it says nothing of them; behind it they are gone, for child processes and whatever else reads it.
 * HAZARD: of settings that both ends of a connection must have alike (FI_OFI_RXM_BUFFER_SIZE: ends that differ refuse each other) there can be none here: the environment of a worker thread is
 * a copy that libfabric does not see, so that ranks there go without.
 */
export function withSettings<T>(use: () => T): T {
  const missing = Object.entries(SETTINGS).filter(([name]) => process.env[name] === undefined);
  for (const [name, value] of missing) process.env[name] = value;
  try {
    return use();
  } finally {
    for (const [name] of missing) delete process.env[name];
  }
}
