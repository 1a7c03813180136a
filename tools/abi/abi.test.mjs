import { expect, test } from 'vitest';
import { emitOffsets, emitTypeScript } from './emit.mjs';
import { emptyAbi, includedHeaders, parseHeader } from './parse.mjs';

/** @param {string} body lines after the include guard's two lines */
const parse = (body) => {
  const abi = emptyAbi();
  parseHeader(abi, 'a.h', `#ifndef A_H\n#define A_H\n${body}\n#endif\n`);
  return abi;
};

test('structs are laid out as C does', () => {
  const abi = parse(`#define EP_N 3u
typedef struct ep_small {
  uint8_t a;
  uint16_t b[EP_N];
} ep_small;
EP_STATIC_ASSERT(sizeof(ep_small) == 2 * (EP_N + 1), "padded");
/* What it is. */
typedef struct ep_large {
  uint8_t first; /* the first */
  ep_small small[2];
  uint64_t last;
  int32_t tail;
} ep_large;`);
  const large = abi.structs.get('ep_large');
  expect(large?.fields.map(({ offset }) => offset)).toEqual([0, 2, 24, 32]);
  expect(large).toMatchObject({ size: 40, align: 8, comment: 'What it is.' });
  expect(large?.fields[0]?.comment).toBe('the first');
  expect(emitOffsets(abi, ['a.h'])).toContain('offsetof(ep_large, last) == 24');
  const text = emitTypeScript(abi);
  expect(text).toContain('readSmall(view, at + 2 + i * 8)');
  expect(text).toContain('last: view.getBigUint64(at + 24, true)');
});

const wire = `typedef uint32_t ep_be32;
#define EP_BITS(offset, high, low) ((offset) * 65536u + (high) * 256u + (low))
#define EP_LE_BITS(offset, high, low) ((offset) * 65536u + (high) * 256u + (low) + 128u)
#define EP_X_BYTES 16
#define EP_X_Y_BYTES 8`;

test('big-endian fields and bits are read in their order', () => {
  const abi = parse(`${wire}
#define EP_X_KIND EP_BITS(0x4, 31, 24) /* what it is */
#define EP_X_WIDE EP_BITS(8, 63, 0)
#define EP_X_Y_LOW_BITS EP_BITS(0, 3, 0)
typedef struct ep_seg {
  ep_be32 word;
} ep_seg;`);
  const text = emitTypeScript(abi);
  expect(text).toContain('word: view.getUint32(at + 0, false)');
  expect(text).toContain(`export const xBits = {
  byteLength: 16,
  fields: {
    /** what it is */
    kind: [4, 31, 24],
    wide: [8, 63, 0],
  },
} as const satisfies BitLayout;`);
  expect(text).toContain('lowBits: [0, 3, 0],');
  expect(text).not.toContain('EP_X_KIND');
});

test('bits of little-endian words are told apart', () => {
  const abi = parse(`${wire}
#define EP_X_FIRST EP_LE_BITS(0, 15, 0)
#define EP_X_SECOND EP_LE_BITS(0, 16, 16)
#define EP_X_OVER EP_LE_BITS(4, 63, 0)`);
  expect(emitTypeScript(abi)).toContain(`export const xBits = {
  byteLength: 16,
  littleEndian: true,
  fields: {
    first: [0, 15, 0],
    second: [0, 16, 16],
    over: [4, 63, 0],
  },
} as const satisfies BitLayout;`);
});

