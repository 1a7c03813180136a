/** What comes from queues, traces and people as bytes: work requests, completions and commands of mlx5. */
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { bytesTarget, type FuzzSuite } from '@ep/fuzz';
import {
  decodeCommand,
  decodeCqe,
  decodeWqe,
  dumpCommand,
  dumpCqe,
  dumpWqe,
  encodeCommand,
  encodeCqe,
  encodeWqe,
  splitQueue,
} from '../src/index.js';

const refused = (error: unknown): boolean => isEpError(error) && error.code === 'EP_INVALID_ARGUMENT';

/** A value that is not refused is what its bytes say: written again, it gives what was read. */
function same(what: string, first: unknown, second: unknown): void {
  const text = (value: unknown) =>
    JSON.stringify(value, (_, item: unknown) => (typeof item === 'bigint' ? `${item}n` : item));
  if (text(first) !== text(second)) throw new Error(`${what} does not survive writing and reading`);
}

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    bytesTarget('wqe', refused, (bytes) => {
      const { wqe, violations } = decodeWqe(bytes);
      dumpWqe(bytes);
      splitQueue(bytes);
      if (wqe !== undefined && violations.length === 0) same('a work request', decodeWqe(encodeWqe(wqe)).wqe, wqe);
    }),
    bytesTarget('cqe', refused, (bytes) => {
      const cqe = decodeCqe(bytes);
      dumpCqe(bytes);
      same('a completion', decodeCqe(encodeCqe(cqe)), cqe);
    }),
    bytesTarget('command', refused, (bytes) => {
      const { name, parts, violations } = decodeCommand(bytes);
      dumpCommand(bytes);
      const again = encodeCommand(name, parts);
      same('a command', decodeCommand(again).parts, parts);
      if (violations.length === 0 && Buffer.compare(again, bytes) !== 0) throw new Error('a command lost bits');
    }),
  ],
};
