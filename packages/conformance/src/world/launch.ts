/** Programs beside the test, each a worker thread or a process, and their side of the conversation. */
import { fork } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads';
import type { Mode } from '../cases/case.js';

interface Quit {
  readonly kind: 'quit';
}

export interface Launched<To, From> {
  /** `quit` ends the program once nothing else keeps it. */
  readonly send: (message: To | Quit) => void;
  /** SIGKILL, or terminate(): nothing of the program runs any more. */
  readonly kill: () => Promise<void>;
  readonly onMessage: (listener: (message: From) => void) => void;
  readonly onExit: (listener: (how: string) => void) => void;
}

function launchThread<To, From>(main: URL, data: unknown): Launched<To, From> {
  const worker = new Worker(main, { workerData: data });
  return {
    send: (message) => worker.postMessage(message),
    kill: async () => {
      await worker.terminate();
    },
    onMessage: (listener) => worker.on('message', listener),
    onExit: (listener) => {
      worker.on('error', (error) => listener(`uncaught ${error.stack ?? String(error)}`));
      worker.on('exit', (code) => listener(`exit code ${code}`));
    },
  };
}

function launchProcess<To, From>(main: URL, data: unknown): Launched<To, From> {
  const child = fork(fileURLToPath(main), [JSON.stringify(data)], {
    serialization: 'advanced',
    execArgv: [],
    stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
  });
  const gone = new Promise<void>((resolve) => child.once('exit', () => resolve()));
  return {
    send: (message) => child.send(message as object),
    kill: async () => {
      if (child.exitCode === null && child.signalCode === null) child.kill('SIGKILL');
      await gone;
    },
    onMessage: (listener) => child.on('message', (message) => listener(message as From)),
    onExit: (listener) => {
      child.on('exit', (code, signal) => listener(signal === null ? `exit code ${code}` : `signal ${signal}`));
    },
  };
}

/** `data`, JSON, is what the program finds in `launchData()`. */
export function launch<To, From>(mode: Mode, main: URL, data: unknown): Launched<To, From> {
  return mode === 'threads' ? launchThread(main, data) : launchProcess(main, data);
}

const port = isMainThread ? undefined : parentPort!;

/** In a launched program. */
export const launchData = (): unknown => (port ? workerData : JSON.parse(process.argv[2] ?? '{}'));

/** In a launched program: hears what it is sent until it is told to quit, or the launcher is gone. Gives the way back. */
export function hearLauncher<To extends { readonly kind: string }, From>(
  receive: (message: To) => void,
): (message: From) => void {
  const hear = (message: To | Quit): void => {
    if (message.kind !== 'quit') receive(message as To);
    else if (port) port.close();
    else process.disconnect();
  };
  if (port) port.on('message', hear);
  else process.on('message', (message) => hear(message as To | Quit));
  // A launcher that is gone cannot be told anything.
  process.on('disconnect', () => process.exit());
  return (message) => {
    if (port) port.postMessage(message);
    else process.send!(message);
  };
}
