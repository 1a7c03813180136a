/** Work requests and completions for people: the bytes, and beside each row what they say. */
import { EP_EFA_STATUS_OK } from '@ep/native/abi';
import { hex, rows, violationRows } from '@ep/native/wire';
import { type Cqe, decodeCqe } from './cqe.js';
import { decodeWqe } from './decode.js';
import { segmentBytes } from './encode.js';
import { opcodeName, statusName } from './names.js';
import { decodeReceive } from './receive.js';
import type { DataSegment, Payload, RemoteAddress, Wqe } from './wqe.js';

const address = (value: bigint): string => hex(value, 12);

const immTexts = (value: { readonly imm?: number }): string[] =>
  value.imm === undefined ? [] : [`imm ${hex(value.imm, 8)}`];

const headText = (wqe: Wqe, opcode: number): string =>
  [
    `${opcodeName(opcode)} request ${hex(wqe.requestId)} to qp ${hex(wqe.qpn)} ah ${hex(wqe.ah)}`,
    `phase ${wqe.phase}`,
    wqe.completion ? 'completion' : 'no completion',
    ...(wqe.hints === undefined ? [] : [`hints ${hex(wqe.hints)}`]),
    ...(wqe.op === 'read' ? [] : immTexts(wqe)),
  ].join(', ');

const segmentText = ({ address: at, lkey, byteLength }: DataSegment): string =>
  `${byteLength} bytes at ${address(at)} lkey ${hex(lkey)}`;

const payloadTexts = (payload: Payload): string[] =>
  'inline' in payload ? [`${payload.inline.byteLength} bytes inline`] : payload.segments.map(segmentText);

const remoteText = ({ address: at, rkey }: RemoteAddress, byteLength: number): string =>
  `${byteLength} bytes, remote ${address(at)} rkey ${hex(rkey)}`;

/** One text for each row after the head's two. */
function bodyTexts(wqe: Wqe): string[] {
  if (wqe.op === 'send') return payloadTexts(wqe.payload);
  const payload: Payload = wqe.op === 'read' ? { segments: wqe.into } : wqe.payload;
  const byteLength = 'inline' in payload ? payload.inline.byteLength : segmentBytes(payload.segments);
  return [remoteText(wqe.remote, byteLength), ...payloadTexts(payload)];
}

/** Lines of one work request. */
export function dumpWqe(bytes: Uint8Array): string[] {
  const { wqe, opcode, violations } = decodeWqe(bytes);
  const texts =
    wqe === undefined ? [opcodeName(opcode)] : [headText(wqe, opcode), `qkey ${hex(wqe.qkey, 8)}`, ...bodyTexts(wqe)];
  return [...rows(bytes, texts), ...violationRows(violations)];
}

function cqeText(cqe: Exclude<Cqe, { readonly kind: 'empty' }>): string {
  const ok = cqe.status === EP_EFA_STATUS_OK;
  const outcome = ok ? '' : `, status ${cqe.status} (${statusName(cqe.status)})`;
  const verb = cqe.kind === 'received' ? 'received' : 'done';
  return [
    `${ok ? verb : 'failed'} ${opcodeName(cqe.opcode)} request ${hex(cqe.requestId)}${outcome}`,
    `qp ${hex(cqe.qpn)}`,
    `phase ${cqe.phase}`,
    ...(cqe.kind === 'received'
      ? [
          `${cqe.byteCount} bytes from qp ${hex(cqe.sourceQpn)} ${cqe.ah === undefined ? 'ah unknown' : `ah ${hex(cqe.ah)}`}`,
          ...immTexts(cqe),
        ]
      : []),
    ...(cqe.unsolicited === true ? ['unsolicited'] : []),
  ].join(', ');
}

/** Lines of one completion. */
export function dumpCqe(bytes: Uint8Array): string[] {
  const cqe = decodeCqe(bytes);
  if (cqe.kind === 'empty') return rows(bytes, ['empty: never written']);
  const from = cqe.kind === 'received' ? cqe.sourceAddress : undefined;
  return rows(bytes, [cqeText(cqe), ...(from === undefined ? [] : ['address of the sender'])]);
}

/** Lines of one receive buffer. */
export function dumpReceive(bytes: Uint8Array): string[] {
  const { receive, violations } = decodeReceive(bytes);
  const marks = [...(receive.first ? ['first'] : []), ...(receive.last ? ['last'] : [])];
  const text = [`request ${hex(receive.requestId)}: ${segmentText(receive)}`, ...marks].join(', ');
  return [...rows(bytes, [text]), ...violationRows(violations)];
}
