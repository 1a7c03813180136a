/** `ep help`, of all commands and of each. */
import { expect, it } from 'vitest';
import { runEp } from './ep.js';

it.each([
  [['help'], 'Usage: ep [options] [command]'],
  [['help', 'wqe'], 'Usage: ep wqe'],
  [['wqe', 'help', 'decode'], 'Usage: ep wqe decode'],
])('%j shows help', async (args, usage) => {
  expect(await runEp(args)).toMatchObject({ code: 0, stdout: expect.stringContaining(usage), stderr: '' });
});

it.each([[['help', 'bogus']], [['wqe', 'help', 'bogus']]])('%j says that there is no such command', async (args) => {
  const { code, stdout, stderr } = await runEp(args);
  expect({ code, stdout }).toEqual({ code: 2, stdout: '' });
  expect(stderr).toContain("unknown command 'bogus'");
  const json = await runEp([...args, '--json']);
  expect(JSON.parse(json.stdout)).toMatchObject({ error: { message: "unknown command 'bogus'" } });
});
