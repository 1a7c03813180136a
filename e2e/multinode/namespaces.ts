/** Hosts that are network namespaces of this machine, joined by a pair of virtual interfaces. They go away with the processes that hold them. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync, readlinkSync } from 'node:fs';
import type { Host, Running, StartOptions } from './host.js';

const textOf = (error: unknown): string =>
  error instanceof Error ? error.message.split('\n').join(' ') : String(error);

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
    return `a network namespace with a veth pair cannot be made: ${textOf(error)}`;
  }
}

/** Why no link between namespaces can be made slow here; empty: it can. */
export function throttleMissing(): string {
  if (namespacesMissing()) return namespacesMissing();
  const make =
    'ip link add ep0 type veth peer name ep1 && tc qdisc add dev ep0 root tbf rate 10mbit burst 32kb latency 400ms';
  try {
    execFileSync('unshare', ['--net', 'sh', '-c', make], { stdio: 'pipe' });
    return '';
  } catch (error) {
    return `tc cannot limit an interface: ${textOf(error)}`;
  }
}

/** Nobody's. */
const NO_MAC = '02:00:00:00:00:fe';

const addressOf = (number: number): string => `10.77.0.${number + 1}`;

export class NamespaceHost implements Host {
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

  start(command: readonly string[], { env = {}, onMessage, onOutput }: StartOptions): Running {
    const output = onOutput === undefined ? 'inherit' : 'pipe';
    const child = spawn('nsenter', [...this.inside, ...command], {
      stdio: ['ignore', output, output, ...(onMessage === undefined ? [] : (['ipc'] as const))],
      env: { ...process.env, ...env },
    });
    for (const stream of [child.stdout, child.stderr]) stream?.on('data', (text) => onOutput?.(String(text)));
    if (onMessage !== undefined) child.on('message', onMessage);
    return {
      send: (message) => {
        if (child.connected) child.send(message as object);
      },
      kill: () => child.kill('SIGKILL'),
      // Behind the last of its output.
      ended: once(child, onOutput === undefined ? 'exit' : 'close').then(([code, signal]) => signal ?? code),
    };
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

async function makeHost(number: number): Promise<NamespaceHost> {
  // It ends when its input does, that is with this process at the latest.
  const holder = spawn('unshare', ['--net', 'sh', '-c', 'echo made; exec cat'], { stdio: ['pipe', 'pipe', 'inherit'] });
  await once(holder.stdout!, 'data');
  return new NamespaceHost(holder, number);
}

export async function makeNamespaces(): Promise<readonly [NamespaceHost, NamespaceHost]> {
  const [a, b] = await Promise.all([makeHost(0), makeHost(1)]);
  a.run('ip', 'link', 'add', a.interface, 'type', 'veth', 'peer', 'name', b.interface, 'netns', String(b.pid));
  for (const host of [a, b]) {
    host.run('ip', 'address', 'add', `${host.address}/24`, 'dev', host.interface);
    host.run('ip', 'link', 'set', 'lo', 'up');
    host.link('up');
  }
  return [a, b];
}
