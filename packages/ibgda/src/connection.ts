/** Connection data as plain values: what the structs of `ep/abi/ibgda_peer.h` and `ibgda.h` carry, in a form that JSON takes and people read. */
import type { Rank } from '@ep/core';
import {
  EP_ABI_MAJOR,
  EP_ABI_MINOR,
  EP_IBGDA_LINK_ETHERNET,
  EP_IBGDA_LINK_INFINIBAND,
  EP_MAGIC_IBGDA_PEER,
  EP_MLX5_MTU_256,
  EP_MLX5_MTU_4096,
  ibgdaPeerLayout,
  ibgdaRemoteLayout,
  readIbgdaPeer,
  readIbgdaRemote,
  writeIbgdaPeer,
  writeIbgdaRemote,
} from '@ep/native/abi';
import { hex } from '@ep/native/wire';

/** What peers need to connect their queue pairs to a rank's. */
export interface IbgdaConnection {
  readonly link: 'infiniband' | 'ethernet';
  /** Of its port: eight groups of four hexadecimal digits. */
  readonly gid: string;
  /** Of its port; 0 on Ethernet. */
  readonly lid: number;
  /** 1 or 2; 0 on InfiniBand. */
  readonly roceVersion: number;
  /** Bytes of a packet: 256, 512, 1024, 2048 or 4096. Both ends use the smaller one, here and below. */
  readonly mtu: number;
  /** Bytes of a message at most, a power of two. */
  readonly maxMessageBytes: number;
  /** Reads and atomics under way on a queue pair at most, a power of two. */
  readonly outstanding: number;
  /** Numbers of its queue pairs, of 24 bits: for each rank those to it. */
  readonly qpns: readonly (readonly number[])[];
  /** For each of them the number of the first packet that it awaits, of 24 bits. */
  readonly startingPsns: readonly (readonly number[])[];
}

/** Where a rank's part of a memory lies, and by which keys its NIC lets peers in. Addresses are hexadecimal: `0x7f00aa10`. */
export interface IbgdaPart {
  readonly address: string;
  readonly rkey: number;
  readonly signals: string;
  readonly signalsRkey: number;
}

/** Makes the error for a field that is not as expected. */
export type Refuse = (field: string, expected: string, found: unknown) => Error;

/** Whose value is read, and what of it was told here: of the same length there. */
export interface ReadingFrom {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly like: Uint8Array;
  readonly refuse: Refuse;
}

const viewOf = (bytes: Uint8Array): DataView => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

type Fields = Readonly<Record<string, unknown>>;

function fieldsOf(value: unknown, field: string, refuse: Refuse): Fields {
  if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value as Fields;
  throw refuse(field, 'an object', value);
}

function integerOf(value: unknown, field: string, [least, most]: readonly [number, number], refuse: Refuse): number {
  if (typeof value === 'number' && Number.isInteger(value) && value >= least && value <= most) return value;
  throw refuse(field, `an integer from ${least} to ${most}`, value);
}

/** The exponent of a power of two. */
function logOf(value: unknown, field: string, [least, most]: readonly [number, number], refuse: Refuse): number {
  const log = typeof value === 'number' ? Math.log2(value) : Number.NaN;
  if (Number.isInteger(log) && log >= least && log <= most) return log;
  throw refuse(field, `a power of two from ${2 ** least} to ${2 ** most}`, value);
}

function addressOf(value: unknown, field: string, refuse: Refuse): bigint {
  if (typeof value === 'string' && /^0x[0-9a-f]{1,16}$/.test(value)) return BigInt(value);
  throw refuse(field, '0x and at most 16 hexadecimal digits', value);
}

// ---- what has no fields for others

export const formatBytes = (bytes: Uint8Array): string => Buffer.from(bytes).toString('hex');

export function readBytes(value: unknown, field: string, { like, refuse }: ReadingFrom): Uint8Array {
  const digits = 2 * like.byteLength;
  if (typeof value === 'string' && value.length === digits && /^[0-9a-f]*$/.test(value))
    return Buffer.from(value, 'hex');
  throw refuse(field, `${digits} hexadecimal digits`, value);
}

// ---- connections

const NUMBER_BYTES = 4;
const U24: readonly [number, number] = [0, 2 ** 24 - 1];
const U32: readonly [number, number] = [0, 2 ** 32 - 1];
/** The exponent of MTU_256. */
const MTU_BASE = 8 - EP_MLX5_MTU_256;

const formatGid = (gid: readonly number[]): string => (Buffer.from(gid).toString('hex').match(/.{4}/g) ?? []).join(':');

function gidOf(value: unknown, field: string, refuse: Refuse): number[] {
  if (typeof value === 'string' && /^[0-9a-f]{4}(?::[0-9a-f]{4}){7}$/.test(value))
    return [...Buffer.from(value.replaceAll(':', ''), 'hex')];
  throw refuse(field, 'eight groups of four hexadecimal digits', value);
}

/** Queue pairs of each peer, from the length of what tells two numbers of each. */
const pairsIn = (bytes: Uint8Array, worldSize: number): number =>
  (bytes.byteLength - ibgdaPeerLayout.byteLength) / NUMBER_BYTES / 2 / worldSize;

