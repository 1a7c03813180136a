export type PlanErrorCode =
  | 'EP_INVALID_ARGUMENT'
  | 'EP_DETACHED'
  | 'EP_INVALID_PLAN'
  | 'EP_PLAN_VERSION'
  | 'EP_CAPACITY';

const brand: unique symbol = Symbol.for('@ep/error') as never;

/**
 * What every function of this package throws. It has the shape and the brand of `EpError` of `@ep/core`, which this package cannot
 * import because it has no dependencies: `isEpError` of core recognises both. `code` is the API, the text is for people.
 */
export class PlanError extends Error {
  override readonly name = 'EpError';
  readonly code: PlanErrorCode;
  /** Nothing outlives the failed call: every function here is pure. */
  readonly scope = 'call' as const;
  readonly context: Readonly<Record<string, unknown>>;
  readonly [brand] = true as const;

  constructor(code: PlanErrorCode, message: string, context: Readonly<Record<string, unknown>> = {}) {
    super(message);
    this.code = code;
    this.context = context;
  }
}

export function invalidArgument(message: string, context: Readonly<Record<string, unknown>>): PlanError {
  return new PlanError('EP_INVALID_ARGUMENT', message, context);
}

function className(value: object): string {
  const name: unknown = value.constructor?.name;
  return typeof name === 'string' && name !== '' ? name : 'an object';
}

/** For people. HAZARD: whatever a caller handed over is shown; `String()` itself throws for objects without a prototype. */
export function shown(value: unknown): string {
  if (Array.isArray(value)) return `an array of ${value.length}`;
  if ((typeof value === 'object' && value !== null) || typeof value === 'function') return className(value);
  return String(value);
}

/** What `validate` functions throw: EP_INVALID_PLAN with field, index, what was expected and what was found. */
export function violation(field: string, index: number | undefined, expected: unknown, found: unknown): PlanError {
  const at = index === undefined ? field : `${field}[${index}]`;
  return new PlanError('EP_INVALID_PLAN', `${at} must be ${shown(expected)}, found ${shown(found)}`, {
    field,
    index,
    expected,
    found,
  });
}
