/** A python with torch, where there is one. */
import { execFileSync } from 'node:child_process';

export type Torch = { readonly python: string; readonly version: string } | { readonly unavailable: string };

function find(): Torch {
  const named = process.env.EP_TORCH_PYTHON;
  const python = named === undefined || named === '' ? 'python3' : named;
  try {
    const program = 'import torch.distributed as d, torch; print(torch.__version__ if d.is_available() else "")';
    const options = { encoding: 'utf8', stdio: 'pipe', timeout: 120_000 } as const;
    const version = execFileSync(python, ['-c', program], options).trim();
    return version === '' ? { unavailable: `the torch of ${python} has no torch.distributed` } : { python, version };
  } catch (error) {
    const said = String((error as { readonly stderr?: unknown }).stderr ?? '')
      .trim()
      .split('\n')
      .at(-1);
    const why = said === undefined || said === '' ? String(error) : said;
    // A python that somebody named and that has no torch is a mistake, not a machine without torch.
    if (python === named) throw new Error(`EP_TORCH_PYTHON=${python} cannot import torch: ${why}`);
    return { unavailable: `${python} cannot import torch (${why}), and EP_TORCH_PYTHON names no other` };
  }
}

export const torch = find();

/** For the names of tests, so that a report says with which torch they ran or why they did not. */
export const torchLabel = 'python' in torch ? `torch ${torch.version}` : `unavailable: ${torch.unavailable}`;
