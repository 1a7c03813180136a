import type { AttentionPlan } from './attention.js';
import type { DispatchPlan, PlanKind } from './dispatch-plan.js';
import { checkPlan, entryFields } from './form.js';

/** MurmurHash3 x86_128 over 32-bit words (Appleby, public domain). Words, not bytes: the result does not depend on byte order. */
export class WordHash {
  #h1: number;
  #h2: number;
  #h3: number;
  #h4: number;
  #words = 0;
  readonly #block = new Int32Array(4);

  constructor(seed = 0) {
    this.#h1 = this.#h2 = this.#h3 = this.#h4 = seed | 0;
  }

  word(value: number): void {
    const at = this.#words & 3;
    this.#block[at] = value;
    this.#words++;
    if (at === 3) this.#mix(this.#block[0]!, this.#block[1]!, this.#block[2]!, this.#block[3]!);
  }

  /** The length, then the elements: without it [1][2,3] and [1,2][3] would be one. */
  array(values: Int32Array): void {
    this.word(values.length);
    let i = 0;
    while (i < values.length && (this.#words & 3) !== 0) this.word(values[i++]!);
    for (; i + 4 <= values.length; i += 4) {
      this.#mix(values[i]!, values[i + 1]!, values[i + 2]!, values[i + 3]!);
      this.#words += 4;
    }
    while (i < values.length) this.word(values[i++]!);
  }

  text(value: string): void {
    this.word(value.length);
    for (let i = 0; i < value.length; i++) this.word(value.charCodeAt(i));
  }

  /** 32 hexadecimal digits. */
  hex(): string {
    const tail = this.#words & 3;
    let [h1, h2, h3, h4] = [this.#h1, this.#h2, this.#h3, this.#h4];
    if (tail > 2) h3 ^= Math.imul(rotate(Math.imul(this.#block[2]!, 0x38b34ae5), 17), 0xa1e38b93);
    if (tail > 1) h2 ^= Math.imul(rotate(Math.imul(this.#block[1]!, 0xab0e9789), 16), 0x38b34ae5);
    if (tail > 0) h1 ^= Math.imul(rotate(Math.imul(this.#block[0]!, 0x239b961b), 15), 0xab0e9789);
    const bytes = Math.imul(this.#words, 4);
    h1 ^= bytes;
    h2 ^= bytes;
    h3 ^= bytes;
    h4 ^= bytes;
    h1 = (h1 + h2 + h3 + h4) | 0;
    h2 = (h2 + h1) | 0;
    h3 = (h3 + h1) | 0;
    h4 = (h4 + h1) | 0;
    h1 = finish(h1);
    h2 = finish(h2);
    h3 = finish(h3);
    h4 = finish(h4);
    h1 = (h1 + h2 + h3 + h4) | 0;
    h2 = (h2 + h1) | 0;
    h3 = (h3 + h1) | 0;
    h4 = (h4 + h1) | 0;
    return [h1, h2, h3, h4].map((h) => (h >>> 0).toString(16).padStart(8, '0')).join('');
  }

  #mix(k1: number, k2: number, k3: number, k4: number): void {
    let h1 = this.#h1 ^ Math.imul(rotate(Math.imul(k1, 0x239b961b), 15), 0xab0e9789);
    h1 = (rotate(h1, 19) + this.#h2) | 0;
    h1 = (Math.imul(h1, 5) + 0x561ccd1b) | 0;
    let h2 = this.#h2 ^ Math.imul(rotate(Math.imul(k2, 0xab0e9789), 16), 0x38b34ae5);
    h2 = (rotate(h2, 17) + this.#h3) | 0;
    h2 = (Math.imul(h2, 5) + 0x0bcaa747) | 0;
    let h3 = this.#h3 ^ Math.imul(rotate(Math.imul(k3, 0x38b34ae5), 17), 0xa1e38b93);
    h3 = (rotate(h3, 15) + this.#h4) | 0;
    h3 = (Math.imul(h3, 5) + 0x96cd1c35) | 0;
    let h4 = this.#h4 ^ Math.imul(rotate(Math.imul(k4, 0xa1e38b93), 18), 0x239b961b);
    h4 = (rotate(h4, 13) + h1) | 0;
    h4 = (Math.imul(h4, 5) + 0x32ac3b17) | 0;
    this.#h1 = h1;
    this.#h2 = h2;
    this.#h3 = h3;
    this.#h4 = h4;
  }
}

/** 128 bits over every field of a plan, as hexadecimal: ranks that compare it know whether they hold the same plan. Not cryptographic. */
export function digest(plan: DispatchPlan | AttentionPlan): string {
  checkPlan(plan);
  const hash = new WordHash();
  if ('layout' in plan) {
    hash.text('attention');
    hash.text(plan.sharing);
    hash.word(plan.shards.worldSize);
    hash.word(plan.shards.documents);
    for (const values of [
      plan.shards.shardOffsets,
      plan.shards.lengths,
      plan.shards.document,
      plan.shards.position,
      plan.serverRank,
    ])
      hash.array(values);
    for (const part of [plan.fwdQ, plan.revQ, plan.fwdKv, plan.revKv, plan.revKvCompact]) addDispatch(hash, part);
    for (const name of ['shard', 'kvStart', 'kvLength'] as const) hash.array(plan.layout[name]);
  } else {
    addDispatch(hash, plan);
  }
  return hash.hex();
}

const kindCode: Readonly<Record<PlanKind, number>> = {
  'fwd-q': 0,
  'rev-q': 1,
  'fwd-kv': 2,
  'rev-kv': 3,
  'rev-kv-compact': 4,
};

function addDispatch(hash: WordHash, plan: DispatchPlan): void {
  hash.word(plan.version);
  hash.word(kindCode[plan.kind]);
  hash.word(plan.worldSize);
  hash.word(plan.replicas);
  for (const name of entryFields) hash.array(plan[name]);
}

function rotate(x: number, bits: number): number {
  return (x << bits) | (x >>> (32 - bits));
}

function finish(x: number): number {
  let h = x ^ (x >>> 16);
  h = Math.imul(h, 0x85ebca6b);
  h ^= h >>> 13;
  h = Math.imul(h, 0xc2b2ae35);
  return h ^ (h >>> 16);
}
