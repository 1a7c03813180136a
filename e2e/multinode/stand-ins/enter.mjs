import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { constants } from 'node:os';

/** `<address>=<pid>,...` */
export const placesOf = (map) => new Map(map.split(',').map((entry) => entry.split('=')));

/** Runs the command in the network namespace of the host's process; its status as a shell has it. */
export async function enter(places, host, command, { env, stdin }) {
  const pid = places.get(host);
  if (pid === undefined) {
    process.stderr.write(`no host ${host}\n`);
    return 255;
  }
  const child = spawn('nsenter', ['--target', pid, '--net', '--', ...command], {
    env,
    stdio: [stdin, 'inherit', 'inherit'],
  });
  const [code, signal] = await once(child, 'exit');
  return signal === null ? code : 128 + constants.signals[signal];
}
