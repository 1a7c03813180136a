/** Bytes of hardware's formats for people: 16 to a row, and beside them what they say. */
import { hex, type Violation, violationText } from './words.js';

const ROW_BYTES = 16;

/** 16 bytes as four words. */
function rowWords(bytes: Uint8Array): string {
  return [0, 4, 8, 12]
    .map((at) => Buffer.from(bytes.subarray(at, at + 4)).toString('hex'))
    .filter((text) => text !== '')
    .join(' ')
    .padEnd(35);
}

/** One line for every 16 bytes: their offset, the bytes in their order in memory, and the text of that row. */
export function rows(bytes: Uint8Array, texts: readonly string[]): string[] {
  return Array.from({ length: Math.ceil(bytes.byteLength / ROW_BYTES) }, (_, row) => {
    const at = row * ROW_BYTES;
    return `  ${hex(at, 2)}  ${rowWords(bytes.subarray(at, at + ROW_BYTES))}  ${texts[row] ?? ''}`.trimEnd();
  });
}

export const violationRows = (violations: readonly Violation[]): string[] =>
  violations.map((violation) => `  ! ${violationText(violation)}`);
