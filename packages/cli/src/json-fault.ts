/** Where a text stops being JSON. `JSON.parse` says so in words that differ between versions of Node, mostly without a position. */
import { EpError } from '@ep/core';

export interface JsonFault {
  /** UTF-16 index of the first character that cannot be there; the length of the text if it ends too early. */
  readonly offset: number;
  readonly expected: string;
}

/** What may come next. Inside of an array or object `first` means that it may also be empty. */
type State = 'value' | 'first-item' | 'first-key' | 'key' | 'colon' | 'after';

const space = /[ \t\n\r]*/y;
/** Characters of a string that stand for themselves: no control character, no quote, no backslash. */
const plain = /[ !#-[\]-\uffff]*/y;
const escaped = /\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})/y;
const scalar = /true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;

/** Index behind what the sticky pattern matches at `at`; -1 if it does not. */
function behind(pattern: RegExp, text: string, at: number): number {
  pattern.lastIndex = at;
  return pattern.test(text) ? pattern.lastIndex : -1;
}

/** Index behind the string that begins at `at`, or its fault. */
function stringEnd(text: string, at: number): number | JsonFault {
  for (let i = at + 1; ; ) {
    i = behind(plain, text, i);
    if (text[i] === '"') return i + 1;
    const next = behind(escaped, text, i);
    if (next < 0) return { offset: i, expected: text[i] === '\\' ? 'an escape sequence' : 'the end of a string' };
    i = next;
  }
}

const EXPECTED: Readonly<Record<State, string>> = {
  value: 'a value',
  'first-item': 'a value or ]',
  'first-key': 'a name in double quotes or }',
  key: 'a name in double quotes',
  colon: ':',
  after: '',
};

/** Undefined if the text is JSON. */
export function jsonFault(text: string): JsonFault | undefined {
  const open: ('{' | '[')[] = [];
  let state = 'value' as State;
  for (let at = 0; ; ) {
    at = behind(space, text, at);
    const found = text[at];
    const inside = open.at(-1);
    if (state === 'after') {
      if (inside === undefined) return found === undefined ? undefined : { offset: at, expected: 'the end' };
      const close = inside === '{' ? '}' : ']';
      if (found === close) open.pop();
      else if (found === ',') state = inside === '{' ? 'key' : 'value';
      else return { offset: at, expected: `, or ${close}` };
      at++;
    } else if (state === 'colon' && found === ':') {
      state = 'value';
      at++;
    } else if ((state === 'first-item' && found === ']') || (state === 'first-key' && found === '}')) {
      open.pop();
      state = 'after';
      at++;
    } else if (found === '"' && state !== 'colon') {
      const end = stringEnd(text, at);
      if (typeof end !== 'number') return end;
      state = state === 'key' || state === 'first-key' ? 'colon' : 'after';
      at = end;
    } else if ((found === '{' || found === '[') && (state === 'value' || state === 'first-item')) {
      open.push(found);
      state = found === '{' ? 'first-key' : 'first-item';
      at++;
    } else {
      const end = state === 'value' || state === 'first-item' ? behind(scalar, text, at) : -1;
      if (end < 0) return { offset: at, expected: EXPECTED[state] };
      state = 'after';
      at = end;
    }
  }
}

/** As `JSON.parse`, but a byte order mark is fine, and `EP_INVALID_ARGUMENT` names `where`, line, column, what was expected and found. */
export function parseJson(text: string, where: string): unknown {
  const json = text.replace(/^\uFEFF/, '');
  try {
    return JSON.parse(json) as unknown;
  } catch (error) {
    const { offset, expected } = jsonFault(json) ?? { offset: 0, expected: 'less' };
    const before = json.slice(0, offset).split('\n');
    const line = before.length;
    const column = before.at(-1)!.length + 1;
    const found = offset < json.length ? JSON.stringify(String.fromCodePoint(json.codePointAt(offset)!)) : 'the end';
    throw new EpError(
      'EP_INVALID_ARGUMENT',
      `${where}: not JSON at line ${line}, column ${column}: expected ${expected}, found ${found}`,
      { cause: error, context: { where, line, column, expected, found } },
    );
  }
}
