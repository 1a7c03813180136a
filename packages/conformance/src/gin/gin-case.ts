/** What the cases of GIN contexts ask of a transport, as @ep/efa-gda offers it: they cannot import it. */
import type { Need, SymmetricMemory, Transport, WaitOptions } from '@ep/core';
import type { GinCall } from '@ep/native';
import type { CaseRank } from '../cases/case.js';

export type GinSharing = 'device' | 'block' | 'thread';

export interface GinOptions extends WaitOptions {
  readonly signals: number;
  readonly counters: number;
  readonly sharing?: GinSharing;
}

export interface GinContext {
  run(memory: SymmetricMemory, calls: readonly GinCall[], options?: WaitOptions): Promise<readonly bigint[]>;
  readSignal(id: number): bigint;
  readCounter(id: number): bigint;
  close(): Promise<void>;
}

export interface GinTransport extends Transport<Need> {
  openGin(options: GinOptions): Promise<GinContext>;
}

export interface GinCase {
  /** `gin/what`: the key in the committed outcomes. */
  readonly id: string;
  readonly sentence: string;
  readonly body: (rank: CaseRank) => Promise<void>;
}

/** A transport, a memory and a context of this rank. Collective. */
export async function openGin(rank: CaseRank, options: GinOptions, byteLength = 4096) {
  const transport = (await rank.open()) as GinTransport;
  const memory = await transport.allocate({ byteLength, signalSlots: 2 });
  return { transport, memory, gin: await transport.openGin(options) };
}
