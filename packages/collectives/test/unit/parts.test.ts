import { describe, expect, it } from 'vitest';
import { EqualParts } from '../../src/checks.js';

describe('equal parts of an array', () => {
  it('are the same list for the same array, and hold its bytes', () => {
    const parts = new EqualParts();
    const whole = Float32Array.of(1, 2, 3, 4, 5, 6);
    const list = parts.of(whole, 3);
    expect(list.map((part) => [...part])).toEqual([
      [1, 2],
      [3, 4],
      [5, 6],
    ]);
    expect(list.every((part) => part.buffer === whole.buffer)).toBe(true);
    expect(parts.of(whole, 3)).toBe(list);
    expect(parts.of(whole.subarray(0), 3)).not.toBe(list);
    expect(Object.isFrozen(list)).toBe(true);
  });

  it('are others when the group has grown', () => {
    const parts = new EqualParts();
    const whole = new Float32Array(6);
    parts.of(whole, 2);
    expect(parts.of(whole, 3).map((part) => part.length)).toEqual([2, 2, 2]);
  });

  it('are others when the array has grown with its buffer', () => {
    const parts = new EqualParts();
    const buffer = Reflect.construct(ArrayBuffer, [16, { maxByteLength: 64 }]) as ArrayBuffer & {
      resize(byteLength: number): void;
    };
    const whole = new Float32Array(buffer);
    parts.of(whole, 2);
    buffer.resize(32);
    expect(parts.of(whole, 2).map((part) => part.length)).toEqual([4, 4]);
  });
});