test.each([
  ['EP_X_A EP_BITS(2, 1, 0)', 'expected a multiple of 4'],
  ['EP_X_A EP_BITS(0, 64, 0)', 'expected a multiple of 4 and bits high >= low'],
  ['EP_X_A EP_BITS(0, 1, 2)', 'expected a multiple of 4 and bits high >= low'],
  ['EP_X_A EP_BITS(0, EP_N, 2)', 'expected EP_BITS(offset, high, low) of integers'],
  ['EP_X_A EP_BITS(12, 63, 0)', 'expected EP_X_A within 16 bytes'],
  ['EP_Z_A EP_BITS(0, 1, 0)', 'expected a size EP_..._BYTES that EP_Z_A belongs to'],
  ['EP_X_A EP_BITS(0, 4, 0)\n#define EP_X_B EP_BITS(0, 7, 4)', 'expected bits of its own, found those of EP_X_A'],
  ['EP_X_A EP_BITS(0, 31, 0)\n#define EP_X_B EP_BITS(0, 32, 32)', 'expected bits of its own, found those of EP_X_A'],
  [
    'EP_X_A EP_LE_BITS(0, 39, 8)\n#define EP_X_B EP_LE_BITS(4, 7, 7)',
    'expected bits of its own, found those of EP_X_A',
  ],
  ['EP_X_A EP_LE_BITS(0, 1, 0)\n#define EP_X_B EP_BITS(4, 1, 0)', 'expected one byte order in X'],
  ['EP_X_A EP_BITS(0, 1, 0)\n#define EP_X_A EP_BITS(4, 1, 0)', 'expected a new name, found EP_X_A again'],
])('refuses the bits %j', (define, message) => {
  expect(() => emitTypeScript(parse(`#define EP_ABI_MAJOR 1\n${wire}\n#define ${define}`))).toThrow(message);
});

test.each([
  [
    'typedef struct ep_a {\n  int x;\n} ep_a;',
    'a.h:4: expected a fixed-width integer or a struct from above, found int',
  ],
  ['typedef struct ep_a {\n  uint32_t x : 3;\n} ep_a;', "a.h:4: expected restricted C, found ': 3;'"],
  ['typedef struct ep_a {\n  uint32_t *x;\n} ep_a;', "a.h:4: expected the field's name, found *"],
  ['typedef struct ep_a {\n  uint32_t x, y;\n} ep_a;', "a.h:4: expected ';', found ,"],
  ['typedef struct ep_a {\n  uint32_t x[2][2];\n} ep_a;', "a.h:4: expected ';', found ["],
  ['typedef struct ep_a {\n  uint32_t x[0];\n} ep_a;', 'a.h:4: expected an array of at least one, found 0'],
  ['typedef struct ep_a {\n  uint32_t x;\n  uint8_t x;\n} ep_a;', 'a.h:5: expected a new name, found x again'],
  ['typedef struct ep_a {\n} ep_a;', 'a.h:3: expected fields in ep_a, found none'],
  ['typedef struct ep_a {\n  uint8_t x;\n} ep_b;', 'a.h:3: expected the typedef to be called ep_a'],
  ['typedef union ep_a {\n  uint8_t x;\n} ep_a;', "a.h:3: expected 'struct', found union"],
  ['typedef struct ep_a {\n  uint8_t x;\n} ep_a;\nEP_STATIC_ASSERT(sizeof(ep_a) == 2, "r");', 'expected 2, found 1'],
  ['EP_STATIC_ASSERT(sizeof(ep_b) == 2, "r");', 'a.h:3: expected a known type in sizeof, found ep_b'],
  ['static const int x = 3;', "a.h:3: expected restricted C, found '= 3;'"],
  ['uint32_t x;', "a.h:3: expected 'typedef struct' or EP_STATIC_ASSERT, found uint32_t"],
  ['#define EP_A(x) (x)', "a.h:3: expected an include or '#define EP_NAME integer', found #define EP_A(x) (x)"],
  ['#define EP_A EP_B', 'a.h:3: expected a known constant, found EP_B'],
  ['#define EP_A 1\n#define EP_A 2', 'a.h:4: expected a new name, found EP_A again'],
  ['#define EP_A 1 2', 'a.h:3: expected the end of the value, found 2'],
  ['#if defined(__linux__)\n#define EP_A 1\n#endif', 'a.h:3: expected an include or'],
  ['#if defined(__cplusplus)\n#define EP_A 1\n#endif', 'a.h:4: expected only EP_STATIC_ASSERT to differ'],
  ['#pragma pack(1)', 'a.h:3: expected an include or'],
  ['// text', 'a.h:3: expected C comments, found //'],
  ['#define EP_A \\\n 1', 'a.h:3: expected no continued line'],
])('refuses %j', (body, message) => {
  expect(() => parse(body)).toThrow(message);
});

test('refuses a header without a guard', () => {
  expect(() => parseHeader(emptyAbi(), 'a.h', '#define EP_A 1\n')).toThrow('a.h:1: expected an include guard');
});

test('only headers of the same folder are followed', () => {
  expect(includedHeaders('#include <stdint.h>\n#include "b.h"\n')).toEqual(['b.h']);
});
