/** How calls of a group on a device end badly: from what a kernel leaves behind to an error that names ranks of the group. */
import { EpError, formatRanks } from '@ep/core';
import { codeOfStatus, EP_STAGE_ARRIVAL, EP_STAGE_RANGE, groupHeadLayout, type Outcome } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import type { GroupTransport } from '../backends.js';
import type { DeviceCall } from '../engine.js';
import { describeCall, differentCalls } from '../portable/signature.js';
import { describeSignature, signatureOf } from './signature.js';

/** A transport that can say which of its ranks have died, as `nvshmem.cuda` can. */
interface KnowsLost {
  readonly lostRanks: () => readonly number[];
}

interface CallFailuresInit {
  /** This rank, of the group. */
  readonly rank: number;
  /** World rank of each member. */
  readonly ranks: readonly number[];
  readonly transport: GroupTransport;
  readonly memory: DeviceMemory;
  /** Where slots of calls begin. */
  readonly byteOffset: number;
  readonly slotBytes: number;
}

export class CallFailures {
  readonly #init: CallFailuresInit;
  #first: { readonly reason: unknown } | undefined;

  constructor(init: CallFailuresInit) {
    this.#init = init;
  }

  /** A call has failed that the device had begun. */
  poison(reason: unknown): void {
    this.#first ??= { reason };
  }

  /** Throws `EP_POISONED` after a failure. */
  check(where: string): void {
    if (this.#first !== undefined) throw this.#poisoned(where);
  }

  async errorOf(call: DeviceCall, outcome: Outcome): Promise<EpError> {
    const { rank: self, ranks: members, transport } = this.#init;
    const code = codeOfStatus(outcome.status);
    const { sequence, kind, timeoutMs } = call;
    const where = `call ${sequence}: ${kind}`;
    const context = { sequence, kind };
    const whom = members.indexOf(outcome.rank);
    // Peers hear of a failure before they hear of the death that was its reason.
    const lost = ((transport as Partial<KnowsLost>).lostRanks?.() ?? [])
      .map((rank) => members.indexOf(rank))
      .filter((rank) => rank >= 0)
      .sort((a, b) => a - b);
    if (lost.length > 0 && code !== 'EP_MISMATCH' && code !== 'EP_SYSTEM') {
      return new EpError('EP_PEER_LOST', `${where}: ${formatRanks(lost)} died or closed the transport`, {
        context: { ...context, lost },
      });
    }
    const ranks = [...members.keys()];
    const missing = ranks.filter((rank) => ((outcome.found >> BigInt(rank)) & 1n) === 1n);
    switch (code) {
      case 'EP_TIMEOUT': {
        const awaited = missing.length > 0 ? missing : [whom];
        const arrived = ranks.filter((rank) => !awaited.includes(rank));
        return new EpError(
          code,
          `${where}: timed out after ${timeoutMs} ms; awaited ${formatRanks(awaited)}; ${formatRanks(arrived)} arrived`,
          { context: { ...context, arrived, awaited, timeoutMs } },
        );
      }
      case 'EP_PEER_LOST':
        return new EpError(code, `${where}: ${formatRanks([whom])} died or closed the transport`, {
          context: { ...context, lost: [whom] },
        });
      case 'EP_MISMATCH':
        return await this.#mismatch(call, { ...outcome, rank: whom });
      case 'EP_ABORTED': {
        // Nobody but this rank: the call was queued behind one that failed here, whose own error says why.
        if (whom === self) return this.#poisoned(where);
        const waited = missing.length > 0 ? `; awaited ${formatRanks(missing)}` : '';
        return new EpError(code, `${where}: ${formatRanks([whom])} gave up this call, or an earlier one${waited}`, {
          context: { ...context, ranks: [whom], awaited: missing },
        });
      }
      default:
        return new EpError(code, `${where}: ${outcome.message ?? 'failed'}`, { context });
    }
  }

  #poisoned(where: string): EpError {
    return new EpError(
      'EP_POISONED',
      `${where}: an earlier call on the device failed, and ranks no longer agree where they are: open another group`,
      { cause: this.#first?.reason },
    );
  }

  /** `rank`: of the group. */
  async #mismatch(call: DeviceCall, { rank, stage, expected, found }: Outcome): Promise<EpError> {
    const { rank: self, ranks: members, memory, byteOffset, slotBytes } = this.#init;
    const { sequence, dtype } = call;
    if (stage === EP_STAGE_RANGE) {
      const given = `rank ${rank} gives ${found} bytes to rank ${self}`;
      const taken = `rank ${self} takes ${expected}`;
      return new EpError('EP_MISMATCH', `call ${sequence}: ${call.kind} ${dtype}: ${given}, but ${taken}`, {
        context: { ranks: [rank, self].sort((a, b) => a - b), sequence, expected: given, found: taken },
      });
    }
    if (stage !== EP_STAGE_ARRIVAL) {
      return new EpError(
        'EP_MISMATCH',
        `call ${sequence}: ${formatRanks([rank])} made another call, or an earlier one, as others found`,
        {
          context: { ranks: [rank], sequence, expected: describeCall(call), found: 'another call' },
        },
      );
    }
    // What all have said of the call lies where their first messages do.
    const texts = new Map<number, string>([[self, describeSignature(signatureOf(call))]]);
    const head = new Uint8Array(groupHeadLayout.byteLength);
    for (const source of members.keys()) {
      if (source === self) continue;
      const at = byteOffset + Number(found) + source * slotBytes;
      await memory.read(memory.local(at, head.byteLength), head);
      texts.set(source, describeSignature(new DataView(head.buffer).getBigUint64(0, true)));
    }
    const named = differentCalls(sequence, texts);
    if (named !== undefined) return named;
    return new EpError('EP_MISMATCH', `call ${sequence}: rank ${rank} made another call`, {
      context: { ranks: [rank], sequence, expected: texts.get(self), found: 'another call' },
    });
  }
}
