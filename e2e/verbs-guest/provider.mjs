/** The backing `verbs` with a device of its own for every rank: EP_GUEST_DEVICES names them, in turn. */
import { exchange } from '@ep/core';
import { ibgda } from '@ep/ibgda';

const devices = (process.env.EP_GUEST_DEVICES ?? '').split(',');

const opened = (member, options) => {
  const own = { devices: devices[member.rank % devices.length] };
  return ibgda.verbs.open(member, { ...options, config: { ...options.config, ...own } });
};

export const verbs = { name: ibgda.verbs.name, probe: (config) => ibgda.verbs.probe(config), open: opened };

/** The same where the ranks bring what they tell each other by means of their own, as JSON. */
export const verbsByExchange = {
  ...verbs,
  open: ({ rank, worldSize, store }, options) => {
    const all = async (local) => {
      const bytes = Buffer.from(JSON.stringify(local));
      const told = await exchange(store, { rank, worldSize, key: `plain/${local.step}`, bytes });
      return told.map((theirs) => JSON.parse(Buffer.from(theirs).toString()));
    };
    return opened({ rank, worldSize, exchange: all }, options);
  },
};
