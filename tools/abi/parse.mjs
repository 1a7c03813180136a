// Reads the restricted C of native/include/ep/abi: integer constants, structs of fixed-width integers (also big-endian
// ones), arrays and other such structs, bit fields of hardware formats (EP_BITS, EP_LE_BITS), static assertions about sizes.
// Anything else is refused with its place: a construct that this parser guessed at would become a wrong offset in
// JavaScript.

/**
 * @typedef {{ file: string, line: number }} Place
 * @typedef {{ kind: 'word' | 'number' | 'sign' | 'text', text: string, line: number }} Token
 * @typedef {{ name: string, value: bigint, text: string, comment: string, place: Place }} Constant
 * @typedef {{ name: string, type: string, count: number | null, offset: number, comment: string, place: Place }} Field
 *   count: null for a single value, else the length of the array
 * @typedef {{ name: string, fields: readonly Field[], size: number, align: number, comment: string, place: Place }} Struct
 * @typedef {{ name: string, offset: number, high: number, low: number, order: ByteOrder, comment: string, place: Place }} Bits
 *   of the dword at offset; of the qword there if high > 31
 * @typedef {'big' | 'little'} ByteOrder of the words whose bits are named
 * @typedef {{ bytes: number, order: ByteOrder, fields: Map<string, Bits> }} BitLayout
 * @typedef {{ constants: Map<string, Constant>, structs: Map<string, Struct>, bits: Map<string, Bits> }} Abi
 */

/** Bytes of the types that a struct may use; alignment is the same on every machine we build for. */
export const scalarBytes = /** @type {Readonly<Record<string, number>>} */ ({
  uint8_t: 1,
  int8_t: 1,
  uint16_t: 2,
  int16_t: 2,
  uint32_t: 4,
  int32_t: 4,
  uint64_t: 8,
  int64_t: 8,
  ep_be16: 2,
  ep_be32: 4,
  ep_be64: 8,
});

/** The one spelling of each big-endian type's declaration, in wire.h. */
const bigEndianTypes = /** @type {Readonly<Record<string, string>>} */ ({
  uint16_t: 'ep_be16',
  uint32_t: 'ep_be32',
  uint64_t: 'ep_be64',
});
const bitsMacros = [
  '#define EP_BITS(offset, high, low) ((offset) * 65536u + (high) * 256u + (low))',
  '#define EP_LE_BITS(offset, high, low) ((offset) * 65536u + (high) * 256u + (low) + 128u)',
];

export class AbiError extends Error {
  /**
   * @param {Place} place
   * @param {string} text
   */
  constructor(place, text) {
    super(`${place.file}:${place.line}: ${text}`);
    this.name = 'AbiError';
  }
}

const conditionOfCxx = '#if defined(__cplusplus)';
const limits = /** @type {Readonly<Record<string, bigint>>} */ ({
  UINT8_MAX: 0xffn,
  UINT16_MAX: 0xffffn,
  UINT32_MAX: 0xffff_ffffn,
  UINT64_MAX: 0xffff_ffff_ffff_ffffn,
});

/** @returns {Abi} */
export const emptyAbi = () => ({ constants: new Map(), structs: new Map(), bits: new Map() });

/**
 * Adds what one header declares. Headers that it includes must have been added before.
 * @param {Abi} abi
 * @param {string} file named in errors
 * @param {string} text
 */
export function parseHeader(abi, file, text) {
  const { code, comments } = splitComments(file, text);
  const declarations = readDirectives(abi, file, code, comments);
  new Declarations(abi, file, tokenize(file, declarations), comments).read();
}

/**
 * The headers of the same folder that a header includes.
 * @param {string} text
 */
