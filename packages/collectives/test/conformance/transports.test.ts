import { describeHostile, describeNvshmem } from './matrices.js';

describeHostile('threads');
describeNvshmem('threads');
