import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, it, vi } from 'vitest';
import type { WorldReport } from '../src/trace/merge.js';
import { runEp } from './ep.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-trace-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

describe('ep trace merge of real ranks', () => {
  const program = fileURLToPath(new URL('./programs/trace-rank.mjs', import.meta.url));

  /** Runs three processes that do `what`, and merges what they left. */
  async function traced(what: string): Promise<{ readonly code: number | null; readonly world: WorldReport }> {
    const path = join(folder, `job ${what}`);
    await runEp(['run', '-n', '3', '--keep-going', '--', process.execPath, program, what], { EP_TRACE_DIR: path });
    const { code, stdout, stderr } = await runEp(['trace', 'merge', path, '--json']);
    expect(stderr).toBe('');
    const { worlds } = JSON.parse(stdout) as { readonly worlds: readonly WorldReport[] };
    expect(worlds).toHaveLength(1);
    return { code, world: worlds[0]! };
  }

  const said = (world: WorldReport): string[] => world.findings.map((one) => `${one.kind}: ${one.text}`);

  it('finds nothing where all went well, and how late ranks were', async () => {
    const { code, world } = await traced('fine');
    expect(code).toBe(0);
    expect(world).toMatchObject({ world: 'world', size: 3, clock: 'machine', findings: [] });
    expect(world.ranks.map((rank) => rank.dump && [rank.reason, ...rank.calls.map((call) => call.call)])).toEqual(
      Array.from({ length: 3 }, () => ['call', 'allReduce(f32[4], sum)', 'barrier()']),
    );
    expect(world.skews).toMatchObject([{ group: 'world', us: expect.any(Number) }]);
  });

  for (const [what, called] of [
    ['mismatch', 'broadcast(f32[4], root 0)'],
    ['abrupt', 'barrier()'],
  ] as const) {
    it(`names the rank that called something else: ${what}`, async () => {
      const { code, world } = await traced(what);
      expect(code).toBe(1);
      expect(said(world)).toEqual([
        `mismatch: call 2 of world differs: rank 1 called ${called} where ranks 0, 2 called allReduce(f32[4], sum)`,
        expect.stringMatching(/^failed: call 2 of world, .*, failed with EP_MISMATCH on ranks 0-2$/),
      ]);
      expect(world.ranks.map((rank) => rank.dump && [rank.reason, rank.cause?.code])).toEqual(
        Array.from({ length: 3 }, () => ['failure', 'EP_MISMATCH']),
      );
    });
  }

  it('names the rank that did not come', async () => {
    const { code, world } = await traced('late');
    expect(code).toBe(1);
    expect(said(world)[0]).toBe(
      'behind: rank 2 never entered call 2 of world, allReduce(f32[4], max), as ranks 0-1 did: it is 1 call behind; its last there was call 1, allReduce(f32[4], sum), ended',
    );
    expect(world.ranks.map((rank) => rank.dump && rank.reason)).toContain('timeout');
  });

  it('names the rank that died, from what the others left', async () => {
    const { code, world } = await traced('death');
    expect(code).toBe(1);
    expect(said(world)).toEqual([
      expect.stringMatching(/^gone: rank 2 died or left: .* \(epoch \d+\); it left no dump$/),
      'failed: call 2 of world, barrier(), failed with EP_PEER_LOST on ranks 0-1',
    ]);
  });

  it('takes ranks in worker threads, which dump when their process gets SIGUSR2', async () => {
    const path = join(folder, 'job threads');
    const store = join(folder, 'threads.store');
    const child = spawn(process.execPath, [program, 'threads', store, '3'], {
      env: { ...process.env, EP_TRACE_DIR: path },
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    const ended = once(child, 'exit');
    let ready = 0;
    for await (const line of createInterface({ input: child.stdout })) {
      if (line.startsWith('ready')) ready++;
      if (ready === 3) break;
    }
    expect(ready).toBe(3);
    child.kill('SIGUSR2');
    const dumps = () => (existsSync(path) ? readdirSync(path).filter((name) => name.endsWith('.json')) : []);
    await vi.waitFor(() => expect(dumps()).toHaveLength(3), { timeout: 20_000 });
    child.kill('SIGTERM');
    expect(await ended).toEqual([0, null]);
    const { code, stdout } = await runEp(['trace', 'merge', path, '--json']);
    expect(code).toBe(0);
    const { worlds } = JSON.parse(stdout) as { readonly worlds: readonly WorldReport[] };
    expect(worlds[0]!.ranks.map((rank) => rank.dump && [rank.reason, rank.pid, rank.thread > 0])).toEqual(
      Array.from({ length: 3 }, () => ['signal', child.pid, true]),
    );
  });
});
