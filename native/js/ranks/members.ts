/**
 * Who of a world is here, and how ranks come in the place of dead ones, or in places in which nobody has been yet.
 *
 * Ranks that stay call `readmit`, those that come call `rejoin`, with the store of the world. A newcomer applies under a number of its own (its incarnation); the lowest of those
 * that stay takes the last application of each rank whose applicant lives, and publishes who is here from now on. From there on everybody maps everybody, and a new team of all
 * that are here ends it: what one could not do, all hear of.
 */
import { createHash } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  checkInteger,
  checkObject,
  type EpCode,
  EpError,
  ERROR_TABLE,
  formatRanks,
  invalid,
  isEpError,
  linkSignals,
  type Rank,
  type Store,
  type WaitOptions,
} from '@ep/core';
import { EP_LIFE_ALIVE } from '../abi.gen.js';
import { native } from '../native.js';
import { reportStep, type SetUpStep } from './gather.js';
import { agreedFacts, connectControls, type JoinedRanks, type JoinOptions } from './join.js';
import { Liveness } from './liveness.js';
import { RankTeam } from './team.js';

/** How long a rank that is to be replaced may still look alive: its death has been seen by somebody. */
const DEATH_MS = 1000;
const LOOK_MS = 10;
const LIFE_DIGITS = 16;

export interface ReadmitOptions extends WaitOptions {
  /** The one that the world was opened with. */
  readonly store: Store;
  /** Places into which ranks come now: of dead ranks, or empty ones. */
  readonly joining: readonly Rank[];
  /** Ranks that were here and stay away: dead, or given up alive. */
  readonly without?: readonly Rank[];
}

export interface MembersInit extends JoinedRanks {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly transport: string;
  /** What newcomers must have chosen alike. */
  readonly facts: string;
  readonly timeoutMs: number;
  /** Called before others come in the places of these. */
  readonly onReplace: (ranks: readonly Rank[]) => void;
}

interface Application {
  readonly incarnation: number;
  readonly facts: string;
  readonly control: string;
}

interface Plan {
  /** Of the world. */
  readonly id: string;
  /** How often the world has let ranks in, or tried to. */
  readonly round: number;
  readonly members: readonly Rank[];
  readonly joining: readonly Rank[];
  /** Handles of control segments by rank; empty for ranks that are not here. */
  readonly controls: readonly string[];
  readonly team: string;
}

type Word = { readonly plan: Plan } | { readonly code: EpCode; readonly message: string };

const toBase64 = (bytes: Uint8Array): string => Buffer.from(bytes).toString('base64');
const fromBase64 = (text: string): Uint8Array => Uint8Array.from(Buffer.from(text, 'base64'));
const formatJson = (value: unknown): Uint8Array => new TextEncoder().encode(JSON.stringify(value));

/** Throws `EP_RENDEZVOUS` for what no rank of this version writes. */
function parseJson<T>(bytes: Uint8Array, is: (value: Record<string, unknown>) => boolean): T {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
    if (typeof value === 'object' && value !== null && is(value as Record<string, unknown>)) return value as T;
  } catch {
    // Said below.
  }
  throw new EpError('EP_RENDEZVOUS', `members: ${bytes.byteLength} bytes in the store were written by another version`);
}

const isTexts = (value: unknown): value is string[] =>
  Array.isArray(value) && value.every((one) => typeof one === 'string');
/** Some ranks of so many, in order. */
const isRanks = (value: unknown, worldSize: number): value is number[] =>
  Array.isArray(value) &&
  value.every((one, i) => Number.isSafeInteger(one) && one < worldSize && one > (i === 0 ? -1 : value[i - 1]));

/** What a newcomer has put into the store. @internal */
export const parseApplication = (bytes: Uint8Array): Application =>
  parseJson(
    bytes,
    ({ incarnation, facts, control }) =>
      Number.isSafeInteger(incarnation) && typeof facts === 'string' && typeof control === 'string',
  );

