/** What a caller may bring connection data from rank to rank with: here all ranks are of one thread, and values travel as JSON. */
import type { IbgdaExchange, IbgdaIntroduction } from '../src/index.js';

interface AllGather {
  readonly exchange: IbgdaExchange;
  /** What the ranks told, by step. */
  readonly told: ReadonlyMap<string, readonly IbgdaIntroduction[]>;
}

/** Ends a step when so many ranks have come to it. `change` is what happens to an answer on its way to a rank. */
export function allGather(
  worldSize: number,
  change: (answer: IbgdaIntroduction[], rank: number) => unknown = (answer) => answer,
): AllGather {
  const told = new Map<string, IbgdaIntroduction[]>();
  const ends = new Map<string, (() => void)[]>();
  const exchange: IbgdaExchange = async (local) => {
    const { step, rank } = local;
    const values = told.get(step) ?? [];
    const waiting = ends.get(step) ?? [];
    told.set(step, values);
    ends.set(step, waiting);
    values.push(JSON.parse(JSON.stringify(local)) as IbgdaIntroduction);
    const all = new Promise<void>((resolve) => waiting.push(resolve));
    if (values.length === worldSize) for (const end of waiting) end();
    await all;
    return change(structuredClone(values), rank) as IbgdaIntroduction[];
  };
  return { exchange, told };
}
