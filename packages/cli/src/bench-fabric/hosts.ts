/** Two hosts for `ep bench fabric`: namespaces of this machine, each with a name and a network of its own, and a pair of virtual interfaces between them. They go away with the processes that hold them. */
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { promisify } from 'node:util';

const run = promisify(execFile);

export interface Host {
  readonly address: string;
  /** A program is started there by this command before its own. */
  readonly enter: readonly string[];
}

export interface Hosts {
  readonly hosts: readonly Host[];
  close(): void;
}

/** Of all addresses of `makeHosts`. */
export const hostsSubnet = '10.77.0.0/24';

const inside = (holder: ChildProcess): string[] => ['nsenter', '--target', String(holder.pid), '--net', '--uts', '--'];

/** Or why there can be none. */
export async function makeHosts(): Promise<Hosts | string> {
  if (process.getuid?.() !== 0) return 'network namespaces with interfaces between them take root';
  const holders: ChildProcess[] = [];
  const close = (): void => {
    for (const holder of holders) holder.kill('SIGKILL');
  };
  try {
    for (let host = 0; host < 2; host++) {
      // Ends when its input does: with this process at the latest.
      const made = `hostname ep-bench-${host} && echo made; exec cat`;
      const holder = spawn('unshare', ['--net', '--uts', 'sh', '-c', made], {
        stdio: ['pipe', 'pipe', 'ignore'],
      });
      holders.push(holder);
      const [said] = await Promise.race([once(holder.stdout!, 'data'), once(holder, 'exit'), once(holder, 'error')]);
      if (String(said) !== 'made\n') throw new Error(`unshare --net --uts ended: ${String(said)}`);
    }
    const command = async (host: number, ...words: string[]): Promise<void> => {
      const [program, ...args] = [...inside(holders[host]!), 'ip', ...words];
      await run(program!, args);
    };
    const pair = ['link', 'add', 'ep0', 'type', 'veth', 'peer', 'name', 'ep1', 'netns', String(holders[1]!.pid)];
    await command(0, ...pair);
    const hosts: Host[] = [];
    for (const [host, holder] of holders.entries()) {
      const address = `10.77.0.${host + 1}`;
      await command(host, 'address', 'add', `${address}/24`, 'dev', `ep${host}`);
      await command(host, 'link', 'set', 'lo', 'up');
      await command(host, 'link', 'set', `ep${host}`, 'up');
      hosts.push({ address, enter: inside(holder) });
    }
    return { hosts, close };
  } catch (error) {
    close();
    const why = error instanceof Error ? error.message : String(error);
    return `network namespaces cannot be made here: ${why.trim().split('\n').at(-1)}`;
  }
}
