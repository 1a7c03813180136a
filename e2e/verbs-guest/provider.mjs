/** The backing `verbs` with a device of its own for every rank: EP_GUEST_DEVICES names them, in turn. */
import { ibgda } from '@ep/ibgda';

const devices = (process.env.EP_GUEST_DEVICES ?? '').split(',');

export const verbs = {
  name: ibgda.verbs.name,
  probe: (config) => ibgda.verbs.probe(config),
  open: (member, options) => {
    const own = { devices: devices[member.rank % devices.length] };
    return ibgda.verbs.open(member, { ...options, config: { ...options.config, ...own } });
  },
};
