/** A rank that does what it is told: a process, or a worker thread. Rows are f32, so that what experts make of them needs no cast. */
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { openFileStore, prefixStore, tensor } from '@ep/core';
import { joinMoeBuffer, openMoeBuffer } from '@ep/cuda-kernels';
import { native } from '@ep/native';
import { openers, rejoiners } from './openers.mjs';

const { rank, worldSize, storePath } = isMainThread ? JSON.parse(process.env.EP_TEST_RANK) : workerData;
const send = (message) => (isMainThread ? process.send(message) : parentPort.postMessage(message));

const store = await openFileStore(storePath);
let transport;
let buffer;
let received;

const limits = (timeoutMs) => ({ signal: AbortSignal.timeout(60_000), timeoutMs });

function rowsOf({ x }, hidden) {
  const rows = x.shape.slice(0, -1).reduce((product, extent) => product * extent, 1);
  const stride = x.strides?.at(-2) ?? hidden;
  const out = new Float32Array(rows * hidden);
  for (let row = 0; row < rows; row++) out.set(x.data.subarray(row * stride, row * stride + hidden), row * hidden);
  return out;
}

const linkOf = (fd) => {
  try {
    return readlinkSync(`/proc/self/fd/${fd}`);
  } catch {
    return ''; // closed since it was listed
  }
};

const commands = {
  open: async ({ options, way = 'shm', config }) => {
    transport = await openers[way]({ rank, worldSize, store }, { ...limits(20_000), ...(config && { config }) });
    buffer = await openMoeBuffer(transport, options);
  },
  /** A world of those that are left, after one that has ended. */
  openAgain: async ({ options, way, rank, worldSize, name }) => {
    await buffer.close();
    await transport.close();
    transport = await openers[way]({ rank, worldSize, store: prefixStore(store, name) }, limits(20_000));
    buffer = await openMoeBuffer(transport, options);
  },
  rejoin: async ({ way, timeoutMs = 20_000, config }) => {
    transport = await rejoiners[way]({ rank, worldSize, store }, { ...limits(timeoutMs), ...(config && { config }) });
  },
  join: async ({ options }) => {
    buffer = await joinMoeBuffer(transport, options);
  },
  readmit: async ({ joining, without, timeoutMs = 20_000 }) => {
    await transport.readmit({ store, joining, timeoutMs, ...(without && { without }) });
  },
  update: async ({ timeoutMs = 20_000 }) => [...(await buffer.updateMembers({ timeoutMs }))],
  dispatch: async ({ x, hidden, choices, options, hook = false }) => {
    const rows = tensor('f32', [x.length / hidden, hidden], x);
    const of = hook
      ? await (await buffer.dispatchSend(rows, choices, options)).receive(options)
      : await buffer.dispatch(rows, choices, options);
    received = {
      of,
      rows: rowsOf(of, hidden),
      counts: of.counts.slice(),
      blockStart: of.blockStart.slice(),
      layoutRange: of.layoutRange.slice(),
      sourceToken: of.sourceToken.slice(),
      sourceChoice: of.sourceChoice.slice(),
      lostRanks: of.lostRanks,
    };
    return received.lostRanks;
  },
  combine: async ({ hidden, seed, weights, options, hook = false }) => {
    const { of, ...kept } = received;
    const y = kept.rows.map((value, i) => (value + 1) * (((i + seed + rank) % 13) - 6.25));
    const back = tensor('f32', [y.length / hidden, hidden], y);
    const combined = hook
      ? await (await buffer.combineSend(back, of.handle, { ...options, weights })).receive(options)
      : await buffer.combine(back, of.handle, { ...options, weights });
    return { received: kept, y, combined: combined.y.data.slice(), combinedLost: combined.lostRanks };
  },
  losses: async () => [...buffer.losses],
  stop: async () => process.kill(process.pid, 'SIGSTOP'),
  footprint: async () => ({
    mapped: readFileSync('/proc/self/maps', 'utf8')
      .split('\n')
      .filter((line) => line.includes('ep-segment')).length,
    descriptors: readdirSync('/proc/self/fd').filter((fd) => linkOf(fd).includes('ep-segment')).length,
    segments: native().binding.leaks().segments,
  }),
  close: async () => {
    await buffer?.close();
    await transport?.close();
    await store.close();
  },
};

async function obey({ id, name, args }) {
  try {
    send({ id, value: await commands[name](args) });
    // The channel to the parent would keep this one.
    if (name === 'close' && isMainThread) process.disconnect();
    else if (name === 'close') parentPort.close();
  } catch (error) {
    const { code, message, context } = error;
    const named = context?.rank === undefined ? undefined : [context.rank];
    const ranks = context?.lost ?? context?.awaited ?? context?.ranks ?? named;
    send({ id, error: { code, message: `rank ${rank}: ${message}`, ranks } });
  }
}

if (isMainThread) process.on('message', obey);
else parentPort.on('message', obey);
send({ ready: true });
