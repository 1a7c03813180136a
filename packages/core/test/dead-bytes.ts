/** Typed arrays whose memory is gone, in both ways in which that happens; to whoever does not ask they look empty. */

/** ES2024 types of resizable buffers are not in the project's lib; Node 20 has the feature. */
export const resizable = (byteLength: number, maxByteLength: number) =>
  Reflect.construct(ArrayBuffer, [byteLength, { maxByteLength }]) as ArrayBuffer & { resize(n: number): void };

export const detach = (buffer: ArrayBufferLike): void =>
  void structuredClone(buffer, { transfer: [buffer as ArrayBuffer] });

export function deadBytes(): { readonly detached: Uint8Array; readonly shrunk: Uint8Array } {
  const detached = new Uint8Array(4);
  detach(detached.buffer);
  const buffer = resizable(8, 8);
  const shrunk = new Uint8Array(buffer, 4, 4);
  buffer.resize(2);
  return { detached, shrunk };
}
