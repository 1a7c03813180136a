/** The documents that `ep plan` reads, and the numbers of a command line. */
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { type FuzzSuite, textTarget } from '@ep/fuzz';
import { InvalidArgumentError } from 'commander';
import { jsonFault } from '../src/json-fault.js';
import { integerOption } from '../src/options.js';
import { type DocumentsFile, parseCsvDocuments, parseJsonDocuments } from '../src/plan/documents-file.js';
import { evenBudgets, planStep } from '../src/plan/plan-step.js';

const refused = (error: unknown): boolean =>
  isEpError(error) && error.code.startsWith('EP_') && error.code !== 'EP_SYSTEM';

/** A plan of more tokens or ranks shows nothing new. */
const mostTokens = 4096;
const mostRanks = 16;

function planOf(file: DocumentsFile): void {
  for (const { name, tokens } of file.documents) {
    if (typeof name !== 'string' || !Number.isSafeInteger(tokens) || tokens < 0)
      throw new Error('a document that is none');
  }
  const lengths = Int32Array.from(file.documents, (document) => document.tokens);
  const tokens = lengths.reduce((sum, length) => sum + length, 0);
  const ranks = file.ranks ?? 2;
  if (tokens > mostTokens || ranks > mostRanks) return;
  planStep({
    lengths,
    budgets:
      typeof file.budget === 'number'
        ? new Int32Array(ranks).fill(file.budget)
        : Int32Array.from(file.budget ?? evenBudgets(tokens, ranks)),
    balance: file.balance ?? true,
    tolerance: file.tolerance ?? 0,
    block: file.block ?? 1,
    sharing: file.dedup === true ? 'each-server' : 'each-query',
    rowBytesQ: file.rowBytesQ ?? 64,
    rowBytesKv: file.rowBytesKv ?? 16,
  });
}

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    textTarget('documents-json', refused, (text) => {
      let json = true;
      try {
        JSON.parse(text);
      } catch {
        json = false;
      }
      if ((jsonFault(text) === undefined) !== json) throw new Error('JSON.parse and the search for its fault disagree');
      planOf(parseJsonDocuments(text, 'file'));
    }),
    textTarget('documents-csv', refused, (text) => planOf(parseCsvDocuments(text, 'file'))),
    textTarget(
      'integer-option',
      (error) => error instanceof InvalidArgumentError,
      (text) => {
        const value = integerOption(1, 4096)(text);
        if (!(Number.isInteger(value) && value >= 1 && value <= 4096))
          throw new Error(`${value} is outside of the range`);
      },
    ),
  ],
};
