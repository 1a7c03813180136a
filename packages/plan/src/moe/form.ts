import { checkInt32Array, checkInteger, checkObject, checkUint8Array } from '../check.js';
import { invalidArgument } from '../error.js';
import { checkMapForm, maxWorldSize } from './experts.js';
import { checkPolicy } from './layout.js';
import { checkForm, checkPlacement } from './placement.js';
import type { MoePlan } from './plan.js';
import { checkRoutingForm } from './routing.js';

/**
 * EP_INVALID_ARGUMENT unless its fields are of the kinds and lengths of a plan's, in constant time. What they hold is not doubted here: that is
 * what `validateMoe` does.
 */
export function checkMoePlan(plan: MoePlan): void {
  checkObject(plan, 'plan');
  const { map, routing, placement } = plan;
  checkMapForm(map, 'plan.map');
  checkRoutingForm(routing, 'plan.routing.');
  const { worldSize } = map;
  for (const name of ['worldSize', 'experts'] as const) {
    if (routing[name] === map[name]) continue;
    throw invalidArgument(`plan.routing.${name} must be ${map[name]} as in plan.map, found ${routing[name]}`, {
      name: `plan.routing.${name}`,
      expected: map[name],
      found: routing[name],
    });
  }
  checkForm(plan.form, 'plan.form');
  checkPolicy(plan.policy, 'plan.policy');
  const nodes = Math.ceil(worldSize / checkInteger(plan.ranksPerNode, 'plan.ranksPerNode', 1, maxWorldSize));
  for (const name of ['activeRanks', 'lostRanks'] as const) checkUint8Array(plan[name], `plan.${name}`, worldSize);
  for (const name of ['replica', 'slot', 'row'] as const)
    checkInt32Array(plan[name], `plan.${name}`, routing.topkIdx.length);
  checkInt32Array(plan.tokensPerRank, 'plan.tokensPerRank', worldSize ** 2);
  checkInt32Array(plan.tokensPerNode, 'plan.tokensPerNode', worldSize * nodes);
  checkPlacement(placement, map.expert.length, worldSize, 'plan.placement');
  checkInteger(plan.unserved, 'plan.unserved', 0, routing.topkIdx.length);
}
