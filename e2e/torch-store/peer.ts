/** peer.py as an object: one torch process with a TCPStore. */
import { type ChildProcessWithoutNullStreams, spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

type Answer =
  | { readonly value: unknown }
  | { readonly error: string; readonly message: string }
  | { readonly port: number };

export class TorchPeer implements AsyncDisposable {
  readonly #child: ChildProcessWithoutNullStreams;
  readonly #lines: AsyncIterator<string>;
  #complaints = '';
  port = 0;

  private constructor(child: ChildProcessWithoutNullStreams) {
    this.#child = child;
    this.#lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
    child.stderr.on('data', (chunk) => {
      this.#complaints += chunk;
    });
  }

  static async start(
    python: string,
    role: 'server' | 'client',
    port: number,
    backend: 'libuv' | 'legacy',
  ): Promise<TorchPeer> {
    const program = fileURLToPath(new URL('peer.py', import.meta.url));
    const peer = new TorchPeer(
      spawn(python, [program, role, `${port}`, backend], { env: { ...process.env, TORCH_CPP_LOG_LEVEL: 'ERROR' } }),
    );
    try {
      peer.port = ((await peer.#next()) as { readonly port: number }).port;
      return peer;
    } catch (error) {
      await peer[Symbol.asyncDispose]();
      throw error;
    }
  }

  /** What the call returned. Throws what torch raised, its class first. */
  async call(call: string, ...arguments_: readonly unknown[]): Promise<unknown> {
    this.#child.stdin.write(`${JSON.stringify({ call, arguments: arguments_ })}\n`);
    const answer = await this.#next();
    if ('error' in answer) throw new Error(`${answer.error}: ${answer.message}`);
    return 'value' in answer ? answer.value : undefined;
  }

  kill(): void {
    this.#child.kill('SIGKILL');
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#child.exitCode !== null || this.#child.signalCode !== null) return;
    const ended = new Promise((resolve) => this.#child.once('exit', resolve));
    this.kill();
    await ended;
  }

  async #next(): Promise<Answer> {
    const line = await this.#lines.next();
    if (line.done === true) throw new Error(`the torch process ended: ${this.#complaints.trim().slice(-2000)}`);
    return JSON.parse(line.value) as Answer;
  }
}
