/** A folder for one job that is gone when the job is, however that ends. */
import { randomBytes } from 'node:crypto';
import { mkdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { EpError } from '@ep/core';
import { type Guardian, startGuardian } from './guardian.js';

export interface Scratch {
  readonly folder: string;
  readonly guardian: Guardian;
}

/** Runs `body` with a folder of its own in the temporary folder, which is removed afterwards, also after SIGKILL of this process. */
export async function withScratch<T>(prefix: string, body: (scratch: Scratch) => Promise<T>): Promise<T> {
  const folder = join(tmpdir(), `${prefix}${randomBytes(8).toString('hex')}`);
  // HAZARD: the guardian knows the name before the folder exists. The other way round a SIGKILL in between would leave it behind.
  const guardian = startGuardian(folder);
  try {
    try {
      await mkdir(folder, { mode: 0o700 });
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      throw new EpError(
        'EP_SYSTEM',
        `cannot make a job folder in ${tmpdir()}: ${String(code)}; TMPDIR chooses another`,
        {
          cause: error,
          context: { path: folder, errno: code },
        },
      );
    }
    return await body({ folder, guardian });
  } finally {
    // Before `done`, so that somebody removes it if this process dies here.
    await rm(folder, { recursive: true, force: true });
    guardian.done();
  }
}