/** What the deciding rank has put there. @internal */
export const parseWord = (bytes: Uint8Array, worldSize: number): Word =>
  parseJson(bytes, ({ plan, code, message }) => {
    if (plan === undefined) return Object.hasOwn(ERROR_TABLE, String(code)) && typeof message === 'string';
    if (typeof plan !== 'object' || plan === null) return false;
    const { id, round, members, joining, controls, team } = plan as Record<string, unknown>;
    if (typeof id !== 'string' || !Number.isSafeInteger(round) || !isTexts(controls) || controls.length !== worldSize)
      return false;
    return (
      isRanks(members, worldSize) &&
      isRanks(joining, worldSize) &&
      joining.every((rank) => members.includes(rank)) &&
      typeof team === 'string'
    );
  });

const keysOf = (transport: string) => ({
  incarnations: (rank: Rank) => `${transport}/members/incarnations/${rank}`,
  latest: (rank: Rank) => `${transport}/members/latest/${rank}`,
  application: (rank: Rank, incarnation: number) => `${transport}/members/application/${rank}/${incarnation}`,
  invitation: (rank: Rank, incarnation: number) => `${transport}/members/invitation/${rank}/${incarnation}`,
  round: (round: number) => `${transport}/members/round/${round}`,
});

const stepOf = (where: string): SetUpStep => ({
  where,
  what: "map the others' control segments",
  code: 'EP_TRANSPORT_FAILED',
});

/** Milliseconds from now on until `share` of a limit is over. */
function clockOf(timeoutMs: number): (share: number) => number {
  const begin = performance.now();
  return (share) => Math.max(1, timeoutMs * share - (performance.now() - begin));
}

function planOf(word: Word, where: string): Plan {
  if ('plan' in word) return word.plan;
  throw new EpError(word.code, `${where}: ${word.message}`);
}

export class Members {
  readonly #init: MembersInit;
  readonly #controls: Uint8Array[];
  readonly #empty: Uint8Array;
  #world: RankTeam;
  #round: number;

  constructor(init: MembersInit) {
    this.#init = init;
    this.#empty = Uint8Array.from(init.controls, ({ byteLength }) => (byteLength === 0 ? 1 : 0));
    this.#world = init.world;
    this.#round = init.round;
    this.#controls = [...init.controls];
  }

  /** The ranks that are here, in order. */
  get world(): RankTeam {
    return this.#world;
  }

  /** How often the world has let ranks in, or tried to; the same on all ranks that are here. */
  get round(): number {
    return this.#round;
  }

  /** By rank: 1 where nobody is in its place. Changes with who is here. */
  get empty(): Readonly<Uint8Array> {
    return this.#empty;
  }

  /** Names the process in a rank's place; empty if nobody is there. */
  lifeOf(rank: Rank): string {
    const control = this.#controls[rank]!;
    return control.byteLength === 0 ? '' : createHash('sha256').update(control).digest('hex').slice(0, LIFE_DIGITS);
  }

