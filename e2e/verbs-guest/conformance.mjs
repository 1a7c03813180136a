/**
 * Runs in the guest: conformance cases over backings of providers.mjs, on as few processes as a case takes, which have the devices in turn. One line of JSON for every case.
 *   node conformance.mjs BACKINGS CASES SHARE SECONDS DEVICE...
 *     BACKINGS: names, with commas; the cases take them in turn. CASES: a pattern of ids. SHARE: K/N, of every N pairs of cases the K-th from 0. SECONDS: how long one may take, where every instruction is emulated
 */
import { inapplicableBecause, transportCases } from '@ep/conformance/cases';
import { Worlds } from '@ep/conformance/world';

const [named, pattern, share, seconds, ...devices] = process.argv.slice(2);
const [part, parts] = share.split('/').map(Number);
const limitMs = Number(seconds) * 1000;
process.env.EP_TIMEOUT_MS = String(limitMs);
process.env.EP_GUEST_DEVICES = devices.join(',');
const backings = named.split(',');

const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
const module = new URL('./providers.mjs', import.meta.url).href;
const probe = await (await import(module))[backings[0]].probe();
say({ probe: probe.available ? probe.devices : probe.reason });
if (!probe.available) process.exit(1);

const order = {
  suite: { module: import.meta.resolve('@ep/conformance/cases'), name: 'transportCases' },
  config: {},
  limitMs,
};
const worlds = new Worlds();
for (const [index, one] of transportCases.entries()) {
  if (!new RegExp(pattern).test(one.id) || Math.floor(index / 2) % parts !== part) continue;
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
    const provider = { module, name: backings[index % backings.length] };
    await worlds.run('processes', one.ranks ?? 2, { ...order, provider, id: one.id, seed: index + 1 });
    done('pass');
  } catch (error) {
    done('fail', String(error.message));
  }
}
await worlds.close();
