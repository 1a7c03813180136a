/** Opens a buffer for experts: allocates its memory on all ranks and checks that they agree. */
import { EpError, isEpError, type Rank } from '@ep/core';
import { native } from '@ep/native';
import { Agreement } from '../agreement.js';
import { checkTransport } from '../check-spec.js';
import type { DispatchTransport } from '../dispatcher-base.js';
import { HostStream } from '../host-stream.js';
import { MoeBuffer } from './buffer.js';
import { describeMoe } from './codes.js';
import {
  beginsAgain,
  formatMember,
  isEmptyPlace,
  type MemberFacts,
  type Membership,
  membershipOf,
  optionsDigest,
  renewOf,
} from './members.js';
import { type MoeBufferOptions, moeLines, type ResolvedMoe, resolveMoe } from './options.js';
import { moeAgreementPlace, moeMemoryBytes, moeSignalSlots, STORES_ONLY } from './place.js';

/**
 * Collective over the ranks that are here. Those that come later take part once they are taken in (`joinMoeBuffer`, `updateMembers`). `EP_MISMATCH` names ranks with other options, `EP_CAPACITY` says when the transport has too few signal slots for this many calls and
 * ranks: there are five words for each call and rank, whatever the number of experts.
 */
export async function openMoeBuffer(transport: DispatchTransport, options: MoeBufferOptions): Promise<MoeBuffer> {
  const where = 'openMoeBuffer';
  const { moe, signalSlots } = checkMoe(transport, options, where);
  const { worldSize } = transport;
  const wait = { timeoutMs: moe.timeoutMs, ...(options.signal ? { signal: options.signal } : {}) };
  const ownStream = options.stream === undefined;
  const memory = await transport.allocate({ byteLength: moeMemoryBytes(moe), signalSlots, ...wait }).catch((error) => {
    if (!isEpError(error) || error.code !== 'EP_MISMATCH') throw error;
    const text = `${where}: ranks gave options that need other sizes; on this rank ${moeLines(moe).slice(0, 5).join(', ')}: ${error.message}`;
    throw new EpError('EP_MISMATCH', text, { context: error.context, cause: error });
  });
  let stream: HostStream | undefined;
  try {
    const endpoints = await Promise.all(
      Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)),
    );
    const present = Array.from({ length: worldSize }, (_, rank) => rank).filter(
      (rank) => !isEmptyPlace(transport, rank),
    );
    const agreement = new Agreement(transport, memory, endpoints, moeAgreementPlace(moe), present);
    // A rank that fails here still takes part: the others must hear of it instead of waiting for it.
    let made: MoeBuffer | undefined;
    let refused: { readonly reason: unknown } | undefined;
    try {
      stream = options.stream ?? new HostStream();
      const handle = transport.device(memory);
      if (moe.zeroCopyCombine && handle.kind !== STORES_ONLY) {
        const text = `${where}: zeroCopyCombine needs a transport over which all ranks read each other's memory, found ${transport.name} (${handle.kind})`;
        throw new EpError('EP_UNSUPPORTED', text, { context: { transport: transport.name, kind: handle.kind } });
      }
      const buffer = new (native().binding.MoeBuffer)(describeMoe(moe, handle.bytes));
      const init = { moe, transport, memory, endpoints, stream, ownStream, handle, native: buffer };
      made = new MoeBuffer({ ...init, membership: { calls: 0, present } });
    } catch (reason) {
      refused = { reason };
    }
    await agreement.conclude(where, refused, moeLines(moe), wait);
    return made!;
  } catch (error) {
    if (ownStream) await stream?.close();
    await memory.close();
    throw error;
  }
}

/**
 * Instead of `openMoeBuffer`, on a rank that has come later, into an empty place or that of a dead one (`nvshmem.shm.rejoin`): collective with the others' `updateMembers`, whose errors it shares.
 * The options are those that the others have opened the buffer with. The rank takes part from the others' next call on.
 */
export async function joinMoeBuffer(transport: DispatchTransport, options: MoeBufferOptions): Promise<MoeBuffer> {
  const where = 'joinMoeBuffer';
  const { moe, signalSlots } = checkMoe(transport, options, where);
  const renew = renewOf(transport, where);
  const { worldSize } = transport;
  const endpoints = await Promise.all(Array.from({ length: worldSize }, (_, peer) => transport.connect(peer as Rank)));
  const ownStream = options.stream === undefined;
  const stream = options.stream ?? new HostStream();
  const facts: MemberFacts = { calls: 0, options: optionsDigest(moe), lost: [] };
  let membership: Membership | undefined;
  let made: MoeBuffer | undefined;
  try {
    await renew({
      byteLength: moeMemoryBytes(moe),
      signalSlots,
      facts: formatMember(facts),
      timeoutMs: moe.timeoutMs,
      ...(options.signal ? { signal: options.signal } : {}),
      check: (said) => {
        membership = membershipOf(said, where, beginsAgain(transport));
      },
      settle: (memory) => {
        const handle = transport.device(memory);
        const buffer = new (native().binding.MoeBuffer)(describeMoe(moe, handle.bytes));
        const init = { moe, transport, memory, endpoints, stream, ownStream, handle, native: buffer };
        made = new MoeBuffer({ ...init, membership: membership! });
      },
    });
    return made!;
  } catch (error) {
    if (ownStream) await stream.close();
    throw error;
  }
}

function checkMoe(
  transport: DispatchTransport,
  options: MoeBufferOptions,
  where: string,
): { readonly moe: ResolvedMoe; readonly signalSlots: number } {
  checkTransport(transport, where);
  const { worldSize, capabilities } = transport;
  const moe = resolveMoe(options, worldSize, where);
  const signalSlots = moeSignalSlots(moe);
  if (signalSlots <= capabilities.maxSignalSlots) return { moe, signalSlots };
  throw new EpError(
    'EP_CAPACITY',
    `${where}: ${moe.calls} calls over ${worldSize} ranks need ${signalSlots} signal slots, ${transport.name} has ${capabilities.maxSignalSlots}`,
    { context: { needed: signalSlots, available: capabilities.maxSignalSlots } },
  );
}
