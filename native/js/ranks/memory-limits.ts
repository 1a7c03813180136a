/** Does what ranks ask for fit what the machine leaves them? Looked at before anybody allocates, and refused on all of them alike. */
import { EpError, formatRanks, type WaitOptions } from '@ep/core';
import { native } from '../native.js';
import { checkAgreement, type Gathering } from './team.js';

export interface Size {
  readonly byteLength: number;
  readonly signalSlots: number;
}

/** What one rank tells the others. */
interface Asked extends Size {
  /** Bytes that the tightest limit leaves it. */
  readonly allocatable: number;
  /** Bytes that a driver may still pin for its process. */
  readonly pinnable: number;
  readonly pid: number;
  readonly source: string;
}

const NUMBERS = 5;
const SOURCE_BYTES = 64;

function encode({ byteLength, signalSlots, allocatable, pinnable, pid, source }: Asked): Uint8Array {
  const numbers = new Float64Array([byteLength, signalSlots, allocatable, pinnable, pid]);
  const blob = new Uint8Array(numbers.byteLength + SOURCE_BYTES);
  blob.set(new Uint8Array(numbers.buffer));
  blob.set(new TextEncoder().encode(source).subarray(0, SOURCE_BYTES), numbers.byteLength);
  return blob;
}

function decode(blob: Uint8Array): Asked {
  const copy = blob.slice();
  const [byteLength, signalSlots, allocatable, pinnable, pid] = new Float64Array(copy.buffer, 0, NUMBERS);
  const source = new TextDecoder().decode(copy.subarray(NUMBERS * 8)).replace(/\0+$/, '');
  return {
    byteLength: byteLength!,
    signalSlots: signalSlots!,
    allocatable: allocatable!,
    pinnable: pinnable!,
    pid: pid!,
    source,
  };
}

const partBytes = ({ byteLength, signalSlots }: Size): number => byteLength + 8 * signalSlots;

/** Throws `EP_MEMORY_LIMIT` where one more piece of `byteLength` bytes is more than a driver may pin for this process. */
export function checkPinnable(byteLength: number, where: string): void {
  const { pinnable } = native().binding.hostFacts();
  if (pinnable === null || byteLength <= pinnable) return;
  throw new EpError(
    'EP_MEMORY_LIMIT',
    `${where}: ${byteLength} bytes cannot be pinned: RLIMIT_MEMLOCK leaves ${pinnable} bytes; raise it (ulimit -l)`,
    { context: { byteLength, limit: 'RLIMIT_MEMLOCK', left: pinnable } },
  );
}

/**
 * Collective over the world. Each rank alone would see memory that the others are about to take, so all parts together are compared with what the rank with
 * the least may still use; `ranksOnHost` of them share it, all unless given. `makes`: this rank's part is new. `pins`: a NIC pins every part; the kernel counts that for each process. Throws `EP_MISMATCH` or `EP_MEMORY_LIMIT`.
 */
export async function agreeOnSize(
  world: Gathering,
  size: Size,
  {
    pins,
    makes,
    ranksOnHost = world.ranks.length,
  }: { readonly pins: boolean; readonly makes: boolean; readonly ranksOnHost?: number | undefined },
  options: WaitOptions,
): Promise<void> {
  const { allocatable, allocatableSource, pinnable } = native().binding.hostFacts();
  const own = encode({
    ...size,
    allocatable: makes && allocatable !== null ? allocatable : Number.POSITIVE_INFINITY,
    pinnable: pinnable ?? Number.POSITIVE_INFINITY,
    pid: process.pid,
    source: allocatableSource,
  });
  const blobs = await world.allGather(own, options);
  const asked = blobs.map(decode);
  checkAgreement('allocate', world, blobs, (blob) => {
    const { byteLength, signalSlots } = decode(blob);
    return `${byteLength} bytes and ${signalSlots} signal slots`;
  });
  const refuse = (ranks: number, why: string, left: number, position: number, advice = ''): never => {
    const { byteLength, signalSlots } = size;
    throw new EpError(
      'EP_MEMORY_LIMIT',
      `allocate: ${ranks === 1 ? '1 rank' : `${ranks} ranks`} with ${byteLength} bytes and ${signalSlots} signal slots each do not fit: ${why} leaves ${left} bytes on ${formatRanks([world.ranks[position]!])}${advice}`,
      { context: { ...size, worldSize: asked.length, limit: why, left, ranks: [world.ranks[position]!] } },
    );
  };
  const tightest = asked.reduce(
    (least, { allocatable }, at) => (allocatable < asked[least]!.allocatable ? at : least),
    0,
  );
  const { allocatable: left, source } = asked[tightest]!;
  if (ranksOnHost * partBytes(size) > left) refuse(ranksOnHost, source, left, tightest);
  if (!pins) return;
  const ofProcess = new Map<number, number>();
  for (const { pid } of asked) ofProcess.set(pid, (ofProcess.get(pid) ?? 0) + 1);
  for (const [position, { pid, pinnable }] of asked.entries()) {
    const ranks = ofProcess.get(pid)!;
    if (ranks * partBytes(size) > pinnable)
      refuse(ranks, 'RLIMIT_MEMLOCK', pinnable, position, '; raise it (ulimit -l)');
  }
}
