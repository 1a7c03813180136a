/** The documents that `ep plan` reads, the dumps that `ep trace merge` joins, and the numbers of a command line. */
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { type FuzzSuite, textTarget } from '@ep/fuzz';
import { InvalidArgumentError } from 'commander';
import { jsonFault } from '../src/json-fault.js';
import { hostList, integerOption, nodeCount, rendezvousAddress } from '../src/options.js';
import { type DocumentsFile, parseCsvDocuments, parseJsonDocuments } from '../src/plan/documents-file.js';
import { evenBudgets, planStep } from '../src/plan/plan-step.js';
import { bytes, readFailure, readMet, readRecord } from '../src/run/node-records.js';
import { type DumpFile, parseDump } from '../src/trace/dumps.js';
import { mergeDumps } from '../src/trace/merge.js';
import { reportText } from '../src/trace/report.js';

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

/** A dump on each line, of which one of each rank and world counts. */
function mergeLines(text: string): void {
  const files = new Map<string, DumpFile>();
  for (const line of text.split('\n').filter((one) => one !== '')) {
    const dump = parseDump(line, 'file');
    if (JSON.stringify(parseDump(JSON.stringify(dump), 'file')) !== JSON.stringify(dump))
      throw new Error('a dump that is not itself when it is read again');
    if (dump.size <= 256) files.set(`${dump.rank} ${dump.world}`, { path: 'file', dump });
  }
  const reports = mergeDumps([...files.values()], 5);
  for (const { findings } of reports)
    for (const { text } of findings)
      if (text === '' || /undefined|NaN/.test(text)) throw new Error(`a finding: ${text}`);
  // biome-ignore lint/suspicious/noControlCharactersInRegex: what files hold must not steer the terminal.
  if (/[\u0000-\u0009\u000b-\u001f\u007f-\u009f]/.test(reportText(reports, [])))
    throw new Error('a report with control characters');
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
    textTarget('trace-dumps', refused, mergeLines),
    textTarget('documents-csv', refused, (text) => planOf(parseCsvDocuments(text, 'file'))),
    textTarget(
      'hosts-option',
      (error) => error instanceof InvalidArgumentError,
      (text) => {
        const hosts = hostList(4096)(text.trimEnd());
        for (const { host, ranks } of hosts) {
          if (/[\s/[\]]/.test(host) || host === '' || !(ranks >= 1 && ranks <= 4096))
            throw new Error(`a host that is none: ${JSON.stringify({ host, ranks })}`);
          const { port } = rendezvousAddress(`${host.includes(':') ? `[${host}]` : host}:${ranks}`);
          if (port !== ranks) throw new Error('an address that is read in two ways');
        }
        const nodes = `${hosts.length}:${hosts.length + 1}`;
        if (nodeCount(nodes).least !== hosts.length) throw new Error(`${nodes} is not ${hosts.length} and more`);
      },
    ),
    textTarget('node-records', refused, (text) => {
      const value = new TextEncoder().encode(text);
      // A text may be any of the three, and is refused where it is none.
      let refusal: unknown;
      let isRead = false;
      for (const read of [readRecord, readFailure, readMet]) {
        try {
          const found = read('key', value);
          isRead = true;
          if (JSON.stringify(read('key', bytes(found))) !== JSON.stringify(found))
            throw new Error('a record that is not itself when it is read again');
        } catch (error) {
          if (!refused(error)) throw error;
          refusal = error;
        }
      }
      if (!isRead) throw refusal;
    }),
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
