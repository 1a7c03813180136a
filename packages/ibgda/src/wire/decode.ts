/** Bytes to work requests, with everything that is wrong with them. */
import { EpError } from '@ep/core';
import {
  EP_MLX5_DS_BYTES,
  EP_MLX5_INLINE,
  EP_MLX5_OPCODE_ATOMIC_CS,
  EP_MLX5_OPCODE_ATOMIC_FA,
  EP_MLX5_OPCODE_ATOMIC_MASKED_CS,
  EP_MLX5_OPCODE_ATOMIC_MASKED_FA,
  EP_MLX5_OPCODE_NOP,
  EP_MLX5_OPCODE_RDMA_READ,
  EP_MLX5_OPCODE_RDMA_WRITE,
  EP_MLX5_OPCODE_RDMA_WRITE_IMM,
  EP_MLX5_OPCODE_SEND,
  EP_MLX5_OPMOD_ATOMIC_4,
  EP_MLX5_OPMOD_ATOMIC_8,
  mlx5CtrlBits,
  mlx5RaddrSegLayout,
  readMlx5AtomicSeg,
  readMlx5DataSeg,
  readMlx5MaskedCas4Seg,
  readMlx5MaskedCas8Seg,
  readMlx5MaskedFa4Seg,
  readMlx5MaskedFa8Seg,
  readMlx5RaddrSeg,
} from '@ep/native/abi';
import { hex, readBits, strayBits, type Violation } from '@ep/native/wire';
import type { CompletionMode, DataSegment, DecodedWqe, Payload, RemoteAddress, WqeBody, WqeHead } from './wqe.js';

/** Indexed by the control segment's ce field. */
const completions: readonly (CompletionMode | undefined)[] = ['on-error', 'on-first-error', 'always', undefined];

const maskedOpcodes: readonly number[] = [EP_MLX5_OPCODE_ATOMIC_MASKED_FA, EP_MLX5_OPCODE_ATOMIC_MASKED_CS];
const plainAtomics: readonly number[] = [EP_MLX5_OPCODE_ATOMIC_FA, EP_MLX5_OPCODE_ATOMIC_CS];

/** Reads one work request from its start, noting what is wrong. */
class Reader {
  readonly violations: Violation[] = [];
  at = EP_MLX5_DS_BYTES;

  constructor(
    readonly view: DataView,
    /** Bytes that the control segment gives it, and that are there. */
    readonly end: number,
  ) {}

  expect(holds: boolean, offset: number, field: string, expected: string, found: string): void {
    if (!holds) this.violations.push({ offset, field, expected, found });
  }

  /** Where the next `byteLength` bytes begin, or undefined if they are not all there. */
  take(byteLength: number, what: string): number | undefined {
    const at = this.at;
    const there = at + byteLength <= this.end;
    this.expect(there, at, what, `${byteLength} bytes within ds`, `${Math.max(0, this.end - at)}`);
    if (!there) return undefined;
    this.at = at + byteLength;
    return at;
  }

  zero(at: number, byteLength: number, field: string): void {
    for (let i = 0; i < byteLength; i++) {
      const byte = this.view.getUint8(at + i);
      this.expect(byte === 0, at + i, field, '0', hex(byte));
    }
  }

  remote(): RemoteAddress | undefined {
    const at = this.take(EP_MLX5_DS_BYTES, 'remote address segment');
    if (at === undefined) return undefined;
    this.zero(at + mlx5RaddrSegLayout.offset.reserved, 4, 'raddr.reserved');
    const { raddr, rkey } = readMlx5RaddrSeg(this.view, at);
    return { address: raddr, rkey };
  }

  segments(): DataSegment[] {
    const segments: DataSegment[] = [];
    while (this.at < this.end) {
      const at = this.take(EP_MLX5_DS_BYTES, 'data segment');
      if (at === undefined) break;
      const { byteCount, lkey, addr } = readMlx5DataSeg(this.view, at);
      this.expect(byteCount !== 0, at, 'data.byte_count', 'not 0: leave the segment out', '0');
      this.expect(byteCount < EP_MLX5_INLINE, at, 'data.byte_count', 'no inline flag here', hex(byteCount));
      segments.push({ address: addr, lkey, byteLength: byteCount });
    }
    return segments;
  }

