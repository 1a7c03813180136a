// One set-up at a time per checkout. Each claimant puts an empty file <pid>-<start time> into the lock folder and then
// looks at the others': alone, it holds the lock; otherwise it withdraws its claim and tries again.
// HAZARD: claim first, look second. Of two claimants at once at least one sees the other, so two never hold. The usual
// "read the pid, delete a stale file, create mine" lets a second process delete the file that a first just created.
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

/**
 * Start time of a process in clock ticks since boot; with the pid it names a process even after pids wrap around.
 * @param {number} pid
 * @returns {string | null} null: no such process (a zombie counts as gone)
 */
export function processStart(pid) {
  try {
    // The command name, field 2, may itself hold spaces and parentheses; the last ')' ends it.
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    return fields[0] === 'Z' ? null : (fields[19] ?? null);
  } catch {
    return null;
  }
}

/**
 * Runs `body` while no other process on this machine holds `dir`. A holder that died, however it died, is ignored.
 * @template T
 * @param {string} dir
 * @param {() => Promise<T>} body
 * @param {{ onWait?: (pid: number) => void, pollMs?: number }} [options]
 * @returns {Promise<T>}
 */
export async function withLock(dir, body, { onWait = () => {}, pollMs = 200 } = {}) {
  const own = `${process.pid}-${processStart(process.pid)}`;
  const claim = join(dir, own);
  let announced = 0;
  for (;;) {
    mkdirSync(dir, { recursive: true });
    writeFileSync(claim, '');
    const holder = readdirSync(dir).find((name) => name !== own && isAlive(dir, name));
    if (holder === undefined) break;
    rmSync(claim, { force: true });
    const pid = Number.parseInt(holder, 10);
    if (pid !== announced) onWait(pid);
    announced = pid;
    // Two that collide must not collide again in step.
    await sleep(pollMs * (0.5 + Math.random()));
  }
  const release = () => rmSync(claim, { force: true });
  process.on('exit', release);
  try {
    return await body();
  } finally {
    process.off('exit', release);
    release();
  }
}

/**
 * @param {string} dir
 * @param {string} name
 */
function isAlive(dir, name) {
  const [pid, start] = name.split('-');
  if (processStart(Number(pid)) === start) return true;
  rmSync(join(dir, name), { force: true });
  return false;
}
