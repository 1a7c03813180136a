import { describeShm } from './matrices.js';

describeShm('threads');
