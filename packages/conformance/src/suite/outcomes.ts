/** Collects what the cases of one suite came to, and holds it against the committed file, or writes that file. */
import { fileURLToPath } from 'node:url';
import { expect } from 'vitest';
import {
  compareOutcome,
  type ExpectedFile,
  type Outcome,
  readExpected,
  UNEXPLAINED,
  writeExpected,
} from './expected.js';

/** True if vitest was started with `--update`. */
function updating(): boolean {
  const state = expect.getState() as { readonly snapshotState?: { readonly snapshotUpdateState?: string } };
  return state.snapshotState?.snapshotUpdateState === 'all';
}

const firstLine = (error: unknown): string => {
  const message = error instanceof Error ? error.message : String(error);
  return message.split('\n').slice(0, 2).join(' ');
};

export class Outcomes {
  readonly #path: string;
  readonly #ids: readonly string[];
  readonly #mandatory: readonly string[];
  readonly #observed = new Map<string, Outcome>();
  readonly #expected: ExpectedFile | undefined;

  constructor(file: URL, ids: readonly string[], mandatory: readonly string[]) {
    this.#path = fileURLToPath(file);
    this.#ids = ids;
    this.#mandatory = mandatory;
    this.#expected = readExpected(this.#path);
  }

  /** Fails unless the file has exactly the cases of the suite, each explained, and the suite has the mandatory ones. */
  checkComplete(header: Pick<ExpectedFile, 'suite' | 'name' | 'sentences'>): void {
    const ids = this.#ids;
    expect(ids.filter((id, i) => ids.indexOf(id) !== i)).toEqual([]);
    expect(this.#mandatory.filter((id) => !ids.includes(id))).toEqual([]);
    if (updating()) return;
    expect(this.#expected, `${this.#path} is missing: run with --update`).toMatchObject(header);
    expect(Object.keys(this.#expected!.cases).sort()).toEqual([...ids].sort());
    for (const [id, outcome] of Object.entries(this.#expected!.cases)) {
      if (typeof outcome === 'object')
        expect(outcome.deviation.startsWith(UNEXPLAINED), `${id} needs a reason`).toBe(false);
    }
  }

  /** Throws where this differs from what was committed. */
  note(id: string, outcome: 'pass' | 'fail' | 'not-applicable', failure?: unknown): void {
    const committed = this.#expected?.cases[id];
    if (!updating()) {
      compareOutcome(id, committed, outcome, failure);
    } else if (outcome !== 'fail') {
      // One failing world or mode makes it a deviation: a later pass does not take that back.
      if (!this.#observed.has(id)) this.#observed.set(id, outcome);
    } else {
      const reason = `${UNEXPLAINED}${firstLine(failure)}`;
      this.#observed.set(id, typeof committed === 'object' ? committed : { deviation: reason });
    }
  }

  /** With --update: writes the file. Cases that did not run keep their outcome. */
  save(header: Omit<ExpectedFile, 'cases'>): void {
    if (!updating() || this.#observed.size === 0) return;
    const cases = this.#ids.flatMap((id) => {
      const outcome = this.#observed.get(id) ?? this.#expected?.cases[id];
      return outcome === undefined ? [] : [[id, outcome] as const];
    });
    writeExpected(this.#path, { ...header, cases: Object.fromEntries(cases) });
  }
}