  payload(): Payload {
    const isInline = this.at + 4 <= this.end && this.view.getUint32(this.at) >= EP_MLX5_INLINE;
    if (!isInline) return { segments: this.segments() };
    const byteLength = this.view.getUint32(this.at) - EP_MLX5_INLINE;
    const start = this.at;
    const at = this.take(Math.ceil((4 + byteLength) / EP_MLX5_DS_BYTES) * EP_MLX5_DS_BYTES, 'inline data');
    this.expect(at === undefined || this.at === this.end, this.at, 'ds', 'nothing after inline data', 'more segments');
    if (at === undefined) return { inline: new Uint8Array(0) };
    return { inline: new Uint8Array(this.view.buffer, this.view.byteOffset + start + 4, byteLength).slice() };
  }

  result(width: 4 | 8): DataSegment | undefined {
    const at = this.at;
    const [segment, ...more] = this.segments();
    this.expect(
      segment !== undefined && more.length === 0,
      at,
      'ds',
      'one data segment',
      `${more.length + (segment === undefined ? 0 : 1)}`,
    );
    if (segment === undefined) return undefined;
    this.expect(segment.byteLength === width, at, 'data.byte_count', `${width}`, `${segment.byteLength}`);
    return segment;
  }
}

function readAtomic(reader: Reader, opcode: number, width: 4 | 8): WqeBody | undefined {
  const { view } = reader;
  const remote = reader.remote();
  if (remote === undefined) return undefined;
  const aligned = remote.address % BigInt(width) === 0n;
  reader.expect(aligned, EP_MLX5_DS_BYTES, 'raddr.address', `a multiple of ${width}`, hex(remote.address));
  const at = reader.take(opcode === EP_MLX5_OPCODE_ATOMIC_MASKED_CS && width === 8 ? 32 : 16, 'atomic segment');
  if (at === undefined) return undefined;
  const result = reader.result(width);
  if (result === undefined) return undefined;
  if (opcode === EP_MLX5_OPCODE_ATOMIC_FA) {
    const { swapAdd, compare } = readMlx5AtomicSeg(view, at);
    reader.expect(compare === 0n, at + 8, 'atomic.compare', '0 for a fetch-add', hex(compare));
    return { op: 'fetch-add', remote, add: swapAdd, result };
  }
  if (opcode === EP_MLX5_OPCODE_ATOMIC_CS) {
    const { swapAdd, compare } = readMlx5AtomicSeg(view, at);
    return { op: 'compare-swap', remote, swap: swapAdd, compare, result };
  }
  if (opcode === EP_MLX5_OPCODE_ATOMIC_MASKED_FA) {
    if (width === 8) return { op: 'masked-fetch-add', width, remote, ...readMlx5MaskedFa8Seg(view, at), result };
    reader.zero(at + 8, 8, 'atomic.reserved');
    const { add, boundary } = readMlx5MaskedFa4Seg(view, at);
    return { op: 'masked-fetch-add', width, remote, add: BigInt(add), boundary: BigInt(boundary), result };
  }
  if (width === 8) return { op: 'masked-compare-swap', width, remote, ...readMlx5MaskedCas8Seg(view, at), result };
  const { swap, compare, swapMask, compareMask } = readMlx5MaskedCas4Seg(view, at);
  return {
    op: 'masked-compare-swap',
    width,
    remote,
    swap: BigInt(swap),
    compare: BigInt(compare),
    swapMask: BigInt(swapMask),
    compareMask: BigInt(compareMask),
    result,
  };
}

