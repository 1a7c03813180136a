import * as api from '../../src/index.js';
import { describeMisuse } from '../misuse.js';
import { padded } from '../padded.js';

const shards = { worldSize: 2, shardOffsets: Int32Array.of(0, 1, 3), lengths: Int32Array.of(4, 2, 3) };
const documents = { ...shards, documents: 2, document: Int32Array.of(0, 0, 1), position: Int32Array.of(0, 1, 0) };
const plan = api.planAttention(documents, Int32Array.of(1, 0, 1));
const unit = { rowBytes: 8, chunkBytes: 16 };
const offsets = Int32Array.of(0, 1, 2, 2);
const table = { replicas: 1, offsets, dstRank: Int32Array.of(1, 0), replica: new Int32Array(2) };
const list = {
  worldSize: 2,
  documentOffsets: Int32Array.of(0, 1),
  homeRank: Int32Array.of(1),
  lengths: Int32Array.of(4),
};
const text = api.serialize(plan);

/** Arguments that are right, for every function of the package. */
const right: Readonly<Record<string, readonly unknown[]>> = {
  attendedPairs: [0, 4],
  balance: [documents, { qRowBytes: 1, kvRowBytes: 1 }],
  checkCapacity: [
    plan.fwdQ,
    api.sizes(plan.fwdQ, unit),
    { sendBytes: 1e6, recvBytes: 1e6, chunksSent: [9, 9], chunksReceived: Int32Array.of(9, 9) },
  ],
  chunksOf: [4, 2],
  digest: [plan],
  explain: [plan],
  explanationText: [api.explain(plan)],
  fromPaddedAttention: [padded],
  fromPaddedQuery: [padded.seqLen, padded.qDispatch, padded.numSeqs],
  fromPaddedReplicas: [padded.seqLen, [[[0], [0]]], padded.numSeqs],
  homeLayout: [documents, 0],
  maxOverAverage: [[1, 2]],
  packDocuments: [Int32Array.of(4, 4), Int32Array.of(8, 8), 'sequential'],
  parseAttentionPlan: [text],
  parseDispatchPlan: [api.serialize(plan.fwdQ)],
  planAttention: [documents, Int32Array.of(1, 0, 1), { sharing: 'each-query' }],
  planQuery: [shards, Int32Array.of(1, 0, -1)],
  planReplicas: [shards, table],
  rankDispatch: [plan.fwdQ, 0],
  reorder: [Int32Array.of(1, 2), Int32Array.of(1, 0)],
  replicaMask: [{ fwdKv: plan.fwdKv, reduction: plan.reduction }],
  serialize: [plan],
  serverLayout: [plan.layout, 0],
  shardsOfDocuments: [list],
  sizes: [plan.fwdQ, unit],
  validate: [plan],
  validateReduction: [plan.reduction, plan.revKvCompact],
};

// Arithmetic on numbers takes what comes.
describeMisuse('@ep/plan', api, right, {
  lenient: ['attendedPairs', 'chunksOf'],
  unread: /^checkCapacity: argument 1\.(sent|received)\.|^validateReduction: argument 0\.denseRow /,
});
