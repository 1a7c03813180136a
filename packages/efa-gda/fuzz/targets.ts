/** What comes from queues and people as bytes: work requests, completions and receive buffers of EFA. */
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { bytesTarget, type FuzzSuite } from '@ep/fuzz';
import {
  type CqeBytes,
  decodeCqe,
  decodeReceive,
  decodeWqe,
  dumpCqe,
  dumpReceive,
  dumpWqe,
  encodeCqe,
  encodeReceive,
  encodeWqe,
} from '../src/index.js';

const refused = (error: unknown): boolean => isEpError(error) && error.code === 'EP_INVALID_ARGUMENT';

function same(what: string, first: Uint8Array, second: Uint8Array): void {
  if (Buffer.compare(first, second) !== 0) throw new Error(`${what} does not survive reading and writing`);
}

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    bytesTarget('wqe', refused, (bytes) => {
      const { wqe, byteLength, violations } = decodeWqe(bytes);
      dumpWqe(bytes);
      if (wqe === undefined && violations.length === 0) throw new Error('a work request is unreadable for no reason');
      if (wqe !== undefined && violations.length === 0) same('a work request', encodeWqe(wqe, byteLength), bytes);
    }),
    bytesTarget('cqe', refused, (bytes) => {
      const entryBytes = bytes.byteLength as CqeBytes;
      const cqe = decodeCqe(bytes);
      dumpCqe(bytes);
      // Reserved bytes are not kept, so the second writing is compared with the first.
      const written = encodeCqe(cqe, entryBytes);
      same('a completion', encodeCqe(decodeCqe(written), entryBytes), written);
    }),
    bytesTarget('receive', refused, (bytes) => {
      const { receive, violations } = decodeReceive(bytes);
      dumpReceive(bytes);
      if (violations.length === 0) same('a receive buffer', encodeReceive(receive), bytes);
    }),
  ],
};
