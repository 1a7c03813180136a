import { describeHostile, describeIbgda, describeNvshmem } from '../conformance/matrices.js';

describeHostile();
describeNvshmem();
describeIbgda();
