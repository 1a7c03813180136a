/** What has a place in the order of a group's calls. */
import type { EngineCall, EngineEnd, MembershipCall, OpKind } from '../engine.js';
import type { Found } from './admission.js';

/** A call; or a question about who takes part, or a change of it, which goes as a barrier. */
export interface OrderedCall extends EngineCall {
  readonly membership?: Pick<MembershipCall, 'evicted' | 'admitted' | 'size' | 'repairs'> & {
    /** Beside the members. */
    readonly found: Found;
  };
}

export interface OrderedEnd extends EngineEnd {
  /** Of a repair, the call behind which all go on. */
  readonly sequence?: number;
  /** Of a question or change of who takes part, but of a repair: whom all members have found, by rank, and their attempts. */
  readonly found?: ReadonlyMap<number, number>;
}

interface Named {
  readonly kind: OpKind;
  readonly membership?: unknown;
}

/** What ranks hear of it. */
export const nameOf = ({ kind, membership }: Named): OpKind | 'membership' =>
  membership === undefined ? kind : 'membership';
