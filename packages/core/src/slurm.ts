/** Where the ranks of a Slurm step can meet without being told: at rank 0, on a port that other steps do not have. */
import { invalid } from './errors.js';

/** Below the ports that systems hand out by themselves. */
const FIRST_PORT = 10_000;
const PORTS = 20_000;
/** Steps of one job that run at a time are numbered close together. */
const STEPS = 64;

/**
 * The first name of a host list: `gpu[003-005,9],login` begins with `gpu003`. Slurm puts the first tasks of a step on it, with the default distribution and with `cyclic`
 * and `block`. Throws `EP_INVALID_ARGUMENT` naming the variable.
 */
export function firstHostOf(list: string, variable: string): string {
  const [, prefix = '', range, suffix = ''] =
    /^([\w.-]*)(?:\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]([\w.-]*))?(?:,|$)/.exec(list) ?? [];
  const host = range === undefined ? prefix : `${prefix}${range}${suffix}`;
  if (host === '')
    throw invalid(variable, { where: 'environment', expected: 'a host list such as `node[01-04,7]`', found: list });
  return host;
}

/** A port for the step: the same on all of its ranks, another one for other steps of the last jobs. */
export function portOfStep(jobId: number, stepId: number): number {
  return FIRST_PORT + ((jobId * STEPS + (stepId % STEPS)) % PORTS);
}
