/**
 * The suite of every engine of process groups. No test framework is imported here: ranks load it in threads and processes of their own.
 *
 * Counterparts of the tests of Mooncake's process group, at its head (`mooncake-pg/tests`) and in its seed (`mooncake-wheel/tests`):
 *
 * | theirs | here |
 * |--------|------|
 * | collectives: init without options | every case: `open()` gives only what it must |
 * | collectives: all-reduce SUM, MIN, MAX, PRODUCT | `all-reduce/every-dtype-and-op`, `reduce/written-by-hand` |
 * | collectives: broadcast | `broadcast/every-dtype-and-root` |
 * | collectives: all_gather_into_tensor, all_gather | `all-gather/every-dtype` |
 * | collectives: reduce_scatter SUM | `reduce-scatter/every-dtype-and-op` |
 * | collectives: barrier | `barrier/holds` |
 * | collectives: gather, scatter, reduce | `gather/every-root`, `scatter/every-root`, `reduce/every-dtype-and-op` |
 * | collectives: asynchronous all-reduce | `work/thousand`, `work/large-and-small` |
 * | p2p: ring | `p2p/ring` |
 * | p2p: direct and batch_isend_irecv | `p2p/large`, `p2p/batch` |
 * | p2p: order of four messages | `p2p/four-in-order`, `p2p/thousand-in-order` |
 * | p2p: many senders to one | `p2p/any-source`, `p2p/all-pairs` |
 * | p2p: one of three ranks dies, hints and mask on survivors | `failure/message`, `failure/last-rank`, test/failure |
 * | init: basic, null options | `groups/facts` |
 * | init: world size 1 | `groups/of-one`, and every case in a world of one |
 * | init: subgroup create and destroy | `groups/destroy-one` |
 * | init: destroy and init again | `groups/init-again` |
 * | elastic: failed rank | `failure/last-rank`, `failure/rank-0`, `failure/two-at-once`, `failure/idle`, `failure/queue`, test/failure |
 * | elastic: recovery with a replacement, also after graceful deactivation, and both with p2p | test/elastic: `replaced`, `left` |
 * | elastic: graceful deactivation, in the middle of collectives | `elastic/taken-out`, `elastic/leaves-in-order`, `elastic/agrees-anew` |
 * | elastic: in-place rejoin for collectives and p2p | `elastic/comes-back`, test/elastic: `rounds`, `stopped`, `deactivated` |
 * | elastic: extension 3 -> 4, joiner and primary p2p, three subgroups and holes | `elastic/grows`, test/elastic: `grown` (3 to 4 ranks), `holes` |
 * | elastic: all-gather and reduce-scatter after extension and recovery | test/elastic: `grown`, `replaced` (their blocks) |
 * | elastic: four rounds of evict and recover | test/elastic: `rounds` |
 * | inference: TP all-reduce and all-gather over many groups, three times | `groups/topologies` |
 * | inference: overlapping groups | `groups/overlapping`, `groups/two-worlds` |
 * | inference: PP send and recv | `groups/topologies` |
 * | topologies: tp_only, tp_pp, prefill_decode, dp_tp, dp_tp_ep | `groups/topologies` |
 * | seed backend: all-reduce, all-gather on CUDA | as on the CPU, on tensors of a device: test/device, e2e/gpu |
 * | seed chunk: all-reduce of 2^24 i32, more than the buffer | `sizes/larger-than-any-buffer` (2^22, in full 2^24) |
 * | seed cpu: all-reduce, all-gather, barrier | as above |
 * | seed elastic: extension 2 -> 4; broken rank replaced by recoverRanks | test/elastic: `grown` (2 to 4 ranks), `replaced` |
 * | seed elastic: sum without the broken rank | `failure/last-rank` |
 * | seed p2p cpu: ring, order, many senders | `p2p/ring`, `p2p/thousand-in-order`, `p2p/any-source` |
 * | seed perf: at most ten times the latency of NCCL or Gloo | `ep bench collectives`: no test is timed |
 * | seed ep, and the pgbench and k-peer benchmarks | @ep/cuda-kernels; `ep bench collectives` |
 */
import { accountingCases } from './accounting.js';
import type { GroupCase } from './case.js';
import { elasticCases } from './elastic.js';
import { failureCases } from './failure.js';
import { groupCases } from './groups.js';
import { latenessCases } from './lateness.js';
import { messageCases } from './messages.js';
import { mismatchCases } from './mismatch.js';
import { movementCases } from './movement.js';
import { objectCases } from './objects.js';
import { reductionCases } from './reductions.js';
import { sizeCases } from './sizes.js';
import { workCases } from './work.js';

/** Those that end with a dead rank come last: the ranks are started anew after each. */
export const processGroupCases: readonly GroupCase[] = [
  ...reductionCases,
  ...movementCases,
  ...sizeCases,
  ...workCases,
  ...groupCases,
  ...messageCases,
  ...objectCases,
  ...accountingCases,
  ...latenessCases,
  ...mismatchCases,
  ...elasticCases,
  ...failureCases,
];
