/**
 * Connection data that the caller brings from rank to rank, where it has other means than a store.
 *
 * `open` calls `exchange` with one value after the other, in the same order on all ranks, and each time awaits all ranks' values of that step: what they are (`facts`), their
 * segments where they share a host (`control`), their queue pairs (`connections`), and over a network that all of them can be reached (`connected`). Whatever comes back is read
 * field by field before anything is made of it.
 */
import { endianness } from 'node:os';
import { isDeepStrictEqual } from 'node:util';
import {
  compareFacts,
  EpError,
  type FactTable,
  formatRanks,
  hostFacts,
  interruptibleOn,
  invalid,
  isEpError,
  isFactTable,
  type Member,
  type Rank,
  type WaitOptions,
} from '@ep/core';
import type { Introduction, Told } from '@ep/native/ranks';
import {
  formatBytes,
  formatConnection,
  formatPart,
  type IbgdaConnection,
  type IbgdaPart,
  type ReadingFrom,
  type Refuse,
  readBytes,
  readConnection,
  readPart,
} from './connection.js';

/** Another one is refused. */
const VERSION = 1;

interface Head {
  readonly version: typeof VERSION;
  readonly rank: Rank;
  readonly worldSize: number;
}

/** What one rank tells the others in one step of `open`. Plain data: it may travel as JSON. Texts without a form of their own are bytes in hexadecimal. */
export type IbgdaIntroduction = Head &
  (
    | { readonly step: 'facts'; readonly agree: FactTable; readonly host: FactTable }
    | { readonly step: 'control'; readonly handle: string; readonly team: string }
    | {
        readonly step: 'connections';
        readonly connection: IbgdaConnection;
        /** Over a network: what makes the keys of its streams, and the memory in which the ranks agree from then on. */
        readonly nonce?: string;
        readonly memory?: IbgdaPart;
      }
    | { readonly step: 'connected' }
  );

/**
 * An all-gather by the caller's own means (MPI, a scheduler, messages of a parent process): gets what this rank tells, and resolves with what all ranks told in the same step,
 * in any order, with or without its own. The signal fires when nobody waits for it any more. What it rejects with, `open` rejects with, as `cause` of `EP_RENDEZVOUS` unless it
 * is an `EpError`.
 */
export type IbgdaExchange = (
  local: IbgdaIntroduction,
  limits: { readonly signal: AbortSignal },
) => PromiseLike<readonly IbgdaIntroduction[]>;

/** Who joins without a store. */
export interface ExchangingMember extends Omit<Member, 'store'> {
  readonly exchange: IbgdaExchange;
  readonly store?: undefined;
}

type Step = IbgdaIntroduction['step'];
type Value = Readonly<Record<string, unknown>>;

interface Opening extends ExchangingMember {
  readonly transport: string;
}

/** Errors about a step; `ranks` have told what is wrong, as far as that is known. */
const refusing =
  ({ transport }: Opening, step: Step, who: string, ranks: readonly Rank[]): Refuse =>
  (field, expected, found) => {
    const { message, context } = invalid(field, {
      where: `${transport}: exchange, step ${step}: ${who}`,
      expected,
      found,
    });
    return new EpError('EP_RENDEZVOUS', message, { context: { ...context, ranks, field, step } });
  };

/** Awaits the caller's exchange as long as the limits allow. */
async function ask(opening: Opening, local: IbgdaIntroduction, { signal, timeoutMs }: WaitOptions): Promise<unknown> {
  const { transport, exchange, rank } = opening;
  const where = `${transport}: exchange, step ${local.step}: rank ${rank}`;
  const context = { ranks: [rank], step: local.step };
  const over = new AbortController();
  const asked = (async () => exchange(local, { signal: over.signal }))().catch((cause: unknown) => {
    if (isEpError(cause)) throw cause;
    const why = cause instanceof Error ? cause.message : String(cause);
    throw new EpError('EP_RENDEZVOUS', `${where}: it failed: ${why}`, { context, cause });
  });
  const timedOut = () =>
    new EpError('EP_TIMEOUT', `${where} got no answer within ${timeoutMs} ms: a rank has not come to it, perhaps`, {
      context: { ...context, timeoutMs },
    });
  try {
    return await interruptibleOn({ signals: [signal], timeoutMs, where, timedOut }, asked);
  } finally {
    over.abort();
  }
}

