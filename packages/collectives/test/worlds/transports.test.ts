import {
  describeEfa,
  describeFabric,
  describeHostile,
  describeIbgda,
  describeNvshmem,
  describeTwoHosts,
} from '../conformance/matrices.js';

describeHostile();
describeNvshmem();
describeIbgda();
describeEfa();
describeFabric();
describeTwoHosts();