/** Where the numbers of queue pairs begin, and those of packets. */
const numbersAt = (worldSize: number, pairs: number) => ({
  qpns: ibgdaPeerLayout.byteLength,
  startingPsns: ibgdaPeerLayout.byteLength + worldSize * pairs * NUMBER_BYTES,
});

/** Of this rank's own bytes, as `NativeIbgdaNic.connection` gives them. */
export function formatConnection(bytes: Uint8Array, worldSize: number): IbgdaConnection {
  const view = viewOf(bytes);
  const peer = readIbgdaPeer(view);
  const pairs = pairsIn(bytes, worldSize);
  const at = numbersAt(worldSize, pairs);
  const lists = (begin: number): number[][] =>
    Array.from({ length: worldSize }, (_, to) =>
      Array.from({ length: pairs }, (_, k) => view.getUint32(begin + (to * pairs + k) * NUMBER_BYTES, true)),
    );
  return {
    link: peer.link === EP_IBGDA_LINK_ETHERNET ? 'ethernet' : 'infiniband',
    gid: formatGid(peer.gid),
    lid: peer.lid,
    roceVersion: peer.roceVersion,
    mtu: 2 ** (MTU_BASE + peer.mtu),
    maxMessageBytes: 2 ** peer.logMaxMessage,
    outstanding: 2 ** peer.logOutstanding,
    qpns: lists(at.qpns),
    startingPsns: lists(at.startingPsns),
  };
}

/** The bytes again. What fits together with this rank's port `NativeIbgdaNic.connect` says. */
export function readConnection(value: unknown, field: string, from: ReadingFrom): Uint8Array {
  const { rank, worldSize, like, refuse } = from;
  const fields = fieldsOf(value, field, refuse);
  const at = (name: keyof IbgdaConnection): readonly [unknown, string] => [fields[name], `${field}.${name}`];
  const [link, linkField] = at('link');
  if (link !== 'infiniband' && link !== 'ethernet') throw refuse(linkField, 'infiniband or ethernet', link);
  const pairs = pairsIn(like, worldSize);
  const bytes = new Uint8Array(like.byteLength);
  const view = viewOf(bytes);
  writeIbgdaPeer(view, 0, {
    header: {
      magic: EP_MAGIC_IBGDA_PEER,
      abiMajor: EP_ABI_MAJOR,
      abiMinor: EP_ABI_MINOR,
      kind: 0,
      byteLength: bytes.byteLength,
    },
    rank,
    worldSize,
    qpsPerPeer: pairs,
    gid: gidOf(...at('gid'), refuse),
    lid: integerOf(...at('lid'), [0, 2 ** 16 - 1], refuse),
    link: link === 'ethernet' ? EP_IBGDA_LINK_ETHERNET : EP_IBGDA_LINK_INFINIBAND,
    mtu: logOf(...at('mtu'), [MTU_BASE + EP_MLX5_MTU_256, MTU_BASE + EP_MLX5_MTU_4096], refuse) - MTU_BASE,
    logMaxMessage: logOf(...at('maxMessageBytes'), [0, 30], refuse),
    logOutstanding: logOf(...at('outstanding'), [0, 7], refuse),
    roceVersion: integerOf(...at('roceVersion'), [0, 2], refuse),
  });
  for (const [name, begin] of Object.entries(numbersAt(worldSize, pairs))) {
    const [lists, listsField] = at(name as 'qpns' | 'startingPsns');
    if (!Array.isArray(lists) || lists.length !== worldSize)
      throw refuse(listsField, `lists of numbers, one for each of ${worldSize} ranks`, lists);
    for (const [to, list] of (lists as readonly unknown[]).entries()) {
      if (!Array.isArray(list) || list.length !== pairs)
        throw refuse(`${listsField}[${to}]`, `${pairs} numbers, as here`, list);
      for (const [k, one] of (list as readonly unknown[]).entries()) {
        const known = integerOf(one, `${listsField}[${to}][${k}]`, U24, refuse);
        view.setUint32(begin + (to * pairs + k) * NUMBER_BYTES, known, true);
      }
    }
  }
  return bytes;
}

// ---- memories

export function formatPart(bytes: Uint8Array): IbgdaPart {
  const { data, dataRkey, signals, signalsRkey } = readIbgdaRemote(viewOf(bytes));
  return { address: hex(data), rkey: dataRkey, signals: hex(signals), signalsRkey };
}

export function readPart(value: unknown, field: string, { refuse }: ReadingFrom): Uint8Array {
  const fields = fieldsOf(value, field, refuse);
  const at = (name: keyof IbgdaPart): readonly [unknown, string] => [fields[name], `${field}.${name}`];
  const bytes = new Uint8Array(ibgdaRemoteLayout.byteLength);
  writeIbgdaRemote(viewOf(bytes), 0, {
    data: addressOf(...at('address'), refuse),
    dataRkey: integerOf(...at('rkey'), U32, refuse),
    signals: addressOf(...at('signals'), refuse),
    signalsRkey: integerOf(...at('signalsRkey'), U32, refuse),
  });
  return bytes;
}
