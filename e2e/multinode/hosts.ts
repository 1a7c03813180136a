/** Hosts that are network namespaces of this machine, joined by a pair of virtual interfaces. They go away with the processes that hold them. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readlinkSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const SECRET = randomBytes(32).toString('hex');
const EP = fileURLToPath(new URL('../../packages/cli/bin/ep.mjs', import.meta.url));
const LAUNCHED = fileURLToPath(new URL('launched.mjs', import.meta.url));
const PROGRAM = fileURLToPath(new URL('program.mjs', import.meta.url));

export interface Report {
  readonly rank: number;
  readonly value?: unknown;
  readonly error?: { readonly code?: string; readonly message: string };
  /** How the rank ended without a report. */
  readonly exit?: string;
}

/** Why there can be no such hosts here; empty: there can. */
export function namespacesMissing(): string {
  if (process.platform !== 'linux') return `network namespaces are of Linux, this is ${process.platform}`;
  if (process.getuid?.() !== 0) return 'making network namespaces with interfaces between them takes root';
  try {
    execFileSync('unshare', ['--net', 'ip', 'link', 'add', 'ep0', 'type', 'veth', 'peer', 'name', 'ep1'], {
      stdio: 'pipe',
    });
    return '';
  } catch (error) {
    return `a network namespace with a veth pair cannot be made: ${error instanceof Error ? error.message.split('\n').join(' ') : String(error)}`;
  }
}

/** Why no link can be made slow here; empty: it can. */
export function throttleMissing(): string {
  if (namespacesMissing()) return namespacesMissing();
  const make =
    'ip link add ep0 type veth peer name ep1 && tc qdisc add dev ep0 root tbf rate 10mbit burst 32kb latency 400ms';
  try {
    execFileSync('unshare', ['--net', 'sh', '-c', make], { stdio: 'pipe' });
    return '';
  } catch (error) {
    return `tc cannot limit an interface: ${error instanceof Error ? error.message.split('\n').join(' ') : String(error)}`;
  }
}

/** The ranks of one run. */
export interface Job {
  /** By SIGKILL. */
  kill(...ranks: readonly number[]): void;
  /** Tells all that are there, once. */
  enough(): void;
}

export interface Launched {
  output: string;
  readonly child: ChildProcess;
  readonly ended: Promise<number | NodeJS.Signals>;
}

/** Nobody's. */
const NO_MAC = '02:00:00:00:00:fe';

const addressOf = (number: number): string => `10.77.0.${number + 1}`;

class Host {
  readonly address: string;
  readonly interface: string;
  readonly #other: string;
  readonly #holder: ChildProcess;

  constructor(holder: ChildProcess, number: number) {
    this.#holder = holder;
    this.address = addressOf(number);
    this.#other = addressOf(1 - number);
    this.interface = `ep${number}`;
  }

  get pid(): number {
    return this.#holder.pid!;
  }

