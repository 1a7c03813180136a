/** Why nobody answers at an address, in words for whoever has to mend the network. */
import { createSocket } from 'node:dgram';
import { isIPv6 } from 'node:net';
import { networkInterfaces } from 'node:os';
import { isEpError } from '../../errors.js';

/** How far the last attempt came. */
export type Reached = 'nothing' | 'connection';

export interface Route {
  readonly address: string;
  readonly interface: string;
}

const LOOK_MS = 1000;

/** From where this host speaks to another one: what the routing table says, nothing is sent. Undefined where no route leads there. */
export function routeTo(host: string, port: number): Promise<Route | undefined> {
  return new Promise((resolve) => {
    const socket = createSocket(isIPv6(host) ? 'udp6' : 'udp4');
    const end = (found?: Route): void => {
      clearTimeout(timer);
      socket.removeAllListeners();
      socket.on('error', () => {});
      socket.close();
      resolve(found);
    };
    // The name's resolution may hang.
    const timer = setTimeout(end, LOOK_MS);
    socket.once('error', () => end());
    // HAZARD: called with errors, too, which then are no event: the socket has the address 0.0.0.0.
    const onEnd = (error?: Error): void => {
      if (error) {
        end();
        return;
      }
      const { address } = socket.address();
      const [name] =
        Object.entries(networkInterfaces()).find(([, all]) => all?.some((one) => one.address === address)) ?? [];
      end({ address, interface: name ?? 'an interface without a name' });
    };
    socket.connect(port, host, onEnd as () => void);
  });
}

const CAUSES: Readonly<Record<string, string>> = {
  ECONNREFUSED:
    'the host is there and nobody listens at this port: the server has not started, ended, or listens at another address',
  ECONNRESET: 'the connection was cut by the other side',
  ENOTFOUND: 'the name does not resolve',
  EAI_AGAIN: 'the name does not resolve for now: the name server does not answer',
  ENETUNREACH: 'no interface of this host leads there',
  EHOSTUNREACH: 'nothing on the way there answers for the host: it is down, or the address is of another network',
  ETIMEDOUT: 'the host, or a firewall, swallows what is sent there',
};

/** `cause`: of the last attempt, undefined where it was still under way. */
export async function whyUnreachable(
  { host, port, key }: { readonly host: string; readonly port: number; readonly key?: Uint8Array | undefined },
  reached: Reached,
  cause: unknown,
): Promise<string> {
  const code = (cause as NodeJS.ErrnoException | undefined)?.code;
  let found: string;
  if (isEpError(cause)) found = `the last attempt ended with: ${cause.message}`;
  else if (code !== undefined) found = `the last attempt ended with ${code}${CAUSES[code] ? `: ${CAUSES[code]}` : ''}`;
  else if (reached === 'connection')
    found = `it took the connection and did not answer${key === undefined ? '' : '; stores of PyTorch do not answer to a job secret: for them it is "none"'}`;
  else found = 'it did not answer: it is down, or a firewall swallows what is sent there';
  const route = await routeTo(host, port);
  if (route !== undefined) return `${found} (tried from ${route.address}, ${route.interface})`;
  return code === 'ENOTFOUND' || code === 'EAI_AGAIN' ? found : `${found} (no route of this host leads there)`;
}
