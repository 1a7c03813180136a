// What `pnpm test:gpu` says where there is no GPU: everything that it would have run, and why it has not, without building it first.
import { chmodSync, existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import { programs } from '../../native/tests/cuda/programs.mjs';
import { run } from '../../tools/process.mjs';

const at = (/** @type {string} */ path) => fileURLToPath(new URL(path, import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'ep-no-gpu-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** @param {string} program @param {readonly string[]} args @param {Readonly<Record<string, string>>} env */
async function said(program, args, env) {
  const { code, output } = await run(process.execPath, [at(program), ...args], {
    limitMs: 60_000,
    env: { ...process.env, EP_REQUIRE: '', ...env },
  });
  return { code, lines: output.trim().split('\n') };
}

describe('cases, without a GPU', () => {
  const main = (/** @type {readonly string[]} */ args, env = {}) =>
    said('./main.mjs', args, { EP_CUDA_PATH: './no-such-kernels.so', ...env });

  it.each([
    ['', 200],
    ['NVSHMEM', 9],
    ['NCCL', 9],
    ['timed', 14],
    ['per-token', 6],
    ['several GPUs', 50],
  ])('are all listed with the reason: "%s"', async (text, least) => {
    const { code, lines } = await main(text === '' ? [] : [text]);
    expect(code).toBe(0);
    const listed = lines.slice(0, -1);
    expect(listed.length).toBeGreaterThanOrEqual(least);
    for (const line of listed) expect(line).toMatch(/^unavailable {2}.*: no GPU can be used: .*no-such-kernels\.so/);
    expect(lines.at(-1)).toBe(`0 passed, 0 failed, ${listed.length} unavailable`);
  });

  it('are a failure where a GPU is required', async () => {
    expect(await main(['NVSHMEM'], { EP_REQUIRE: 'gpu' })).toMatchObject({ code: 1 });
  });

  it('of which none has the name are an error', async () => {
    const { code, lines } = await main(['no such case']);
    expect({ code, lines }).toEqual({
      code: 2,
      lines: ['no case\'s name holds "no such case": without TEXT, all of them are run or listed'],
    });
  });

  it('that this GPU cannot run are listed with the reason', async () => {
    const env = {
      EP_CUDA_PATH: at('../../native/build/Release/libep_cuda_host.so'),
      EP_NCCL_PATH: './no-such-nccl.so',
    };
    const one = await main(['timed'], env);
    expect(one.code).toBe(0);
    const reasons = new Set(one.lines.slice(1, -1).map((line) => line.slice(line.lastIndexOf(': ') + 2)));
    expect([...reasons].sort()).toEqual([
      'NCCL takes one rank of each GPU, and here is one',
      'here is one GPU',
      'what is timed says nothing of host threads',
    ]);
    const two = await main(['NCCL'], { ...env, EP_CUDA_HOST_DEVICES: '2' });
    expect(two.lines.at(-1)).toMatch(/^0 passed, 0 failed, \d+ unavailable$/);
    expect(two.lines.at(-2)).toMatch(/no-such-nccl\.so/);
  });
});

const tests = Object.keys(programs).filter((name) => name.endsWith('_test'));

describe('programs, with nvcc', () => {
  /** An nvcc whose programs end with `code`, and which writes down what it was called with. @param {number} code */
  function nvcc(code) {
    const calls = join(folder, `calls-${code}`);
    const compiler = join(folder, `nvcc-${code}`);
    writeFileSync(
      compiler,
      `#!/bin/sh
[ "$1" = --version ] && { echo 'Build cuda_13.0'; exit 0; }
echo "$*" >> ${calls}
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\necho no GPU: says the driver\\nexit ${code}\\n' > "$2"
chmod +x "$2"
`,
    );
    chmodSync(compiler, 0o755);
    // The compiler of the host's parts has nothing to link with here.
    const env = { CUDACXX: compiler, CXX: compiler, EP_CUDA_ARCHITECTURES: '90' };
    const called = () => (existsSync(calls) ? readFileSync(calls, 'utf8').trim().split('\n') : []);
    return { env, called };
  }

  it.each(['test', 'bench', 'sanitize'])('are not built where there is no GPU: %s', async (set) => {
    const { env, called } = nvcc(2);
    const before = called().length;
    const { code, lines } = await said('../../native/tests/cuda/run.mjs', [set], env);
    expect(code).toBe(0);
    expect(lines.length).toBeGreaterThanOrEqual(4);
    for (const line of lines) expect(line).toMatch(/^unavailable {2}\w+: no GPU: says the driver$/);
    const calls = called().slice(before);
    expect(calls).toHaveLength(1);
    expect(calls[0]).toMatch(/gpu_here\.cpp/);
  });

  it('are a failure where a GPU is required', async () => {
    const { env } = nvcc(2);
    expect(await said('../../native/tests/cuda/run.mjs', ['test'], { ...env, EP_REQUIRE: 'gpu' })).toMatchObject({
      code: 1,
    });
  });

  it('are built without one if they are only to be built', async () => {
    const { env, called } = nvcc(2);
    const before = called().length;
    const built = await said('../../native/tests/cuda/run.mjs', ['test', '--build-only', join(folder, 'built')], env);
    expect(built.code).toBe(0);
    const calls = called().slice(before);
    expect(calls.some((call) => call.includes('gpu_here'))).toBe(false);
    expect(calls.filter((call) => /-o \S+_test$/.test(call))).toHaveLength(tests.length);
  });

  it('are built and run where there is one', async () => {
    const { env, called } = nvcc(0);
    const { code, lines } = await said('../../native/tests/cuda/run.mjs', ['test'], env);
    expect(code).toBe(0);
    expect(lines.filter((line) => line.endsWith('_test'))).toHaveLength(tests.length);
    expect(called().filter((call) => /-o \S+_test$/.test(call))).toHaveLength(tests.length);
  });
});
