/** Hosts that are network namespaces of this machine, joined by a pair of virtual interfaces. They go away with the processes that hold them. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
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

export interface Launched {
  output: string;
  readonly child: ChildProcess;
  readonly ended: Promise<number | NodeJS.Signals>;
}

class Host {
  readonly address: string;
  readonly interface: string;
  readonly #holder: ChildProcess;

  constructor(holder: ChildProcess, number: number) {
    this.#holder = holder;
    this.address = `10.77.0.${number + 1}`;
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
      readonly ready?: () => void;
      readonly secrets?: readonly [string, string];
      readonly env?: NodeJS.ProcessEnv;
    } = {},
  ): Promise<readonly Report[]> {
    const worldSize = 2 * perHost;
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
      let report: Report | undefined;
      child.on('message', (message: Report | 'ready') => {
        if (message !== 'ready') report = message;
        else if (--awaited === 0) ready();
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
