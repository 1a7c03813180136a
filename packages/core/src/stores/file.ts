/**
 * A store in one file, for the ranks of one machine.
 *
 * The file is a log of operations. Each operation is one `write` to a file opened for appending, which the kernel does whole and at the end, one
 * writer after the other; the place in the log is the place in the order. Everybody replays the log, so everybody computes the same outcome, and an
 * operation's own result is what it was when the replay reached it. There is no lock that a killed process could keep. Not for network file
 * systems: they do not order appends.
 *
 * The log only grows, so use one file for each run and remove it afterwards; a file that an earlier run left behind holds that run's keys.
 */
import { randomBytes } from 'node:crypto';
import { closeSync, constants, type FSWatcher, fstatSync, openSync, readSync, watch, writeSync } from 'node:fs';
import { EpError, invalid } from '../errors.js';
import { formatRecord, parseLine } from './log.js';
import { type Operation, type Outcome, Replica, ReplicaStore } from './replica.js';

/** How often to look although inotify reports changes: it does not everywhere (overlays, some container mounts). */
const LOOK_ANYWAY_MS = 250;
/** How often to look where inotify is not to be had (a user may have 128 instances): from the first to the second, doubling while idle. */
const POLL_MS = [1, 32] as const;

/**
 * What is read at a time, where no record is longer. HAZARD: who is far behind must not be slower for it, or writers outrun it for good: the whole rest at once took memory that the kernel
 * had to clear first, and that no cache held.
 */
const READ_BYTES = 1 << 18;

const NEWLINE = 0x0a;

function systemError(call: string, path: string, cause: unknown): EpError {
  const { code, errno } = cause as NodeJS.ErrnoException;
  return new EpError('EP_SYSTEM', `file store: ${call} of ${path} failed: ${code ?? String(cause)}`, {
    context: { call, path },
    cause,
    ...(errno === undefined ? {} : { native: { status: errno, name: code ?? '', errno: -errno } }),
  });
}

export class FileStore extends ReplicaStore {
  readonly path: string;
  readonly #fd: number;
  readonly #writer = randomBytes(8).toString('hex');
  readonly #followers = new Set<(reason: unknown) => void>();
  #records = 0;
  /** Everything before this byte was applied. Always the start of a line. */
  #offset = 0;
  /** Where this store's newest record stands in its own count, and what came of it. */
  #applied = { number: 0, outcome: undefined as Outcome };
  /** A log that could not be replayed stays so: going on behind the bad record would give this rank another order than the others. */
  #failure: EpError | undefined;
  #watcher: FSWatcher | undefined;
  #timer: NodeJS.Timeout | undefined;

  /** Use `openFileStore`. */
  constructor(path: string, fd: number) {
    super('file store', new Replica());
    this.path = path;
    this.#fd = fd;
  }

  // Reads and writes are synchronous: in the page cache they take microseconds, less than a hop to the thread pool, and nothing can come
  // between an append and its replay.

