/** Parsers of option values, for commander. */
import { InvalidArgumentError } from 'commander';

/** An integer in `min..max`. */
export function integerOption(min: number, max: number = Number.MAX_SAFE_INTEGER): (text: string) => number {
  return (text) => {
    const value = /^\d{1,16}$/.test(text) ? Number(text) : Number.NaN;
    if (value >= min && value <= max) return value;
    throw new InvalidArgumentError(`expected an integer from ${min} to ${max}.`);
  };
}

/** Bytes as `64`, `16KB`, `4MB` or `1GB`, in powers of 1 024. */
export function byteCount(text: string): number {
  const [, digits, unit] = /^(\d{1,12})\s*(B|KB|MB|GB)?$/i.exec(text) ?? [];
  if (digits === undefined) throw new InvalidArgumentError('expected bytes, for example 8, 16KB or 64MB.');
  return Number(digits) * 1024 ** ['B', 'KB', 'MB', 'GB'].indexOf((unit ?? 'B').toUpperCase());
}

/** Values with commas between them. */
export function listOption<T>(parse: (text: string) => T): (text: string) => readonly T[] {
  return (text) => text.split(',').map((part) => parse(part.trim()));
}
