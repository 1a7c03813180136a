/** What comes from queues, traces and people: work requests, completions and commands of mlx5 as bytes, and connection data that callers bring. */
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { bytesTarget, type FuzzSuite, spoilObject } from '@ep/fuzz';
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
import { formatTold, readStep, readTold } from '../src/introduction.js';

const refused = (error: unknown): boolean => isEpError(error) && error.code === 'EP_INVALID_ARGUMENT';

/** A value that is not refused is what its bytes say: written again, it gives what was read. */
function same(what: string, first: unknown, second: unknown): void {
  const text = (value: unknown) =>
    JSON.stringify(value, (_, item: unknown) => (typeof item === 'bigint' ? `${item}n` : item));
  if (text(first) !== text(second)) throw new Error(`${what} does not survive writing and reading`);
}

const refusedByField = (error: unknown): boolean =>
  isEpError(error) && error.code === 'EP_RENDEZVOUS' && Array.isArray(error.context.ranks);

/** What two ranks tell each other, with three queue pairs to each, over a network. */
const WORLD = 2;
const introductions = [0, 1].map((rank) => ({
  version: 1 as const,
  rank,
  worldSize: WORLD,
  step: 'connections' as const,
  nonce: 'a5'.repeat(32),
  memory: { address: '0x7f5501002000', rkey: 0x1d00, signals: '0x7f5501000000', signalsRkey: 0x1e00 },
  connection: {
    link: 'infiniband' as const,
    gid: 'fd65:7000:7f00:0001:1234:0000:0000:00ff',
    lid: 7,
    roceVersion: 0,
    mtu: 4096,
    maxMessageBytes: 2 ** 30,
    outstanding: 16,
    qpns: [
      [1, 2, 3],
      [4, 5, 6],
    ],
    startingPsns: [
      [12345, 0, 2 ** 24 - 1],
      [7, 8, 9],
    ],
  },
}));
/** Of the lengths that their bytes have. */
const like = { nonce: new Uint8Array(32), memory: new Uint8Array(24), connection: new Uint8Array(64 + 8 * 6) };
const openings = introductions.map(({ rank }) => ({
  rank,
  worldSize: WORLD,
  transport: 'ibgda:fuzz',
  exchange: () => Promise.resolve([]),
}));

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
    // An input is which fields to change of what both ranks told.
    bytesTarget('introduction', refusedByField, (bytes) => {
      const [here, there] = openings;
      const peer = readStep(here!, introductions[0]!, spoilObject(introductions, bytes))[1]!;
      const again = formatTold(there!, 'connections', readTold(here!, peer, like));
      for (const [field, value] of Object.entries(again)) same(`${field} of an introduction`, peer[field], value);
    }),
  ],
};
