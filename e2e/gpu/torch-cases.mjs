// The cases of memory of another library: with PyTorch on a GPU, and with a process in its place over the stand-in for one.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { runRanks, valuesOf } from './ranks.mjs';

const limits = { timeoutMs: 180_000 };
const beside = (/** @type {string} */ name) => fileURLToPath(new URL(name, import.meta.url));

/** The stand-in for PyTorch. */
export const standInPeer = [process.execPath, beside('./standin-peer.mjs')];

/** A python whose torch has a GPU, or why there is none. @returns {{ peer: readonly string[], version: string } | { unavailable: string }} */
export function findTorch() {
  const python = process.env.EP_TORCH_PYTHON || 'python3';
  const program =
    'import torch; print(torch.__version__ if torch.cuda.is_available() else f"- torch {torch.__version__} of this python sees no GPU")';
  try {
    const options = { encoding: 'utf8', stdio: 'pipe', timeout: 120_000 };
    const said = execFileSync(python, ['-c', program], /** @type {const} */ (options)).trim();
    if (said.startsWith('-')) return { unavailable: `${python}: ${said.slice(2)}` };
    return { peer: [python, beside('./torch-peer.py')], version: said };
  } catch (error) {
    const lines = String(/** @type {any} */ (error).stderr ?? '').trim();
    return {
      unavailable: `${python} cannot import torch (${lines.split('\n').at(-1) || error}); EP_TORCH_PYTHON names another`,
    };
  }
}

/**
 * @param {readonly string[]} peer
 * @param {boolean} real PyTorch
 * @returns {readonly import('./cases.mjs').Case[]}
 */
export function torchCases(peer, real) {
  /** @param {string} scenario @param {number} ranks */
  const run = async (scenario, ranks) => valuesOf(await runRanks(scenario, ranks, { data: { peer }, ...limits }));
  return [
    {
      name: 'PyTorch: memory that a process of it shares is opened, adopted, read, written and sent from, 2 ranks',
      run: async () => {
        const values = await run('torchMemory', 2);
        for (const { left, apart } of values) assert.deepEqual({ left, apart }, { left: 0, apart: true });
        return `handles of ${values[0].handle} bytes`;
      },
      processes: true,
    },
    {
      name: 'PyTorch: a rank goes on when the process whose memory it has adopted is killed',
      run: async () => {
        const [{ outcome, again }] = await run('torchKilled', 1);
        // A GPU's driver keeps what is mapped, and promises nothing.
        if (!real) assert.deepEqual([outcome, again], ['kept', 'EP_INVALID_ARGUMENT']);
        return `read after that: ${outcome}; opened again: ${again}`;
      },
      processes: true,
    },
    ...(real
      ? [
          {
            name: 'PyTorch: memory of expandable segments is refused by name',
            run: async () => {
              const [{ code, shared }] = await run('torchExpandable', 1);
              if (shared !== undefined) return `PyTorch does not share it: ${shared}`;
              assert.equal(code, 'EP_UNSUPPORTED');
            },
            processes: true,
          },
        ]
      : []),
  ];
}
