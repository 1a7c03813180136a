import { execFileSync } from 'node:child_process';
import { describe, expect, it } from 'vitest';
import { EpError } from '../src/errors.js';
import { createWork, doneWork, WorkOwner } from '../src/work.js';

const setUp = <T = void>(op = 'put') => {
  const owner = new WorkOwner('endpoint to rank 3');
  return { owner, ...bind(createWork<T>({ op, sequence: 7, owner })) };
};
const bind = <T>(control: ReturnType<typeof createWork<T>>) => ({ control, work: control.work });

describe('Work', () => {
  it('is awaitable before and after it ends', async () => {
    const { control, work } = setUp<number>();
    expect([work.op, work.sequence, work.status]).toEqual(['put', 7, 'pending']);
    const early = Promise.resolve(work);
    expect(control.resolve(5)).toBe(true);
    expect(work.status).toBe('done');
    expect([await early, await work, await work.wait(), await work.then((x) => x + 1)]).toEqual([5, 5, 5, 6]);
  });

  it('ends once', async () => {
    const { control, work } = setUp<number>();
    control.resolve(1);
    expect([control.resolve(2), control.reject(new Error('x')), control.abort('y')]).toEqual([false, false, false]);
    expect(await work).toBe(1);
  });

  it('rejects with the untouched reason', async () => {
    const reason = { odd: true };
    const failed = setUp();
    failed.control.reject(reason);
    expect(failed.work.status).toBe('failed');
    await expect(failed.work).rejects.toBe(reason);
    expect(await failed.work.catch((error) => error)).toBe(reason);
    const aborted = setUp();
    const waiting = aborted.work.wait();
    aborted.control.abort(reason);
    expect(aborted.work.status).toBe('aborted');
    await expect(waiting).rejects.toBe(reason);
  });

  it('lets its maker look for the end when somebody begins to wait, who then need not wait', async () => {
    const owner = new WorkOwner('endpoint to rank 3');
    const ends: (() => void)[] = [];
    const hurried: string[] = [];
    const make = (name: string) => {
      const hurry = () => {
        hurried.push(name);
        ends.shift()?.();
      };
      return createWork<string>({ op: name, sequence: 0, owner, hurry });
    };
    const [late, good, bad] = ['late', 'good', 'bad'].map(make);
    const waiting = late!.work.wait();
    expect(late!.work.status).toBe('pending');
    ends.push(() => good!.resolve('value'));
    expect(await good!.work).toBe('value');
    ends.push(() => bad!.reject('reason'));
    await expect(bad!.work.wait({ timeoutMs: 10_000 })).rejects.toBe('reason');
    // Whoever waits again finds it ended. Nobody missed the failure.
    expect(await good!.work).toBe('value');
    late!.resolve('later');
    expect(await waiting).toBe('later');
    expect(hurried).toEqual(['late', 'good', 'bad']);
    await owner.close();
  });

  it('runs finally both ways', async () => {
    let ran = 0;
    const good = setUp<string>();
    good.control.resolve('v');
    expect(await good.work.finally(() => void ran++)).toBe('v');
    const bad = setUp();
    bad.control.reject(new Error('no'));
    await expect(bad.work.finally(() => void ran++)).rejects.toThrow('no');
    expect(ran).toBe(2);
  });

  it('bounds a wait without touching the operation', async () => {
    const { control, work } = setUp<string>();
    await expect(work.wait({ timeoutMs: 1 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      message: 'wait for put 7: still pending after 1 ms; the operation goes on',
    });
    await expect(work.wait({ signal: AbortSignal.abort('mine') })).rejects.toBe('mine');
    await expect(work.wait({ timeoutMs: -1 })).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    expect(work.status).toBe('pending');
    control.resolve('later');
    expect(await work.wait({ timeoutMs: 0 })).toBe('later');
  });
});

describe('WorkOwner', () => {
  it('reports a failure that nobody looked at, once, with cause', () => {
    const { owner, control } = setUp();
    owner.check();
    const cause = new EpError('EP_PEER_LOST', 'rank 3 died', { context: { peer: 3 } });
    control.reject(cause);
    expect(owner.pending).toBe(0);
    expect(() => owner.check()).toThrow(
      expect.objectContaining({
        code: 'EP_PEER_LOST',
        scope: 'endpoint',
        message: 'endpoint to rank 3: put 7 failed earlier and nobody waited for it: rank 3 died',
        context: { peer: 3, op: 'put', sequence: 7, failures: 1 },
        cause,
      }),
    );
    owner.check();
  });

  it('keeps quiet about failures that somebody saw, before or after the end', async () => {
    const before = setUp();
    const seen = before.work.catch(() => 'seen');
    before.control.reject(new Error('x'));
    before.owner.check();
    expect(await seen).toBe('seen');
    const after = setUp();
    after.control.reject(new Error('x'));
    await after.work.catch(() => {});
    after.owner.check();
  });

  it('does not lose a failure that came after a wait had given up', async () => {
    const { owner, control, work } = setUp();
    await work.wait({ timeoutMs: 1 }).catch(() => {});
    control.reject(new Error('late'));
    expect(() => owner.check()).toThrow(/late/);
  });

  it('says nothing about what was aborted on purpose', () => {
    const { owner, control } = setUp();
    control.abort(new Error('closing'));
    owner.check();
  });

  it('throws several failures as one, and counts what it did not keep', () => {
    const owner = new WorkOwner('group');
    const works = Array.from({ length: 100 }, (_, i) => createWork({ op: 'send', sequence: i, owner }));
    expect(owner.pending).toBe(100);
    for (const work of works) work.reject(new EpError('EP_TIMEOUT', `slow ${work.work.sequence}`));
    const error = (() => {
      try {
        owner.check();
      } catch (caught) {
        return caught as EpError;
      }
      return undefined;
    })();
    expect(error).toMatchObject({ code: 'EP_TIMEOUT', context: { failures: 100, sequence: 0 } });
    expect(error?.message).toMatch(/send 0 failed earlier .* \(and 99 later ones\): slow 0/);
    expect(error).toMatchObject({ cause: { errors: { length: 16 } } });
    owner.check();
  });

  it('gives foreign errors the code EP_ABORTED and keeps them as cause', () => {
    const { owner, control } = setUp();
    control.reject('just text');
    expect(() => owner.check()).toThrow(
      expect.objectContaining({
        code: 'EP_ABORTED',
        cause: 'just text',
        message: expect.stringMatching(/: just text$/),
      }),
    );
  });

  it('drains on close and then reports', async () => {
    const { owner, control } = setUp();
    const closing = owner.close();
    setTimeout(() => control.reject(new Error('while draining')), 5);
    await expect(closing).rejects.toThrow(/while draining/);
    await owner.close();
  });

  it('cuts off on close when the signal fires first', async () => {
    const { owner, work } = setUp();
    const seen = work.catch((reason) => reason);
    await expect(owner.close({ signal: AbortSignal.abort('now') })).rejects.toBe('now');
    expect([work.status, await seen, owner.pending]).toEqual(['aborted', 'now', 0]);
  });

  it('names what is pending when draining takes too long', async () => {
    const { owner } = setUp();
    await expect(owner.idle({ timeoutMs: 1 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      message: 'endpoint to rank 3: drain: 1 pending after 1 ms: put 7',
    });
    expect(owner.abort(new Error('x'))).toBe(1);
    await owner.idle();
  });
});

describe('unhandled rejections', () => {
  const run = (body: string) => {
    const program = `
      import { createWork, doneWork, WorkOwner } from './src/work.js';
      const owner = new WorkOwner('owner');
      const control = createWork({ op: 'op', sequence: 1, owner });
      process.on('exit', (code) => console.log('exit', code));
      ${body}
      await new Promise((resolve) => setTimeout(resolve, 20));
      console.log('alive');
    `;
    try {
      return execFileSync(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', program], {
        cwd: new URL('..', import.meta.url),
        stdio: ['ignore', 'pipe', 'ignore'],
      }).toString();
    } catch (error) {
      return String((error as { stdout: Buffer }).stdout);
    }
  };

  it.each([
    ['a failure that nobody looks at', `control.reject(new Error('lost'));`],
    [
      'a failure after a wait that timed out',
      `await control.work.wait({ timeoutMs: 1 }).catch(() => {}); control.reject(new Error('lost'));`,
    ],
    ['an abort that nobody looks at', `control.abort(new Error('cut'));`],
    ['a failure that is handled', `control.work.catch(() => {}); control.reject(new Error('seen'));`],
  ])('%s does not end the process', (_, body) => {
    expect(run(body)).toBe('alive\nexit 0\n');
  });

  it("a caller's own unhandled chain still does", () => {
    expect(run(`control.work.then(() => {}); control.reject(new Error('mine'));`)).toBe('exit 1\n');
  });
});

describe('doneWork', () => {
  it('is done, gives its value to whoever awaits it, and rejects only a wait that was aborted before', async () => {
    const work = doneWork('put', 7, 'value');
    expect([work.op, work.sequence, work.status]).toEqual(['put', 7, 'done']);
    expect(await work).toBe('value');
    expect(await work.finally(() => {})).toBe('value');
    expect(await doneWork('put', 8).catch(() => 'never')).toBeUndefined();
    const reason = new Error('gone');
    await expect(work.wait({ signal: AbortSignal.abort(reason) })).rejects.toBe(reason);
    expect(await work.wait({ timeoutMs: 1 })).toBe('value');
  });
});
