/** `ep plan`: explains and draws the plan of a file of documents. */
import { accessSync, constants, statSync, writeFileSync } from 'node:fs';
import { basename, dirname } from 'node:path';
import { invalid } from '@ep/core';
import { explanationText } from '@ep/plan';
import { Argument, Command, InvalidArgumentError, Option } from 'commander';
import { formatBytes } from '../doctor/machine.js';
import { fileError, jsonText, UsageError } from '../failure.js';
import { integerOption } from '../options.js';
import { drawPlan } from '../picture/draw.js';
import { type DocumentsFile, mostRanks, mostRowBytes, mostTokens, readDocumentsFile } from './documents-file.js';
import { evenBudgets, movedBytes, planStep } from './plan-step.js';

interface PlanFlags {
  readonly ranks?: number;
  readonly budget?: number;
  readonly balance?: boolean;
  readonly tolerance?: number;
  readonly block?: number;
  readonly dedup?: boolean;
  readonly rowBytesQ?: number;
  readonly rowBytesKv?: number;
  readonly svg?: string;
  readonly json?: boolean;
}

/** Rows of 8 query heads and of 2 key-value heads (K and V) of 64 bf16 elements. */
const defaultRowBytesQ = 8 * 64 * 2;
const defaultRowBytesKv = 2 * 2 * 64 * 2;

export function planCommand(): Command {
  return new Command('plan')
    .description('explain and draw who sends what to whom for the documents of a file')
    .addArgument(new Argument('<file>', 'documents: .json {"documents": [...], "ranks": N, …} or .csv name,tokens'))
    .addOption(new Option('-n, --ranks <count>', 'ranks').argParser(integerOption(1, mostRanks)))
    .addOption(
      new Option('--budget <tokens>', 'tokens that each rank holds (default: shared out evenly)').argParser(
        integerOption(0, mostTokens),
      ),
    )
    .addOption(new Option('--balance', 'move attention work to idle ranks (default)'))
    .addOption(new Option('--no-balance', 'compute every shard where it lives'))
    .addOption(
      new Option('--tolerance <fraction>', 'work a rank may have above the average (default: 0)').argParser(fraction),
    )
    .addOption(
      new Option('--block <tokens>', 'new shard borders at multiples of this (default: 1)').argParser(
        integerOption(1, mostTokens),
      ),
    )
    .addOption(new Option('--dedup', 'send keys and values once per server, however many queries use them'))
    .addOption(
      new Option('--row-bytes-q <bytes>', `bytes of a query row (default: ${defaultRowBytesQ})`).argParser(
        integerOption(1, mostRowBytes),
      ),
    )
    .addOption(
      new Option(
        '--row-bytes-kv <bytes>',
        `bytes of a key row and a value row together (default: ${defaultRowBytesKv})`,
      ).argParser(integerOption(1, mostRowBytes)),
    )
    .option('--svg <path>', 'draw traffic and load per rank')
    .option('--json', 'the explanation as one JSON object')
    .action(async (file: string, flags: PlanFlags) => {
      await explainFile(file, flags);
    });
}

function fraction(text: string): number {
  const value = Number(text);
  if (text.trim() !== '' && value >= 0 && value <= 1e6) return value;
  throw new InvalidArgumentError('expected a number from 0 to 1000000.');
}

function budgetsOf(
  file: DocumentsFile,
  ranks: number,
  tokens: number,
  flag: number | undefined,
  where: string,
): Int32Array {
  const budget = flag ?? file.budget;
  if (budget === undefined) return evenBudgets(tokens, ranks);
  if (typeof budget === 'number') return new Int32Array(ranks).fill(budget);
  if (budget.length !== ranks) {
    throw invalid('budget', {
      where,
      expected: `one number, or a list of ${ranks}`,
      found: `${budget.length} numbers`,
    });
  }
  return Int32Array.from(budget);
}

async function explainFile(path: string, flags: PlanFlags): Promise<void> {
  const file = readDocumentsFile(path);
  const ranks = flags.ranks ?? file.ranks;
  if (ranks === undefined) {
    throw new UsageError(`${path}: the number of ranks is not given: use --ranks N or "ranks" in a JSON file`);
  }
  const lengths = Int32Array.from(file.documents, (document) => document.tokens);
  const tokens = lengths.reduce((sum, length) => sum + length, 0);
  const rowBytesQ = flags.rowBytesQ ?? file.rowBytesQ ?? defaultRowBytesQ;
  const rowBytesKv = flags.rowBytesKv ?? file.rowBytesKv ?? defaultRowBytesKv;
  const step = planStep({
    lengths,
    budgets: budgetsOf(file, ranks, tokens, flags.budget, path),
    balance: flags.balance ?? file.balance ?? true,
    tolerance: flags.tolerance ?? file.tolerance ?? 0,
    block: flags.block ?? file.block ?? 1,
    sharing: (flags.dedup ?? file.dedup ?? false) ? 'each-server' : 'each-query',
    rowBytesQ,
    rowBytesKv,
  });
  const { explanation } = step;
  const bytes = movedBytes(explanation, rowBytesQ, rowBytesKv);
  if (flags.svg !== undefined) {
    const title = `${basename(path)}: ${explanation.documents} documents, ${explanation.tokens} tokens on ${formatRanksCount(ranks)}`;
    writePicture(flags.svg, await drawPlan(explanation, { title, rowBytesQ, rowBytesKv }));
  }
  if (flags.json === true) {
    const balanced = step.planned !== step.atHome;
    const svg = flags.svg === undefined ? {} : { svg: flags.svg };
    process.stdout.write(`${jsonText({ file: path, balanced, rowBytesQ, rowBytesKv, bytes, explanation, ...svg })}\n`);
    return;
  }
  process.stdout.write(explanationText(explanation));
  process.stdout.write(
    `\nbytes between ranks, forward: ${formatBytes(bytes.query)} query, ${formatBytes(bytes.keyValue)} key-value (${formatBytes(bytes.neededKeyValue)} distinct)\n`,
  );
  if (flags.svg !== undefined) process.stdout.write(`picture: ${flags.svg}\n`);
}

function formatRanksCount(ranks: number): string {
  return ranks === 1 ? '1 rank' : `${ranks} ranks`;
}

/** Throws what `writePicture` would, as far as that shows before the work whose picture it is. */
export function checkPicture(path: string): void {
  const there = statSync(path, { throwIfNoEntry: false });
  try {
    if (there?.isDirectory() === true) throw Object.assign(new Error('a folder'), { code: 'EISDIR' });
    accessSync(there === undefined ? dirname(path) : path, constants.W_OK);
  } catch (error) {
    throw fileError('write', path, error);
  }
}

export function writePicture(path: string, svg: string): void {
  try {
    writeFileSync(path, svg);
  } catch (error) {
    throw fileError('write', path, error);
  }
}
