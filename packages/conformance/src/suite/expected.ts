/** Committed outcomes: what each case came to, so that a change in either direction is seen. */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';

/** `deviation`: the case fails, and this is why that is known. */
export type Outcome = 'pass' | 'not-applicable' | { readonly deviation: string };

export type Suite = 'transport' | 'store' | 'group' | 'gin';

const SUITES: readonly unknown[] = ['transport', 'store', 'group', 'gin'] satisfies readonly Suite[];

export interface ExpectedFile {
  readonly suite: Suite;
  /** `family:backing` of a transport; the kind of a store; the engine of process groups. */
  readonly name: string;
  /** How the whole matrix runs: absent for stores, which need no ranks. */
  readonly modes?: readonly string[];
  readonly worlds?: readonly number[];
  /** What each case says, where the cases are those of another package than this one. */
  readonly sentences?: Readonly<Record<string, string>>;
  readonly cases: Readonly<Record<string, Outcome>>;
}

/** Marks a deviation that `--update` wrote and nobody has explained yet; such a file fails. */
export const UNEXPLAINED = 'unexplained: ';

function isOutcome(value: unknown): value is Outcome {
  if (value === 'pass' || value === 'not-applicable') return true;
  return (
    typeof value === 'object' && value !== null && typeof (value as { deviation?: unknown }).deviation === 'string'
  );
}

/** Undefined if the file is not there. Throws what is wrong with it. */
export function readExpected(path: string): ExpectedFile | undefined {
  if (!existsSync(path)) return undefined;
  const value = JSON.parse(readFileSync(path, 'utf8')) as ExpectedFile;
  if (
    !SUITES.includes(value.suite) ||
    typeof value.name !== 'string' ||
    typeof value.cases !== 'object' ||
    value.cases === null
  ) {
    throw new Error(`${path}: expected {suite, name, cases}`);
  }
  for (const [id, outcome] of Object.entries(value.cases)) {
    if (!isOutcome(outcome)) throw new Error(`${path}: ${id}: expected pass, not-applicable or a deviation`);
  }
  return value;
}

export function writeExpected(path: string, file: ExpectedFile): void {
  writeFileSync(path, `${JSON.stringify(file, null, 2)}\n`);
}

/** Throws where an observed outcome differs from the committed one, in either direction. `failure` is what the case threw. */
export function compareOutcome(
  id: string,
  expected: Outcome | undefined,
  observed: 'pass' | 'fail' | 'not-applicable',
  failure?: unknown,
): void {
  const update = 'run `vitest run <test file> --update` with EP_TEST_FULL=1 and commit the file with the reason';
  if (expected === undefined) throw new Error(`${id} has no committed outcome: ${update}`, { cause: failure });
  const column = typeof expected === 'string' ? expected : 'fail';
  if (column === observed) return;
  if (observed === 'fail') throw failure;
  const shown = typeof expected === 'string' ? expected : `deviation (${expected.deviation})`;
  throw new Error(`${id}: committed as ${shown}, but it is now ${observed}: if that is right, ${update}`);
}
