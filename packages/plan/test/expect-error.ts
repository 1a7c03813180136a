import { expect } from 'vitest';
import { PlanError, type PlanErrorCode } from '../src/index.js';

/** The call must throw a PlanError of this code whose text contains every part. */
export function expectPlanError(call: () => unknown, code: PlanErrorCode, ...parts: readonly string[]): PlanError {
  let thrown: unknown;
  try {
    call();
  } catch (error) {
    thrown = error;
  }
  expect(thrown).toBeInstanceOf(PlanError);
  const error = thrown as PlanError;
  expect(error.code).toBe(code);
  for (const part of parts) expect(error.message).toContain(part);
  return error;
}
