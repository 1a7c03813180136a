/**
 * This host's part in a job on several hosts. When a rank fails, or a node is lost, all ranks of the job are stopped; while `maxRestarts` allows, the nodes
 * meet again and all ranks start anew, with what nodes are there then. The node that holds the store is not replaced: without it the job is over.
 */
import { hostname } from 'node:os';
import { EpError, isEpError } from '@ep/core';
import { OutputLost } from '../output.js';
import { signalOf, stopStatus } from '../stop.js';
import { freePort, type LaunchEvent, type LaunchResult, launchRanks } from './launch.js';
import { checkRestarts, type Failure, type JobPlan, type NodeRecord, type NodeSpec, recordOf } from './node-records.js';
import { indexOfThisHost, NodeMeeting, type Rendezvous, spansHosts } from './nodes.js';

export interface NodeJobOptions {
  readonly rdzv: Rendezvous;
  /** Ranks on this host; with `hosts` what the list says. */
  readonly ranks?: number;
  readonly hosts?: readonly NodeSpec[];
  readonly nodeRank?: number;
  readonly least: number;
  readonly most: number;
  readonly maxRestarts: number;
  /** How long nodes wait for each other. */
  readonly joinMs: number;
  /** From the moment at which there are `least` nodes, how long more may come. */
  readonly lastCallMs: number;
  readonly program: string;
  readonly args: readonly string[];
  readonly graceMs: number;
  readonly onEvent: (event: LaunchEvent) => void;
  /** What whoever watches should know: restarts, losses. */
  readonly onNote: (text: string) => void;
  /** Ends the job on all nodes, with the status that its reason gives (`stopStatus`). */
  readonly signal: AbortSignal;
}

type Ended = { readonly code: number } | { readonly failure: Failure };

/** Resolves with the status of the job, the same on all nodes. Throws `EP_RENDEZVOUS`, `EP_SECRET`, `EP_TIMEOUT` where the nodes do not meet. */
export async function runNode(options: NodeJobOptions): Promise<number> {
  const { hosts, joinMs, signal } = options;
  const index = options.nodeRank ?? (hosts === undefined ? undefined : await indexOfThisHost(hosts));
  const ranks = hosts === undefined ? options.ranks! : hosts[index!]!.ranks;
  const others = () => (hosts === undefined ? options.most > 1 : spansHosts(hosts));
  const meeting = await NodeMeeting.open(options.rdzv, { joinMs, others, signal });
  const quiet = meeting.holdsStore ? meeting.tellOfRefused(options.onNote) : () => {};
  try {
    return await new NodeJob(options, meeting, ranks, index).run();
  } finally {
    quiet();
    await meeting.close();
  }
}

/** That this node was told to stop, as all nodes are told. */
function stoppedAt(at: string, { reason }: AbortSignal): Failure {
  const why = reason instanceof OutputLost ? `${at}: ${reason.message}` : `by ${signalOf(reason)} ${at}`;
  return { code: stopStatus(reason), text: `the job was stopped ${why}`, stopped: true };
}

const placeText = (plan: JobPlan, node: number): string => `on node ${node} (${plan.nodes[node]!.host})`;

class NodeJob {
  readonly #options: NodeJobOptions;
  readonly #meeting: NodeMeeting;
  readonly #ranks: number;
  readonly #index: number | undefined;

  constructor(options: NodeJobOptions, meeting: NodeMeeting, ranks: number, index: number | undefined) {
    this.#options = options;
    this.#meeting = meeting;
    this.#ranks = ranks;
    this.#index = index;
  }

