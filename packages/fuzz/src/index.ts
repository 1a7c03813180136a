/** @ep/fuzz (private): what the packages' fuzzers share. Used from source: it is never built nor published. */
export { type FuzzSuite, readCorpus } from './corpus.js';
export { runFuzzers } from './main.js';
export { generator, mutateBytes, mutateText } from './mutate.js';
export { spoilObject } from './objects.js';
export { type Outcomes, replay } from './replay.js';
export { bytesTarget, type FuzzTarget, textTarget } from './target.js';
