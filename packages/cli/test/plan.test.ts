import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { type Explanation, explain } from '@ep/plan';
import fc from 'fast-check';
import { afterAll, describe, expect, it } from 'vitest';
import { fileError } from '../src/failure.js';
import { jsonFault } from '../src/json-fault.js';
import { bandsOf, loadOf, mostBands, shortBytes, trafficOf } from '../src/picture/data.js';
import { drawPlan } from '../src/picture/draw.js';
import { parseCsvDocuments, parseJsonDocuments } from '../src/plan/documents-file.js';
import { evenBudgets, planStep } from '../src/plan/plan-step.js';
import { runEp } from './ep.js';

const folder = mkdtempSync(join(tmpdir(), 'ep-plan-test-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

function file(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}

interface PlanJson {
  readonly balanced: boolean;
  readonly bytes: { readonly query: number; readonly keyValue: number; readonly neededKeyValue: number };
  readonly explanation: Explanation;
}

async function planJson(...args: string[]): Promise<PlanJson> {
  const { code, stdout, stderr } = await runEp(['plan', ...args, '--json']);
  expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
  return JSON.parse(stdout) as PlanJson;
}

const lengths = [1024, 100, 37, 0, 513, 222];
const planned = (balance: boolean, ranks = 3) =>
  planStep({
    lengths: Int32Array.from(lengths),
    budgets: evenBudgets(
      lengths.reduce((a, b) => a + b, 0),
      ranks,
    ),
    balance,
    tolerance: 0,
    block: 1,
    sharing: 'each-server',
    rowBytesQ: 64,
    rowBytesKv: 16,
  });

describe('ep plan', () => {
  it('balances the documents of a JSON file and explains it', async () => {
    const path = file('a.json', JSON.stringify({ documents: lengths, ranks: 3 }));
    const even = await planJson(path);
    expect(even.balanced).toBe(true);
    expect(even.explanation).toMatchObject({ worldSize: 3, documents: 6, tokens: 1896, longestDocument: 1024 });
    expect(even.explanation.imbalanceBefore).toBeGreaterThan(1.4);
    expect(even.explanation.imbalanceAfter).toBeLessThan(1.001);
    expect(even.bytes.query).toBe(even.explanation.movedQueryTokens * 1024);
    expect(even.bytes.keyValue).toBe(even.explanation.movedKvTokens * 512);

    const home = await planJson(path, '--no-balance');
    expect(home.balanced).toBe(false);
    expect(home.bytes.query).toBe(0);
    expect(home.explanation.imbalanceAfter).toBe(home.explanation.imbalanceBefore);
  });

  it('sends less with --dedup, and rounds borders to a block', async () => {
    const path = file(
      'b.json',
      JSON.stringify({ documents: [4000, 100, 100, 100], ranks: 4, rowBytesQ: 10, rowBytesKv: 3 }),
    );
    const each = await planJson(path);
    const once = await planJson(path, '--dedup');
    expect(once.explanation.sharing).toBe('each-server');
    expect(once.bytes.keyValue).toBe(once.bytes.neededKeyValue);
    expect(once.bytes.keyValue).toBeLessThanOrEqual(each.bytes.keyValue);
    const coarse = await planJson(path, '--dedup', '--block', '512', '--tolerance', '0.1');
    expect(coarse.explanation.shards).toBeLessThanOrEqual(once.explanation.shards);
    expect(coarse.bytes.query % 10).toBe(0);
  });

  it('reads CSV with a heading, quotes and blank lines, and takes ranks and budget from the command line', async () => {
    const path = file('c.csv', 'name,tokens\n"one, with a comma",30\r\n\n two ,12\n');
    const { explanation } = await planJson(path, '-n', '2', '--budget', '40');
    expect(explanation).toMatchObject({ documents: 2, tokens: 42 });
    expect(explanation.ranks.map((rank) => rank.homeTokens)).toEqual([40, 2]);
  });

  it('takes rows of as many bytes as it says, and no longer ones', async () => {
    const path = file('w.json', '{"documents": [100, 3], "ranks": 2}');
    const { bytes } = await planJson(path, '--row-bytes-q', '2147483647', '--row-bytes-kv', '2147483647');
    expect(bytes.query % 2147483647).toBe(0);
    const longer = await runEp(['plan', path, '--row-bytes-q', '2147483648']);
    expect(longer.code).toBe(2);
    expect(longer.stderr).toMatch(/--row-bytes-q.* 1 to 2147483647/);
  });

  it('writes text for people and a picture', async () => {
    const path = file('d.json', JSON.stringify({ documents: lengths, ranks: 3, dedup: true }));
    const svg = join(folder, 'd.svg');
    const { code, stdout } = await runEp(['plan', path, '--svg', svg]);
    expect(code).toBe(0);
    expect(stdout).toContain('6 documents, 1896 tokens');
    expect(stdout).toMatch(/bytes between ranks, forward: .* query, .* key-value/);
    const drawn = readFileSync(svg, 'utf8');
    expect(drawn).toMatch(/^<svg /);
    expect(drawn).toContain('d.json: 6 documents, 1896 tokens on 3 ranks');
  });

  const bad: readonly [string, string, RegExp][] = [
    ['missing.json', '', /cannot read .*missing\.json: there is no such file or folder \(ENOENT\) \[EP_SYSTEM\]/],
    [
      'e.json',
      '{"documents": [1, 2],\n "ranks": }\n',
      /e\.json: not JSON at line 2, column 11: expected a value, found "}" \[EP_INVALID_ARGUMENT\]/,
    ],
    ['f.json', '{"documents": [1', /f\.json: not JSON at line 1, column 17: expected , or \], found the end/],
    [
      'g.json',
      '{"documents": [5, -1], "ranks": 1}',
      /documents\[1\] must be an integer from 0 to 2147483647, found -1/,
    ],
    [
      'h.json',
      '{"documents": [{"name": "x", "tokens": 1.5}], "ranks": 1}',
      /documents\[0\]\.tokens must be .* found 1\.5/,
    ],
    [
      'i.json',
      '{"documents": [{"tokens": 1, "size": 2}], "ranks": 1}',
      /field of documents\[0\] must be name or tokens, found "size"/,
    ],
    ['j.json', '{"documents": [], "ranks": 1}', /documents must be a list with at least one document/],
    ['k.json', '{"documents": [1], "rank": 1}', /field must be one of documents, ranks, .* found "rank"/],
    [
      'm.json',
      '{"documents": [10, 10], "ranks": 2, "budget": [10, 9]}',
      /the documents have 20 tokens, the budgets of 2 ranks hold 19 \[EP_CAPACITY\]/,
    ],
    [
      'v.json',
      '{"documents": [10], "ranks": 2, "rowBytesKv": 2147483648}',
      /v\.json: rowBytesKv must be an integer from 1 to 2147483647, found 2147483648/,
    ],
    ['n.json', '{"documents": [10], "ranks": 2, "budget": [10]}', /budget must be one number, or a list of 2/],
    ['o.csv', 'a,1\nb,x\n', /o\.csv: line 2: tokens must be an integer from 0 to 2147483647, found "x"/],
    ['p.csv', 'a,1\nb,2,3\n', /p\.csv: line 2: fields must be 2 in number, name and tokens, found 3/],
    ['q.csv', 'a,1\n"b,2\n', /q\.csv: not CSV at line \d+/],
    ['r.csv', 'name,tokens\n', /r\.csv: the file must be at least one line name,tokens/],
    ['s.txt', '1', /s\.txt: the file name must be one that ends in \.json or \.csv, found "\.txt"/],
  ];
  it('takes a file without a number of ranks for a command line that lacks one', async () => {
    const { code, stdout, stderr } = await runEp(['plan', file('l.json', '{"documents": [1]}')]);
    expect({ code, stdout }).toEqual({ code: 2, stdout: '' });
    expect(stderr).toMatch(/l\.json: the number of ranks is not given: use --ranks N/);
  });

  for (const [name, text, message] of bad) {
    it(`refuses ${name} and says where`, async () => {
      const path = name.startsWith('missing') ? join(folder, name) : file(name, text);
      const { code, stdout, stderr } = await runEp(['plan', path, ...(name.endsWith('.csv') ? ['-n', '2'] : [])]);
      expect({ code, stdout }).toEqual({ code: 1, stdout: '' });
      expect(stderr).toMatch(message);
    });
  }

  it('says why a file cannot be read or written', async () => {
    const directory = join(folder, 'folder.json');
    mkdirSync(directory, { recursive: true });
    const good = file('u.json', '{"documents": [1], "ranks": 1}');
    const cases: readonly (readonly [readonly string[], RegExp])[] = [
      [[directory], /cannot read .*folder\.json: it is a folder, not a file \(EISDIR\)/],
      [[join(good, 'x.json')], /cannot read .*: a part of the path before the last is not a folder \(ENOTDIR\)/],
      [[good, '--svg', join(folder, 'none', 'x.svg')], /cannot write .*: there is no such file or folder \(ENOENT\)/],
      [[good, '--svg', directory], /cannot write .*: it is a folder, not a file \(EISDIR\)/],
    ];
    for (const [args, message] of cases) {
      const { code, stderr } = await runEp(['plan', ...args]);
      expect(code).toBe(1);
      expect(stderr).toMatch(message);
    }
    // As root everything may be read.
    const error = Object.assign(new Error(), { code: 'EACCES' });
    expect(fileError('read', 'a.json', error).message).toBe('cannot read a.json: permission denied (EACCES)');
  });

  it('finds where a text stops being JSON', () => {
    const faults: readonly (readonly [string, number, string])[] = [
      ['', 0, 'a value'],
      ['[1 2]', 3, ', or ]'],
      ['[1,]', 3, 'a value'],
      ['[,', 1, 'a value or ]'],
      ['{"a" 1}', 5, ':'],
      ['{"a":1,}', 7, 'a name in double quotes'],
      ['{a:1}', 1, 'a name in double quotes or }'],
      ['{"a":1]', 6, ', or }'],
      ['"a\nb"', 2, 'the end of a string'],
      ['"a\\x"', 2, 'an escape sequence'],
      ['01', 1, 'the end'],
      ['nul', 0, 'a value'],
      ['[] []', 3, 'the end'],
    ];
    for (const [text, offset, expected] of faults)
      expect({ text, ...jsonFault(text) }).toEqual({ text, offset, expected });
    fc.assert(fc.property(fc.json(), (text) => jsonFault(text) === undefined));
    expect(jsonFault('['.repeat(1e6) + ']'.repeat(1e6))).toBeUndefined();
  });

  it('reports an error as JSON when asked for JSON', async () => {
    const path = file('t.csv', 'a,-1\n');
    const { code, stdout } = await runEp(['plan', path, '-n', '1', '--json']);
    expect(code).toBe(1);
    expect(JSON.parse(stdout)).toMatchObject({ error: { code: 'EP_INVALID_ARGUMENT', context: { what: 'tokens' } } });
  });

  for (const [name, parse] of [
    ['JSON', parseJsonDocuments],
    ['CSV', parseCsvDocuments],
  ] as const) {
    it(`gives documents or an EpError for whatever a ${name} file holds`, () => {
      const pieces = [
        '{',
        '}',
        '[',
        ']',
        '"',
        ',',
        ':',
        '\n',
        'documents',
        'tokens',
        '1',
        '-',
        '.5',
        'e9',
        '"a",7\n',
        ' ',
        '\u0000',
        'null',
      ];
      const text = fc.oneof(
        fc.string(),
        fc.json(),
        fc.array(fc.constantFrom(...pieces), { maxLength: 30 }).map((list) => list.join('')),
      );
      fc.assert(
        fc.property(text, (content) => {
          try {
            for (const document of parse(content, 'file').documents) {
              expect(Number.isSafeInteger(document.tokens) && document.tokens >= 0).toBe(true);
            }
          } catch (error) {
            if (!isEpError(error)) throw error;
          }
        }),
        { numRuns: 2000 },
      );
    });
  }
});

describe('the picture of a plan', () => {
  it('counts every byte that crosses once', () => {
    const { explanation } = planned(true);
    const bands = bandsOf(3);
    const cells = trafficOf(explanation, bands, 64, 16);
    const sent = cells.filter((cell) => !cell.local).reduce((sum, cell) => sum + cell.bytes, 0);
    expect(sent).toBe(explanation.movedQueryTokens * 64 + explanation.movedKvTokens * 16);
    expect(cells).toHaveLength(9);
    const all = cells.reduce((sum, cell) => sum + cell.bytes, 0);
    const expected = explanation.traffic.reduce((sum, pair) => sum + pair.queryTokens * 64 + pair.kvTokens * 16, 0);
    expect(all).toBe(expected);
  });

  it('shows the load of each rank before and after', () => {
    const { explanation } = planned(true);
    const bars = loadOf(explanation, bandsOf(3));
    const largest = (plan: string) => Math.max(...bars.filter((bar) => bar.plan === plan).map((bar) => bar.load));
    expect(largest('at home')).toBeCloseTo(explanation.imbalanceBefore, 10);
    expect(largest('as planned')).toBeCloseTo(explanation.imbalanceAfter, 10);
  });

  it('folds many ranks into bands and loses none', () => {
    for (const worldSize of [1, 63, 64, 65, 128, 1000]) {
      const bands = bandsOf(worldSize);
      expect(bands.length).toBeLessThanOrEqual(mostBands);
      expect(bands[0]!.first).toBe(0);
      expect(bands.at(-1)!.last).toBe(worldSize - 1);
      for (let i = 1; i < bands.length; i++) expect(bands[i]!.first).toBe(bands[i - 1]!.last + 1);
    }
    const explanation = explain(planned(true, 130).planned);
    const cells = trafficOf(explanation, bandsOf(130), 64, 16);
    const within = explanation.traffic.filter(({ from, to }) => from !== to);
    const bytes = within.reduce((sum, pair) => sum + pair.queryTokens * 64 + pair.kvTokens * 16, 0);
    expect(cells.filter((cell) => !cell.local).reduce((sum, cell) => sum + cell.bytes, 0)).toBe(bytes);
  });

  it('is an SVG with a ground of its own, readable wherever it is shown', async () => {
    const { explanation } = planned(true);
    const svg = await drawPlan(explanation, { title: 'a & b <c>', rowBytesQ: 64, rowBytesKv: 16 });
    expect(svg).toContain('fill="#ffffff"');
    expect(svg).toContain('a &amp; b &lt;c&gt;');
    expect(svg).toContain('as planned');
    expect(svg).not.toMatch(/NaN|undefined|Infinity/);
    expect((svg.match(/aria-roledescription="rect mark"|<path aria-label="to rank/g) ?? []).length).toBeGreaterThan(0);
  });

  it('draws one rank, empty documents, and more ranks than tokens', async () => {
    for (const ranks of [1, 7, 200]) {
      const { explanation } = planStep({
        lengths: Int32Array.of(0, 5, 0),
        budgets: evenBudgets(5, ranks),
        balance: true,
        tolerance: 0,
        block: 1,
        sharing: 'each-query',
        rowBytesQ: 64,
        rowBytesKv: 16,
      });
      const svg = await drawPlan(explanation, { title: 'small', rowBytesQ: 64, rowBytesKv: 16 });
      expect(svg).toMatch(/^<svg [\s\S]*<\/svg>$/);
      expect(svg).not.toMatch(/NaN|undefined/);
    }
  });

  it('writes bytes in three digits', () => {
    expect([0, 999, 1000, 9_949, 9_950, 999_499, 999_500, 4.2e9].map(shortBytes)).toEqual([
      '0',
      '999',
      '1.0k',
      '9.9k',
      '10k',
      '999k',
      '1.0M',
      '4.2G',
    ]);
  });
});
