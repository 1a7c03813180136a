/** Hosts that are there: a list of them, reached by ssh or another command, or those of an allocation of Slurm. */
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import type { Host, Running, StartOptions } from './host.js';

const AGENT = fileURLToPath(new URL('agent.mjs', import.meta.url));
const LOOK = fileURLToPath(new URL('look.mjs', import.meta.url));

export interface Place {
  readonly name: string;
  /** Ranks that may run there. */
  readonly slots: number;
}

/** How a command line for the shell of a host is brought there. */
export type Launcher = (name: string, line: string) => readonly [string, ...string[]];

export interface Allocation {
  readonly places: readonly [Place, Place];
  readonly launcher: Launcher;
  /** Ranks can be started by `srun` itself. */
  readonly isSlurm: boolean;
}

const bad = (name: string, expected: string, found: unknown): Error =>
  new Error(`environment: ${name} must be ${expected}, found ${JSON.stringify(found)}`);

/** `a:2,b:2`, the port-like number a host's slots. */
export function placesOf(list: string): readonly Place[] {
  return list.split(',').map((entry) => {
    const [, name, slots = '1'] = /^(\w[\w.-]*)(?::([1-9]\d{0,3}))?$/.exec(entry.trim()) ?? [];
    if (name === undefined) throw bad('EP_HOSTS', 'a list of hosts and their slots such as `a:2,b:2`', list);
    return { name, slots: Number(slots) };
  });
}

/** Slurm's `2(x3),1`: of three hosts two each, of the next one. */
export function slotsOf(text: string): readonly number[] {
  return text.split(',').flatMap((entry) => {
    const [, slots, times = '1'] = /^(\d+)(?:\(x(\d+)\))?$/.exec(entry) ?? [];
    if (slots === undefined) throw bad('SLURM_TASKS_PER_NODE', 'counts such as `2(x3),1`', text);
    return Array<number>(Number(times)).fill(Number(slots));
  });
}

function two(places: readonly Place[], source: string): readonly [Place, Place] {
  const [first, second] = places;
  if (first === undefined || second === undefined || first.name === second.name)
    throw new Error(`the suites of several hosts need two, ${source} has ${places.map(({ name }) => name).join()}`);
  return [first, second];
}

/** EP_HOSTS, or the allocation in which this process runs; undefined: neither. Throws where they make no sense. */
export function givenHosts(env: NodeJS.ProcessEnv = process.env): Allocation | undefined {
  if (env.EP_HOSTS) {
    const [command = 'ssh', ...args] = (env.EP_HOSTS_LAUNCHER || 'ssh -o BatchMode=yes').trim().split(/\s+/);
    return {
      places: two(placesOf(env.EP_HOSTS), 'EP_HOSTS'),
      launcher: (name, line) => [command, ...args, name, line],
      isSlurm: false,
    };
  }
  const list = env.SLURM_JOB_ID ? (env.SLURM_JOB_NODELIST ?? env.SLURM_NODELIST) : undefined;
  if (!list) return undefined;
  const names = execFileSync('scontrol', ['show', 'hostnames', list], { encoding: 'utf8', env })
    .split('\n')
    .filter(Boolean);
  const slots = slotsOf(env.SLURM_TASKS_PER_NODE || '1');
  const step = ['--overlap', '--quiet', '--unbuffered', '--nodes=1', '--ntasks=1'];
  return {
    places: two(
      names.map((name, at) => ({ name, slots: slots[at] ?? 1 })),
      'the allocation',
    ),
    launcher: (name, line) => ['srun', ...step, `--nodelist=${name}`, 'sh', '-c', line],
    isSlurm: true,
  };
}

const quote = (text: string): string => `'${text.replaceAll("'", "'\\''")}'`;

/** This checkout lies at the same place there, built, and so does Node. */
class GivenHost implements Host {
  readonly #name: string;
  readonly #launcher: Launcher;
  address = '';

  constructor({ name }: Place, launcher: Launcher) {
    this.#name = name;
    this.#launcher = launcher;
  }

  start([program, ...args]: readonly string[], { env = {}, onMessage, onOutput }: StartOptions): Running {
    const line = `exec ${quote(process.execPath)} ${quote(AGENT)}`;
    const [launcher, ...rest] = this.#launcher(this.#name, line);
    const child = spawn(launcher, rest, { stdio: ['pipe', 'pipe', 'inherit'] });
    // HAZARD: its last words may come when nobody reads them any more.
    child.stdin.on('error', () => {});
    const say = (what: unknown): unknown => child.stdin.writable && child.stdin.write(`${JSON.stringify(what)}\n`);
    const command = [program === process.execPath ? 'node' : program, ...args];
    // The environment goes this way, too: a command line is there for everybody to read.
    say({ start: { command, env, speaks: onMessage !== undefined } });
    let end: number | NodeJS.Signals | undefined;
    createInterface({ input: child.stdout }).on('line', (text) => {
      const told = JSON.parse(text);
      if (told.message !== undefined) onMessage?.(told.message);
      if (told.output !== undefined) (onOutput ?? ((output: string) => process.stdout.write(output)))(told.output);
      if (told.end !== undefined) end = told.end;
    });
    const gone = (code: unknown): never => {
      throw new Error(`${this.#name}: ${launcher} ended with ${code}, and nothing was heard of the program`);
    };
    return {
      send: (message) => say({ message }),
      kill: () => say({ kill: true }),
      ended: Promise.race([
        once(child, 'close').then(([code, signal]) => end ?? gone(signal ?? code)),
        once(child, 'error').then(([error]) => {
          throw error;
        }),
      ]),
    };
  }

  /** Why there is no fabric there; empty: there is. */
  async look(other: string): Promise<string> {
    let said: { readonly address: string; readonly missing: string } | undefined;
    const onMessage = (message: unknown): void => {
      said = message as typeof said;
    };
    const code = await this.start([process.execPath, LOOK, other], { onMessage }).ended;
    if (said === undefined) throw new Error(`${this.#name}: the look at the host ended with ${code}`);
    this.address = said.address;
    return said.missing && `${this.#name}: ${said.missing}`;
  }

  close(): void {}
}

/** Asks both for their addresses. Rejects where one cannot be reached, or reaches the other by no network. */
export async function openGivenHosts({ places, launcher }: Allocation): Promise<{
  readonly hosts: readonly [Host, Host];
  readonly missing: string;
}> {
  const hosts = [new GivenHost(places[0], launcher), new GivenHost(places[1], launcher)] as const;
  const missing = await Promise.all(hosts.map((host, at) => host.look(places[1 - at]!.name)));
  return { hosts, missing: missing.find(Boolean) ?? '' };
}
