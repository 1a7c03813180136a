/** The version of this package, which all ranks must have alike. */
import { createRequire } from 'node:module';

export const { version: VERSION } = createRequire(import.meta.url)('@ep/nvshmem/package.json') as {
  readonly version: string;
};
