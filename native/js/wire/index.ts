/** Formats of hardware, as far as all network cards have them in common: bit fields by generated tables, violations, dumps. */
export { type BitValues, type PlacedLayout, readBits, strayBits, writeBits } from './bits.js';
export { rows, violationRows } from './rows.js';
export { hex, named, type Violation, violationText } from './words.js';
