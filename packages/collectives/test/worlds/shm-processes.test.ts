import { describeShm } from '../conformance/matrices.js';

describeShm('processes');
