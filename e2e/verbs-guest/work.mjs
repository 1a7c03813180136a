/**
 * Runs in the guest: the workloads of e2e/multinode on ranks that reach each other by `fabric` of providers.mjs, each a process, which have the devices in turn. One line of JSON for every
 * workload that all ranks have done.
 *   node work.mjs RANKS STEPS DEVICE...
 */
import { fork } from 'node:child_process';
import { mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { openFileStore } from '@ep/core';
import { workloads } from '../multinode/workloads.mjs';
import { fabric } from './providers.mjs';

const names = ['attention', 'experts', 'groups'];

async function beRank({ rank, worldSize, steps, path }) {
  const store = await openFileStore(path);
  const transport = await fabric.open(
    { rank, worldSize, store },
    { signal: AbortSignal.timeout(120_000), config: { timeoutMs: 120_000 } },
  );
  for (const name of names) {
    const work = await workloads[name]({ transport, store, rank, worldSize, data: {} });
    for (let step = 0; step < steps; step++) await work.step(step);
    await work.close();
    await transport.barrier();
    process.send({ name, provider: transport.offer.provider });
  }
  await transport.close();
  await store.close();
  process.disconnect();
}

async function beParent([ranks, steps, ...devices]) {
  process.env.EP_GUEST_DEVICES = devices.join(',');
  const path = join(mkdtempSync(join(tmpdir(), 'ep-guest-')), 'store');
  const worldSize = Number(ranks);
  const done = new Map(names.map((name) => [name, 0]));
  const ends = Array.from({ length: worldSize }, (_, rank) => {
    const order = { rank, worldSize, steps: Number(steps), path };
    const child = fork(fileURLToPath(import.meta.url), [JSON.stringify(order)]);
    child.on('message', ({ name, provider }) => {
      done.set(name, done.get(name) + 1);
      if (done.get(name) === worldSize)
        process.stdout.write(`${JSON.stringify({ done: name, ranks: worldSize, provider })}\n`);
    });
    return new Promise((resolve) =>
      child.on('exit', (code, signal) => resolve(code === 0 ? 0 : `rank ${rank}: ${code ?? signal}`)),
    );
  });
  const bad = (await Promise.all(ends)).filter((end) => end !== 0);
  if (bad.length > 0) throw new Error(bad.join(', '));
}

if (process.send === undefined) await beParent(process.argv.slice(2));
else await beRank(JSON.parse(process.argv[2]));
