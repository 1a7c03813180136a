import {
  describeEfa,
  describeFabric,
  describeHostile,
  describeIbgda,
  describeNvshmem,
} from '../conformance/matrices.js';

describeHostile();
describeNvshmem();
describeIbgda();
describeEfa();
describeFabric();
