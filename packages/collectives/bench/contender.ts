/** One contender: the processes of its ranks, which sleep until they are told something. */
import type { ChildProcess } from 'node:child_process';
import { createServer, type Server, type Socket } from 'node:net';
import { createInterface } from 'node:readline';
import { type Command, formatCommand, parseAnswer, type Target } from './protocol.js';

/** The contender has no such operation. */
export class Unsupported extends Error {}

export interface ContenderOptions {
  /** As messages and tables call it. */
  readonly name: string;
  readonly ranks: number;
  /** Where its socket may be made; a unique name each. */
  readonly socketPath: string;
  /** Starts all ranks, as one process or several, which then connect to the socket. */
  readonly launch: (socketPath: string) => readonly ChildProcess[];
  /** Longest start, longest answer. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/** What of a process's last words is kept for a message. */
const KEPT_OUTPUT = 2000;
/** From SIGTERM to SIGKILL. */
const STOP_MS = 2000;

interface Waiting {
  readonly doing: string;
  readonly answers: (string | undefined)[];
  readonly resolve: (answers: readonly string[]) => void;
}

export class Contender {
  readonly name: string;
  readonly ranks: number;
  readonly #children: readonly ChildProcess[];
  readonly #server: Server;
  readonly #sockets: (Socket | undefined)[];
  readonly #timeoutMs: number;
  readonly #exits: Promise<unknown>;
  #waiting: Waiting | undefined;
  #output = '';
  #ending = false;
  /** Rejects when the contender is lost; every wait is a race against it. */
  readonly #lost: Promise<never>;
  #lose!: (reason: unknown) => void;

  private constructor(server: Server, options: ContenderOptions) {
    this.name = options.name;
    this.ranks = options.ranks;
    this.#timeoutMs = options.timeoutMs;
    this.#server = server;
    this.#sockets = new Array<Socket | undefined>(options.ranks).fill(undefined);
    this.#lost = new Promise((_, reject) => {
      this.#lose = reject;
    });
    // Nobody may be waiting at the moment at which a process dies.
    this.#lost.catch(() => undefined);
    options.signal?.addEventListener('abort', () => this.#lose(options.signal?.reason), { once: true });
    server.on('connection', (socket) => this.#greet(socket));
    this.#children = options.launch(options.socketPath);
    this.#exits = Promise.all(this.#children.map((child) => this.#watch(child)));
  }

  /** Resolves when every rank has connected. */
  static async start(options: ContenderOptions): Promise<Contender> {
    const server = createServer();
    await new Promise<void>((resolve, reject) => server.once('error', reject).listen(options.socketPath, resolve));
    const contender = new Contender(server, options);
    try {
      options.signal?.throwIfAborted();
      await contender.#wait('start', () => undefined);
      return contender;
    } catch (error) {
      await contender.stop();
      throw error;
    }
  }

  /** By rank, what follows `ok`. Throws `Unsupported`, or an error that names contender, command and rank. */
  async ask(command: Command): Promise<readonly (readonly string[])[]> {
    const line = formatCommand(command);
    const answers = await this.#wait(line, () => {
      for (const socket of this.#sockets) socket?.write(`${line}\n`);
    });
    return answers.map((text) => {
      const answer = parseAnswer(text);
      if (answer.kind === 'ok') return answer.words;
      if (answer.kind === 'unsupported') throw new Unsupported(`${this.name}: ${line}: ${answer.text}`);
      throw new Error(`${this.name}: ${line}: ${answer.text}`);
    });
  }

  /** By rank, the numbers that follow `ok`. */
  async numbers(command: Command): Promise<readonly (readonly number[])[]> {
    return (await this.ask(command)).map((words) => words.map(Number));
  }

  /** Throws if a result of the target is wrong. */
  async check(target: Target): Promise<void> {
    const numbers = await this.numbers({ verb: 'check', ...target });
    // The native loop has no hook in which ranks could come late: what it calls is what the other variants call.
    if (target.op === 'barrier' && target.variant !== 'native' && target.variant !== 'exchange')
      checkBarriers(this.name, numbers, target.elements);
  }

