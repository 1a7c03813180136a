/** Work requests and completions for people: the bytes, and beside each segment what they say. */
import { EP_MLX5_SYNDROME_FLUSHED } from '@ep/native/abi';
import { hex, rows, violationRows } from '@ep/native/wire';
import { decodeCommand } from './command.js';
import { decodeCqe } from './cqe.js';
import { decodeWqe } from './decode.js';
import { opcodeName, syndromeName } from './names.js';
import { type DataSegment, type DecodedWqe, type Payload, type RemoteAddress, type Wqe, wqeBlocks } from './wqe.js';

const SEGMENT_BYTES = 16;

const address = (value: bigint): string => hex(value, 12);

const headText = (wqe: Wqe, decoded: DecodedWqe): string =>
  [
    `${opcodeName(decoded.opcode)} index ${wqe.index} qp ${hex(wqe.qpn)} ds ${decoded.byteLength / SEGMENT_BYTES}`,
    `completion ${wqe.completion}`,
    ...(wqe.fence === undefined ? [] : [`fence ${wqe.fence}`]),
    ...(wqe.solicited === true ? ['solicited'] : []),
    ...(wqe.op === 'write-imm' ? [`imm ${hex(wqe.imm, 8)}`] : []),
  ].join(', ');

const remoteText = (remote: RemoteAddress): string => `remote ${address(remote.address)} rkey ${hex(remote.rkey)}`;

const segmentText = ({ address: at, lkey, byteLength }: DataSegment): string =>
  `${byteLength} bytes at ${address(at)} lkey ${hex(lkey)}`;

const payloadTexts = (payload: Payload): string[] =>
  'inline' in payload ? [`${payload.inline.byteLength} bytes inline`] : payload.segments.map(segmentText);

/** One text for each segment after the control segment. */
function bodyTexts(wqe: Wqe): string[] {
  switch (wqe.op) {
    case 'nop':
      return [];
    case 'send':
      return payloadTexts(wqe.payload);
    case 'write':
    case 'write-imm':
      return [remoteText(wqe.remote), ...payloadTexts(wqe.payload)];
    case 'read':
      return [remoteText(wqe.remote), ...wqe.into.map(segmentText)];
    case 'fetch-add':
      return [remoteText(wqe.remote), `8 bytes: add ${hex(wqe.add)}`, segmentText(wqe.result)];
    case 'compare-swap': {
      const text = `8 bytes: if ${hex(wqe.compare)} then ${hex(wqe.swap)}`;
      return [remoteText(wqe.remote), text, segmentText(wqe.result)];
    }
    case 'masked-fetch-add': {
      const text = `${wqe.width} bytes: add ${hex(wqe.add)}, carries stop at ${hex(wqe.boundary)}`;
      return [remoteText(wqe.remote), text, segmentText(wqe.result)];
    }
    case 'masked-compare-swap': {
      const values = `${wqe.width} bytes: if ${hex(wqe.compare)} then ${hex(wqe.swap)}`;
      const masks = `masks ${hex(wqe.compareMask)}, ${hex(wqe.swapMask)}`;
      const operands = wqe.width === 8 ? [values, masks] : [`${values}, ${masks}`];
      return [remoteText(wqe.remote), ...operands, segmentText(wqe.result)];
    }
  }
}

/** Lines of one work request. `cut`: whoever kept the bytes kept the first of them only. */
export function dumpWqe(bytes: Uint8Array, options?: { readonly cut?: boolean }): string[] {
  const decoded = decodeWqe(bytes);
  if (options?.cut === true && decoded.byteLength > bytes.byteLength) {
    const text = `${opcodeName(decoded.opcode)}, the first ${bytes.byteLength} of ${decoded.byteLength} bytes`;
    return rows(bytes, [text]);
  }
  const { wqe, violations } = decoded;
  const own = bytes.subarray(0, Math.max(SEGMENT_BYTES, decoded.byteLength));
  const texts = wqe === undefined ? [opcodeName(decoded.opcode)] : [headText(wqe, decoded), ...bodyTexts(wqe)];
  return [...rows(own, texts), ...violationRows(violations)];
}

/** The work requests that lie one after the other in a queue, with the byte that each begins at. The rest may be too short to say. */
export function splitQueue(bytes: Uint8Array): { readonly at: number; readonly bytes: Uint8Array }[] {
  const wqes: { at: number; bytes: Uint8Array }[] = [];
  for (let at = 0; at < bytes.byteLength; ) {
    const rest = bytes.subarray(at);
    wqes.push({ at, bytes: rest });
    if (rest.byteLength < SEGMENT_BYTES) break;
    at += wqeBlocks(decodeWqe(rest).byteLength) * 64;
  }
  return wqes;
}

/** Lines of one completion. */
export function dumpCqe(bytes: Uint8Array): string[] {
  const cqe = decodeCqe(bytes);
  if (cqe.kind === 'empty') return [...rows(bytes, ['empty: never written'])];
  const tail = `qp ${hex(cqe.qpn)} ${opcodeName(cqe.wqeOpcode)} index ${cqe.wqeCounter} owner ${cqe.owner}`;
  const texts = ['', '', `user index ${hex(cqe.userIndex)}`, ''];
  if (cqe.kind === 'error') {
    const cause = cqe.syndrome === EP_MLX5_SYNDROME_FLUSHED ? '' : `, vendor syndrome ${hex(cqe.vendorSyndrome, 2)}`;
    texts[3] = `${cqe.side} error ${hex(cqe.syndrome, 2)} (${syndromeName(cqe.syndrome)})${cause}; ${tail}`;
  } else {
    if (cqe.kind === 'write-imm') texts[2] += `, imm ${hex(cqe.imm, 8)}`;
    texts[2] += `, ${cqe.byteCount} bytes`;
    texts[3] = `${cqe.kind === 'done' ? 'done' : 'arrived'}; ${tail}; time ${cqe.timestamp}`;
  }
  return rows(bytes, texts);
}

/** Lines of one DevX command: the fields that are not 0. */
export function dumpCommand(bytes: Uint8Array): string[] {
  const { name, parts, violations } = decodeCommand(bytes);
  const fields = Object.entries(parts).flatMap(([part, values]) =>
    Object.entries(values)
      .filter(([, value]) => BigInt(value) !== 0n)
      .map(([field, value]) => `  ${`${part}.${field}`.padEnd(28)} ${hex(value)}`),
  );
  return [`${name}, ${bytes.byteLength} bytes`, ...fields, ...violationRows(violations)];
}
