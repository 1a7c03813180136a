import { describeHostile, describeNvshmem } from '../conformance/matrices.js';

describeHostile();
describeNvshmem();
