/** One call of each operation, and whether its result is that of its contributors. */
import assert from 'node:assert/strict';
import type { CollectiveWork, ProcessGroup } from '../../src/index.js';
import type { Scenario } from './protocol.js';

export interface PostedCall {
  readonly work: CollectiveWork;
  /** Throws unless every element is what these ranks' data come to. */
  readonly check: (contributors: readonly number[]) => void;
}

/** Different for every rank and call, and so is the sum of any set of ranks. */
const givenBy = (rank: number, call: number): number => 2 ** rank * 1_000 + (call % 1_000);

const filled = (length: number, value: number): Int32Array => new Int32Array(length).fill(value);

function checkAll(found: Int32Array, value: number, what: string): void {
  const wrong = found.findIndex((element) => element !== value);
  if (wrong >= 0) assert.fail(`${what}: element ${wrong} of ${found.length}: expected ${value}, found ${found[wrong]}`);
}

/** Untouched elements of outputs. */
const UNTOUCHED = -1;

export function postCall(
  group: ProcessGroup,
  operation: Scenario['operation'],
  {
    length,
    call,
    root,
    timeoutMs,
  }: { readonly length: number; readonly call: number; readonly root: number; readonly timeoutMs: number },
): PostedCall {
  const { rank, size } = group;
  const amRoot = rank === root;
  const all = Array.from({ length: size }, (_, one) => one);
  const own = filled(length, givenBy(rank, call));
  /** What `from` gives to `to`, where each gets something else. */
  const part = (from: number, to: number): number => givenBy(from, call) + 7 * to;
  const outputs = (): Int32Array[] => all.map(() => filled(length, UNTOUCHED));
  const sum = (contributors: readonly number[], value: (from: number) => number): number =>
    contributors.reduce((total, from) => total + value(from), 0);
  const checkRows =
    (rows: readonly Int32Array[], value: (from: number) => number) =>
    (contributors: readonly number[]): void => {
      for (const from of contributors) checkAll(rows[from]!, value(from), `${operation} ${call}, of rank ${from}`);
    };
  const limits = { timeoutMs };
  switch (operation) {
    case 'barrier':
      return { work: group.barrier(limits), check: () => {} };
    case 'broadcast':
      return {
        work: group.broadcast(own, { root, ...limits }),
        check: () => checkAll(own, givenBy(root, call), `broadcast ${call}`),
      };
    case 'all-reduce':
      return {
        work: group.allReduce(own, { op: 'sum', ...limits }),
        check: (contributors) =>
          checkAll(
            own,
            sum(contributors, (from) => givenBy(from, call)),
            `all-reduce ${call}`,
          ),
      };
    case 'reduce':
      return {
        work: group.reduce(own, { root, op: 'sum', ...limits }),
        check: (contributors) => {
          const expected = amRoot ? sum(contributors, (from) => givenBy(from, call)) : givenBy(rank, call);
          checkAll(own, expected, `reduce ${call}`);
        },
      };
    case 'all-gather': {
      const rows = outputs();
      return { work: group.allGather(rows, own, limits), check: checkRows(rows, (from) => givenBy(from, call)) };
    }
    case 'gather': {
      const rows = outputs();
      return {
        work: group.gather(own, amRoot ? { root, outputs: rows, ...limits } : { root, ...limits }),
        check: amRoot ? checkRows(rows, (from) => givenBy(from, call)) : () => {},
      };
    }
    case 'scatter': {
      const inputs = all.map((to) => filled(length, part(rank, to)));
      const output = filled(length, UNTOUCHED);
      return {
        work: group.scatter(output, amRoot ? { root, inputs, ...limits } : { root, ...limits }),
        check: () => checkAll(output, part(root, rank), `scatter ${call}`),
      };
    }
    case 'reduce-scatter': {
      const inputs = all.map((to) => filled(length, part(rank, to)));
      const output = filled(length, UNTOUCHED);
      return {
        work: group.reduceScatter(output, inputs, { op: 'sum', ...limits }),
        check: (contributors) =>
          checkAll(
            output,
            sum(contributors, (from) => part(from, rank)),
            `reduce-scatter ${call}`,
          ),
      };
    }
    case 'all-to-all': {
      const inputs = all.map((to) => filled(length, part(rank, to)));
      const rows = outputs();
      return { work: group.allToAll(rows, inputs, limits), check: checkRows(rows, (from) => part(from, rank)) };
    }
  }
}
