/** Assertions that say rank, place and bytes. */
import assert from 'node:assert/strict';
import { type EpCode, type EpError, isEpError, type Rank, type SymmetricMemory } from '@ep/core';

/** Runs a call that must be refused, at once or by what it returns, with one of the codes; returns the error. */
export async function refused(codes: EpCode | readonly EpCode[], call: () => unknown): Promise<EpError> {
  let value: unknown;
  try {
    value = await call();
  } catch (error) {
    assert.ok(isEpError(error), `expected an EpError, found ${String(error)}`);
    const expected = typeof codes === 'string' ? [codes] : codes;
    assert.ok(
      expected.includes(error.code),
      `expected ${expected.join(' or ')}, found ${error.code}: ${error.message}`,
    );
    return error;
  }
  assert.fail(`expected ${String(codes)} from ${call.toString()}, found ${String(value)}`);
}

/** The call must reject with this very object. */
export async function rejectsWith(reason: unknown, call: () => unknown): Promise<void> {
  let value: unknown;
  try {
    value = await call();
  } catch (error) {
    assert.equal(error, reason, `expected the caller's own reason, found ${String(error)}`);
    return;
  }
  assert.fail(`expected ${call.toString()} to reject, found ${String(value)}`);
}

/** A byte that tells who wrote it, in which round, and where. */
export const patternByte = (writer: Rank, round: number, index: number): number =>
  (writer * 83 + round * 29 + index * 7 + (index >>> 8) * 13 + 1) & 0xff;

export function fillPattern(
  memory: SymmetricMemory,
  offset: number,
  length: number,
  writer: Rank,
  round: number,
): void {
  const bytes = memory.view('u8', offset, length);
  for (let i = 0; i < length; i++) bytes[i] = patternByte(writer, round, i);
}

export function checkPattern(
  memory: SymmetricMemory,
  offset: number,
  length: number,
  writer: Rank,
  round: number,
  what: string,
): void {
  const bytes = memory.view('u8', offset, length);
  assert.equal(bytes.length, length, `${what}: the view is gone`);
  for (let i = 0; i < length; i++) {
    const expected = patternByte(writer, round, i);
    if (bytes[i] !== expected) {
      assert.fail(
        `${what}: byte ${i} of ${length} at offset ${offset}, written by rank ${writer} in round ${round}: expected ${expected}, found ${bytes[i]}`,
      );
    }
  }
}

export function checkBytes(memory: SymmetricMemory, offset: number, length: number, value: number, what: string): void {
  const bytes = memory.view('u8', offset, length);
  for (let i = 0; i < length; i++) {
    if (bytes[i] !== value) assert.fail(`${what}: byte ${offset + i}: expected ${value}, found ${bytes[i]}`);
  }
}

export const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
export const ranksOf = (worldSize: number): readonly Rank[] => Array.from({ length: worldSize }, (_, rank) => rank);
