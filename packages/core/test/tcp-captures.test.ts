/** The protocol, held against what torch's own client and servers said to each other: see captures/capture.py. */
import { readdirSync, readFileSync } from 'node:fs';
import { createServer, type Socket } from 'node:net';
import { describe, expect, it } from 'vitest';
import { CloseScope, openTcpStore, prefixStore, type Store } from '../src/index.js';
import { ByteQueue } from '../src/stores/tcp/bytes.js';
import { Session, StoreState } from '../src/stores/tcp/session.js';
import { readRequest, requestParts } from '../src/stores/tcp/wire.js';

interface Capture {
  readonly torch: string;
  readonly backend: 'libuv' | 'legacy';
  readonly steps: readonly {
    readonly call: string;
    readonly bytes: readonly (readonly ['send' | 'receive', string])[];
  }[];
}

const LIMITS = {
  stringBytes: 1 << 20,
  items: 1000,
  requestBytes: 1 << 20,
  storeBytes: 1 << 20,
  connections: 10,
  unreadBytes: 1 << 20,
  stallMs: 1000,
};
const folder = new URL('captures/', import.meta.url);
const captures = readdirSync(folder)
  .filter((name) => name.endsWith('.json'))
  .map((name) => [name, JSON.parse(readFileSync(new URL(name, folder), 'utf8')) as Capture] as const);
const said = ({ bytes }: Capture['steps'][number], side: 'send' | 'receive') =>
  bytes.flatMap(([direction, data]) => (direction === side ? [data] : [])).join('');

it("has captures of both of torch's servers", () => {
  expect(captures.map(([, { backend }]) => backend).sort()).toEqual(['legacy', 'libuv']);
  for (const [, { torch, steps }] of captures) {
    expect(torch).toMatch(/^\d+\.\d+/);
    expect(steps.length).toBeGreaterThan(23);
  }
});

describe.each(captures)('%s', (_, capture) => {
  it.each([
    ['as they came', Number.POSITIVE_INFINITY],
    ['byte by byte', 1],
    ['in threes', 3],
  ])("our server answers torch's client as torch's server did, its bytes %s", (_how, size) => {
    let answered = '';
    const session = new Session(new StoreState(LIMITS), {
      send: (parts) => {
        answered += Buffer.concat(parts).toString('hex');
      },
      blocked: () => false,
    });
    for (const step of capture.steps) {
      answered = '';
      for (const [direction, data] of step.bytes) {
        const bytes = Buffer.from(data, 'hex');
        if (direction === 'send')
          for (let at = 0; at < bytes.length; at += size)
            session.receive(bytes.subarray(at, Math.min(bytes.length, at + size)));
      }
      expect({ call: step.call, answered }).toEqual({ call: step.call, answered: said(step, 'receive') });
    }
    expect(session.owesBytes).toBe(false);
  });

  it('our encoder writes the requests that our parser reads, byte for byte', () => {
    const queue = new ByteQueue();
    let requests = 0;
    for (const step of capture.steps) {
      const sent = said(step, 'send');
      queue.push(Buffer.from(sent, 'hex'));
      let written = '';
      while (queue.length > 0) {
        const step = readRequest(queue, { stringBytes: 1 << 20, items: 100, bytes: 1 << 20 }).next();
        if (step.done !== true) throw new Error('the capture ends within a request');
        written += Buffer.concat(requestParts(step.value)).toString('hex');
        requests++;
      }
      expect(written).toBe(sent);
    }
    expect(requests).toBeGreaterThan(30);
  });

  it("our client sends what torch's client sent, and a ping behind what has no reply", async () => {
    await using scope = new CloseScope();
    let sent = '';
    const state = new StoreState(LIMITS);
    const sockets = new Set<Socket>();
    const server = createServer((socket) => {
      sockets.add(socket);
      const session = new Session(state, {
        send: (parts) => void socket.write(Buffer.concat(parts)),
        blocked: () => false,
      });
      socket.on('error', () => {});
      socket.on('data', (chunk) => {
        sent += chunk.toString('hex');
        session.receive(chunk);
      });
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    scope.defer(() => {
      for (const socket of sockets) socket.destroy();
      server.close();
    });
    const { port } = server.address() as { port: number };
    const store: Store = scope.add(await openTcpStore({ host: '127.0.0.1', port }));
    const bytes = (text: string) => Buffer.from(text);
    const calls: Record<string, () => Promise<unknown>> = {
      'set a': () => store.set('a', bytes('bc')),
      'set e': () => store.set('e', bytes('')),
      'add n 5': () => store.add('n', 5),
      'add n -7': () => store.add('n', -7),
      'compare_set cs empty v1': () => store.compareSet('cs', bytes(''), bytes('v1')),
      'compare_set cs v1 v2': () => store.compareSet('cs', bytes('v1'), bytes('v2')),
      'compare_set absent x v3': () => store.compareSet('absent', bytes('x'), bytes('v3')),
      'check a zz': () => store.check(['a', 'zz']),
      'wait a e': () => store.wait(['a', 'e']),
      num_keys: () => store.numKeys(),
      'append ap': () => store.append('ap', bytes('xy')),
      'multi_set m1 m2': () =>
        store.multiSet(
          new Map([
            ['m1', bytes('1')],
            ['m2', bytes('22')],
          ]),
        ),
      'multi_get m1 ap m2': () => store.multiGet(['m1', 'ap', 'm2']),
      'delete a': () => store.delete('a'),
      'set k under two prefixes': () => prefixStore(prefixStore(store, 'in'), 'out').set('k', bytes('v')),
    };
    const unacknowledged = /^(set|append|multi_set) /;
    for (const [call, run] of Object.entries(calls)) {
      const recorded = capture.steps.find((step) => step.call === call);
      sent = '';
      await run();
      const ping = unacknowledged.test(call) ? sent.slice(-10) : '';
      if (ping !== '') expect(ping).toMatch(/^0d/);
      expect({ call, sent: sent.slice(0, sent.length - ping.length) }).toEqual({ call, sent: said(recorded!, 'send') });
    }
  });
});
