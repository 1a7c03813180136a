/** What transports are built of: how ranks meet, on one host or over a network, see each other die, wait, and allocate. */

export { byPlace, checkAmong, resolveActiveRanks } from './active.js';
export { AdoptedRange, type NativeLocal, type NicMemories } from './adopted.js';
export { AdoptedDeviceMemory } from './adopted-device.js';
export {
  type Allocator,
  allocateMemory,
  byRank,
  checkHostAllocation,
  type Reach,
  type ReconnectedReach,
  type RenewableReach,
} from './allocate.js';
export { AtomicEndpoint, type AtomicEndpointInit, type NicAtomics } from './atomic-endpoint.js';
export type { AtomicWord } from './atomic-words.js';
export { allocateDeviceMemory, type DeviceAllocator, DeviceMemory, type DeviceReach } from './device-memory.js';
export { type Fencing, fenceRanks } from './fence.js';
export { reportStep, type SetUpStep, together } from './gather.js';
export { type Introduced, type Introduction, type Told, throughStore } from './introduction.js';
export { agreedFacts, type JoinedRanks, type JoinOptions, joinRanks } from './join.js';
export { joinApart, type LinkedNic, type NetworkWorld } from './join-apart.js';
export {
  LinkedTeam,
  openLinkedTeam,
  type TeamEndpoint,
  teamMemory,
  type WorldTeam,
} from './linked-team.js';
export { emptyPlace, Liveness } from './liveness.js';
export { type Meeting, meetAnew } from './meet-anew.js';
export { Members, type MembersInit, parseApplication, parseWord, type ReadmitOptions, rejoinRanks } from './members.js';
export { awaitedRanks, comparisonCode, RankMemory, type RankMemoryInit } from './memory.js';
export { agreeOnSize, checkPinnable } from './memory-limits.js';
export { type NicNetwork, type NicNetworkConfig, resolveNetwork } from './network.js';
export { NicEndpoint, type NicEndpointInit, type NicRequests, type PostedRequest } from './nic-endpoint.js';
export { checkLimits, nativeTimeout, runWait, waitError, withClosing } from './outcome.js';
export { checkOver, type NothingOver, type Over, overOrFailure, refuseOver } from './over.js';
export { inheritMemory, type Renewer, renewMemory } from './renew.js';
export { checkRemote, checkSameSize, checkValue, type SignalWords, signalWords, wordOf } from './requests.js';
export {
  checkSecret,
  fingerprint,
  hostOfProcess,
  hostsOf,
  LINK_KEYS_BYTES,
  linkKeys,
  NONCE_BYTES,
  networkOfProcess,
  newNonce,
} from './secret.js';
export { SHORTEST_STALL_US, stallsIn } from './stalls.js';
export { type SuccessionInit, successionOf } from './succession.js';
export { checkAgreement, GATHER_BYTES, type Gathering, RankTeam, type RankTeamInit } from './team.js';
