/**
 * `gin_putvalue`: the pull request's test of values between two ranks, over the software EFA or over EFA itself. The kernel, its phases and what they show are in
 * `native/include/ep/device/gin_putvalue.h`.
 */
import { parseArgs } from 'node:util';
import { EpError, invalid, isEpError, type OpenedRendezvous, openRendezvous, prefixStore } from '@ep/core';
import type { EfaConfig } from './config.js';
import { efaGda } from './provider.js';

const usage = `usage: gin_putvalue [options], as both ranks of a world of two, for example ep run -n 2 -- npx gin_putvalue
  --backing soft|hardware   a software EFA in each rank's process (unless given), or EFA itself
  --device name             of hardware; any unless given
  --library path            of hardware: libfabric, or a name for the loader; libfabric.so.1 unless given
  --seeds a..b              of the software EFA, one transport for each; 1..1 unless given
  --network address         of the software EFA: this rank's IPv4 address; NICs then reach each other by TCP, ranks of any hosts
  --rounds n                of each seed, three phases each; 100 unless given
  --values inline|staged    how values travel; inline where the device can, unless given
  --check every|last        phase 3 looks at every value of the burst (unless given), or takes the last one for a sign of the others, as the test was first
                            written: on EFA that is no sign, and the run fails when it shows
  --faults text             of the software EFA: rules as in native/nic/efa/faults.hpp, for rank 0's
  --timeout seconds         of each wait; 60 unless given
  --json                    one object a line`;

interface Arguments {
  readonly backing: 'soft' | 'hardware';
  readonly device: string | undefined;
  readonly library: string | undefined;
  readonly network: string | undefined;
  readonly seeds: readonly [number, number];
  readonly rounds: number;
  readonly values: 'inline' | 'staged';
  readonly check: 'every' | 'last';
  readonly faults: string | undefined;
  readonly timeoutMs: number;
  readonly json: boolean;
}

function oneOf<T extends string>(name: string, found: string, of: readonly T[]): T {
  const known = of.find((one) => one === found);
  if (known === undefined) throw invalid(name, { where: 'gin_putvalue', expected: of.join(' or '), found });
  return known;
}

function integer(name: string, text: string, most: number): number {
  const value = /^\d{1,10}$/.test(text) ? Number(text) : Number.NaN;
  if (value >= 1 && value <= most) return value;
  throw invalid(name, { where: 'gin_putvalue', expected: `an integer from 1 to ${most}`, found: text });
}

/** Throws `EP_INVALID_ARGUMENT`; undefined: help was asked for. */
function argumentsOf(words: readonly string[]): Arguments | undefined {
  let values: ReturnType<typeof parse>;
  try {
    values = parse(words);
  } catch (error) {
    throw new EpError('EP_INVALID_ARGUMENT', `gin_putvalue: ${(error as Error).message}`, { cause: error });
  }
  if (values.help) return undefined;
  const [first = '', last = first] = values.seeds.split('..');
  const seeds = [integer('--seeds', first, 2 ** 31), integer('--seeds', last, 2 ** 31)] as const;
  if (seeds[1] < seeds[0]) throw invalid('--seeds', { where: 'gin_putvalue', expected: 'a..b', found: values.seeds });
  return {
    backing: oneOf('--backing', values.backing, ['soft', 'hardware']),
    device: values.device,
    library: values.library,
    network: values.network,
    seeds,
    rounds: integer('--rounds', values.rounds, 2 ** 31 - 1),
    values: oneOf('--values', values.values, ['inline', 'staged']),
    check: oneOf('--check', values.check, ['every', 'last']),
    faults: values.faults,
    timeoutMs: integer('--timeout', values.timeout, 86_400) * 1000,
    json: values.json,
  };
}

