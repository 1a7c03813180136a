import { describeHostile, describeNvshmem } from '../conformance/matrices.js';

describeHostile('processes');
describeNvshmem('processes');
