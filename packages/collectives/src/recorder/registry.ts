/**
 * SIGUSR2 makes every rank of the process dump, also those in worker threads.
 *
 * Signals reach the main thread only. It listens from the first group that it opens to the last that it destroys, beside other listeners, and only where
 * EP_TRACE_DIR is set: elsewhere SIGUSR2 keeps its meaning, which is to end the process. It tells the workers by a BroadcastChannel, which stays in the
 * process. A main thread that holds no rank itself calls `dumpOnSignal()`.
 *
 * HAZARD: both need a turn of the event loop. A thread that blocks, or that is inside of native code, dumps when it comes back to its loop.
 */
import { BroadcastChannel, isMainThread } from 'node:worker_threads';
import { traceFolder } from './dump-file.js';

/** What the registry needs of a recorder. */
interface Dumper {
  dumpFor(reason: 'signal'): void;
}

const channelName = 'ep:flight-recorder';

const dumpers = new Set<Dumper>();
/** Main thread: who wants the signal, beside the recorders. */
let watchers = 0;
let stopListening: (() => void) | undefined;

function dumpAll(): void {
  for (const dumper of [...dumpers]) dumper.dumpFor('signal');
}

function listen(): () => void {
  const channel = new BroadcastChannel(channelName);
  // Listening must not keep a process or a worker alive.
  channel.unref();
  if (isMainThread) {
    const onSignal = (): void => {
      channel.postMessage('dump');
      dumpAll();
    };
    process.on('SIGUSR2', onSignal);
    return () => {
      process.off('SIGUSR2', onSignal);
      channel.close();
    };
  }
  channel.onmessage = () => dumpAll();
  return () => channel.close();
}

function update(): void {
  const wanted = dumpers.size > 0 || watchers > 0;
  if (wanted && stopListening === undefined) stopListening = listen();
  else if (!wanted && stopListening !== undefined) {
    stopListening();
    stopListening = undefined;
  }
}

export function join(dumper: Dumper): void {
  dumpers.add(dumper);
  update();
}

export function leave(dumper: Dumper): void {
  dumpers.delete(dumper);
  update();
}

const last = new Set<() => void>();
const runLast = (): void => {
  for (const action of [...last]) action();
};

/** Runs `action` when this thread ends, but by SIGKILL or `terminate()`, until the returned function is called. One listener for all: Node warns of many. */
export function atExit(action: () => void): () => void {
  if (last.size === 0) process.on('exit', runLast);
  last.add(action);
  return () => {
    last.delete(action);
    if (last.size === 0) process.off('exit', runLast);
  };
}

/**
 * For a main thread whose workers are the ranks: passes SIGUSR2 on to them until the returned function is called. Does nothing where EP_TRACE_DIR is not set,
 * and in a worker.
 */
export function dumpOnSignal(): () => void {
  if (!isMainThread || traceFolder() === undefined) return () => {};
  watchers++;
  update();
  let watching = true;
  return () => {
    if (!watching) return;
    watching = false;
    watchers--;
    update();
  };
}