  /** Ends it in order. Throws if a rank did not end, or not well. */
  async close(): Promise<void> {
    this.#ending = true;
    for (const socket of this.#sockets) socket?.write('end\n');
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<never>((_, reject) => {
      const error = new Error(`${this.name}: its ranks did not end within ${this.#timeoutMs} ms`);
      timer = setTimeout(reject, this.#timeoutMs, error);
    });
    try {
      await Promise.race([this.#exits, this.#lost, late]);
    } finally {
      clearTimeout(timer);
      await this.stop();
    }
  }

  /** Ends it, whatever it does. mpirun passes SIGTERM on to its ranks; what does not heed that is killed. */
  async stop(): Promise<void> {
    this.#ending = true;
    for (const child of this.#children) child.kill('SIGTERM');
    const timer = setTimeout(() => {
      for (const child of this.#children) child.kill('SIGKILL');
    }, STOP_MS);
    await this.#exits;
    clearTimeout(timer);
    for (const socket of this.#sockets) socket?.destroy();
    if (this.#server.listening) await new Promise((resolve) => this.#server.close(resolve));
  }

  async #wait(doing: string, start: () => void): Promise<readonly string[]> {
    let timer: NodeJS.Timeout | undefined;
    try {
      return await Promise.race([
        this.#lost,
        new Promise<readonly string[]>((resolve, reject) => {
          const answers = new Array<string | undefined>(this.ranks).fill(undefined);
          this.#waiting = { doing, answers, resolve };
          timer = setTimeout(() => {
            const missing = answers.flatMap((answer, rank) => (answer === undefined ? [rank] : []));
            reject(
              new Error(
                `${this.name}: ${doing}: no answer of ranks ${missing.join(', ')} within ${this.#timeoutMs} ms${this.#said()}`,
              ),
            );
          }, this.#timeoutMs);
          start();
        }),
      ]);
    } finally {
      clearTimeout(timer);
      this.#waiting = undefined;
    }
  }

  #answer(rank: number, text: string): void {
    const waiting = this.#waiting;
    if (waiting === undefined) return;
    waiting.answers[rank] = text;
    // The others may hang in a call that the failed rank will not make.
    if (parseAnswer(text).kind === 'failed' && waiting.doing !== 'start') {
      this.#lose(new Error(`${this.name}: ${waiting.doing}: ${text.trim().replace(/^failed /, '')}`));
    }
    if (waiting.answers.every((answer) => answer !== undefined)) waiting.resolve(waiting.answers as string[]);
  }

  #greet(socket: Socket): void {
    let rank: number | undefined;
    const lines = createInterface({ input: socket });
    // A reset is the end of a process, which says more. HAZARD: the interface emits its stream's errors again, and throws those that nobody hears.
    for (const side of [socket, lines]) side.on('error', () => socket.destroy());
    lines.on('line', (text) => {
      if (rank !== undefined) return this.#answer(rank, text);
      const said = /^rank (\d+)$/.exec(text);
      rank = Number(said?.[1] ?? Number.NaN);
      if (!(rank < this.ranks) || this.#sockets[rank] !== undefined) {
        this.#lose(new Error(`${this.name}: a rank introduced itself with ${JSON.stringify(text.slice(0, 200))}`));
        return socket.destroy();
      }
      this.#sockets[rank] = socket;
      this.#answer(rank, text);
    });
  }

  #watch(child: ChildProcess): Promise<void> {
    for (const stream of [child.stdout, child.stderr]) {
      stream?.setEncoding('utf8').on('data', (text: string) => {
        this.#output = (this.#output + text).slice(-KEPT_OUTPUT);
      });
    }
    return new Promise((resolve) => {
      child.on('error', (error) => {
        this.#lose(new Error(`${this.name}: cannot be started: ${error.message}`));
        resolve();
      });
      child.on('close', (code, by) => {
        if (!this.#ending || code !== 0) {
          this.#lose(
            new Error(
              `${this.name}: a process ended with ${by ?? `status ${code}`} during ${this.#waiting?.doing ?? 'no command'}${this.#said()}`,
            ),
          );
        }
        resolve();
      });
    });
  }

  #said(): string {
    const output = this.#output.trim();
    return output === '' ? '' : `; its last words: ${output}`;
  }
}

/** `times`: by rank, when it came to each barrier and when it left. Nobody may have left before all had come. */
export function checkBarriers(name: string, times: readonly (readonly number[])[], rounds: number): void {
  for (let round = 0; round < rounds; round++) {
    const came = times.map((of) => of[2 * round] ?? Number.NaN);
    const left = times.map((of) => of[2 * round + 1] ?? Number.NaN);
    const last = Math.max(...came);
    const first = Math.min(...left);
    if (first >= last) continue;
    throw new Error(
      `${name}: barrier ${round}: rank ${left.indexOf(first)} left ${last - first} ns before rank ${came.indexOf(last)} came`,
    );
  }
}