  protected override commit(operation: Operation): Outcome {
    const number = ++this.#records;
    const record = formatRecord({ writer: this.#writer, number, operation });
    let written: number;
    try {
      written = writeSync(this.#fd, record);
    } catch (error) {
      throw systemError('write', this.path, error);
    }
    if (written !== record.byteLength) {
      // The torn line counts for nobody. Appending the rest would not help: somebody else's record may already lie behind it.
      throw new EpError(
        'EP_SYSTEM',
        `file store: ${written} of ${record.byteLength} bytes fit into ${this.path}; nothing was changed`,
        {
          context: { path: this.path, written, byteLength: record.byteLength },
        },
      );
    }
    this.refresh();
    if (this.#applied.number !== number) throw this.#damaged('the record just written is not in it');
    return this.#applied.outcome;
  }

  protected override refresh(): void {
    if (this.#failure !== undefined) throw this.#failure;
    try {
      for (let room = READ_BYTES; ; ) {
        const { size } = fstatSync(this.#fd);
        if (size < this.#offset) throw this.#damaged(`it shrank from ${this.#offset} to ${size} bytes`);
        const left = size - this.#offset;
        if (left === 0) return;
        const chunk = Buffer.allocUnsafe(Math.min(left, room));
        const length = readSync(this.#fd, chunk, 0, chunk.byteLength, this.#offset);
        const end = chunk.subarray(0, length).lastIndexOf(NEWLINE) + 1;
        if (end > 0) {
          this.#offset += end;
          this.#replay(chunk, end);
          room = READ_BYTES;
        } else if (chunk.byteLength < left) {
          room *= 2; // a longer record
        } else {
          // The rest is a record that is being written, or one whose writer died; the next record's newline tells.
          return;
        }
      }
    } catch (error) {
      this.#failure = error instanceof EpError ? error : systemError('read', this.path, error);
      throw this.#failure;
    }
  }

  protected override follow(fail: (reason: unknown) => void): () => void {
    this.#followers.add(fail);
    if (this.#followers.size === 1) this.#startFollowing();
    return () => {
      this.#followers.delete(fail);
      if (this.#followers.size === 0) this.#stopFollowing();
    };
  }

  protected override release(): void {
    closeSync(this.#fd);
  }

  #replay(chunk: Buffer, end: number): void {
    for (let start = 0; start < end; ) {
      const stop = chunk.indexOf(NEWLINE, start);
      const record = stop === start ? undefined : parseLine(chunk.toString('utf8', start, stop), this.path);
      if (record !== undefined) {
        const outcome = this.replica.apply(record.operation);
        if (record.writer === this.#writer) this.#applied = { number: record.number, outcome };
      }
      start = stop + 1;
    }
  }

  #startFollowing(): void {
    let pause: number = LOOK_ANYWAY_MS;
    try {
      this.#watcher = watch(this.path, () => this.#look());
      this.#watcher.on('error', () => this.#watcher?.close());
    } catch {
      pause = POLL_MS[0];
    }
    const polls = this.#watcher === undefined;
    const again = (): void => {
      const before = this.#offset;
      this.#look();
      if (this.#followers.size === 0) return;
      if (polls) pause = this.#offset === before ? Math.min(2 * pause, POLL_MS[1]) : POLL_MS[0];
      this.#timer = setTimeout(again, pause);
    };
    this.#timer = setTimeout(again, pause);
    // What was appended between the caller's last look and the start of watching has no event: look once more, outside of its call.
    queueMicrotask(() => this.#look());
  }

  #stopFollowing(): void {
    clearTimeout(this.#timer);
    this.#watcher?.close();
    this.#watcher = undefined;
  }

  #look(): void {
    if (this.#followers.size === 0) return;
    try {
      this.refresh();
    } catch (error) {
      for (const fail of [...this.#followers]) fail(error);
    }
  }

  #damaged(what: string): EpError {
    return new EpError('EP_TRANSPORT_FAILED', `file store: ${this.path} was changed by somebody else: ${what}`, {
      context: { path: this.path },
    });
  }
}

/**
 * Opens the file, or makes it (mode 0600). Throws `EP_SYSTEM` naming the errno if that is not possible, `EP_INVALID_ARGUMENT` for a path that is no
 * text, and if the file holds something else than a store of this version.
 */
export async function openFileStore(path: string): Promise<FileStore> {
  if (typeof path !== 'string')
    throw invalid('path', { where: 'file store', expected: 'the path of a file', found: path });
  let fd: number;
  try {
    fd = openSync(path, constants.O_RDWR | constants.O_APPEND | constants.O_CREAT, 0o600);
  } catch (error) {
    throw systemError('open', path, error);
  }
  const store = new FileStore(path, fd);
  try {
    if (!fstatSync(fd).isFile())
      throw invalid('path', { where: 'file store', expected: 'a regular file', found: path });
    await store.numKeys();
  } catch (error) {
    await store.close();
    throw error;
  }
  return store;
}
