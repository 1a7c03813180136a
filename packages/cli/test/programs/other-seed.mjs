// Loaded before a rank's own program: rank 1 draws from another seed than the job's, so that its rows are not those that its peers expect.
import fs from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';

if (process.env.RANK === '1') {
  const { readFileSync } = fs;
  /** @type {(...args: Parameters<typeof readFileSync>) => ReturnType<typeof readFileSync>} */
  const readOther = (path, ...options) => {
    const found = readFileSync(path, ...options);
    return String(path).endsWith('job.json') ? String(found).replace(/"seed":\d+/, '"seed":999') : found;
  };
  Object.assign(fs, { readFileSync: readOther });
  syncBuiltinESMExports();
}
