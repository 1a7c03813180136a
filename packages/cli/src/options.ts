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
