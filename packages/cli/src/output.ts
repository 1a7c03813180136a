/** What becomes of a command whose stdout or stderr takes no more: its reader has gone (`ep … | head`), or the disk is full. */
import { constants } from 'node:os';
import type { EpError } from '@ep/core';
import { CommandExit, fileError } from './failure.js';

const STREAMS = ['stdout', 'stderr'] as const;
type StreamName = (typeof STREAMS)[number];

/** Ends a command as SIGPIPE would if the reader has gone, without a word; else with status 1 and `error`. */
export class OutputLost extends CommandExit {
  readonly stream: StreamName;
  readonly error?: EpError<'EP_SYSTEM'>;

  constructor(stream: StreamName, cause: NodeJS.ErrnoException) {
    const gone = cause.code === 'EPIPE';
    super(gone ? 128 + constants.signals.SIGPIPE : 1);
    this.stream = stream;
    if (!gone) this.error = fileError('write', stream, cause);
    this.message = this.error?.message ?? `nobody reads its ${stream} any more`;
  }
}

/** Calls back at the first error of stdout or stderr; those after it say nothing new. No error of theirs is uncaught until the function that it returns is called. */
export function watchOutput(onLost: (lost: OutputLost) => void): () => void {
  let lost = false;
  const ends = STREAMS.map((name) => {
    const onError = (error: NodeJS.ErrnoException): void => {
      if (lost) return;
      lost = true;
      onLost(new OutputLost(name, error));
    };
    process[name].on('error', onError);
    return () => void process[name].off('error', onError);
  });
  return () => {
    for (const end of ends) end();
  };
}

/** Resolves once the streams have passed on what was written to them, or their errors have been told. */
export async function outputWritten(): Promise<void> {
  const written = (name: StreamName): Promise<void> =>
    new Promise((resolve) => {
      // HAZARD: a stream tells whoever wrote before it emits its error.
      process[name].write('', () => setImmediate(resolve));
    });
  await Promise.all(STREAMS.map(written));
}