  /**
   * Collective over all ranks that are here but those of `joining` and `without`, and over those that come into the places of `joining` (`rejoinRanks`). Resolves with the team of
   * all that are here then, which the caller closes in time. `EP_TIMEOUT` or `EP_PEER_LOST` names who did not come or died; the ranks are then where they were before, and may
   * try again. `EP_INVALID_ARGUMENT` where a rank to be replaced lives.
   */
  async readmit(options: ReadmitOptions): Promise<RankTeam> {
    const where = 'readmit';
    const { rank, worldSize, context, liveness, timeoutMs: own } = this.#init;
    const { joining, staying } = this.#checkRanks(options, where);
    const { store, signal } = options;
    const timeoutMs = options.timeoutMs ?? own;
    const clock = clockOf(timeoutMs);
    const round = ++this.#round;
    const leader = staying[0]!;
    const word =
      leader === rank
        ? await this.#lead({ store, round, joining, staying, clock, where, signal })
        : await this.#hear(store, round, leader, clock, where, signal);
    const plan = planOf(word, where);
    const wereEmpty = joining.filter((one) => this.#empty[one] === 1);
    let team: RankTeam | undefined;
    // HAZARD: who dies on the way into an empty place has never been of this world: its death is none of it.
    liveness.expect(wereEmpty);
    try {
      let failure: unknown;
      try {
        await this.#take(plan, { joining, staying, leader, where, signal });
      } catch (reason) {
        failure = reason;
      }
      const ranks = Int32Array.from(plan.members);
      team = new RankTeam({ context, liveness, worldRank: rank, handle: fromBase64(plan.team), ranks, timeoutMs: own });
      const report = Uint8Array.of(failure === undefined ? 1 : 0);
      await reportStep(team, stepOf(where), report, failure, { ...(signal && { signal }), timeoutMs: clock(1) });
    } catch (error) {
      await team?.close();
      for (const one of wereEmpty) this.#leaveEmpty(one, true);
      throw error;
    } finally {
      liveness.expect([]);
    }
    for (let one = 0; one < worldSize; one++) {
      if (plan.members.includes(one)) this.#empty[one] = 0;
      else this.#leaveEmpty(one);
    }
    liveness.renew();
    this.#world = team;
    return team;
  }

  /** Maps who comes. */
  async #take(
    plan: Plan,
    of: {
      readonly joining: readonly Rank[];
      readonly staying: readonly Rank[];
      readonly leader: Rank;
      readonly where: string;
      readonly signal: AbortSignal | undefined;
    },
  ): Promise<void> {
    const { joining, staying, leader, where, signal } = of;
    if (plan.joining.join() !== joining.join() || !staying.every((one) => plan.members.includes(one))) {
      const theirs = `rank ${leader} has ${formatRanks(plan.joining)} join`;
      throw new EpError('EP_MISMATCH', `${where}: ${theirs}, this rank ${formatRanks(joining)}`, {
        context: { odd: [leader], joining: plan.joining },
      });
    }
    this.#init.onReplace(joining);
    for (const one of joining) {
      this.#controls[one] = fromBase64(plan.controls[one]!);
      await this.#replace(one, this.#controls[one], signal);
    }
  }

