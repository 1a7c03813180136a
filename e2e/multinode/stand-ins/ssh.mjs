// Stands for ssh: `ssh.mjs <address>=<pid>,... <host> <command line>` gives the line to a shell in the network namespace of the host's process, which has nothing of the environment here.
import { enter, placesOf } from './enter.mjs';

const [map, host, line, ...more] = process.argv.slice(2);
if (line === undefined || more.length > 0) throw new Error('usage: ssh.mjs <address>=<pid>,... <host> <command line>');
const { HOME, PATH } = process.env;
process.exitCode = await enter(placesOf(map), host, ['sh', '-c', line], { env: { HOME, PATH }, stdin: 'inherit' });
