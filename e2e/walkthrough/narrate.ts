/** Tells what three ranks did, in plain words, from their reports and the plan. */
import { type DispatchPlan, rankDispatch, sizes } from '@ep/plan';
import { chunkBytes, leases, makePlans, rowElements, worldSize } from './example.js';
import type { Arrived, Counters, Facts } from './facts.js';

const rowBytes = 4 * rowElements;
const list = (numbers: Iterable<number>): string => `[${[...numbers].join(' ')}]`;
const run = (first: number, rows: number): string => `${first}..${first + rows - 1}`;

/** Ids of consecutive tokens, shortened. */
function ids(values: readonly number[]): string {
  const runs: string[] = [];
  for (let from = 0; from < values.length; ) {
    let to = from + 1;
    while (to < values.length && values[from] !== 0 && values[to] === values[to - 1]! + 1) to++;
    while (to < values.length && values[from] === 0 && values[to] === 0) to++;
    const [first, last] = [values[from]!, values[to - 1]!];
    if (first === 0) runs.push(`${to - from} rows of zeros`);
    else runs.push(to - from === 1 ? `${first}` : `${first}..${last}`);
    from = to;
  }
  return runs.join(', ');
}

/** Who sends which rows where, one line per dispatch. */
function entries(plan: DispatchPlan, what: string): string[] {
  return Array.from({ length: worldSize }, (_, rank) => {
    const mine = rankDispatch(plan, rank);
    return Array.from(mine.dstRank, (to, e) => {
      const from = run(mine.srcOffset[e]!, mine.length[e]!);
      const replica = plan.replicas > 1 ? ` (replica ${mine.replica[e]})` : '';
      return `  rank ${rank} sends ${what} rows ${from} to rank ${to}, rows ${run(mine.dstOffset[e]!, mine.length[e]!)} there${replica}`;
    });
  }).flat();
}

/** What each receiver expects. */
function expected(plan: DispatchPlan, what: string): string[] {
  const { received } = sizes(plan, { rowBytes, chunkBytes });
  return Array.from({ length: worldSize }, (_, rank) => {
    const from = plan.received.offsets[rank]!;
    const to = plan.received.offsets[rank + 1]!;
    const sources = Array.from({ length: to - from }, (_, i) => {
      const pair = from + i;
      return `${plan.received.tokens[pair]} from rank ${plan.received.peer[pair]} in ${received.chunks[pair]} chunks`;
    });
    return `  rank ${rank} gets ${plan.recvTokens[rank]} ${what} rows: ${sources.join(', ')}`;
  });
}

function countersText(facts: readonly Facts[], of: (one: Facts) => Counters, lease: number): string[] {
  return facts.map((one) => {
    const { arrivals, credits } = of(one);
    return `  rank ${one.rank}: chunks arrived by source ${list(arrivals[lease]!)}, credits by destination ${list(credits[lease]!)}`;
  });
}

function arrivedText(facts: readonly Facts[], of: (one: Facts) => Arrived): string[] {
  return facts.map((one) => {
    const tensors = Object.entries(of(one).ids).map(([name, values]) => `${name} = ${ids(values)}`);
    return `  rank ${one.rank}: ${tensors.join('; ')}`;
  });
}

/** Text by phase, in order. The names mark the places of docs/walkthrough.md where the texts stand. */
export function narrate(facts: readonly Facts[]): Readonly<Record<string, string>> {
  const plans = makePlans();
  const memory = facts[0]!.memory;
  const same = facts.every(({ digests }) => digests.q === facts[0]!.digests.q && digests.kv === facts[0]!.digests.kv);
  const sections: Record<string, readonly string[]> = {
    plan: [
      'queries, home to server:',
      ...entries(plans.fwdQ, 'query'),
      ...expected(plans.fwdQ, 'query'),
      'keys and values, home to server:',
      ...entries(plans.fwdKv, 'key-value'),
      ...expected(plans.fwdKv, 'key-value'),
      `all ranks computed the same plan: ${same ? 'yes' : 'no'}`,
    ],
    memory: [
      `each rank: ${leases} leases of ${memory.leaseBytes} bytes, ${memory.signalSlots} signal words`,
      'counters of lease 0 before the first call:',
      ...countersText(facts, (one) => one.before, 0),
    ],
    forward: [
      ...facts.map(
        ({ rank, forwardBytes: { bytesSent, bytesReceived }, forward }) =>
          `  rank ${rank} sent ${bytesSent} bytes and received ${bytesReceived}; ${forward.stagedBytes} bytes were copied first`,
      ),
      'what each rank holds now, by token id:',
      ...arrivedText(facts, (one) => one.forward),
      'counters of lease 0:',
      ...countersText(facts, (one) => one.forward.counters, 0),
    ],
    output: [
      ...entries(plans.revQ, 'output'),
      'what came home:',
      ...arrivedText(facts, (one) => one.output),
      'counters of lease 1:',
      ...countersText(facts, (one) => one.output.counters, 1),
    ],
    released: [
      'lease 0:',
      ...countersText(facts, (one) => one.released, 0),
      'lease 1:',
      ...countersText(facts, (one) => one.released, 1),
    ],
    gradients: [
      ...entries(plans.revKv, 'gradient'),
      'what came home, replica-major:',
      ...arrivedText(facts, (one) => one.gradients),
      'counters of lease 0:',
      ...countersText(facts, (one) => one.gradients.counters, 0),
    ],
    summed: [
      ...facts.map(({ rank }) => {
        const [compact, dense] = [plans.revKvCompact.recvTokens[rank], plans.revKv.recvTokens[rank]];
        return `  rank ${rank} receives into ${compact} rows (replica-major: ${dense})`;
      }),
      'the sum over replicas:',
      ...facts.map(({ rank, summed }) => `  rank ${rank}: dKv = ${list(summed.ids.dKv!)}`),
    ],
    absence: [
      ...facts.map(
        ({ rank, absence }) => `  rank ${rank}: ${absence.outcome}${absence.poisoned ? ' (now poisoned)' : ''}`,
      ),
      'counters of lease 0:',
      ...countersText(facts, (one) => one.absence.counters, 0),
    ],
    resync: [
      ...facts.map(({ rank, resync: { epoch, revoked } }) => {
        const lost = revoked === undefined ? '' : `; the result that it held was ${revoked ? 'revoked' : 'kept'}`;
        return `  rank ${rank} is in epoch ${epoch}${lost}`;
      }),
      'the same call again:',
      ...arrivedText(facts, (one) => one.repeated),
      'counters of lease 0:',
      ...countersText(facts, (one) => one.repeated.counters, 0),
    ],
  };
  return Object.fromEntries(Object.entries(sections).map(([phase, lines]) => [phase, lines.join('\n')]));
}
