/** Assertions about errors. */
import assert from 'node:assert/strict';
import { type EpCode, type EpError, isEpError } from '@ep/core';

/** Runs a call that must fail, at once or by what it returns, with one of the codes; returns the error. */
export async function failsWith(codes: EpCode | readonly EpCode[], call: () => unknown): Promise<EpError> {
  let value: unknown;
  try {
    value = await call();
  } catch (error) {
    assert.ok(isEpError(error), `expected an EpError, found ${error instanceof Error ? error.stack : String(error)}`);
    const expected = typeof codes === 'string' ? [codes] : codes;
    assert.ok(
      expected.includes(error.code),
      `expected ${expected.join(' or ')}, found ${error.code}: ${error.message}`,
    );
    return error;
  }
  assert.fail(`expected ${String(codes)} from ${call.toString()}, found ${String(value)}`);
}

/** The call must fail with this very object. */
export async function failsWithReason(reason: unknown, call: () => unknown): Promise<void> {
  let value: unknown;
  try {
    value = await call();
  } catch (error) {
    assert.equal(error, reason, `expected the caller's own reason, found ${String(error)}`);
    return;
  }
  assert.fail(`expected ${call.toString()} to fail, found ${String(value)}`);
}
