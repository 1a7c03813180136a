import { fileURLToPath } from 'node:url';
import { expect } from 'vitest';
import type { DemoReport } from '../src/demo/report.js';
import { runEp } from './ep.js';

const root = fileURLToPath(new URL('../../..', import.meta.url));

/** What the small demo of attention reports, which must end well and without a word on stderr. */
export async function demo(args: readonly string[], env?: Readonly<Record<string, string>>): Promise<DemoReport> {
  const { code, stdout, stderr } = await runEp(['demo', '--small', '--from', root, '--json', '--no-svg', ...args], env);
  expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
  return JSON.parse(stdout) as DemoReport;
}
