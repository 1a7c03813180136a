// Child processes that always end: by themselves, by their time limit, or with this process.
// HAZARD: each child leads its own process group and the whole group is killed. Killing only the child would leave
// its grandchildren (turbo -> pnpm -> vitest -> ranks) running and holding memory and locks.
import { spawn } from 'node:child_process';
import { createWriteStream, mkdirSync } from 'node:fs';
import { constants } from 'node:os';
import { dirname } from 'node:path';

/**
 * @typedef {{ cwd?: string, env?: NodeJS.ProcessEnv, limitMs?: number, log?: string,
 *   onLine?: (line: string) => void, input?: string }} RunOptions  log: file that gets the whole output
 * @typedef {{ code: number, timedOut: boolean, output: string, ms: number }} RunResult
 *   code is 127 when the command does not exist and 128 + n after signal n; output is the last 256 KiB
 */

const outputLimit = 256 * 1024;
/** @type {Set<number>} */
const groups = new Set();
/** The exit status of this process once it was told to stop. @type {number | undefined} */
let stopping;

/**
 * @param {number} pid
 * @param {NodeJS.Signals} signal
 */
function killGroup(pid, signal) {
  try {
    process.kill(-pid, signal);
  } catch {
    // The group ended between the decision and the call.
  }
}

process.on('exit', () => {
  for (const pid of groups) killGroup(pid, 'SIGKILL');
});

/**
 * Ends the children and then this process when it is asked to stop; `before` runs first (status lines, locks).
 * @param {() => void} [before]
 */
export function exitOnSignals(before = () => {}) {
  for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM', 'SIGHUP'])) {
    process.once(signal, () => {
      before();
      stopping = 128 + constants.signals[signal];
      if (groups.size === 0) process.exit(stopping);
      for (const pid of groups) killGroup(pid, 'SIGTERM');
      // Children get a moment to remove their own temporary files; 'exit' above kills what is left.
      setTimeout(() => process.exit(stopping), 1500);
    });
  }
}

/**
 * Runs a command to its end. Never rejects: what went wrong is in the result.
 * @param {string} command
 * @param {readonly string[]} args
 * @param {RunOptions} [options]
 * @returns {Promise<RunResult>}
 */
export function run(command, args, options = {}) {
  const started = performance.now();
  return new Promise((resolve) => {
    const child = spawn(command, args, {
      cwd: options.cwd,
      env: options.env,
      detached: true,
      stdio: [options.input === undefined ? 'ignore' : 'pipe', 'pipe', 'pipe'],
    });
    if (options.log) mkdirSync(dirname(options.log), { recursive: true });
    const log = options.log ? createWriteStream(options.log) : undefined;
    let output = '';
    let partial = '';
    let timedOut = false;
    let ended = false;

    const { pid } = child;
    if (pid !== undefined) groups.add(pid);
    const timer =
      options.limitMs === undefined
        ? undefined
        : setTimeout(() => {
            timedOut = true;
            if (pid !== undefined) killGroup(pid, 'SIGKILL');
          }, options.limitMs);

    /** @param {number} code */
    const finish = (code) => {
      if (ended) return;
      ended = true;
      clearTimeout(timer);
      // What the child left behind in its group would outlive the step and disturb the next one.
      if (pid !== undefined) {
        killGroup(pid, 'SIGKILL');
        groups.delete(pid);
      }
      // HAZARD: a child may turn our SIGTERM into status 0 (turbo does). Told to stop, nobody gets a result to go on with.
      if (stopping !== undefined) {
        if (groups.size === 0) process.exit(stopping);
        return;
      }
      if (partial) options.onLine?.(partial);
      const result = { code, timedOut, output, ms: performance.now() - started };
      if (log) log.end(() => resolve(result));
      else resolve(result);
    };

    /** @param {string} text */
    const take = (text) => {
      log?.write(text);
      output = (output + text).slice(-outputLimit);
      const lines = (partial + text).split(/\r?\n/);
      partial = lines.pop() ?? '';
      for (const line of lines) options.onLine?.(line);
    };
    for (const stream of [child.stdout, child.stderr]) stream?.setEncoding('utf8').on('data', take);
    if (options.input !== undefined) child.stdin?.on('error', () => {}).end(options.input);

    child.on('error', (error) => {
      take(`${error.message}\n`);
      finish('code' in error && error.code === 'ENOENT' ? 127 : 126);
    });
    child.on('close', (code, signal) => finish(code ?? 128 + constants.signals[signal ?? 'SIGKILL']));
    // A grandchild that keeps the pipes open must not hold the step after the child itself has ended.
    child.on('exit', (code, signal) => {
      setTimeout(() => finish(code ?? 128 + constants.signals[signal ?? 'SIGKILL']), 2000).unref();
    });
  });
}
