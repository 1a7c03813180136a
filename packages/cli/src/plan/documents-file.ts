/** Documents from a JSON or CSV file. What is wrong is named by field (JSON) or line (CSV). */
import { readFileSync } from 'node:fs';
import { extname } from 'node:path';
import { checkInteger, EpError, invalid } from '@ep/core';
import { CsvError, parse } from 'csv-parse/sync';
import { fileError } from '../failure.js';
import { parseJson } from '../json-fault.js';

export interface NamedDocument {
  readonly name: string;
  readonly tokens: number;
}

/** What a file may say; whatever it leaves out comes from the command line or has a default. */
export interface DocumentsFile {
  readonly documents: readonly NamedDocument[];
  readonly ranks?: number;
  /** Tokens per rank: one number for all, or one for each. */
  readonly budget?: number | readonly number[];
  readonly balance?: boolean;
  readonly tolerance?: number;
  readonly block?: number;
  readonly dedup?: boolean;
  readonly rowBytesQ?: number;
  readonly rowBytesKv?: number;
}

export const mostTokens = 2 ** 31 - 1;
export const mostRanks = 65_536;
/** As `@ep/plan` has it. */
export const mostRowBytes = 2 ** 31 - 1;
const largestFile = 256 * 2 ** 20;

/** Throws `EP_INVALID_ARGUMENT` naming the file and the field or line, or `EP_SYSTEM` if it cannot be read. */
export function readDocumentsFile(path: string): DocumentsFile {
  let bytes: Buffer;
  try {
    bytes = readFileSync(path);
  } catch (error) {
    throw fileError('read', path, error);
  }
  if (bytes.length > largestFile) {
    throw invalid('the file', { where: path, expected: `at most ${largestFile} bytes`, found: bytes.length });
  }
  const text = new TextDecoder('utf-8').decode(bytes);
  const kind = extname(path).toLowerCase();
  if (kind === '.json') return parseJsonDocuments(text, path);
  if (kind === '.csv') return parseCsvDocuments(text, path);
  throw invalid('the file name', { where: path, expected: 'one that ends in .json or .csv', found: kind });
}

const readers: { readonly [K in keyof DocumentsFile]-?: (value: unknown, where: string) => DocumentsFile[K] } = {
  documents: readDocuments,
  ranks: (value, where) => checkInteger(value, 'ranks', where, 1, mostRanks),
  budget: readBudget,
  balance: (value, where) => readBoolean(value, 'balance', where),
  tolerance: readTolerance,
  block: (value, where) => checkInteger(value, 'block', where, 1, mostTokens),
  dedup: (value, where) => readBoolean(value, 'dedup', where),
  rowBytesQ: (value, where) => checkInteger(value, 'rowBytesQ', where, 1, mostRowBytes),
  rowBytesKv: (value, where) => checkInteger(value, 'rowBytesKv', where, 1, mostRowBytes),
};

/** `{"documents": [lengths] or [{"name", "tokens"}], "ranks": …, "budget": …, …}`. */
export function parseJsonDocuments(text: string, where: string): DocumentsFile {
  const value = parseJson(text, where);
  if (!isRecord(value)) throw invalid('the file', { where, expected: 'a JSON object with "documents"', found: value });
  const fields: Record<string, unknown> = {};
  for (const [name, item] of Object.entries(value)) {
    if (!Object.hasOwn(readers, name)) {
      throw invalid('field', { where, expected: `one of ${Object.keys(readers).join(', ')}`, found: name });
    }
    fields[name] = readers[name as keyof DocumentsFile](item, where);
  }
  if (fields.documents === undefined) throw invalid('documents', { where, expected: 'a list', found: undefined });
  return fields as unknown as DocumentsFile;
}

function readDocuments(value: unknown, where: string): NamedDocument[] {
  if (!Array.isArray(value) || value.length === 0) {
    throw invalid('documents', { where, expected: 'a list with at least one document', found: value });
  }
  return value.map((item: unknown, i) => {
    const at = `documents[${i}]`;
    if (typeof item === 'number')
      return { name: `document ${i}`, tokens: checkInteger(item, at, where, 0, mostTokens) };
    if (!isRecord(item))
      throw invalid(at, { where, expected: 'a number of tokens or {"name", "tokens"}', found: item });
    for (const field of Object.keys(item)) {
      if (field !== 'name' && field !== 'tokens') {
        throw invalid(`field of ${at}`, { where, expected: 'name or tokens', found: field });
      }
    }
    if (item.name !== undefined && typeof item.name !== 'string') {
      throw invalid(`${at}.name`, { where, expected: 'a string', found: item.name });
    }
    const tokens = checkInteger(item.tokens, `${at}.tokens`, where, 0, mostTokens);
    return { name: item.name ?? `document ${i}`, tokens };
  });
}

function readBudget(value: unknown, where: string): number | number[] {
  if (!Array.isArray(value)) return checkInteger(value, 'budget', where, 0, mostTokens);
  return value.map((item: unknown, rank) => checkInteger(item, `budget[${rank}]`, where, 0, mostTokens));
}

function readBoolean(value: unknown, what: string, where: string): boolean {
  if (typeof value === 'boolean') return value;
  throw invalid(what, { where, expected: 'true or false', found: value });
}

function readTolerance(value: unknown, where: string): number {
  if (typeof value === 'number' && value >= 0 && value <= 1e6) return value;
  throw invalid('tolerance', { where, expected: 'a number from 0 to 1000000', found: value });
}

/** `name,tokens` per line; a first line that says just that is a heading. */
export function parseCsvDocuments(text: string, where: string): DocumentsFile {
  const documents: NamedDocument[] = [];
  for (const { record, line } of csvRecords(text, where)) {
    const at = `${where}: line ${line}`;
    if (record.length !== 2) {
      throw invalid('fields', { where: at, expected: '2 in number, name and tokens', found: record.length });
    }
    const [name, tokens] = record.map((field) => field.trim()) as [string, string];
    if (documents.length === 0 && name === 'name' && tokens === 'tokens') continue;
    if (!/^\d{1,16}$/.test(tokens)) {
      throw invalid('tokens', { where: at, expected: `an integer from 0 to ${mostTokens}`, found: tokens });
    }
    documents.push({ name, tokens: checkInteger(Number(tokens), 'tokens', at, 0, mostTokens) });
  }
  if (documents.length === 0) {
    throw invalid('the file', { where, expected: 'at least one line name,tokens', found: 'none' });
  }
  return { documents };
}

function csvRecords(text: string, where: string): { readonly record: readonly string[]; readonly line: number }[] {
  try {
    const rows = parse(text, {
      bom: true,
      skip_empty_lines: true,
      relax_column_count: true,
      info: true,
    }) as unknown as {
      readonly record: readonly string[];
      readonly info: { readonly lines: number };
    }[];
    return rows.map(({ record, info }) => ({ record, line: info.lines }));
  } catch (error) {
    if (!(error instanceof CsvError)) throw error;
    const line = typeof error.lines === 'number' ? error.lines : undefined;
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `${where}: not CSV${line === undefined ? '' : ` at line ${line}`}: ${error.message.toLowerCase()}`,
      { cause: error, context: { where, line, csv: error.code } },
    );
  }
}

function isRecord(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