function readBody(reader: Reader, opcode: number, opmod: number, imm: number): WqeBody | undefined {
  switch (opcode) {
    case EP_MLX5_OPCODE_NOP:
      return { op: 'nop' };
    case EP_MLX5_OPCODE_SEND:
      return { op: 'send', payload: reader.payload() };
    case EP_MLX5_OPCODE_RDMA_WRITE:
    case EP_MLX5_OPCODE_RDMA_WRITE_IMM: {
      const remote = reader.remote();
      if (remote === undefined) return undefined;
      const payload = reader.payload();
      return opcode === EP_MLX5_OPCODE_RDMA_WRITE
        ? { op: 'write', remote, payload }
        : { op: 'write-imm', remote, payload, imm };
    }
    case EP_MLX5_OPCODE_RDMA_READ: {
      const remote = reader.remote();
      return remote && { op: 'read', remote, into: reader.segments() };
    }
    default:
      if (plainAtomics.includes(opcode)) return readAtomic(reader, opcode, 8);
      if (!maskedOpcodes.includes(opcode)) {
        reader.expect(false, 3, 'ctrl.opcode', 'one of a send queue', hex(opcode, 2));
        return undefined;
      }
      return opmod === EP_MLX5_OPMOD_ATOMIC_4 || opmod === EP_MLX5_OPMOD_ATOMIC_8
        ? readAtomic(reader, opcode, opmod === EP_MLX5_OPMOD_ATOMIC_8 ? 8 : 4)
        : undefined;
  }
}

/**
 * The work request that begins with the first byte; what follows it is ignored. Bytes that break the format are told in `violations`, also such as
 * hardware may not look at. Throws `EP_INVALID_ARGUMENT` if there is not even a control segment.
 */
export function decodeWqe(bytes: Uint8Array): DecodedWqe {
  if (bytes.byteLength < EP_MLX5_DS_BYTES) {
    const found = `${bytes.byteLength} bytes`;
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `a work request begins with a control segment of 16 bytes, found ${found}`,
    );
  }
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const ctrl = readBits(mlx5CtrlBits, view);
  const byteLength = ctrl.ds * EP_MLX5_DS_BYTES;
  const reader = new Reader(view, Math.min(byteLength, bytes.byteLength));
  reader.expect(ctrl.ds > 0, 4, 'ctrl.ds', 'at least 1', '0');
  reader.expect(byteLength <= bytes.byteLength, 4, 'ctrl.ds', `at most ${bytes.byteLength} bytes`, `${byteLength}`);
  for (const { offset, bits } of strayBits(new DataView(view.buffer, view.byteOffset, 16), [[mlx5CtrlBits, 0]])) {
    reader.expect(false, offset, 'ctrl reserved bits', '0', hex(bits, 8));
  }
  const completion = completions[ctrl.ce];
  reader.expect(completion !== undefined, 11, 'ctrl.ce', '0, 1 or 2', '3');
  reader.expect(ctrl.fence <= 4, 11, 'ctrl.fence', 'at most 4', `${ctrl.fence}`);
  reader.expect(ctrl.dciStream === 0, 9, 'ctrl.dci_stream', '0 on a reliable connection', hex(ctrl.dciStream));
  const masked = maskedOpcodes.includes(ctrl.opcode);
  const opmods = masked ? [EP_MLX5_OPMOD_ATOMIC_4, EP_MLX5_OPMOD_ATOMIC_8] : [0];
  reader.expect(opmods.includes(ctrl.opmod), 0, 'ctrl.opmod', opmods.join(' or '), hex(ctrl.opmod));
  const mayHaveImm = ctrl.opcode === EP_MLX5_OPCODE_RDMA_WRITE_IMM;
  reader.expect(mayHaveImm || ctrl.imm === 0, 12, 'ctrl.imm', '0 without immediate data', hex(ctrl.imm, 8));

  const body = readBody(reader, ctrl.opcode, ctrl.opmod, ctrl.imm);
  if (body?.op === 'nop') reader.expect(ctrl.ds === 1, 4, 'ctrl.ds', '1 for a NOP', `${ctrl.ds}`);
  const head: WqeHead = {
    index: ctrl.index,
    qpn: ctrl.qpn,
    completion: completion ?? 'always',
    ...(ctrl.fence === 0 ? {} : { fence: ctrl.fence }),
    ...(ctrl.solicited === 0 ? {} : { solicited: true }),
    ...(ctrl.signature === 0 ? {} : { signature: ctrl.signature }),
  };
  const wqe = body === undefined || completion === undefined ? undefined : { ...head, ...body };
  return { wqe, opcode: ctrl.opcode, byteLength, violations: reader.violations };
}
