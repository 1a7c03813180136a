/** Backings with a device of its own for every rank: EP_GUEST_DEVICES names them, in turn. */
import { exchange } from '@ep/core';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';

const devices = (process.env.EP_GUEST_DEVICES ?? '').split(',');

/** The backing where `own` says what a rank opens it with besides. */
const withOwn = (backing, own) => ({
  name: backing.name,
  probe: (config) => backing.probe({ ...config, ...own(0) }),
  open: (member, options) => backing.open(member, { ...options, config: { ...options.config, ...own(member.rank) } }),
});

export const verbs = withOwn(ibgda.verbs, (rank) => ({ devices: devices[rank % devices.length] }));

/** The same where the ranks bring what they tell each other by means of their own, as JSON. */
export const verbsByExchange = {
  ...verbs,
  open: ({ rank, worldSize, store }, options) => {
    const all = async (local) => {
      const bytes = Buffer.from(JSON.stringify(local));
      const told = await exchange(store, { rank, worldSize, key: `plain/${local.step}`, bytes });
      return told.map((theirs) => JSON.parse(Buffer.from(theirs).toString()));
    };
    return verbs.open({ rank, worldSize, exchange: all }, options);
  },
};

/** libfabric over the same devices, which it knows by the addresses that native/tests/verbs-guest/run.sh gives them. */
export const fabric = withOwn(nvshmem.fabric, (rank) => ({
  provider: 'verbs;ofi_rxm',
  address: `10.0.0.${(rank % devices.length) + 1}`,
}));
