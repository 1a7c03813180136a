// What ranks of one process ask of the few queues that a GPU has: streams, and work that lies behind a kernel which waits for a peer (native/napi/gpu_pieces.hpp).
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';
import { run } from '../../tools/process.mjs';

const at = (/** @type {string} */ path) => fileURLToPath(new URL(path, import.meta.url));
const built = (/** @type {string} */ name) => at(`../../native/build/Release/${name}`);

it('a stream of the rank and one for copies, however often it opens a buffer; no fills', {
  timeout: 120_000,
}, async () => {
  const text = 'every mode, payload and way back gives the bytes of a buffer on the host, 4 ranks as threads';
  const { code, output } = await run(process.execPath, [at('./main.mjs'), text], {
    limitMs: 110_000,
    env: {
      ...process.env,
      ...{ EP_CUDA_PATH: built('libep_cuda_slow.so'), EP_CUDA_SLOW_OF: built('libep_cuda_host.so') },
      ...{ EP_CUDA_SLOW_COUNT: '1', EP_CUDA_SLOW_MS: '60000', EP_REQUIRE: '' },
    },
  });
  expect(output).toMatch(/^1 passed, 0 failed, 0 unavailable$/m);
  expect(code).toBe(0);
  const calls = Object.fromEntries(
    [...output.matchAll(/^calls:(.*)$/gm)].flatMap(([, line]) =>
      [...line.matchAll(/(\w+) (\d+)/g)].map(([, name, count]) => [name, Number(count)]),
    ),
  );
  expect(calls.moe_dispatch).toBeGreaterThan(100);
  // One more, in which the process sets up what kernels read.
  expect(calls.stream_create).toBe(4 * 2 + 1);
  // What fills words is a kernel, and one that lies behind a kernel which waits holds up the queue of both.
  expect(calls.fill).toBe(0);
});
