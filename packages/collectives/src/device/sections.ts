/** Which groups have which sections of a world's device memory: agreed on in the store of the group that opened it. */
import { randomBytes } from 'node:crypto';
import { EpError, formatRanks, type Store } from '@ep/core';

export interface DeviceSection {
  readonly index: number;
  /** Says which use of the section this is. */
  readonly token: string;
}

/** A group that has the section, on its members. */
interface Use {
  readonly token: string;
  readonly ranks: readonly number[];
}

const NOBODY = '[]';
const bytes = (text: string): Uint8Array => new Uint8Array(Buffer.from(text));
const text = (value: Uint8Array): string => Buffer.from(value).toString();
const usesIn = (held: string): readonly Use[] => JSON.parse(held) as readonly Use[];

const keyOf = (index: number): string => `device/sections/${index}`;
const counterKey = ({ index, token }: DeviceSection): string => `${keyOf(index)}/closed/${token}`;

/**
 * Groups without a common member may have the same section. Free again is what all members have closed in order: of a member that died nothing says when what it put has landed.
 */
export class DeviceSections {
  readonly #store: Store;
  readonly #count: number;

  constructor(store: Store, count: number) {
    this.#store = store;
    this.#count = count;
  }

  /** By one rank for all members, given as ranks of the world. Throws `EP_CAPACITY`. */
  async take(group: string, ranks: readonly number[]): Promise<DeviceSection> {
    const token = randomBytes(8).toString('hex');
    for (let index = 0; index < this.#count; index++) {
      const took = await this.#change(index, (uses) =>
        uses.some((use) => use.ranks.some((rank) => ranks.includes(rank))) ? undefined : [...uses, { token, ranks }],
      );
      if (took) return { index, token };
    }
    const count = this.#count;
    throw new EpError(
      'EP_CAPACITY',
      `group ${group}: ${formatRanks([...ranks])} have no section of device memory in common that is free: there are ${count}, one for each group that a rank is in, and groups that lost a member keep theirs; close some groups, or raise device.maxGroups`,
      { context: { maxGroups: count, ranks } },
    );
  }

  /** Called by each of `size` members when nothing of its own comes to the section any more. */
  async giveBack(section: DeviceSection, size: number): Promise<void> {
    const counter = counterKey(section);
    if ((await this.#store.add(counter, 1)) < size) return;
    await this.#store.delete(counter);
    await this.#change(section.index, (uses) => uses.filter(({ token }) => token !== section.token));
  }

  /** False where `next` has nothing to put in the place of what is there. */
  async #change(index: number, next: (uses: readonly Use[]) => readonly Use[] | undefined): Promise<boolean> {
    const key = keyOf(index);
    let held = text(await this.#store.compareSet(key, new Uint8Array(0), bytes(NOBODY)));
    for (;;) {
      const uses = next(usesIn(held));
      if (uses === undefined) return false;
      const wanted = JSON.stringify(uses);
      const found = text(await this.#store.compareSet(key, bytes(held), bytes(wanted)));
      if (found === wanted) return true;
      held = found;
    }
  }
}