  /**
   * Nobody is in this place, and if somebody died there, that is told no longer. HAZARD: whoever was given up alive has mapped the others: nobody comes in its place while it lives,
   * so its words stay. Of who has mapped nothing, because nothing came of its coming (`wasEmpty`), they go.
   */
  #leaveEmpty(one: Rank, wasEmpty = false): void {
    const { context } = this.#init;
    this.#controls[one] = new Uint8Array(0);
    this.#empty[one] = 1;
    if (wasEmpty || context.gone(one)) context.vacate(one);
  }

  #checkRanks(options: ReadmitOptions, where: string): { readonly joining: Rank[]; readonly staying: Rank[] } {
    const { rank, worldSize } = this.#init;
    checkObject(options, 'options', 'an object with store and joining', where);
    const { store, joining, without = [] } = options;
    if (typeof store?.compareSet !== 'function') throw invalid('store', { where, expected: 'a store', found: store });
    for (const [name, ranks] of Object.entries({ joining, without })) {
      if (!Array.isArray(ranks)) throw invalid(name, { where, expected: 'a list of ranks', found: ranks });
      for (const one of ranks) checkInteger(one, name, where, 0, worldSize - 1);
    }
    const away = new Set([...joining, ...without]);
    if (away.size !== joining.length + without.length || away.has(rank)) {
      const expected = `other ranks than this one, ${rank}, each named once`;
      throw invalid('joining and without', { where, expected, found: [...joining, ...without] });
    }
    const staying = [...this.#world.ranks].filter((one) => !away.has(one));
    return { joining: [...joining].sort((a, b) => a - b), staying };
  }

  /** What one rank knows to be dead, another may learn a little later. */
  async #replace(one: Rank, handle: Uint8Array, signal: AbortSignal | undefined): Promise<void> {
    const until = performance.now() + DEATH_MS;
    for (;;) {
      try {
        this.#init.context.replace(one, handle);
        return;
      } catch (error) {
        if (!isEpError(error) || error.code !== 'EP_BUSY' || performance.now() > until) throw error;
      }
      await sleep(LOOK_MS, undefined, signal && { signal });
    }
  }

  async #awaitDeaths(joining: readonly Rank[], where: string, signal: AbortSignal | undefined): Promise<void> {
    const { context } = this.#init;
    const until = performance.now() + DEATH_MS;
    for (;;) {
      const there = joining.filter((one) => !context.gone(one));
      if (there.length === 0) return;
      if (performance.now() > until) {
        throw new EpError('EP_INVALID_ARGUMENT', `${where}: ${formatRanks(there)} live: only dead ranks are replaced`, {
          context: { ranks: there },
        });
      }
      await sleep(LOOK_MS, undefined, signal && { signal });
    }
  }

  /** Decides for all, and publishes it: also that nothing comes of it. */
  async #lead(of: {
    readonly store: Store;
    readonly round: number;
    readonly joining: readonly Rank[];
    readonly staying: readonly Rank[];
    readonly clock: (share: number) => number;
    readonly where: string;
    readonly signal: AbortSignal | undefined;
  }): Promise<Word> {
    const { store, round, joining, staying, clock, where, signal } = of;
    const { rank, transport, facts, context } = this.#init;
    const keys = keysOf(transport);
    const came = new Map<Rank, Application>();
    let word: Word;
    let thrown: { readonly reason: unknown } | undefined;
    try {
      await this.#awaitDeaths(joining, where, signal);
      // A part of the limit is left for the others to hear of it.
      for (const one of joining) came.set(one, await this.#applicant(store, one, () => clock(0.75), signal));
      const odd = joining.filter((one) => came.get(one)!.facts !== facts);
      if (odd.length > 0) {
        const theirs = odd.map((one) => `rank ${one}: ${came.get(one)!.facts}`).join('; ');
        throw new EpError('EP_RENDEZVOUS', `${formatRanks(odd)} differ; this rank: ${facts}; ${theirs}`);
      }
      const controls = this.#controls.map((handle, one) =>
        staying.includes(one) ? toBase64(handle) : (came.get(one)?.control ?? ''),
      );
      const members = [...staying, ...joining].sort((a, b) => a - b);
      const team = toBase64(context.createTeamSegment(members.length));
      word = { plan: { id: this.#init.id, round, members, joining, controls, team } };
    } catch (reason) {
      thrown = { reason };
      word = isEpError(reason)
        ? { code: reason.code, message: reason.message }
        : { code: 'EP_ABORTED', message: `rank ${rank} gave up: ${String(reason)}` };
    }
    await store.set(keys.round(round), formatJson(word));
    for (const [one, { incarnation }] of came) await store.set(keys.invitation(one, incarnation), formatJson(word));
    if (thrown === undefined) return word;
    if (!isEpError(thrown.reason)) throw thrown.reason;
    const { code, message, context: about } = thrown.reason;
    throw new EpError(code, message.startsWith(where) ? message : `${where}: ${message}`, {
      context: about,
      cause: thrown.reason,
    });
  }

  /** The last who applied as a rank, and lives. */
  async #applicant(store: Store, rank: Rank, left: () => number, signal?: AbortSignal): Promise<Application> {
    const keys = keysOf(this.#init.transport);
    const limits = () => ({ timeoutMs: left(), ...(signal && { signal }) });
    let dead = 0;
    try {
      for (;;) {
        const latest = Number(new TextDecoder().decode(await store.get(keys.latest(rank), limits())));
        if (latest !== dead) {
          const application = parseApplication(await store.get(keys.application(rank, latest), limits()));
          if (native().binding.lifeBehind(fromBase64(application.control)) === EP_LIFE_ALIVE) return application;
          dead = latest;
        }
        if (left() <= 1) throw new EpError('EP_TIMEOUT', 'its applicant died');
        await sleep(LOOK_MS, undefined, signal && { signal });
      }
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      const how = dead === 0 ? 'nobody came' : `who came (incarnation ${dead}) died, and nobody since`;
      throw new EpError('EP_TIMEOUT', `${formatRanks([rank])} did not come: ${how} in its place`, {
        context: { ranks: [rank], awaited: [rank], incarnation: dead },
        cause: error,
      });
    }
  }

  async #hear(
    store: Store,
    round: number,
    leader: Rank,
    clock: (share: number) => number,
    where: string,
    signal: AbortSignal | undefined,
  ): Promise<Word> {
    const { context, transport, worldSize } = this.#init;
    const over = new AbortController();
    const watch = setInterval(() => {
      if (context.life(leader) === EP_LIFE_ALIVE) return;
      const text = `${where}: rank ${leader}, which decides who comes in, died or closed`;
      over.abort(new EpError('EP_PEER_LOST', text, { context: { lost: [leader], awaited: [leader] } }));
    }, LOOK_MS);
    const linked = linkSignals(signal, over.signal);
    try {
      const said = await store.get(keysOf(transport).round(round), { timeoutMs: clock(1), signal: linked.signal });
      return parseWord(said, worldSize);
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      const text = `${where}: rank ${leader}, which decides who comes in, did not say so in time`;
      throw new EpError('EP_TIMEOUT', text, { context: { awaited: [leader] }, cause: error });
    } finally {
      clearInterval(watch);
      linked.unlink();
    }
  }
}

