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

type Numbers = Int32Array | Uint8Array | Float64Array;

/** As long as `like`, to whoever does not ask: its buffer was detached, or shrunk so that the array lies outside of it. */
function dead(like: Numbers): readonly (readonly [string, Numbers])[] {
  const Kind = like.constructor as new (buffer: ArrayBuffer, byteOffset: number, length: number) => Numbers;
  const made = (buffer: ArrayBuffer) => new Kind(buffer, like.BYTES_PER_ELEMENT, like.length);
  const byteLength = like.BYTES_PER_ELEMENT * (like.length + 1);
  const buffer = new ArrayBuffer(byteLength);
  const detached = made(buffer);
  structuredClone(buffer, { transfer: [buffer] });
  // ES2024 types of resizable buffers are not in the project's lib; Node 20 has the feature.
  const options = { maxByteLength: byteLength };
  const resizable = Reflect.construct(ArrayBuffer, [byteLength, options]) as ArrayBuffer & { resize(n: number): void };
  const shrunk = made(resizable);
  resizable.resize(0);
  return [
    ['detached', detached],
    ['shrunk', shrunk],
  ];
}

/** The value with one of the typed arrays in it, however deep, dead. */
export function* withDead(value: unknown, path: string): Generator<readonly [string, unknown]> {
  if (ArrayBuffer.isView(value)) {
    for (const [how, array] of dead(value as Numbers)) yield [`${path} ${how}`, array];
  } else if (Array.isArray(value)) {
    for (const [at, item] of value.entries())
      for (const [what, copy] of withDead(item, `${path}[${at}]`)) yield [what, value.with(at, copy)];
  } else if (typeof value === 'object' && value !== null) {
    for (const [key, item] of Object.entries(value))
      for (const [what, copy] of withDead(item, `${path}.${key}`)) yield [what, { ...value, [key]: copy }];
  }
}

/** `right`: arguments that are right, for every function. `lenient`: those that take what comes, such as arithmetic on numbers; `unread`: arrays that nobody looks at. */
export function describeMisuse(
  entry: string,
  api: Readonly<Record<string, unknown>>,
  right: Readonly<Record<string, readonly unknown[]>>,
  { lenient = [], unread = /^$/ }: { readonly lenient?: readonly string[]; readonly unread?: RegExp } = {},
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

    const arrays = functions.flatMap(([name, call]) =>
      (right[name] ?? []).flatMap((arg, at) =>
        [...withDead(arg, `argument ${at}`)].map(([what, copy]) => ({
          what: `${name}: ${what}`,
          name,
          call,
          at,
          copy,
        })),
      ),
    );
    it.each(functions.filter(([name]) => arrays.some((one) => one.name === name)))(
      '%s refuses each typed array whose buffer is gone',
      (of) => {
        const wrong: string[] = [];
        for (const { what, call, at, copy } of arrays.filter(({ name }) => name === of)) {
          if (unread.test(what)) continue;
          try {
            call(...right[of]!.with(at, copy));
            wrong.push(`${what}: accepted`);
          } catch (error) {
            if (!(error instanceof PlanError)) wrong.push(`${what}: ${String(error)}`);
          }
        }
        expect(wrong).toEqual([]);
      },
    );
  });
}
