/** Every function of an entry point, called with arguments of wrong kinds: it refuses them with a PlanError, or has a use for them. */
import { describe, expect, it } from 'vitest';
import { PlanError } from '../src/index.js';

type Call = (...args: unknown[]) => unknown;

const odd = [undefined, null, {}, 5, 'x'];

/** Ways to say an argument wrongly, with their names: another value in its place, or in the place of one of its fields. */
function spoiled(args: readonly unknown[]): readonly (readonly [string, readonly unknown[]])[] {
  return args.flatMap((arg, at) => {
    const keys = typeof arg === 'object' && arg !== null && !ArrayBuffer.isView(arg) ? Object.keys(arg) : [];
    return odd.flatMap((value) => [
      [`argument ${at}: ${String(value)}`, args.with(at, value)] as const,
      ...keys.map((key) => {
        const copy = Array.isArray(arg) ? arg.with(Number(key), value) : { ...(arg as object), [key]: value };
        return [`argument ${at}, ${key}: ${String(value)}`, args.with(at, copy)] as const;
      }),
    ]);
  });
}

/** `right`: arguments that are right, for every function. `lenient`: those that take what comes, such as arithmetic on numbers. */
export function describeMisuse(
  entry: string,
  api: Readonly<Record<string, unknown>>,
  right: Readonly<Record<string, readonly unknown[]>>,
  lenient: readonly string[] = [],
): void {
  const functions = Object.entries(api).filter(
    (pair): pair is [string, Call] => typeof pair[1] === 'function' && pair[1] !== PlanError,
  );
  describe(`wrong kinds of arguments of ${entry}`, () => {
    it.each(functions)('%s says which and what it expected', (name, call) => {
      const args = right[name];
      expect(args, `${name} needs right arguments in this test`).toBeDefined();
      expect(() => call(...args!)).not.toThrow();
      const wrong: string[] = [];
      let refused = 0;
      for (const [what, given] of [['no arguments', []] as const, ...spoiled(args!)]) {
        try {
          call(...given);
        } catch (error) {
          if (error instanceof PlanError) refused++;
          else wrong.push(`${what}: ${String(error)}`);
        }
      }
      expect(wrong).toEqual([]);
      if (!lenient.includes(name)) expect(refused).toBeGreaterThan(0);
    });
  });
}
