import { fork } from 'node:child_process';
import { readFileSync, readdirSync } from 'node:fs';
import { openFileStore, prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import os from 'node:os'; import { mkdtempSync } from 'node:fs'; import path from 'node:path';
if (!process.send) {
  const dir = mkdtempSync(path.join(os.tmpdir(), 'xxp-'));
  const kids = [0, 1].map((r) => fork(import.meta.filename, [String(r), path.join(dir, 's')], { execArgv: String(r) === process.env.PROF ? ['--cpu-prof', '--cpu-prof-dir=/tmp/fx/prof', '--cpu-prof-interval=100'] : [] }));
  for (const k of kids) k.on('exit', (c) => c && console.log('exit', c));
} else {
  const rank = Number(process.argv[2]); const peer = 1 - rank;
  const store = await openFileStore(process.argv[3]);
  const t = await nvshmem.fabric.open({ rank, worldSize: 2, store: prefixStore(store, 'f') }, { signal: new AbortController().signal, config: { address: '127.0.0.1', ranksOnHost: 2, timeoutMs: 60000 } });
  const B = Number(process.env.B ?? 1 << 20), W = 8, N = Number(process.env.N ?? 64), T = Number(process.env.T ?? 60);
  const m = await t.allocate({ byteLength: 2 * W * B, signalSlots: 3 });
  const e = await t.connect(peer);
  const cpu = () => { const [a, b] = readFileSync('/proc/thread-self/schedstat', 'utf8').split(' '); return Number(a) / 1e3; };
  const all = [];
  const threads = () => Object.fromEntries(readdirSync('/proc/self/task').map((t) => { try { const [a, b, c] = readFileSync(`/proc/self/task/${t}/schedstat`, 'utf8').trim().split(' ').map(Number); return [readFileSync(`/proc/self/task/${t}/comm`, 'utf8').trim() + ':' + t, [a / 1e3, b / 1e3, c]]; } catch { return ['gone', [0,0,0]]; } }));
  let before;
  for (let turn = 0; turn < T; turn++) {
    await t.barrier();
    if (turn === T >> 1) before = threads();
    const b = performance.now(), c = cpu();
    if (rank === 0) {
      const under = [];
      for (let i = 0; i < N; i++) {
        if (under.length === W) await under.shift();
        const at = (i % W) * B;
        under.push(e.put(m.local(at, B), m.remote(peer, W * B + at, B), { signal: { slot: 1, op: 'inc' } }));
      }
      await Promise.all(under);
    }
    all.push([performance.now() - b, cpu() - c]);
    await t.barrier();
  }
  const after = threads(); const puts = N * (T - (T >> 1));
  console.log(`rank ${rank}: ` + Object.entries(after).map(([k, v]) => [k, v.map((x, i) => (x - (before[k]?.[i] ?? 0)) / puts)]).filter(([, v]) => v[0] > 0.3).map(([k, v]) => `${k} cpu ${v[0].toFixed(1)} wait ${v[1].toFixed(1)} us runs ${v[2].toFixed(1)}`).join('; '));
  if (rank === 0) {
    const med = (v) => v.toSorted((x, y) => x - y)[v.length >> 1];
    const tail = all.slice(all.length >> 1);
    console.log(`${((N * B) / med(tail.map((x) => x[0])) / 1e6).toFixed(2)} GB/s, ${((med(tail.map((x) => x[0])) * 1000) / N).toFixed(1)} us a put, JS thread ${(med(tail.map((x) => x[1])) / N).toFixed(1)} us a put`);
  }
  await t.barrier(); await t.close();
}
