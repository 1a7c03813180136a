/** Runs the built `ep` as a user would. */
import { type ChildProcess, spawn } from 'node:child_process';
import { readdirSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

export const bin = fileURLToPath(new URL('../bin/ep.mjs', import.meta.url));

export interface Finished {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly stdout: string;
  readonly stderr: string;
}

export interface Running {
  readonly child: ChildProcess;
  readonly finished: Promise<Finished>;
  /** Resolves once stdout holds a match. */
  seen(pattern: RegExp): Promise<RegExpMatchArray>;
}

export function startEp(args: readonly string[], env: Readonly<Record<string, string>> = {}, cwd?: string): Running {
  const child = spawn(process.execPath, [bin, ...args], {
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
    ...(cwd === undefined ? {} : { cwd }),
  });
  let stdout = '';
  let stderr = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    stderr += text;
  });
  const finished = new Promise<Finished>((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code, signal) => resolve({ code, signal, stdout, stderr }));
  });
  return {
    child,
    finished,
    async seen(pattern) {
      for (;;) {
        const match = stdout.match(pattern);
        if (match !== null) return match;
        if (child.exitCode !== null || child.signalCode !== null) {
          throw new Error(`ep ended before it printed ${pattern}; stdout: ${stdout} stderr: ${stderr}`);
        }
        await sleep(20);
      }
    },
  };
}

export function runEp(
  args: readonly string[],
  env?: Readonly<Record<string, string>>,
  cwd?: string,
): Promise<Finished> {
  return startEp(args, env, cwd).finished;
}

/** As `runEp`, on a terminal of its own (util-linux's `script`): stdout holds what stderr does, too. Arguments must mean nothing to a shell. */
export async function runEpOnTerminal(args: readonly string[]): Promise<Pick<Finished, 'code' | 'stdout'>> {
  // A new pseudoterminal has no width, and what wraps lines at it would print one character on each.
  const command = `stty cols 120 rows 40; exec ${[process.execPath, bin, ...args].join(' ')}`;
  const child = spawn('script', ['-qec', command, '/dev/null'], { stdio: ['ignore', 'pipe', 'inherit'] });
  let stdout = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  return new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code) => resolve({ code, stdout }));
  });
}

/** True while the process exists and is not a zombie that only waits for its parent. */
export function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch {
    return false;
  }
}

export async function untilGone(pids: readonly number[], limitMs: number): Promise<number[]> {
  const end = Date.now() + limitMs;
  while (pids.some(isAlive) && Date.now() < end) await sleep(20);
  return pids.filter(isAlive);
}

/** Waits until a folder holds nothing; throws with what it holds. */
export async function untilEmpty(folder: string, limitMs = 10_000): Promise<void> {
  const end = Date.now() + limitMs;
  while (readdirSync(folder).length > 0 && Date.now() < end) await sleep(20);
  const left = readdirSync(folder, { recursive: true });
  if (left.length > 0) throw new Error(`left behind: ${left.join(', ')}`);
}