function parse(words: readonly string[]) {
  const text = (fallback: string) => ({ type: 'string', default: fallback }) as const;
  const { values } = parseArgs({
    args: [...words],
    options: {
      backing: text('soft'),
      device: { type: 'string' },
      library: { type: 'string' },
      network: { type: 'string' },
      seeds: text('1'),
      rounds: text('100'),
      values: text('inline'),
      check: text('every'),
      faults: { type: 'string' },
      timeout: text('60'),
      json: { type: 'boolean', default: false },
      help: { type: 'boolean', default: false },
    },
  });
  return values;
}

/** How one seed went on this rank. */
interface SeedReport {
  readonly rank: number;
  readonly seed: number;
  readonly rounds: number;
  /** Rounds in which the last value of the burst was seen before another one. */
  readonly behind: number;
  readonly pass: boolean;
}

async function runSeed(meeting: OpenedRendezvous, wanted: Arguments, seed: number): Promise<SeedReport> {
  const { rank, worldSize } = meeting;
  const { rounds, timeoutMs, values } = wanted;
  const member = { rank, worldSize, store: prefixStore(meeting.store, `gin_putvalue/${seed}`) };
  const limits = { signal: new AbortController().signal, timeoutMs };
  const config: EfaConfig = { timeoutMs, values };
  const soft = {
    ...(rank === 0 && wanted.faults !== undefined ? { faults: wanted.faults } : {}),
    ...(wanted.network === undefined ? {} : { network: { address: wanted.network } }),
  };
  const hardware = {
    ...(wanted.device === undefined ? {} : { device: wanted.device }),
    ...(wanted.library === undefined ? {} : { library: wanted.library }),
  };
  const transport =
    wanted.backing === 'soft'
      ? await efaGda.soft.open(member, { ...limits, config: { ...config, seed, ...soft } })
      : await efaGda.hardware.open(member, { ...limits, config: { ...config, ...hardware } });
  try {
    const memory = await transport.allocate({ byteLength: 4096, signalSlots: 0 });
    const gin = await transport.openGin({ signals: 1, counters: 0 });
    const { behind } = await gin.testValues(memory, rounds);
    // Nobody closes what the other one may still write to.
    await transport.barrier();
    return { rank, seed, rounds, behind, pass: wanted.check === 'every' || behind === 0 };
  } finally {
    await transport.close();
  }
}

function textOf(report: SeedReport, { backing, check, rounds }: Arguments): string {
  const { rank, seed, behind, pass } = report;
  const seen = rank === 0 ? '' : `; in ${behind} the last value of the burst came before another one`;
  const why = pass ? '' : ', which --check last takes for a loss';
  const of = backing === 'soft' ? `seed ${seed}, ` : '';
  return `${pass ? 'PASS' : 'FAIL'} rank ${rank}: ${of}${rounds} rounds, check ${check}${seen}${why}\n`;
}

/** Runs one command line and resolves with the exit status: 0 every seed passed, 1 one did not, 2 it was not understood. */
export async function main(words: readonly string[]): Promise<number> {
  let wanted: Arguments | undefined;
  try {
    wanted = argumentsOf(words);
  } catch (error) {
    process.stderr.write(`${(error as Error).message}\n${usage}\n`);
    return 2;
  }
  if (wanted === undefined) {
    process.stdout.write(`${usage}\n`);
    return 0;
  }
  let meeting: OpenedRendezvous | undefined;
  try {
    meeting = await openRendezvous('env://', { timeoutMs: wanted.timeoutMs });
    if (meeting.worldSize !== 2) {
      throw new EpError('EP_INVALID_ARGUMENT', `gin_putvalue: it takes two ranks, and there are ${meeting.worldSize}`);
    }
    let pass = true;
    for (let seed = wanted.seeds[0]; seed <= wanted.seeds[1]; seed++) {
      const report = await runSeed(meeting, wanted, seed);
      process.stdout.write(wanted.json ? `${JSON.stringify(report)}\n` : textOf(report, wanted));
      pass &&= report.pass;
    }
    return pass ? 0 : 1;
  } catch (error) {
    const { code, message } = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error));
    process.stderr.write(`gin_putvalue: ${code}: ${message}\n`);
    return 1;
  } finally {
    await meeting?.store.close();
  }
}
