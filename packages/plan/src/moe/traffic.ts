import { checkObject } from '../check.js';
import { checkMap } from './experts.js';
import { checkMoePlan } from './form.js';
import { alignedRowBytes, messageBytes, type Payload, payloadBytes } from './payload.js';
import type { MoePlan } from './plan.js';

export interface MoeTrafficUnit {
  readonly hidden: number;
  readonly dispatch: Payload;
  readonly combine: Payload;
}

/** Bytes of one direction, by rank. All exact; a choice that does not travel is in none of them. */
export interface DirectionTraffic {
  /** Payload of every choice, own rank included: what peers' benchmarks divide by time ("logical" bandwidth). Dispatch: by sender; combine: by who returns. */
  readonly logicalBytes: Float64Array;
  /** The part of it that stays on its rank. */
  readonly ownRankBytes: Float64Array;
  /** What crosses between ranks, header and alignment included, one message for each choice. */
  readonly wireBytes: Float64Array;
  /** The part of `wireBytes` that also crosses between nodes. */
  readonly nodeWireBytes: Float64Array;
}

export interface MoeTraffic {
  readonly dispatch: DirectionTraffic;
  readonly combine: DirectionTraffic;
  /** What dispatch would put on the wire if a token went to each other rank once, however many of its experts are there. */
  readonly wireOncePerRankBytes: Float64Array;
}

/** The accounting that every printed figure of bytes uses. */
export function moeTraffic(plan: MoePlan, unit: MoeTrafficUnit): MoeTraffic {
  checkMoePlan(plan);
  checkMap(plan.map, 'plan.map');
  checkObject(unit, 'unit');
  const { map, placement, ranksPerNode } = plan;
  const { worldSize } = map;
  const message = messageBytes(unit.dispatch, unit.hidden);
  const there = direction(worldSize);
  const back = direction(worldSize);
  const add = (d: DirectionTraffic, from: number, to: number, rows: number, logical: number, wire: number) => {
    d.logicalBytes[from]! += rows * logical;
    if (from === to) d.ownRankBytes[from]! += rows * logical;
    else d.wireBytes[from]! += rows * wire;
    if (Math.floor(from / ranksPerNode) !== Math.floor(to / ranksPerNode)) d.nodeWireBytes[from]! += rows * wire;
  };
  const sizes = {
    there: payloadBytes(unit.dispatch, unit.hidden),
    back: payloadBytes(unit.combine, unit.hidden),
    row: alignedRowBytes(unit.combine, unit.hidden),
  };
  for (let p = 0; p < map.expert.length; p++) {
    const to = map.rank[p]!;
    for (let s = 0; s < worldSize; s++) {
      const rows = placement.count[p * worldSize + s]!;
      if (rows === 0) continue;
      add(there, s, to, rows, sizes.there, message);
      add(back, to, s, rows, sizes.back, sizes.row);
    }
  }
  const wireOncePerRankBytes = new Float64Array(worldSize);
  for (let s = 0; s < worldSize; s++) {
    for (let r = 0; r < worldSize; r++) {
      const gone = plan.lostRanks[s] === 1 || plan.lostRanks[r] === 1;
      if (r !== s && !gone) wireOncePerRankBytes[s]! += plan.tokensPerRank[s * worldSize + r]! * message;
    }
  }
  return { dispatch: there, combine: back, wireOncePerRankBytes };
}

function direction(worldSize: number): DirectionTraffic {
  return {
    logicalBytes: new Float64Array(worldSize),
    ownRankBytes: new Float64Array(worldSize),
    wireBytes: new Float64Array(worldSize),
    nodeWireBytes: new Float64Array(worldSize),
  };
}
