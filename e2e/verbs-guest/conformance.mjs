/**
 * Runs in the guest: conformance cases over the backing `verbs`, on as few processes as the case takes, which have the devices in turn. One line of JSON for every case.
 *   node conformance.mjs CASES SECONDS DEVICE...     CASES: a pattern of ids; SECONDS: how long one may take, where every instruction is emulated
 */
import { inapplicableBecause, transportCases } from '@ep/conformance/cases';
import { Worlds } from '@ep/conformance/world';
import { ibgda } from '@ep/ibgda';

const [pattern, seconds, ...devices] = process.argv.slice(2);
const limitMs = Number(seconds) * 1000;
process.env.EP_TIMEOUT_MS = String(limitMs);
process.env.EP_GUEST_DEVICES = devices.join(',');

const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
const probe = await ibgda.verbs.probe();
say({ probe: probe.available ? probe.devices : probe.reason });
if (!probe.available) process.exit(1);

const order = {
  suite: { module: import.meta.resolve('@ep/conformance/cases'), name: 'transportCases' },
  config: {},
  limitMs,
};
const module = new URL('./provider.mjs', import.meta.url).href;
const worlds = new Worlds();
for (const [index, one] of transportCases.entries()) {
  if (!new RegExp(pattern).test(one.id)) continue;
  const begin = performance.now();
  const done = (outcome, why) => {
    const ms = Math.round(performance.now() - begin);
    say({ id: one.id, outcome, ms, ...(why === undefined ? {} : { why }) });
  };
  if (inapplicableBecause(one, probe.capabilities) !== undefined) {
    done('not-applicable');
    continue;
  }
  try {
    // Ranks meet by a store and by an exchange of their own, in turn.
    const provider = { module, name: index % 2 === 0 ? 'verbs' : 'verbsByExchange' };
    await worlds.run('processes', one.ranks ?? 2, { ...order, provider, id: one.id, seed: index + 1 });
    done('pass');
  } catch (error) {
    done('fail', String(error.message));
  }
}
await worlds.close();