/**
 * Instead of `joinRanks`, in the place of a rank that died, while those that stay call `readmit`. Rejects with `EP_TIMEOUT` where they do not, and with `EP_RENDEZVOUS` where
 * they refuse this rank.
 */
export async function rejoinRanks(
  options: JoinOptions & { readonly store: Store },
  limits: WaitOptions,
): Promise<JoinedRanks> {
  const where = 'rejoin';
  const { rank, worldSize, store, transport, ranksOnHost, timeoutMs } = options;
  const clock = clockOf(limits.timeoutMs ?? timeoutMs);
  const wait = () => ({ timeoutMs: clock(1), ...(limits.signal && { signal: limits.signal }) });
  const keys = keysOf(transport);
  const { binding } = native();
  const context = new binding.RankContext(rank, worldSize, ranksOnHost ?? worldSize);
  try {
    const incarnation = await store.add(keys.incarnations(rank), 1);
    const application: Application = {
      incarnation,
      facts: agreedFacts(options),
      control: toBase64(context.handle()),
    };
    await store.set(keys.application(rank, incarnation), formatJson(application));
    await store.set(keys.latest(rank), new TextEncoder().encode(String(incarnation)));
    const invitation = await store.get(keys.invitation(rank, incarnation), wait()).catch((error: unknown) => {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      const text = `${where}: rank ${rank} (incarnation ${incarnation}) was not taken in: the ranks of this world call readmit() meanwhile`;
      throw new EpError('EP_TIMEOUT', text, { context: { rank, incarnation }, cause: error });
    });
    const plan = planOf(parseWord(invitation, worldSize), where);
    const controls = plan.controls.map(fromBase64);
    connectControls(context, controls);
    const liveness = new Liveness(context, rank, worldSize);
    const ranks = Int32Array.from(plan.members);
    const world = new RankTeam({ context, liveness, worldRank: rank, handle: fromBase64(plan.team), ranks, timeoutMs });
    try {
      await reportStep(world, stepOf(where), Uint8Array.of(1), undefined, wait());
    } catch (error) {
      await world.close();
      throw error;
    }
    return { context, liveness, world, controls, round: plan.round, id: plan.id };
  } catch (error) {
    context.close();
    throw error;
  }
}
