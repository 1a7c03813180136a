/** The suite of GIN contexts. No test framework is imported here: ranks load it in threads and processes of their own. */
export { breakProvider, ginBreaks } from './broken.js';
export { ginCases } from './cases.js';
export type { GinCase, GinContext, GinOptions, GinSharing, GinTransport } from './gin-case.js';
