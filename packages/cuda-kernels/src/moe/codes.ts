/** A buffer in the numbers of native/include/ep/abi/moe.h. */
import {
  EP_MOE_BF16,
  EP_MOE_F8_F32,
  EP_MOE_F8_F32_POW2,
  EP_MOE_F8_UE8M0,
  EP_MOE_F16,
  EP_MOE_F32,
  EP_MOE_HIGH_THROUGHPUT,
  EP_MOE_LOGFMT10,
  EP_MOE_LOW_LATENCY,
  type MoeDescription,
} from '@ep/native';
import type { MoeDType, ResolvedMoe } from './options.js';
import { moeParts } from './place.js';

const DTYPES: Readonly<Record<MoeDType, number>> = { f32: EP_MOE_F32, f16: EP_MOE_F16, bf16: EP_MOE_BF16 };

export const dtypeCode = (dtype: MoeDType): number => DTYPES[dtype];

export function payloadCode({ payload, roundScales }: Pick<ResolvedMoe, 'payload' | 'roundScales'>): number {
  switch (payload) {
    case 'f8e4m3+f32':
      return roundScales ? EP_MOE_F8_F32_POW2 : EP_MOE_F8_F32;
    case 'f8e4m3+ue8m0':
      return EP_MOE_F8_UE8M0;
    default:
      return dtypeCode(payload);
  }
}

/** What does not depend on where the buffer lies. */
export function moeForm(moe: ResolvedMoe): Omit<MoeDescription, 'handle' | 'blocks' | 'simt'> {
  const { map } = moe;
  return {
    mode: moe.mode === 'low-latency' ? EP_MOE_LOW_LATENCY : EP_MOE_HIGH_THROUGHPUT,
    payload: payloadCode(moe),
    resultPayload: moe.combinePayload === 'logfmt10' ? EP_MOE_LOGFMT10 : dtypeCode(moe.combinePayload),
    hidden: moe.hidden,
    maxTokens: moe.maxTokens,
    topK: moe.topK,
    calls: moe.calls,
    alignment: moe.alignment,
    recvRows: moe.recvRows,
    staged: moe.staged,
    zeroCopy: moe.zeroCopyCombine,
    parts: moeParts(moe),
    firstSignal: 0,
    experts: map.experts,
    replicaRank: map.rank,
    replicaExpert: map.expert,
    rankBegin: map.rankOffsets,
  };
}

export function describeMoe(moe: ResolvedMoe, handle: Uint8Array): MoeDescription {
  const { blocks, simt } = moe;
  return { ...moeForm(moe), handle, blocks, ...(simt === undefined ? {} : { simt }) };
}
