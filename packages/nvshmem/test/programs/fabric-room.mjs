/** The first use of libfabric in a process: what two ranks hold of memory that is written, and what is left in the environment. One line of JSON. */
import { readFileSync } from 'node:fs';
import { memoryStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';

const anonymous = () => Number(/^RssAnon:\s+(\d+) kB$/m.exec(readFileSync('/proc/self/status', 'utf8'))[1]) / 1024;
const settings = () => Object.keys(process.env).filter((name) => name.startsWith('FI_'));

const before = { megabytes: anonymous(), settings: settings() };
const store = memoryStore();
const config = { provider: 'tcp;ofi_rxm', address: '127.0.0.1', secret: 'none' };
const ranks = await Promise.all(
  [0, 1].map((rank) =>
    nvshmem.fabric.open({ rank, worldSize: 2, store }, { signal: AbortSignal.timeout(30_000), config }),
  ),
);
const megabytes = (anonymous() - before.megabytes) / 2;
await Promise.all(ranks.map((transport) => transport.close()));
process.stdout.write(JSON.stringify({ megabytes, before: before.settings, behind: settings() }));
