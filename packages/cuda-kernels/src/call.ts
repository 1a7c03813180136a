/** The calls of a bound dispatch: what the kernel is told, what its tensors are, and what its failure means. */
import { EpError, formatRanks, type SymmetricMemory, type Tensor, tensor } from '@ep/core';
import {
  codeOfStatus,
  type DispatchDescription,
  type NativeDispatch,
  native,
  nativePlaceOf,
  type Outcome,
} from '@ep/native';
import type { BoundPart, BoundSpec } from './binding-spec.js';
import { arrivalSlot, creditSlot, type Layout, stagingPlace } from './layout.js';
import { outcomeText } from './outcome-text.js';

/** From this payload on, copies go past the caches. */
const NON_TEMPORAL_BYTES = 8 * 1024 * 1024;
/** Up to this payload a call is tried on the calling thread first: copying it takes a few microseconds. */
const INLINE_BYTES = 16 * 1024;

export interface CallPlace {
  readonly layout: Layout;
  readonly memory: SymmetricMemory;
  readonly transportName: string;
  readonly lease: number;
}

/** A bound dispatch in one lease: everything of its calls but sources and counters. */
export interface PreparedCall {
  readonly spec: BoundSpec;
  readonly place: CallPlace;
  readonly dispatch: NativeDispatch;
  /** The received tensors by part name: views of the lease. */
  readonly tensors: Readonly<Record<string, Tensor>>;
  /** Small enough to be tried on the calling thread. */
  readonly inline: boolean;
}

type Staging = NonNullable<DispatchDescription['parts'][number]['staging']>;

/** Send and receive buffers of the staged variant, one of each per part, back to back. */
function stagingOf(spec: BoundSpec, layout: Layout): readonly Staging[] | undefined {
  if (layout.stagingBytes === 0) return undefined;
  const base = stagingPlace(layout);
  let sent = 0;
  let received = 0;
  const buffers = spec.parts.map((part) => {
    const buffer = {
      sendOffset: base + sent,
      recvOffset: base + layout.stagingBytes + received,
      sendRows: part.sendRows,
      recvRows: part.receiveRows,
    };
    sent += part.sendRows * part.rowBytes;
    // The largest receiver's size: offsets of later parts must be the same on all ranks.
    received += part.receiveCapacity * part.rowBytes;
    return buffer;
  });
  const needed = Math.max(sent, received);
  if (needed <= layout.stagingBytes) return buffers;
  throw new EpError(
    'EP_CAPACITY',
    `the dispatch needs staging buffers of ${needed} bytes, this dispatcher has ${layout.stagingBytes} (stagingBytes)`,
    { context: { needed, stagingBytes: layout.stagingBytes } },
  );
}

function sumOf(part: BoundPart, { layout, memory, transportName, lease }: CallPlace): DispatchDescription['sums'] {
  if (part.sum === undefined) return [];
  const local = nativePlaceOf(memory.view('u8', lease * layout.leaseBytes, layout.leaseBytes));
  if (local === undefined) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `the memory of ${transportName} is not in native hands: its views must be registered with @ep/native to sum in it`,
    );
  }
  return [
    {
      source: local.operand,
      srcOffset: local.byteOffset + part.receiveOffset,
      target: local.operand,
      dstOffset: local.byteOffset + part.sum.offset,
      strideBytes: part.rowBytes,
      rowElements: part.rowElements,
      dtype: part.sum.dtype,
      program: part.sum.program,
    },
  ];
}

/** Throws `EP_CAPACITY` or `EP_UNSUPPORTED`. */
export function prepareCall(
  spec: BoundSpec,
  place: CallPlace,
  kernel: Pick<DispatchDescription, 'handle' | 'blocks'> & { readonly simt: DispatchDescription['simt'] },
): PreparedCall {
  const { layout, lease } = place;
  const { simt, ...shared } = kernel;
  const staging = stagingOf(spec, layout);
  const dispatch = new (native().binding.Dispatch)({
    ...shared,
    ...(simt === undefined ? {} : { simt }),
    parts: spec.parts.map((part, i) => ({
      rowBytes: part.rowBytes,
      dstOffset: lease * layout.leaseBytes + part.receiveOffset,
      dstRows: part.receiveCapacity,
      program: part.program,
      ...(staging === undefined ? {} : { staging: staging[i]! }),
    })),
    sums: spec.parts.flatMap((part) => sumOf(part, place)),
    arrivalSlot: arrivalSlot(layout, lease),
    creditSlot: creditSlot(layout, lease),
    nonTemporal: spec.bytesSent >= NON_TEMPORAL_BYTES,
  });
  return {
    spec,
    place,
    dispatch,
    tensors: Object.freeze(Object.fromEntries(spec.parts.map((part) => [part.spec.name, tensorOf(part, place)]))),
    inline: Math.max(spec.bytesSent, spec.bytesReceived) <= INLINE_BYTES,
  };
}

function tensorOf(part: BoundPart, place: CallPlace): Tensor {
  const { dtype, rowShape } = part.spec;
  const rows = part.sum?.rows ?? part.receiveRows;
  const offset = place.lease * place.layout.leaseBytes + (part.sum?.offset ?? part.receiveOffset);
  return tensor(dtype, [rows, ...rowShape], place.memory.view(dtype, offset, rows * part.rowElements));
}

/** Rows that no sender writes hold what an earlier call left there. */
export function zeroGaps({ spec, place }: PreparedCall): void {
  for (const part of spec.parts) {
    if (part.gaps.length === 0 || part.sum !== undefined) continue;
    const offset = place.lease * place.layout.leaseBytes + part.receiveOffset;
    const bytes = place.memory.view('u8', offset, part.receiveRows * part.rowBytes);
    for (const [row, rows] of part.gaps) bytes.fill(0, row * part.rowBytes, (row + rows) * part.rowBytes);
  }
}

/** Says who was awaited for what, and from whom something is still missing. */
export function callError(name: string, outcome: Outcome, place: CallPlace, counters: Float64Array): EpError {
  const code = codeOfStatus(outcome.status);
  const first = arrivalSlot(place.layout, place.lease);
  const late = Array.from(counters.subarray(0, place.layout.worldSize), (expected, rank) =>
    place.memory.signals.peek(first + rank) < expected ? [rank] : [],
  ).flat();
  const verb =
    code === 'EP_PEER_LOST' ? 'lost' : code === 'EP_TIMEOUT' ? 'timed out waiting for' : 'ended while waiting for';
  const missing = late.length > 0 ? `; incomplete from ${formatRanks(late)}` : '';
  const text = outcome.message ?? `${outcomeText(outcome, verb)}${missing}`;
  return new EpError(code, `${name}: ${text}`, {
    context: {
      rank: outcome.rank,
      stage: outcome.stage,
      expected: outcome.expected,
      found: outcome.found,
      awaited: late,
    },
  });
}