  run(...command: readonly string[]): string {
    return execFileSync('nsenter', [...this.inside, ...command], {
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'pipe'],
    });
  }

  get inside(): readonly string[] {
    return ['--target', String(this.pid), '--net', '--'];
  }

  /** Bytes that have left by the interface to the other host. */
  bytesSent(): number {
    const line = this.run('cat', '/proc/net/dev')
      .split('\n')
      .find((one) => one.trim().startsWith(`${this.interface}:`));
    return Number(line!.split(':')[1]!.trim().split(/\s+/)[8]);
  }

  link(state: 'up' | 'down'): void {
    this.run('ip', 'link', 'set', this.interface, state);
  }

  /** Bytes of the largest packet. */
  mtu(bytes: number): void {
    this.run('ip', 'link', 'set', this.interface, 'mtu', String(bytes));
  }

  /** What this host sends is lost without a word; what the other one sends still comes. */
  mute(isMute: boolean): void {
    const on = ['ip', 'neigh', 'replace', this.#other, 'lladdr', NO_MAC, 'dev', this.interface, 'nud', 'permanent'];
    this.run(...(isMute ? on : ['ip', 'neigh', 'del', this.#other, 'dev', this.interface]));
  }

  /** Sends no more than that much in a second. */
  throttle(megabits: number): void {
    const bucket = ['burst', '32kb', 'latency', '400ms'];
    this.run('tc', 'qdisc', 'add', 'dev', this.interface, 'root', 'tbf', 'rate', `${megabits}mbit`, ...bucket);
  }

  /** Ends that; says how often something had to wait for it. */
  unthrottle(): number {
    const said = this.run('tc', '-s', 'qdisc', 'show', 'dev', this.interface, 'root');
    this.run('tc', 'qdisc', 'del', 'dev', this.interface, 'root');
    return Number(/overlimits (\d+)/.exec(said)![1]);
  }

  /** Processes on this host, but for the one that holds it. */
  processes(): readonly string[] {
    const namespace = readlinkSync(`/proc/${this.pid}/ns/net`);
    return readdirSync('/proc').filter((pid) => {
      if (!/^\d+$/.test(pid) || Number(pid) === this.pid) return false;
      try {
        return readlinkSync(`/proc/${pid}/ns/net`) === namespace;
      } catch {
        return false; // ended since it was listed, or not ours
      }
    });
  }

  close(): void {
    this.#holder.kill('SIGKILL');
  }
}

async function makeHost(number: number): Promise<Host> {
  // It ends when its input does, that is with this process at the latest.
  const holder = spawn('unshare', ['--net', 'sh', '-c', 'echo made; exec cat'], { stdio: ['pipe', 'pipe', 'inherit'] });
  await once(holder.stdout!, 'data');
  return new Host(holder, number);
}

export class TwoHosts {
  readonly hosts: readonly [Host, Host];
  readonly #ranks = new Set<ChildProcess>();

  private constructor(hosts: readonly [Host, Host]) {
    this.hosts = hosts;
  }

  static async make(): Promise<TwoHosts> {
    const [a, b] = await Promise.all([makeHost(0), makeHost(1)]);
    const made = new TwoHosts([a, b]);
    a.run('ip', 'link', 'add', a.interface, 'type', 'veth', 'peer', 'name', b.interface, 'netns', String(b.pid));
    for (const host of made.hosts) {
      host.run('ip', 'address', 'add', `${host.address}/24`, 'dev', host.interface);
      host.run('ip', 'link', 'set', 'lo', 'up');
      host.link('up');
    }
    return made;
  }

  /** As many ranks on either host, the first host's first. `ready` is called when all have said so. */
  async run(
    scenario: string,
    perHost: number,
    {
      data = {},
      ready = () => {},
      secrets = [SECRET, SECRET],
      env = {},
    }: {
      readonly data?: unknown;
      readonly ready?: (job: Job) => void;
      readonly secrets?: readonly [string, string];
      readonly env?: NodeJS.ProcessEnv;
    } = {},
  ): Promise<readonly Report[]> {
    // Those of a test that timed out would keep the store's port.
    for (const child of this.#ranks) child.kill('SIGKILL');
    const worldSize = 2 * perHost;
    const children: ChildProcess[] = [];
    const job: Job = {
      kill: (...ranks) => {
        for (const rank of ranks) children[rank]!.kill('SIGKILL');
      },
      enough: () => {
        for (const child of children) if (child.connected) child.send('enough');
      },
    };
    const store = { host: this.hosts[0].address, port: 29_511 };
    let awaited = worldSize;
    const ranks = Array.from({ length: worldSize }, (_, rank) => {
      const host = this.hosts[rank < perHost ? 0 : 1];
      const secret = secrets[rank < perHost ? 0 : 1];
      const start = { scenario, rank, worldSize, perHost, store, address: host.address, data };
      const child = spawn('nsenter', [...host.inside, process.execPath, PROGRAM, JSON.stringify(start)], {
        stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
        env: { ...process.env, ...env, EP_JOB_SECRET: secret },
      });
      this.#ranks.add(child);
      children.push(child);
      let report: Report | undefined;
      child.on('message', (message: Report | 'ready') => {
        if (message !== 'ready') report = message;
        else if (--awaited === 0) ready(job);
      });
      return once(child, 'exit').then(([code, signal]): Report => {
        this.#ranks.delete(child);
        return report ?? { rank, exit: String(signal ?? code) };
      });
    });
    return Promise.all(ranks);
  }

  /** `ep run` on one of the hosts; `output` grows. */
  launch(host: 0 | 1, flags: readonly string[], ...args: readonly string[]): Launched {
    const command = [process.execPath, EP, 'run', ...flags, '--', process.execPath, LAUNCHED, ...args];
    const child = spawn('nsenter', [...this.hosts[host].inside, ...command], {
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { ...process.env, EP_JOB_SECRET: SECRET },
    });
    this.#ranks.add(child);
    const launched: { output: string } = { output: '' };
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (text) => (launched.output += String(text)));
    const ended = once(child, 'close').then(([code, signal]) => {
      this.#ranks.delete(child);
      return signal ?? code;
    });
    return Object.assign(launched, { child, ended });
  }

  close(): void {
    for (const child of this.#ranks) child.kill('SIGKILL');
    for (const host of this.hosts) host.close();
  }
}
