/** What the suites need of a host. */
export interface StartOptions {
  /** Beside what is set there. */
  readonly env?: NodeJS.ProcessEnv;
  /** The program is Node's, and says something by `process.send`; without this it cannot. */
  readonly onMessage?: (message: unknown) => void;
  /** Of stdout and stderr; this process's own get it otherwise. */
  readonly onOutput?: (text: string) => void;
}

export interface Running {
  /** For `process.on('message')`. */
  send(message: unknown): void;
  /** By SIGKILL. */
  kill(): void;
  /** Exit status or signal. */
  readonly ended: Promise<number | NodeJS.Signals>;
}

export interface Host {
  /** Of the interface that the other host reaches. */
  readonly address: string;
  start(command: readonly string[], options: StartOptions): Running;
  close(): void;
}
