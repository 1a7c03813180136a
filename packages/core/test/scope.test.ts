import { spawnSync } from 'node:child_process';
import { getMaxListeners, setMaxListeners } from 'node:events';
import { describe, expect, it, vi } from 'vitest';
import { CloseScope, Resource } from '../src/scope.js';
import { interruptible, linkSignals } from '../src/waiting.js';

class Thing extends Resource {
  readonly #log: string[];
  readonly #name: string;
  readonly #failure: Error | undefined;
  constructor(log: string[], name: string, failure?: Error) {
    super(name);
    this.#log = log;
    this.#name = name;
    this.#failure = failure;
  }
  child(name: string, failure?: Error): Thing {
    this.checkOpen('child');
    return this.children.add(new Thing(this.#log, name, failure));
  }
  run<T>(body: () => Promise<T>): Promise<T> {
    return this.guard('run', body);
  }
  /** Ends only when this is closed. */
  listen(): Promise<never> {
    return this.guard('listen', () =>
      interruptible<never>({ signals: [this.closing], where: 'listen', timedOut: () => undefined }, () => undefined),
    );
  }
  protected release(): void {
    this.#log.push(this.#name);
    if (this.#failure) throw this.#failure;
  }
}

const tick = () => new Promise((resolve) => setImmediate(resolve));

describe('CloseScope', () => {
  it('closes newest first, sync and async, and waits for each', async () => {
    const log: string[] = [];
    const scope = new CloseScope();
    scope.defer(() => log.push('first'));
    scope.add({
      async [Symbol.asyncDispose]() {
        await tick();
        log.push('second');
      },
    });
    scope.add({ [Symbol.dispose]: () => log.push('third') });
    await scope.close();
    expect(log).toEqual(['third', 'second', 'first']);
    await scope.close();
    expect(log.length).toBe(3);
  });

  it('goes on after failures: one is thrown as it is, several together', async () => {
    const [a, b] = [new Error('a'), new Error('b')];
    const log: string[] = [];
    const one = new CloseScope();
    one.defer(() => log.push('reached'));
    one.defer(() => {
      throw a;
    });
    await expect(one.close()).rejects.toBe(a);
    await expect(one.close()).rejects.toBe(a);
    expect(log).toEqual(['reached']);
    const two = new CloseScope();
    two.defer(() => Promise.reject(a));
    two.defer(() => Promise.reject(b));
    await expect(two.close()).rejects.toMatchObject({ errors: [b, a], message: '2 of 2 closes failed' });
  });

  it('refuses additions after close and lets things be taken out', async () => {
    const log: string[] = [];
    const scope = new CloseScope();
    const kept = scope.add(new Thing(log, 'kept'));
    expect(scope.remove(kept)).toBe(true);
    await scope.close();
    expect(kept.closed).toBe(false);
    expect(() => scope.defer(() => {})).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
    await kept.close();
  });

  it('forgets children that were closed on their own', async () => {
    const scope = new CloseScope();
    let disposed = 0;
    for (let i = 0; i < 1000; i++) {
      scope.add({ closed: i !== 500, [Symbol.dispose]: () => disposed++ });
    }
    await scope.close();
    expect(disposed).toBeLessThan(40);
    expect(disposed).toBeGreaterThan(0);
  });

  it('is what await using calls', async () => {
    const log: string[] = [];
    {
      await using scope = new CloseScope();
      scope.defer(() => log.push('closed'));
    }
    expect(log).toEqual(['closed']);
  });
});

describe('Resource', () => {
  it('closes once, however often it is asked', async () => {
    const log: string[] = [];
    const thing = new Thing(log, 'thing');
    expect(thing.closed).toBe(false);
    const first = thing.close();
    expect(thing.closed).toBe(true);
    await Promise.all([first, thing.close(), thing[Symbol.asyncDispose]()]);
    expect(log).toEqual(['thing']);
  });

  it('refuses use after close, naming object and operation', async () => {
    const thing = new Thing([], 'thing');
    await thing.close();
    await expect(thing.run(async () => 1)).rejects.toMatchObject({
      code: 'EP_CLOSED',
      message: 'thing: run was called after close()',
    });
    expect(() => thing.child('late')).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
  });

  it('closes children newest first, then itself, collecting failures', async () => {
    const log: string[] = [];
    const [a, b] = [new Error('a'), new Error('b')];
    const parent = new Thing(log, 'parent', b);
    parent.child('older', a).child('grandchild');
    parent.child('newer');
    await expect(parent.close()).rejects.toMatchObject({ errors: [a, b] });
    expect(log).toEqual(['newer', 'grandchild', 'older', 'parent']);
  });

  it('delays close until what is in flight has ended', async () => {
    const log: string[] = [];
    const thing = new Thing(log, 'thing');
    let finish: (value: string) => void = () => {};
    const running = thing.run(() => new Promise<string>((resolve) => (finish = resolve)));
    const closing = thing.close();
    await tick();
    expect(log).toEqual([]);
    finish('result');
    expect(await running).toBe('result');
    await closing;
    expect(log).toEqual(['thing']);
  });

  it('cuts off waits with EP_ABORTED', async () => {
    const thing = new Thing([], 'thing');
    const waiting = thing.listen();
    const closing = thing.close();
    await expect(waiting).rejects.toMatchObject({ code: 'EP_ABORTED', message: 'thing was closed' });
    await closing;
  });

  it('lets a caller stop waiting for a close that goes on', async () => {
    const log: string[] = [];
    const thing = new Thing(log, 'thing');
    let finish: () => void = () => {};
    const running = thing.run(() => new Promise<void>((resolve) => (finish = resolve)));
    const stop = new AbortController();
    const closing = thing.close({ signal: stop.signal });
    const reason = new Error('no patience');
    stop.abort(reason);
    await expect(closing).rejects.toBe(reason);
    finish();
    await running;
    await thing.close();
    expect(log).toEqual(['thing']);
  });
});

describe('waits', () => {
  const never = { where: 'test', timedOut: () => new Error('too late') };

  it('reject with the untouched reason, start nothing when aborted before, and clean up once', async () => {
    const reason = { any: 'thing' };
    let started = 0;
    let cleaned = 0;
    const start = () => {
      started++;
      return () => {
        cleaned++;
      };
    };
    const before = interruptible({ signals: [AbortSignal.abort(reason)], timeoutMs: 1, ...never }, start);
    await expect(before).rejects.toBe(reason);
    expect(started).toBe(0);
    const controller = new AbortController();
    const during = interruptible({ signals: [undefined, controller.signal], timeoutMs: 10_000, ...never }, start);
    controller.abort(reason);
    await expect(during).rejects.toBe(reason);
    const late = interruptible({ signals: [], timeoutMs: 0, ...never }, start);
    await expect(late).rejects.toThrow('too late');
    expect([started, cleaned]).toEqual([2, 2]);
  });

  it('clean up when they end inside of start', async () => {
    let cleaned = 0;
    const value = await interruptible<number>({ signals: [], timeoutMs: 0, ...never }, (resolve) => {
      resolve(3);
      return () => {
        cleaned++;
      };
    });
    expect([value, cleaned]).toEqual([3, 1]);
    const thrown = interruptible({ signals: [], timeoutMs: 0, ...never }, () => {
      throw new Error('start failed');
    });
    await expect(thrown).rejects.toThrow('start failed');
  });

  it('do not end at once when the deadline is longer than a timer can be', async () => {
    const controller = new AbortController();
    const wait = interruptible({ signals: [controller.signal], timeoutMs: 2 ** 40, ...never }, () => undefined);
    setTimeout(() => controller.abort('still waiting'), 20);
    await expect(wait).rejects.toBe('still waiting');
  });

  it('keep a deadline of more than one timer exactly', async () => {
    vi.useFakeTimers();
    try {
      let ended: unknown;
      const limits = { signals: [], timeoutMs: 2 ** 32, ...never };
      const wait = interruptible(limits, () => undefined).catch((error) => {
        ended = error;
      });
      await vi.advanceTimersByTimeAsync(2 ** 32 - 10);
      expect(ended).toBeUndefined();
      await vi.advanceTimersByTimeAsync(10);
      await wait;
      expect(ended).toMatchObject({ message: 'too late' });
    } finally {
      vi.useRealTimers();
    }
  });

  it('share one signal without a warning, and keep a limit that the caller set', async () => {
    const warnings: Error[] = [];
    const onWarning = (warning: Error) => warnings.push(warning);
    process.on('warning', onWarning);
    const controller = new AbortController();
    const limits = { signals: [controller.signal], ...never };
    const waits = Array.from({ length: 50 }, () => interruptible(limits, () => undefined).catch((reason) => reason));
    const strict = new AbortController();
    setMaxListeners(3, strict.signal);
    linkSignals(strict.signal).unlink();
    expect(getMaxListeners(strict.signal)).toBe(3);
    const unlimited = new AbortController();
    setMaxListeners(0, unlimited.signal);
    linkSignals(unlimited.signal).unlink();
    controller.abort('all');
    expect(new Set(await Promise.all(waits))).toEqual(new Set(['all']));
    await tick();
    process.off('warning', onWarning);
    expect(warnings).toEqual([]);
  });

  it('link signals and let go of them', () => {
    const a = new AbortController();
    const linked = linkSignals(undefined, a.signal, new AbortController().signal);
    a.abort('a');
    expect(linked.signal.reason).toBe('a');
    const b = new AbortController();
    const unlinked = linkSignals(b.signal);
    unlinked.unlink();
    b.abort('b');
    expect(unlinked.signal.aborted).toBe(false);
    expect(linkSignals(b.signal).signal.reason).toBe('b');
  });
});

describe('EP_DEBUG=leaks', () => {
  const program = `
    import { Resource } from './src/scope.js';
    class Thing extends Resource { constructor() { super('thing'); } release() {} }
    const close = process.argv.includes('close');
    await (async () => { const thing = new Thing(); if (close) await thing.close(); })();
    for (let i = 0; i < 20; i++) { globalThis.gc(); await new Promise((resolve) => setTimeout(resolve, 5)); }
  `;
  const run = (debug: string, ...args: string[]) =>
    spawnSync(
      process.execPath,
      ['--expose-gc', '--import', 'tsx', '--input-type=module', '-e', program, '--', ...args],
      { cwd: new URL('..', import.meta.url), env: { ...process.env, EP_DEBUG: debug }, encoding: 'utf8' },
    ).stderr;

  it('names what was collected without close, and only that', () => {
    expect(run('plan, leaks')).toMatch(
      /\[EP_LEAK\] EpLeakWarning: thing was garbage collected without close\(\); it was made at new Thing/,
    );
    expect(run('leaks', 'close')).toBe('');
    expect(run('')).toBe('');
  });
});
