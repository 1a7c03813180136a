// Runs one program on a host that was given, for the process whose lines come in: passes on what it says, what it is told and how it ends. It and its program end with that process.
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';

/** After SIGTERM. */
const GRACE_MS = 15_000;

const tell = (what, then) => process.stdout.write(`${JSON.stringify(what)}\n`, then);
let child;

/** `command[0]` is this Node where it is `node`. */
function start({ command: [program, ...args], env, speaks }) {
  const made = spawn(program === 'node' ? process.execPath : program, args, {
    stdio: ['ignore', 'pipe', 'pipe', ...(speaks ? ['ipc'] : [])],
    env: { ...process.env, ...env },
  });
  const ends = ['close', ...(speaks ? ['disconnect'] : [])].map(
    (event) => new Promise((over) => made.once(event, over)),
  );
  made.on('error', (error) => tell({ output: `${error.message}\n`, end: 127 }, () => process.exit()));
  made.on('message', (message) => tell({ message }));
  for (const stream of [made.stdout, made.stderr]) stream.on('data', (text) => tell({ output: String(text) }));
  Promise.all(ends).then(() => tell({ end: made.signalCode ?? made.exitCode }, () => process.exit()));
  return made;
}

for await (const line of createInterface({ input: process.stdin })) {
  const said = JSON.parse(line);
  if (said.start !== undefined) child = start(said.start);
  else if (said.kill) child?.kill('SIGKILL');
  else if (child?.connected) child.send(said.message);
}
child?.kill('SIGTERM');
setTimeout(() => child?.kill('SIGKILL'), GRACE_MS).unref();