export const includedHeaders = (text) => [...text.matchAll(/^#include "([^"]+)"$/gm)].map((match) => match[1] ?? '');

/**
 * Blanks comments, keeping lines. A comment counts for the line it ends on.
 * @param {string} file
 * @param {string} text
 */
function splitComments(file, text) {
  /** @type {Map<number, string>} */
  const comments = new Map();
  if (text.includes('\\\n')) {
    throw new AbiError({ file, line: lineAt(text, text.indexOf('\\\n')) }, 'expected no continued line');
  }
  const slashes = /^(?:[^"\n]|"[^"\n]*")*?\/\//m.exec(
    text.replace(/\/\*[\s\S]*?\*\//g, (all) => all.replace(/[^\n]/g, ' ')),
  );
  if (slashes) throw new AbiError({ file, line: lineAt(text, slashes.index) }, 'expected C comments, found //');
  const code = text.replace(/\/\*([\s\S]*?)\*\//g, (all, body, offset) => {
    comments.set(lineAt(text, offset + all.length - 1), body.replace(/\s*\n\s*\*? ?/g, ' ').trim());
    return all.replace(/[^\n]/g, ' ');
  });
  return { code, comments };
}

/**
 * @param {string} text
 * @param {number} offset
 */
const lineAt = (text, offset) => text.slice(0, offset).split('\n').length;

/**
 * Takes the preprocessor's lines out. Accepted: the include guard, includes, integer constants, and the one conditional
 * that defines EP_STATIC_ASSERT for C and C++.
 * @param {Abi} abi
 * @param {string} file
 * @param {string} code
 * @param {Map<number, string>} comments
 */
function readDirectives(abi, file, code, comments) {
  const lines = code.split('\n').map((line) => line.trimEnd());
  const guard = lines.findIndex((line) => line !== '');
  const guardName = /^#ifndef (\w+)$/.exec(lines[guard] ?? '')?.[1];
  const last = lines.findLastIndex((line) => line !== '');
  if (guardName === undefined || lines[guard + 1] !== `#define ${guardName}` || lines[last] !== '#endif') {
    throw new AbiError({ file, line: guard + 1 }, 'expected an include guard around the whole header');
  }
  let inCxxChoice = false;
  return lines.map((line, index) => {
    if (!line.startsWith('#')) return line;
    const place = { file, line: index + 1 };
    if (index <= guard + 1 || index === last || /^#include [<"][\w/.]+[>"]$/.test(line)) return '';
    if (!inCxxChoice && line === conditionOfCxx) {
      inCxxChoice = true;
      return '';
    }
    if (inCxxChoice) {
      if (line === '#endif') inCxxChoice = false;
      else if (line !== '#else' && !line.startsWith('#define EP_STATIC_ASSERT(')) {
        throw new AbiError(place, `expected only EP_STATIC_ASSERT to differ between C and C++, found ${line}`);
      }
      return '';
    }
    if (bitsMacros.includes(line)) return '';
    const define = /^#define (EP_\w+)\s+(\S.*)$/.exec(line);
    if (!define) throw new AbiError(place, `expected an include or '#define EP_NAME integer', found ${line}`);
    const [, name = '', value = ''] = define;
    if (abi.constants.has(name) || abi.bits.has(name)) {
      throw new AbiError(place, `expected a new name, found ${name} again`);
    }
    if (/^EP_(?:LE_)?BITS\(/.test(value)) {
      abi.bits.set(name, { name, ...readBits(place, value), comment: comments.get(index + 1) ?? '', place });
      return '';
    }
    const expression = new Expression(abi, file, tokenize(file, [...Array(index).fill(''), value]));
    const constant = { name, value: expression.whole(), text: value, comment: comments.get(index + 1) ?? '', place };
    abi.constants.set(name, constant);
    return '';
  });
}

/**
 * @param {Place} place
 * @param {string} value
 */
function readBits(place, value) {
  const parts = /^EP_(LE_)?BITS\((0x[0-9a-f]+|\d+), (\d+), (\d+)\)$/.exec(value);
  if (!parts) throw new AbiError(place, `expected EP_BITS(offset, high, low) of integers, found ${value}`);
  const order = /** @type {ByteOrder} */ (parts[1] === undefined ? 'big' : 'little');
  const [offset = 0, high = 0, low = 0] = parts.slice(2).map(Number);
  if (offset % 4 !== 0 || offset > 0xffff || high > 63 || low > high) {
    throw new AbiError(place, `expected a multiple of 4 and bits high >= low of a dword or qword, found ${value}`);
  }
  return { offset, high, low, order };
}

/**
 * The layouts that bit fields form: EP_X_FIELD belongs to the longest X for which EP_X_BYTES is a constant.
 * @param {Abi} abi
 * @returns {Map<string, BitLayout>} X and FIELD without EP_
 */
export function bitLayouts(abi) {
  /** @type {Map<string, BitLayout>} */
  const layouts = new Map();
  for (const bits of abi.bits.values()) {
    const words = bits.name.split('_');
    const length = words.findLastIndex((_, i) => abi.constants.has([...words.slice(0, i), 'BYTES'].join('_')));
    const layout = words.slice(1, length).join('_');
    const bytes = Number(abi.constants.get(`EP_${layout}_BYTES`)?.value);
    if (length <= 1) throw new AbiError(bits.place, `expected a size EP_..._BYTES that ${bits.name} belongs to`);
    if (bits.offset + (bits.high > 31 ? 8 : 4) > bytes) {
      throw new AbiError(bits.place, `expected ${bits.name} within ${bytes} bytes`);
    }
    const fields = layouts.get(layout)?.fields ?? new Map();
    for (const other of fields.values()) {
      if (bits.order !== other.order)
        throw new AbiError(bits.place, `expected one byte order in ${layout}, found another than ${other.name} has`);
      if (overlap(bits, other))
        throw new AbiError(bits.place, `expected bits of its own, found those of ${other.name}`);
    }
    fields.set(words.slice(length).join('_'), bits);
    layouts.set(layout, { bytes, order: bits.order, fields });
  }
  return layouts;
}

/**
 * @param {Bits} a
 * @param {Bits} b
 */
function overlap(a, b) {
  /** First and last bit in wire order. @param {Bits} bits */
  const span = ({ offset, high, low, order }) => {
    if (order === 'little') return { first: offset * 8 + low, last: offset * 8 + high };
    const end = offset * 8 + (high > 31 ? 63 : 31);
    return { first: end - high, last: end - low };
  };
  const [left, right] = [span(a), span(b)];
  return left.first <= right.last && right.first <= left.last;
}

/**
 * @param {string} file
 * @param {readonly string[]} lines
 */
function tokenize(file, lines) {
  /** @type {Token[]} */
  const tokens = [];
  lines.forEach((line, index) => {
    const pattern = /\s+|("[^"]*")|(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)(?!\w)|([A-Za-z_]\w*)|(==|[{}()[\];,+*-])/y;
    while (pattern.lastIndex < line.length) {
      const at = pattern.lastIndex;
      const match = pattern.exec(line);
      if (!match)
        throw new AbiError({ file, line: index + 1 }, `expected restricted C, found '${line.slice(at).trim()}'`);
      const [, text, number, , word, sign] = match;
      if (text !== undefined) tokens.push({ kind: 'text', text, line: index + 1 });
      else if (number !== undefined) tokens.push({ kind: 'number', text: number, line: index + 1 });
      else if (word !== undefined) tokens.push({ kind: 'word', text: word, line: index + 1 });
      else if (sign !== undefined) tokens.push({ kind: 'sign', text: sign, line: index + 1 });
    }
  });
  return tokens;
}

/** A position in a token list. */
class Cursor {
  /**
   * @param {Abi} abi
   * @param {string} file
   * @param {readonly Token[]} tokens
   */
  constructor(abi, file, tokens) {
    this.abi = abi;
    this.file = file;
    this.tokens = tokens;
    this.at = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  /** @returns {Place} */
  get place() {
    return { file: this.file, line: (this.next ?? this.tokens.at(-1))?.line ?? 1 };
  }

  /**
   * @param {string} expected
   * @returns {never}
   */
  refuse(expected) {
    throw new AbiError(this.place, `expected ${expected}, found ${this.next?.text ?? 'the end'}`);
  }

  /** @param {string} text */
  accepts(text) {
    if (this.next?.text !== text || this.next.kind === 'text') return false;
    this.at += 1;
    return true;
  }

  /** @param {string} text */
  needs(text) {
    if (!this.accepts(text)) this.refuse(`'${text}'`);
  }

  /**
   * @param {Token['kind']} kind
   * @param {string} what
   */
  take(kind, what) {
    const token = this.next;
    if (token?.kind !== kind) return this.refuse(what);
    this.at += 1;
    return token.text;
  }
}

/** Sums and products of integers, constants and sizeof. */
class Expression extends Cursor {
  whole() {
    const value = this.sum();
    if (this.next !== undefined) this.refuse('the end of the value');
    return value;
  }

  /** @returns {bigint} */
  sum() {
    let value = this.product();
    for (;;) {
      if (this.accepts('+')) value += this.product();
      else if (this.accepts('-')) value -= this.product();
      else return value;
    }
  }

  /** @returns {bigint} */
  product() {
    let value = this.single();
    while (this.accepts('*')) value *= this.single();
    return value;
  }

  /** @returns {bigint} */
  single() {
    if (this.accepts('(')) {
      const value = this.sum();
      this.needs(')');
      return value;
    }
    if (this.next?.kind === 'number') return BigInt(this.take('number', 'a number'));
    if (this.accepts('sizeof')) {
      this.needs('(');
      const name = this.take('word', 'a type');
      const size = this.abi.structs.get(name)?.size ?? scalarBytes[name];
      if (size === undefined) throw new AbiError(this.place, `expected a known type in sizeof, found ${name}`);
      this.needs(')');
      return BigInt(size);
    }
    const name = this.take('word', 'an integer');
    const value = this.abi.constants.get(name)?.value ?? limits[name];
    if (value === undefined) throw new AbiError(this.place, `expected a known constant, found ${name}`);
    return value;
  }
}

class Declarations extends Expression {
  /**
   * @param {Abi} abi
   * @param {string} file
   * @param {readonly Token[]} tokens
   * @param {ReadonlyMap<number, string>} comments
   */
  constructor(abi, file, tokens, comments) {
    super(abi, file, tokens);
    this.comments = comments;
  }

  read() {
    while (this.next !== undefined) {
      if (this.accepts('typedef')) this.type();
      else if (this.accepts('EP_STATIC_ASSERT')) this.assertion();
      else this.refuse("'typedef struct' or EP_STATIC_ASSERT");
    }
  }

  type() {
    const word = this.next?.text ?? '';
    const alias = bigEndianTypes[word];
    if (alias === undefined) return this.struct();
    this.needs(word);
    this.needs(alias);
    this.needs(';');
  }

  struct() {
    const { place } = this;
    this.needs('struct');
    const name = this.take('word', "the struct's name");
    if (!/^ep_\w+$/.test(name)) throw new AbiError(place, `expected a name that begins with ep_, found ${name}`);
    if (this.abi.structs.has(name)) throw new AbiError(place, `expected a new name, found ${name} again`);
    this.needs('{');
    /** @type {Field[]} */
    const fields = [];
    let end = 0;
    let align = 1;
    while (!this.accepts('}')) {
      const field = this.field(end);
      if (fields.some((other) => other.name === field.name)) {
        throw new AbiError(field.place, `expected a new name, found ${field.name} again`);
      }
      const type = this.typeOf(field);
      end = field.offset + type.size * (field.count ?? 1);
      align = Math.max(align, type.align);
      fields.push(field);
    }
    if (fields.length === 0) throw new AbiError(place, `expected fields in ${name}, found none`);
    if (this.take('word', "the struct's name again") !== name)
      throw new AbiError(place, `expected the typedef to be called ${name}`);
    this.needs(';');
    const comment = this.comments.get(place.line - 1) ?? '';
    this.abi.structs.set(name, { name, fields, size: roundUp(end, align), align, comment, place });
  }

  /**
   * @param {number} end of the field before
   * @returns {Field}
   */
  field(end) {
    const { place } = this;
    const type = this.take('word', 'a type');
    if (scalarBytes[type] === undefined && !this.abi.structs.has(type)) {
      throw new AbiError(place, `expected a fixed-width integer or a struct from above, found ${type}`);
    }
    const name = this.take('word', "the field's name");
    let count = null;
    if (this.accepts('[')) {
      count = Number(this.sum());
      if (!(count > 0)) throw new AbiError(place, `expected an array of at least one, found ${count}`);
      this.needs(']');
    }
    this.needs(';');
    const field = { name, type, count, offset: end, comment: this.comments.get(place.line) ?? '', place };
    return { ...field, offset: roundUp(end, this.typeOf(field).align) };
  }

  /** @param {Field} field */
  typeOf(field) {
    const bytes = scalarBytes[field.type];
    if (bytes !== undefined) return { size: bytes, align: bytes };
    return /** @type {Struct} */ (this.abi.structs.get(field.type));
  }

  assertion() {
    const { place } = this;
    this.needs('(');
    const found = this.sum();
    this.needs('==');
    const expected = this.sum();
    this.needs(',');
    this.take('text', "the assertion's reason");
    this.needs(')');
    this.needs(';');
    if (found !== expected)
      throw new AbiError(place, `the assertion does not hold: expected ${expected}, found ${found}`);
  }
}

/**
 * @param {number} value
 * @param {number} step
 */
const roundUp = (value, step) => Math.ceil(value / step) * step;
