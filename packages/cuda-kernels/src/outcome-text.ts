/** How a kernel ended, in words. The numbers are of native/include/ep/abi/dispatch.h. */
import {
  EP_NIC_FOUND_INDEX,
  EP_NIC_FOUND_QPN,
  EP_NIC_FOUND_SYNDROME,
  EP_NIC_FOUND_VENDOR,
  EP_STAGE_NIC,
  EP_STAGE_SHARING,
  EP_STAGE_SOURCE,
  type Outcome,
} from '@ep/native';

/** By `EP_STAGE_*`: what was awaited of a rank. */
const STAGE_NAMES = [
  '',
  'to release its receive tensor',
  'to send its chunks',
  'to make room in the queue to it',
  'behind an earlier poster of the queue pair to it',
  'to complete what was posted to it',
];

const hex = (value: bigint): string => `0x${value.toString(16)}`;

const bits = (word: bigint, shift: number, width: number): bigint => BigInt.asUintN(width, word >> BigInt(shift));

function brokenPairText({ rank, expected, found }: Outcome): string {
  if (found === 0n)
    return `this rank's own NIC reaches nobody, rank ${rank} for one: its port is down, it has refused an earlier request, or the device has failed`;
  const pair = `queue pair ${hex(bits(found, EP_NIC_FOUND_QPN, 24))} to rank ${rank}`;
  const index = bits(found, EP_NIC_FOUND_INDEX, 16);
  const syndrome = bits(found, EP_NIC_FOUND_SYNDROME, 8);
  if (syndrome === 0n) return `${pair} was given up by a poster that waited for room for WQE ${index}`;
  const vendor = bits(found, EP_NIC_FOUND_VENDOR, 8);
  return `${pair} failed at WQE ${index}: syndrome ${hex(syndrome)}, vendor syndrome ${hex(vendor)}, remote address ${hex(expected)}`;
}

/** Says who was awaited for what; `verb` says how the wait ended. */
export function outcomeText(outcome: Outcome, verb: string): string {
  const { rank, stage, expected, found } = outcome;
  if (stage === EP_STAGE_NIC) return brokenPairText(outcome);
  if (stage === EP_STAGE_SOURCE) {
    return `a put to rank ${rank} reads ${found} bytes at ${hex(expected)}, which no memory registered with the transport holds`;
  }
  if (stage === EP_STAGE_SHARING) {
    return `${found} blocks post to ${expected} queue pairs of a peer, which blocks may not share: launch fewer blocks, make more queue pairs, or share them between blocks`;
  }
  const who = rank >= 0 ? `rank ${rank} ${STAGE_NAMES[stage] ?? ''}` : 'its peers';
  return `${verb} ${who}: expected count ${expected}, found ${found}`;
}