/** What all ranks told in the step of `local`, by rank, as far as that is alike in all steps. Throws `EP_RENDEZVOUS` naming the rank and the field. */
export function readStep(opening: Opening, local: IbgdaIntroduction, given: unknown): readonly Value[] {
  const { rank, worldSize } = opening;
  const { step } = local;
  const refuse = (who: string, ranks: readonly Rank[] = []) => refusing(opening, step, who, ranks);
  if (!Array.isArray(given)) throw refuse(`rank ${rank}`, [rank])('the answer', 'a list of what all ranks told', given);
  const values = new Map<Rank, Value>();
  for (const [at, value] of (given as readonly unknown[]).entries()) {
    if (typeof value !== 'object' || value === null) throw refuse(`value ${at}`)('it', 'an object', value);
    const fields = value as Value;
    const { rank: by } = fields;
    if (typeof by !== 'number' || !Number.isInteger(by) || by < 0 || by >= worldSize)
      throw refuse(`value ${at}`)('rank', `an integer from 0 to ${worldSize - 1}`, by);
    for (const [field, own] of Object.entries({ version: VERSION, step, worldSize })) {
      if (fields[field] !== own) throw refuse(`rank ${by}`, [by])(field, `${own}, as on rank ${rank}`, fields[field]);
    }
    if (values.has(by)) throw refuse(`rank ${by}`, [by])('the answer', 'one value of each rank', 'two of this one');
    if (by === rank && !isDeepStrictEqual(value, local))
      throw refuse(`rank ${by}`, [by])(
        'its own value',
        'what it told',
        'another one: do two processes run as one rank?',
      );
    values.set(by, fields);
  }
  values.set(rank, local as Value & IbgdaIntroduction);
  const missing = Array.from({ length: worldSize }, (_, peer) => peer).filter((peer) => !values.has(peer));
  if (missing.length > 0) {
    const text = `${opening.transport}: exchange, step ${step}: rank ${rank} was brought nothing of ${formatRanks(missing)} of ${worldSize}`;
    throw new EpError('EP_RENDEZVOUS', text, { context: { ranks: missing, worldSize, step } });
  }
  return Array.from({ length: worldSize }, (_, peer) => values.get(peer)!);
}

/** How bytes look to the caller. */
interface Form {
  readonly format: (bytes: Uint8Array, worldSize: number) => unknown;
  readonly read: (value: unknown, field: string, from: ReadingFrom) => Uint8Array;
}

const plain: Form = { format: formatBytes, read: readBytes };
/** By name; `plain` unless it is here. */
const forms: Readonly<Record<string, Form>> = {
  connection: { format: formatConnection, read: readConnection },
  memory: { format: formatPart, read: readPart },
};
const formOf = (name: string): Form => forms[name] ?? plain;

/** What a rank tells in a step that carries bytes, for the caller's exchange. */
export function formatTold(opening: Opening, step: string, told: Told<string>): IbgdaIntroduction {
  const { rank, worldSize } = opening;
  const fields = Object.entries(told).map(([name, bytes]) => [name, formOf(name).format(bytes, worldSize)] as const);
  return { version: VERSION, rank, worldSize, step, ...Object.fromEntries(fields) } as IbgdaIntroduction;
}

/** The bytes again that a rank told, of the names and lengths of `like`. Throws `EP_RENDEZVOUS` naming the rank and the field. */
export function readTold<Name extends string>(opening: Opening, value: Value, like: Told<Name>): Told<Name> {
  const rank = value.rank as Rank;
  const refuse = refusing(opening, value.step as Step, `rank ${rank}`, [rank]);
  const parts = Object.entries<Uint8Array>(like).map(([name, own]) => {
    const from = { rank, worldSize: opening.worldSize, like: own, refuse };
    return [name, formOf(name).read(value[name], name, from)] as const;
  });
  return Object.fromEntries(parts) as Told<Name>;
}

/** Through the member's `exchange`. Rejects with `EP_RENDEZVOUS` naming rank and field where what comes back is no such data, with `EP_TIMEOUT` where nothing does. */
export function throughExchange(member: ExchangingMember, transport: string): Introduction {
  const { rank, worldSize } = member;
  const opening: Opening = { ...member, transport };
  return {
    compare: async (facts, limits) => {
      const agree = { ...facts.agree, 'byte order': endianness() };
      const host = facts.host ?? hostFacts();
      const local = { version: VERSION, rank, worldSize, step: 'facts', agree, host } as const;
      const values = readStep(opening, local, await ask(opening, local, limits));
      const peers = values.map((value, peer) => {
        const refuse = refusing(opening, 'facts', `rank ${peer}`, [peer]);
        const table = (field: 'agree' | 'host'): FactTable => {
          const found = value[field];
          if (isFactTable(found)) return found;
          throw refuse(field, 'an object of texts, numbers and booleans', found);
        };
        return { rank: peer, agree: table('agree'), host: table('host') };
      });
      compareFacts(peers);
      return peers;
    },
    tell: async <Name extends string>(step: string, told: Told<Name>, limits: WaitOptions) => {
      const local = formatTold(opening, step, told);
      const values = readStep(opening, local, await ask(opening, local, limits));
      return values.map((value, peer) => (peer === rank ? told : readTold(opening, value, told)));
    },
  };
}
