/** Right arguments, spoiled one after the other: by values of other kinds, and by typed arrays whose memory is gone. */
import { isEpError, Resource } from '@ep/core';

export type Call = (...args: unknown[]) => unknown;

function deadBytes(): { readonly detached: Uint8Array; readonly shrunk: Uint8Array } {
  const detached = new Uint8Array(4);
  structuredClone(detached.buffer, { transfer: [detached.buffer] });
  // ES2024 types of resizable buffers are not in the project's lib; Node 20 has the feature.
  const buffer = Reflect.construct(ArrayBuffer, [8, { maxByteLength: 8 }]) as ArrayBuffer & { resize(n: number): void };
  const shrunk = new Uint8Array(buffer, 4, 4);
  buffer.resize(2);
  return { detached, shrunk };
}

export const { detached, shrunk } = deadBytes();

/** The number is a time that no test waits for, where it stands for one. */
export const odd: readonly (readonly [string, unknown])[] = [
  ...[undefined, null, {}, 60_000, 'x'].map((value) => [String(value), value] as const),
  ['detached', detached],
  ['shrunk', shrunk],
];

/** Each argument replaced, and each field of those that are plain objects or arrays. */
export function* spoiled(args: readonly unknown[]): Generator<readonly [string, readonly unknown[]]> {
  for (const [at, arg] of args.entries()) {
    const plain = typeof arg === 'object' && arg !== null && !(arg instanceof Resource) && !(arg instanceof Map);
    for (const [label, value] of odd) {
      yield [`argument ${at}: ${label}`, args.with(at, value)];
      for (const key of plain ? Object.keys(arg) : []) {
        const copy = Array.isArray(arg) ? arg.with(Number(key), value) : { ...(arg as object), [key]: value };
        yield [`argument ${at}, ${key}: ${label}`, args.with(at, copy)];
      }
    }
  }
}

/** What it threw that is no EpError; `undefined` if it threw one, or nothing. */
export async function otherErrorOf(call: Call, args: readonly unknown[]): Promise<string | undefined> {
  try {
    const made = await call(...args);
    if (made instanceof Resource) await made.close();
    return undefined;
  } catch (error) {
    return isEpError(error) ? undefined : String(error);
  }
}
