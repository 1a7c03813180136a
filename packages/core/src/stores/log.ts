/**
 * The records of the file store: one operation each, one line each.
 *
 *     ep1 <crc32 of body, 8 hex digits> <body>      body = JSON ["writer", number, kind, key, ...bytes as base64 or delta];
 *                                                      multi-set has any number of keys, each with its bytes
 *
 * A record is written as newline + line + newline in one append. A writer that dies within the append leaves a torn line, which the next record's
 * leading newline ends; its checksum is wrong, so every reader skips it.
 */
import { crc32 } from 'node:zlib';
import { EpError } from '../errors.js';
import type { Operation, StoreEntry } from './replica.js';

const MAGIC = 'ep1 ';

/** An operation and who wrote it: `writer` numbers its own records, so that it knows them again. */
export interface LogRecord {
  readonly writer: string;
  readonly number: number;
  readonly operation: Operation;
}

const toBase64 = (bytes: Uint8Array): string =>
  Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString('base64');

function operands(operation: Operation): readonly (string | number)[] {
  switch (operation.kind) {
    case 'set':
    case 'append':
      return [operation.key, toBase64(operation.value)];
    case 'add':
      return [operation.key, operation.delta];
    case 'compare-set':
      return [operation.key, toBase64(operation.expected), toBase64(operation.desired)];
    case 'multi-set':
      return operation.entries.flatMap(([key, value]) => [key, toBase64(value)]);
    case 'delete':
      return [operation.key];
  }
}

const checksum = (body: string): string => crc32(body).toString(16).padStart(8, '0');

export function formatRecord({ writer, number, operation }: LogRecord): Buffer {
  const body = JSON.stringify([writer, number, operation.kind, ...operands(operation)]);
  return Buffer.from(`\n${MAGIC}${checksum(body)} ${body}\n`);
}

function fromBase64(text: unknown): Uint8Array | undefined {
  if (typeof text !== 'string') return undefined;
  const bytes = Buffer.from(text, 'base64');
  return bytes.toString('base64') === text ? Uint8Array.from(bytes) : undefined;
}

function parseEntries(rest: readonly unknown[]): readonly StoreEntry[] | undefined {
  if (rest.length % 2 !== 0) return undefined;
  const entries: StoreEntry[] = [];
  for (let i = 0; i < rest.length; i += 2) {
    const [key, value] = [rest[i], fromBase64(rest[i + 1])];
    if (typeof key !== 'string' || value === undefined) return undefined;
    entries.push([key, value]);
  }
  return entries;
}

function parseOperation(kind: unknown, operands: readonly unknown[]): Operation | undefined {
  if (kind === 'multi-set') {
    const entries = parseEntries(operands);
    return entries && { kind, entries };
  }
  const [key, ...rest] = operands;
  if (typeof key !== 'string') return undefined;
  if (kind === 'delete' && rest.length === 0) return { kind, key };
  if (kind === 'add' && rest.length === 1 && Number.isSafeInteger(rest[0]))
    return { kind, key, delta: rest[0] as number };
  const first = fromBase64(rest[0]);
  if ((kind === 'set' || kind === 'append') && rest.length === 1 && first) return { kind, key, value: first };
  const second = fromBase64(rest[1]);
  if (kind === 'compare-set' && rest.length === 2 && first && second)
    return { kind, key, expected: first, desired: second };
  return undefined;
}

function parseBody(body: string): LogRecord | undefined {
  let fields: unknown;
  try {
    fields = JSON.parse(body);
  } catch {
    return undefined;
  }
  if (!Array.isArray(fields)) return undefined;
  const [writer, number, kind, ...rest] = fields as readonly unknown[];
  const operation = parseOperation(kind, rest);
  if (typeof writer !== 'string' || !Number.isSafeInteger(number) || operation === undefined) return undefined;
  return { writer, number: number as number, operation };
}

/** One complete line without its newline. `undefined` for an empty or torn one; throws for what no writer of this version leaves. */
export function parseLine(line: string, path: string): LogRecord | undefined {
  if (MAGIC.startsWith(line)) return undefined;
  const found = line.slice(0, 40);
  if (!line.startsWith(MAGIC)) {
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `file store: ${path} is not a store file of this version: found ${JSON.stringify(found)}`,
      {
        context: { path, found },
      },
    );
  }
  const body = line.slice(MAGIC.length + 9);
  if (line.slice(MAGIC.length, MAGIC.length + 9) !== `${checksum(body)} `) return undefined;
  const record = parseBody(body);
  if (record !== undefined) return record;
  throw new EpError(
    'EP_INVALID_ARGUMENT',
    `file store: ${path} holds a record that this version does not know: ${JSON.stringify(found)}`,
    {
      context: { path, found },
    },
  );
}
