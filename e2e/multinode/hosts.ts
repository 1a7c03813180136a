/** Two hosts and their ranks: those that were given (given.ts), or network namespaces (namespaces.ts), whose links can be cut as well. */
import { randomBytes } from 'node:crypto';
import { fileURLToPath } from 'node:url';
import { nvshmem } from '@ep/nvshmem';
import { it } from 'vitest';
import { givenHosts, openGivenHosts } from './given.js';
import type { Host, Running } from './host.js';
import { makeNamespaces, type NamespaceHost, namespacesMissing, throttleMissing } from './namespaces.js';

export const SECRET = randomBytes(32).toString('hex');
const EP = fileURLToPath(new URL('../../packages/cli/bin/ep.mjs', import.meta.url));
export const LAUNCHED = fileURLToPath(new URL('launched.mjs', import.meta.url));
const PROGRAM = fileURLToPath(new URL('program.mjs', import.meta.url));

export interface Report {
  readonly rank: number;
  readonly value?: unknown;
  readonly error?: { readonly code?: string; readonly message: string };
  /** How the rank ended without a report. */
  readonly exit?: string;
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
  readonly ended: Promise<number | NodeJS.Signals>;
}

export class TwoHosts {
  readonly hosts: readonly [Host, Host];
  readonly #links: readonly [NamespaceHost, NamespaceHost] | undefined;
  readonly #running = new Set<Running>();

  constructor(hosts: readonly [Host, Host], links?: readonly [NamespaceHost, NamespaceHost]) {
    this.hosts = hosts;
    this.#links = links;
  }

  /** The hosts, whose links can fail; only where `found.linksMissing` is empty. */
  get links(): readonly [NamespaceHost, NamespaceHost] {
    if (this.#links === undefined) throw new Error('hosts that were given have links that are not ours to cut');
    return this.#links;
  }

  #start(host: 0 | 1, ...how: Parameters<Host['start']>): Running {
    const running = this.hosts[host].start(...how);
    this.#running.add(running);
    const over = () => this.#running.delete(running);
    running.ended.then(over, over);
    return running;
  }

  /** As many ranks on either host, or on each, the first host's first. `ready` is called when all have said so. */
  async run(
    scenario: string,
    perHost: number | readonly [number, number],
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
    for (const running of this.#running) running.kill();
    const counts = typeof perHost === 'number' ? ([perHost, perHost] as const) : perHost;
    const worldSize = counts[0] + counts[1];
    const all: Running[] = [];
    const job: Job = {
      kill: (...ranks) => {
        for (const rank of ranks) all[rank]!.kill();
      },
      enough: () => {
        for (const running of all) running.send('enough');
      },
    };
    const store = { host: this.hosts[0].address, port: 29_511 };
    let awaited = worldSize;
    const ranks = Array.from({ length: worldSize }, async (_, rank): Promise<Report> => {
      const at = rank < counts[0] ? 0 : 1;
      const { address } = this.hosts[at];
      const start = { scenario, rank, worldSize, first: counts[0], perHost: counts[at], store, address, data };
      let report: Report | undefined;
      const running = this.#start(at, [process.execPath, PROGRAM, JSON.stringify(start)], {
        env: { ...env, EP_JOB_SECRET: secrets[at] },
        onMessage: (message) => {
          if (message !== 'ready') report = message as Report;
          else if (--awaited === 0) ready(job);
        },
      });
      all.push(running);
      const end = await running.ended;
      return report ?? { rank, exit: String(end) };
    });
    return Promise.all(ranks);
  }

  /** A program on one of the hosts; `output` grows. */
  start(host: 0 | 1, command: readonly string[], env: NodeJS.ProcessEnv = {}): Launched {
    const launched: { output: string } = { output: '' };
    const onOutput = (text: string): void => {
      launched.output += text;
    };
    const { ended } = this.#start(host, command, { env: { ...env, EP_JOB_SECRET: SECRET }, onOutput });
    return Object.assign(launched, { ended });
  }

  /** `ep run` on one of the hosts. */
  launch(host: 0 | 1, flags: readonly string[], ...args: readonly string[]): Launched {
    return this.start(host, [process.execPath, EP, 'run', ...flags, '--', process.execPath, LAUNCHED, ...args]);
  }

  close(): void {
    for (const running of this.#running) running.kill();
    for (const host of this.hosts) host.close();
  }
}

/** What the suites of this run can be run on. */
export interface FoundHosts {
  /** Why there are no two hosts with a fabric; empty: there are. */
  readonly missing: string;
  /** Why their links cannot be made to fail, nor their bytes be counted; empty: they can. */
  readonly linksMissing: string;
  readonly throttleMissing: string;
  /** Why not so many ranks run on each; empty: they do. */
  slotsMissing(perHost: number): string;
  /** Why `srun` starts no ranks; empty: it does. */
  readonly slurmMissing: string;
  make(): Promise<TwoHosts>;
}

async function findHosts(): Promise<FoundHosts> {
  const given = givenHosts();
  if (given === undefined) {
    const probe = await nvshmem.fabric.probe();
    return {
      missing: namespacesMissing() || (probe.available ? '' : probe.reason),
      linksMissing: '',
      throttleMissing: throttleMissing(),
      slotsMissing: () => '',
      slurmMissing: 'this is no allocation of Slurm',
      make: async () => {
        const links = await makeNamespaces();
        return new TwoHosts(links, links);
      },
    };
  }
  const { hosts, missing } = await openGivenHosts(given);
  const linksMissing = 'the hosts were given: their links are not ours to cut, nor to count by';
  const slots = Math.min(...given.places.map((place) => place.slots));
  return {
    missing,
    linksMissing,
    throttleMissing: linksMissing,
    slotsMissing: (perHost) => (slots < perHost ? `the hosts have room for ${slots} rank each, not ${perHost}` : ''),
    slurmMissing: given.isSlurm ? '' : 'this is no allocation of Slurm',
    make: async () => new TwoHosts(hosts),
  };
}

export const found = await findHosts();

/** As `it`; skipped for the first of the reasons that is not empty, which its name then says. */
export function itUnless(...reasons: readonly string[]): (name: string, body: () => Promise<void>) => void {
  const reason = reasons.find(Boolean) ?? '';
  return (name, body) => it.skipIf(reason !== '')(reason === '' ? name : `${name} (skipped: ${reason})`, body);
}
