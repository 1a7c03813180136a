import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { expect, test } from 'vitest';
import { run } from './process.mjs';
import { processStart } from './setup/lock.mjs';

test('reports status, output and lines', async () => {
  /** @type {string[]} */
  const lines = [];
  const result = await run('sh', ['-c', 'echo one; printf two; exit 3'], { onLine: (line) => lines.push(line) });
  expect(result).toMatchObject({ code: 3, timedOut: false, output: 'one\ntwo' });
  expect(lines).toEqual(['one', 'two']);
});

test('a command that does not exist is a result, not an exception', async () => {
  expect(await run('ep-no-such-command', [])).toMatchObject({ code: 127 });
});

test('the time limit ends grandchildren too', async () => {
  const result = await run('sh', ['-c', 'sleep 60 & echo $!; wait'], { limitMs: 300 });
  expect(result).toMatchObject({ timedOut: true, code: 137 });
  const grandchild = Number(result.output.trim());
  expect(grandchild).toBeGreaterThan(0);
  await expect.poll(() => processStart(grandchild), { timeout: 5000 }).toBeNull();
});

test('a grandchild left behind ends with its step', async () => {
  const result = await run('sh', ['-c', 'sleep 60 >/dev/null 2>&1 & echo $!']);
  await expect.poll(() => processStart(Number(result.output.trim())), { timeout: 5000 }).toBeNull();
});

test('told to stop, it ends its children and does not go on', async () => {
  const program = `import { exitOnSignals, run } from ${JSON.stringify(new URL('./process.mjs', import.meta.url).href)};
    exitOnSignals(() => console.log('stopping'));
    const child = 'process.on("SIGTERM", () => process.exit(0)); console.log(process.pid); setInterval(() => {}, 1000);';
    const { code } = await run(process.execPath, ['-e', child], {
      onLine: (line) => console.log(line),
    });
    console.log('went on after status', code);`;
  const parent = spawn(process.execPath, ['--input-type=module', '-e', program], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let output = '';
  parent.stdout.setEncoding('utf8').on('data', (/** @type {string} */ text) => {
    if (output === '') parent.kill('SIGINT');
    output += text;
  });
  const [code] = await once(parent, 'close');
  const [child, ...rest] = output.trim().split('\n');
  expect({ code, rest }).toEqual({ code: 130, rest: ['stopping'] });
  expect(processStart(Number(child))).toBeNull();
});