  async run(): Promise<number> {
    const { signal, maxRestarts, onNote } = this.#options;
    const meeting = this.#meeting;
    this.#jobId = meeting.holdsStore ? await meeting.openJob() : await meeting.jobId(signal);
    let attempt = meeting.holdsStore ? 0 : await meeting.attempt(signal);
    for (;;) {
      const ended = await this.#round(attempt);
      if ('code' in ended) return ended.code;
      const { failure } = ended;
      const again = attempt < maxRestarts && failure.stopped !== true;
      onNote(
        `${failure.text}; ${again ? `all ranks start again, ${attempt + 1} of ${maxRestarts}` : 'all ranks were stopped'}`,
      );
      if (!again) {
        if (meeting.holdsStore) await meeting.end(failure.code);
        return failure.code;
      }
      attempt++;
    }
  }

  #own: NodeRecord | undefined;
  #jobId = '';
  /** The attempt in which this node came. */
  #first: number | undefined;

  async #round(attempt: number): Promise<Ended> {
    const plan = await this.#meet(attempt);
    if ('failure' in plan) return plan;
    const place = plan.nodes.findIndex(({ id }) => id === this.#own?.id);
    if (place >= 0) return this.#attempt(attempt, plan, place);
    checkRestarts(this.#own!, plan.nodes[0]!);
    this.#options.onNote(`the job runs on ${plan.nodes.length} nodes without this one, which waits for a restart`);
    return this.#watch(attempt);
  }

  async #meet(attempt: number): Promise<JobPlan | { readonly failure: Failure }> {
    const { signal, hosts, maxRestarts } = this.#options;
    const meeting = this.#meeting;
    const host = hosts?.[this.#index!]?.host ?? hostname();
    this.#first ??= attempt;
    // Before they meet again, nodes stop their ranks, each for as long as its grace.
    const joinMs = this.#options.joinMs + (attempt === this.#first ? 0 : this.#options.graceMs);
    try {
      if (attempt > this.#first && !meeting.holdsStore) await meeting.opened(attempt, joinMs, signal);
      const record = recordOf(
        { host, ranks: this.#ranks, maxRestarts },
        await freePort(),
        meeting.holdsStore,
        this.#index,
      );
      this.#own = record;
      await meeting.join(attempt, record);
      if (meeting.holdsStore) {
        await meeting.openAttempt(attempt);
        await meeting.gather(attempt, { ...this.#options, joinMs }, hosts);
      }
      return await meeting.plan(attempt, signal);
    } catch (error) {
      if (signal.aborted) {
        // HAZARD: the others wait for this node, or for the plan: it goes only once they can know.
        const failure = await this.#fail(attempt, stoppedAt(`on ${host}`, signal));
        if (meeting.holdsStore) await meeting.tell(attempt, { failure });
        return { failure };
      }
      if (meeting.holdsStore) await meeting.end(1).catch(() => {});
      throw error;
    }
  }

  /** Of a node that has no ranks. */
  async #watch(attempt: number): Promise<Ended> {
    const over = new AbortController();
    const signal = AbortSignal.any([over.signal, this.#options.signal]);
    const ends = [
      this.#meeting.over(signal).then((code): Ended => ({ code })),
      this.#meeting.failure(attempt, signal).then((failure): Ended => ({ failure })),
    ];
    try {
      return await Promise.race(ends);
    } finally {
      over.abort();
      await Promise.allSettled(ends);
    }
  }

  async #attempt(attempt: number, plan: JobPlan, node: number): Promise<Ended> {
    const meeting = this.#meeting;
    const { signal } = this.#options;
    const over = new AbortController();
    const stop = new AbortController();
    const onAbort = (): void => stop.abort(signal.reason);
    signal.addEventListener('abort', onAbort);
    if (signal.aborted) onAbort();
    let failure: Failure | undefined;
    const failed = (found: Failure): void => {
      failure ??= found;
      stop.abort('SIGTERM');
    };
    const lost = (error: unknown): void => {
      if (over.signal.aborted) return;
      if (isEpError(error) && error.code === 'EP_RENDEZVOUS') {
        failed({ code: 1, text: error.message, stopped: true });
        return;
      }
      const why = error instanceof Error ? error.message : String(error);
      // Nobody could tell the others apart from this one any more.
      const code = signal.aborted ? stopStatus(signal.reason) : 1;
      failed({ code, text: `the node that holds the store is lost: ${why}`, stopped: true });
    };
    const duties = [
      meeting.failure(attempt, over.signal).then(failed, lost),
      meeting.speak(attempt, node, over.signal).catch(lost),
      ...(meeting.holdsStore ? [meeting.listen(attempt, plan.nodes, over.signal).catch(lost)] : []),
    ];
    try {
      const result = await this.#launch(attempt, plan, node, stop.signal);
      if (failure !== undefined) return { failure };
      const own = this.#failureOf(result, plan, node);
      if (own !== undefined) return { failure: await this.#fail(attempt, own) };
      await meeting.done(attempt, node, result.code);
      return await this.#others(attempt, plan, node, stop.signal, () => failure);
    } catch (error) {
      // The answer to the loss of the store is the same here as there.
      if (failure !== undefined) return { failure };
      if (isEpError(error) && error.code !== 'EP_SYSTEM' && error.code !== 'EP_INVALID_ARGUMENT') {
        lost(error);
        return { failure: failure! };
      }
      await meeting.fail(attempt, { code: 1, text: String(error), stopped: true }).catch(() => {});
      throw error;
    } finally {
      signal.removeEventListener('abort', onAbort);
      over.abort();
      await Promise.allSettled(duties);
    }
  }

  #failureOf(result: LaunchResult, plan: JobPlan, node: number): Failure | undefined {
    const { signal } = this.#options;
    const at = placeText(plan, node);
    if (signal.aborted) return stoppedAt(at, signal);
    if (result.failed === undefined) return undefined;
    const { rank, code, signal: by } = result.failed;
    const how = by === null ? `ended with status ${code}` : `was ended by ${by}`;
    return { code: result.code, text: `rank ${rank} ${at} ${how}` };
  }

  /** Resolves with what counts for all nodes: the first failure that was told. */
  async #fail(attempt: number, own: Failure): Promise<Failure> {
    await this.#meeting.fail(attempt, own);
    return this.#meeting.failure(attempt, new AbortController().signal);
  }

  /** This node's ranks have ended well: waits for those of the others. */
  async #others(
    attempt: number,
    plan: JobPlan,
    node: number,
    stopped: AbortSignal,
    failure: () => Failure | undefined,
  ): Promise<Ended> {
    const meeting = this.#meeting;
    try {
      if (!meeting.holdsStore) return { code: await meeting.over(stopped) };
      const codes = await meeting.allDone(attempt, plan.nodes.length, stopped);
      const code = codes.find((one) => one !== 0) ?? 0;
      await meeting.end(code);
      return { code };
    } catch (error) {
      const found = failure();
      if (found !== undefined) return { failure: found };
      if (!stopped.aborted) throw error;
      return { failure: await this.#fail(attempt, stoppedAt(placeText(plan, node), this.#options.signal)) };
    }
  }

  #launch(attempt: number, plan: JobPlan, node: number, signal: AbortSignal): Promise<LaunchResult> {
    const { program, args, graceMs, onEvent, rdzv, maxRestarts } = this.#options;
    const own = plan.nodes[node];
    if (own === undefined) throw new EpError('EP_RENDEZVOUS', `ep run: the plan has no node ${node}`);
    return launchRanks({
      ranks: own.ranks,
      program,
      args,
      graceMs,
      onEvent,
      signal,
      place: {
        firstRank: own.firstRank,
        worldSize: plan.worldSize,
        node,
        nodes: plan.nodes.length,
        // Rank 0 is on the first node. That is at the address of the rendezvous, or the list names it.
        master: { host: plan.nodes[0]!.holdsStore ? rdzv.host : plan.nodes[0]!.host, port: plan.nodes[0]!.port },
        store: `tcp://${rdzv.host.includes(':') ? `[${rdzv.host}]` : rdzv.host}:${rdzv.port}`,
        runId: this.#jobId,
        attempt,
        maxRestarts,
      },
    });
  }
}
