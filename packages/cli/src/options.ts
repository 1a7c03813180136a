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

const ADDRESS = /^(\[[\da-fA-F:.]+\]|[^\s/:[\]]+):(\d{1,5})$/;

/** `host:port`, the host a name or an address, IPv6 in brackets. */
export function rendezvousAddress(text: string): { readonly host: string; readonly port: number } {
  const [, host, digits] = ADDRESS.exec(text) ?? [];
  const port = Number(digits);
  if (host === undefined || !(port >= 1 && port <= 65_535))
    throw new InvalidArgumentError('expected <host>:<port>, for example node1:29500.');
  return { host: host.replace(/[[\]]/g, ''), port };
}

/** `a:4,b:4`, each with 1 to `most` ranks. */
export function hostList(most: number): (text: string) => readonly { readonly host: string; readonly ranks: number }[] {
  return listOption((part) => {
    const [, host, digits] = ADDRESS.exec(part) ?? [];
    const ranks = Number(digits);
    if (host === undefined || !(ranks >= 1 && ranks <= most))
      throw new InvalidArgumentError('expected hosts with their ranks, for example node1:4,node2:4.');
    return { host: host.replace(/[[\]]/g, ''), ranks };
  });
}

/** `2`, or `2:4`. */
export function nodeCount(text: string): { readonly least: number; readonly most: number } {
  const [, first, second] = /^(\d{1,5})(?::(\d{1,5}))?$/.exec(text) ?? [];
  const [least, most] = [Number(first), Number(second ?? first)];
  if (least >= 1 && most >= least && most <= 65_536) return { least, most };
  throw new InvalidArgumentError('expected a number of hosts, for example 2, or least:most, for example 2:4.');
}
