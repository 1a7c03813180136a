/** Which ranks of a group share a host, as all of its ranks know it. */

export class Placement {
  /** Ranks of each host, ascending; hosts in the order of their lowest ranks. */
  readonly hosts: readonly (readonly number[])[];
  /** This rank's host among them, and its place there. */
  readonly host: number;
  readonly local: number;

  /** `hostOf`: for each rank any number that those of its host have, and no other. */
  constructor(hostOf: readonly number[], rank: number) {
    const byHost = new Map<number, number[]>();
    for (const [member, host] of hostOf.entries()) {
      const members = byHost.get(host);
      if (members === undefined) byHost.set(host, [member]);
      else members.push(member);
    }
    this.hosts = [...byHost.values()];
    this.host = this.hosts.findIndex((members) => members.includes(rank));
    this.local = this.hosts[this.host]!.indexOf(rank);
  }

  /** Ranks of this host. */
  get mates(): readonly number[] {
    return this.hosts[this.host]!;
  }

  /** Several hosts with equally many ranks, two at least: then each rank has one counterpart on every other host, and each host something to do of its own. */
  get even(): boolean {
    const { length } = this.mates;
    return this.hosts.length > 1 && length > 1 && this.hosts.every((members) => members.length === length);
  }

  /** The ranks that have a place on their hosts; ascending. */
  column(local: number): readonly number[] {
    return this.hosts.map((members) => members[local]!).sort((a, b) => a - b);
  }
}
