import { runFuzzers } from '@ep/fuzz';
import { suite } from './targets.js';

runFuzzers(suite);
