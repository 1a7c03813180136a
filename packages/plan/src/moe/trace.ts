import { checkFields, checkInteger, describe, maxRows } from '../check.js';
import { invalidArgument, PlanError, shown } from '../error.js';
import { maxExperts, maxWorldSize, moeVersion } from './experts.js';
import { checkRouting, rankTopk, routingOfRanks, type TokenRouting } from './routing.js';

const format = '@ep/routing-trace';

/**
 * What a router chose, step after step. All steps have the same ranks, experts and top-k.
 *
 * As text it is JSON lines: first `{"format":"@ep/routing-trace","version":1,"worldSize":…,"experts":…,"topK":…,"steps":…}`, then for
 * each step and rank that has tokens `{"step":…,"rank":…,"topkIdx":[…]}`, tokens * topK indices, steps ascending, ranks ascending in a step.
 * Every step has at least one line; one without any tokens says so for rank 0.
 */
export interface RoutingTrace {
  readonly worldSize: number;
  readonly experts: number;
  readonly topK: number;
  readonly steps: readonly TokenRouting[];
}

/** HAZARD: ranks without tokens are backed by no line, and each step costs time for its experts: a short file could ask for much of both. */
const most = { worldSize: 2 ** 22, experts: 2 ** 28 } as const;

/** The text of a trace, its last line ended too. */
export function routingTraceText(trace: RoutingTrace): string {
  checkFields(trace, 'trace', {
    worldSize: 'a number',
    experts: 'a number',
    topK: 'a number',
    steps: 'an array of objects',
  });
  const { worldSize, experts, topK, steps } = trace;
  checkInteger(worldSize, 'worldSize', 1, maxWorldSize);
  checkInteger(experts, 'experts', 1, maxExperts);
  checkInteger(topK, 'topK', 1, experts);
  const lines = [JSON.stringify({ format, version: moeVersion, worldSize, experts, topK, steps: steps.length })];
  steps.forEach((routing, step) => {
    checkRouting(routing);
    for (const name of ['worldSize', 'experts', 'topK'] as const) {
      if (routing[name] !== trace[name]) {
        throw invalidArgument(`steps[${step}].${name} must be ${trace[name]} as in the trace, found ${routing[name]}`, {
          name,
          step,
          expected: trace[name],
          found: routing[name],
        });
      }
    }
    for (let rank = 0; rank < worldSize; rank++) {
      const topkIdx = rankTopk(routing, rank);
      const marksStep = rank === 0 && routing.topkIdx.length === 0;
      if (topkIdx.length > 0 || marksStep) lines.push(JSON.stringify({ step, rank, topkIdx: Array.from(topkIdx) }));
    }
  });
  return `${lines.join('\n')}\n`;
}

/**
 * Reads the text of a trace. Throws EP_INVALID_PLAN with the line and the field, EP_PLAN_VERSION for a trace of another version, EP_CAPACITY
 * for more than 2^22 / worldSize or 2^28 / experts steps.
 */
export function parseRoutingTrace(text: string): RoutingTrace {
  if (typeof text !== 'string') throw malformed(1, 'trace', 'text', describe(text));
  const lines = text.split('\n');
  if (lines.at(-1) === '') lines.pop();
  const head = readObject(lines[0] ?? '', 1);
  if (head.format !== format) throw malformed(1, 'format', `'${format}'`, describe(head.format));
  if (head.version !== moeVersion) {
    throw new PlanError(
      'EP_PLAN_VERSION',
      `the trace has version ${shown(head.version)}, this package reads version ${moeVersion}: record it again`,
      { expected: moeVersion, found: head.version },
    );
  }
  const worldSize = readInteger(head, 1, 'worldSize', 1, maxWorldSize);
  const experts = readInteger(head, 1, 'experts', 1, maxExperts);
  const topK = readInteger(head, 1, 'topK', 1, experts);
  const stepCount = readInteger(head, 1, 'steps', 0, maxRows);
  for (const [name, of] of [
    ['worldSize', worldSize],
    ['experts', experts],
  ] as const) {
    if (stepCount * of <= most[name]) continue;
    throw new PlanError(
      'EP_CAPACITY',
      `the trace has ${stepCount} steps of ${name} ${of}, at most ${Math.floor(most[name] / of)} of them are read: cut it`,
      { name, needed: stepCount * of, limit: most[name] },
    );
  }
  if (stepCount > lines.length - 1) {
    throw malformed(1, 'steps', `at most ${lines.length - 1}, the number of lines that follow`, String(stepCount));
  }
  const none = new Int32Array(0);
  const steps = Array.from({ length: stepCount }, () => new Array<Int32Array>(worldSize).fill(none));
  let last = -1;
  lines.forEach((line, i) => {
    if (i === 0) return;
    const number = i + 1;
    const fields = readObject(line, number);
    const step = readInteger(fields, number, 'step', 0, stepCount - 1);
    const rank = readInteger(fields, number, 'rank', 0, worldSize - 1);
    const lastStep = Math.floor(last / worldSize);
    if (step * worldSize + rank <= last || step > lastStep + 1) {
      const expected = last < 0 ? 'of step 0' : `after step ${lastStep}, rank ${last % worldSize}, or of the next step`;
      throw malformed(number, 'step and rank', expected, `step ${step}, rank ${rank}`);
    }
    last = step * worldSize + rank;
    steps[step]![rank] = readChoices(fields.topkIdx, number, topK);
  });
  const found = Math.floor(last / worldSize) + 1;
  if (found !== stepCount) {
    throw malformed(lines.length, 'steps', `${stepCount}, as the first line says, up to the last one`, String(found));
  }
  return Object.freeze({
    worldSize,
    experts,
    topK,
    steps: steps.map((ranks, step) => readStep(experts, topK, ranks, step)),
  });
}

function readStep(experts: number, topK: number, ranks: readonly Int32Array[], step: number): TokenRouting {
  try {
    return routingOfRanks(experts, topK, ranks);
  } catch (cause) {
    if (!(cause instanceof PlanError)) throw cause;
    throw new PlanError('EP_INVALID_PLAN', `step ${step} of the trace is invalid: ${cause.message}`, cause.context);
  }
}

function readChoices(value: unknown, line: number, topK: number): Int32Array {
  if (!Array.isArray(value) || value.length % topK !== 0) {
    throw malformed(line, 'topkIdx', `a list of a multiple of topK = ${topK} integers`, describe(value));
  }
  return Int32Array.from(value as unknown[], (v, i) => {
    if (typeof v !== 'number' || (v | 0) !== v) throw malformed(line, `topkIdx[${i}]`, 'an int32', describe(v));
    return v;
  });
}

function readObject(line: string, number: number): Readonly<Record<string, unknown>> {
  let value: unknown;
  try {
    value = JSON.parse(line);
  } catch (cause) {
    throw malformed(number, 'line', 'a JSON object', cause instanceof Error ? cause.message : String(cause));
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value))
    throw malformed(number, 'line', 'a JSON object', describe(value));
  return value as Readonly<Record<string, unknown>>;
}

function readInteger(
  fields: Readonly<Record<string, unknown>>,
  line: number,
  name: string,
  min: number,
  max: number,
): number {
  try {
    return checkInteger(fields[name], name, min, max);
  } catch {
    throw malformed(line, name, `an integer in [${min}, ${max}]`, describe(fields[name]));
  }
}

function malformed(line: number, field: string, expected: string, found: string): PlanError {
  return new PlanError('EP_INVALID_PLAN', `line ${line} of the trace: ${field} must be ${expected}, found ${found}`, {
    line,
    field,
    expected,
    found,
  });
}
