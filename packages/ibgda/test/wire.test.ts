import fc from 'fast-check';
import { describe, expect, it, test } from 'vitest';
import {
  type Cqe,
  decodeCommand,
  decodeCommandResult,
  decodeCqe,
  decodeWqe,
  dumpCommand,
  dumpCqe,
  dumpWqe,
  encodeCommand,
  encodeCqe,
  encodeWqe,
  splitQueue,
  type Wqe,
} from '../src/index.js';
import { goldenCommands, goldenWqes, hexBytes } from './golden.js';

const u32 = fc.integer({ min: 0, max: 0xffff_ffff });
const u64 = fc.bigInt({ min: 0n, max: 0xffff_ffff_ffff_ffffn });
const remote = fc.record({ address: u64.map((value) => value & ~7n), rkey: u32 });
const segment = fc.record({ address: u64, lkey: u32, byteLength: fc.integer({ min: 1, max: 0x7fff_ffff }) });
const segments = fc.array(segment, { maxLength: 4 });
const payload = fc.oneof(fc.record({ segments }), fc.record({ inline: fc.uint8Array({ maxLength: 200 }) }));
const width = fc.constantFrom(4 as const, 8 as const);
const operand = (bytes: 4 | 8) => u64.map((value) => BigInt.asUintN(8 * bytes, value));
const result = (bytes: 4 | 8) => segment.map((value) => ({ ...value, byteLength: bytes }));

const body = fc.oneof(
  fc.record({ op: fc.constant('nop' as const) }),
  fc.record({ op: fc.constant('send' as const), payload }),
  fc.record({ op: fc.constant('write' as const), remote, payload }),
  fc.record({ op: fc.constant('write-imm' as const), remote, payload, imm: u32 }),
  fc.record({ op: fc.constant('read' as const), remote, into: segments }),
  fc.record({ op: fc.constant('fetch-add' as const), remote, add: u64, result: result(8) }),
  fc.record({ op: fc.constant('compare-swap' as const), remote, swap: u64, compare: u64, result: result(8) }),
  width.chain((bytes) =>
    fc.record({
      op: fc.constant('masked-fetch-add' as const),
      width: fc.constant(bytes),
      remote,
      add: operand(bytes),
      boundary: operand(bytes),
      result: result(bytes),
    }),
  ),
  width.chain((bytes) =>
    fc.record({
      op: fc.constant('masked-compare-swap' as const),
      width: fc.constant(bytes),
      remote,
      swap: operand(bytes),
      compare: operand(bytes),
      swapMask: operand(bytes),
      compareMask: operand(bytes),
      result: result(bytes),
    }),
  ),
);

const anyWqe: fc.Arbitrary<Wqe> = fc
  .record({
    index: fc.integer({ min: 0, max: 0xffff }),
    qpn: fc.integer({ min: 0, max: 0xff_ffff }),
    completion: fc.constantFrom('on-error' as const, 'on-first-error' as const, 'always' as const),
    fence: fc.constantFrom(undefined, 1, 2, 3, 4),
    solicited: fc.constantFrom(undefined, true as const),
    signature: fc.option(fc.integer({ min: 1, max: 255 }), { nil: undefined }),
  })
  .chain((head) => {
    const present = Object.fromEntries(Object.entries(head).filter(([, value]) => value !== undefined));
    return body.map((rest) => ({ ...present, ...rest }) as Wqe);
  });

describe('work requests', () => {
  test.each(goldenWqes)('$name has its golden bytes', ({ wqe, hex }) => {
    expect(Buffer.from(encodeWqe(wqe)).toString('hex')).toBe(Buffer.from(hexBytes(hex)).toString('hex'));
    expect(decodeWqe(hexBytes(hex))).toMatchObject({ wqe, violations: [] });
  });

  it('has the wrapped index in its first dword', () => {
    const bytes = encodeWqe({ ...goldenWqes[0]!.wqe, index: 0xffff });
    expect(Buffer.from(bytes.subarray(0, 4)).toString('hex')).toBe('00ffff08');
  });

  it('survives writing and reading, whatever it is', () => {
    fc.assert(
      fc.property(anyWqe, (wqe) => {
        const bytes = encodeWqe(wqe);
        const decoded = decodeWqe(bytes);
        expect(decoded.violations).toEqual([]);
        expect(decoded.wqe).toEqual(wqe);
        expect(decoded.byteLength).toBe(bytes.byteLength);
      }),
      { numRuns: 500 },
    );
  });

  it('leaves out the segment of a message without bytes', () => {
    const { wqe } = goldenWqes[0]!;
    const empty = encodeWqe({ ...wqe, payload: { segments: [] } } as Wqe);
    expect(empty.byteLength).toBe(32);
    expect(() =>
      encodeWqe({ ...wqe, payload: { segments: [{ address: 0n, lkey: 1, byteLength: 0 }] } } as Wqe),
    ).toThrow('byteLength');
  });

  const write = goldenWqes[0]!.hex.replace(/\s+/g, '');
  const add4 = goldenWqes[1]!.hex.replace(/\s+/g, '');
  /** The golden request with some bytes replaced. */
  const broken = (hex: string, at: number, bytes: string) =>
    hexBytes(hex.slice(0, at * 2) + bytes + hex.slice(at * 2 + bytes.length));

  test.each([
    ['a reserved bit of the control segment', broken(write, 7, '43'), 'ctrl reserved bits'],
    ['a wrong opmod', broken(write, 0, '08'), 'ctrl.opmod'],
    ['an opmod that masked atomics lack', broken(add4, 0, '07'), 'ctrl.opmod'],
    ['a stream', broken(write, 10, '01'), 'ctrl.dci_stream'],
    ['a fence that is none', broken(write, 11, 'a8'), 'ctrl.fence'],
    ['a completion mode that is none', broken(write, 11, '0c'), 'ctrl.ce'],
    ['immediate data where there is none', broken(write, 12, '01'), 'ctrl.imm'],
    ['a reserved word of the remote segment', broken(write, 31, '01'), 'raddr.reserved'],
    ['a data segment of 0 bytes', broken(write, 32, '00000000'), 'data.byte_count'],
    ['a size of 0', broken(write, 7, '00'), 'ctrl.ds'],
    ['more segments than there are bytes', broken(write, 7, '04'), 'ctrl.ds'],
    ['no remote segment', broken(write, 7, '01'), 'remote address segment'],
    ['no segment for the old value', broken(add4, 7, '03'), 'ds'],
    ['an unaligned atomic', broken(add4, 23, '06'), 'raddr.address'],
    ['a reserved word of the atomic segment', broken(add4, 40, '01'), 'atomic.reserved'],
    ['an old value of another width', broken(add4, 48, '00000008'), 'data.byte_count'],
    ['an unknown opcode', broken(write, 3, '77'), 'ctrl.opcode'],
  ])('with %s is told as a violation', (_, bytes, field) => {
    expect(decodeWqe(bytes).violations.map((violation) => violation.field)).toContain(field);
  });

  it('with inline data longer than its size is told as a violation', () => {
    const { wqe } = goldenWqes[0]!;
    const bytes = encodeWqe({ ...wqe, payload: { inline: new Uint8Array(10) } } as Wqe);
    new DataView(bytes.buffer).setUint32(32, 0x8000_0000 + 13);
    expect(decodeWqe(bytes).violations.map(({ field }) => field)).toContain('inline data');
  });

  it('of fewer bytes than a control segment is refused', () => {
    expect(() => decodeWqe(new Uint8Array(15))).toThrow('a control segment of 16 bytes, found 15 bytes');
  });

  test.each([
    ['an index of 17 bits', { index: 0x1_0000 }, 'index: expected an integer of at most 16 bits, found 65536'],
    ['a queue pair of 25 bits', { qpn: 0x100_0000 }, 'qpn: expected an integer of at most 24 bits'],
  ])('is not made with %s', (_, change, message) => {
    expect(() => encodeWqe({ ...goldenWqes[0]!.wqe, ...change } as Wqe)).toThrow(message);
  });

  it('has at most 63 segments', () => {
    const wqe = { ...goldenWqes[0]!.wqe, payload: { inline: new Uint8Array(61 * 16 - 4) } } as Wqe;
    expect(encodeWqe(wqe).byteLength).toBe(63 * 16);
    expect(() => encodeWqe({ ...wqe, payload: { inline: new Uint8Array(61 * 16 - 3) } } as Wqe)).toThrow('63 segments');
  });

  it('of two blocks is followed by the next one in a queue', () => {
    const { wqe } = goldenWqes[0]!;
    const queue = new Uint8Array(192);
    queue.set(encodeWqe({ ...wqe, payload: { inline: new Uint8Array(40) } } as Wqe));
    queue.set(encodeWqe({ ...wqe, index: 7 }), 128);
    expect(splitQueue(queue).map(({ at, bytes }) => [at, decodeWqe(bytes).wqe?.index])).toEqual([
      [0, 5],
      [128, 7],
    ]);
  });
});

const cqeHead = {
  qpn: fc.integer({ min: 0, max: 0xff_ffff }),
  wqeCounter: fc.integer({ min: 0, max: 0xffff }),
  wqeOpcode: fc.integer({ min: 0, max: 255 }),
  userIndex: u32,
  owner: fc.constantFrom(0 as const, 1 as const),
};
const anyCqe: fc.Arbitrary<Cqe> = fc.oneof(
  fc.constant({ kind: 'empty' as const }),
  fc.record({ kind: fc.constant('done' as const), ...cqeHead, byteCount: u32, timestamp: u64 }),
  fc.record({ kind: fc.constant('write-imm' as const), ...cqeHead, byteCount: u32, timestamp: u64, imm: u32 }),
  fc.record({
    kind: fc.constant('error' as const),
    side: fc.constantFrom('requester' as const, 'responder' as const),
    ...cqeHead,
    syndrome: fc.integer({ min: 0, max: 255 }),
    vendorSyndrome: fc.integer({ min: 0, max: 255 }),
  }),
);

describe('completions', () => {
  it('survive writing and reading', () => {
    fc.assert(
      fc.property(anyCqe, (cqe) => {
        expect(decodeCqe(encodeCqe(cqe))).toEqual(cqe);
      }),
    );
  });

  it('of an untouched queue are empty', () => {
    expect(decodeCqe(new Uint8Array(64).fill(0xff))).toEqual({ kind: 'empty' });
  });

  it('carry syndrome, queue pair and index where a NIC puts them', () => {
    const bytes = new Uint8Array(64);
    bytes.set(hexBytes('00008813 0800123400050 0d0'.replace(/\s/g, '')), 52);
    expect(decodeCqe(bytes)).toMatchObject({
      kind: 'error',
      side: 'requester',
      vendorSyndrome: 0x88,
      syndrome: 0x13,
      wqeOpcode: 8,
      qpn: 0x1234,
      wqeCounter: 5,
    });
  });

  it('with another format or length are refused', () => {
    expect(() => decodeCqe(new Uint8Array(63))).toThrow('found 63');
    const bytes = new Uint8Array(64);
    bytes[63] = 0x0c;
    expect(() => decodeCqe(bytes)).toThrow('format');
    bytes[63] = 0x70;
    expect(() => decodeCqe(bytes)).toThrow('opcode');
  });
});

describe('commands', () => {
  test.each(goldenCommands)('$name has its golden bytes', ({ name, parts, hex, byteLength }) => {
    const expected = new Uint8Array(byteLength);
    expected.set(hexBytes(hex));
    expect(Buffer.from(encodeCommand(name, parts)).toString('hex')).toBe(Buffer.from(expected).toString('hex'));
    const decoded = decodeCommand(expected);
    expect(decoded).toMatchObject({ name, parts, violations: [] });
    expect(Buffer.from(encodeCommand(name, decoded.parts)).equals(expected)).toBe(true);
  });

  it('tell every bit that no field names', () => {
    const bytes = encodeCommand('create-qp', {});
    bytes[0x0f] = 0x10;
    bytes[0x10f] = 1;
    expect(decodeCommand(bytes).violations).toEqual([
      { offset: 0x0c, field: 'reserved bits', expected: '0', found: '0x00000010' },
      { offset: 0x10c, field: 'reserved bits', expected: '0', found: '0x00000001' },
    ]);
  });

  it('are refused with an unknown opcode, another length or a value that does not fit', () => {
    expect(() => decodeCommand(new Uint8Array(16))).toThrow('opcode');
    expect(() => decodeCommand(encodeCommand('create-qp', {}).subarray(0, 271))).toThrow('272 bytes');
    expect(() => encodeCommand('create-qp', { context: { logSqSize: 16 } })).toThrow(
      'logSqSize: expected an integer of at most 4 bits, found 16',
    );
  });

  it('have an answer with a status', () => {
    const answer = hexBytes('03000000 00abcdef 00123456 00000000');
    expect(decodeCommandResult(answer)).toEqual({ status: 3, syndrome: 0xabcdef, object: 0x123456 });
  });
});

describe('dumps', () => {
  it('of a work request show bytes, meaning and violations', () => {
    const bytes = hexBytes(goldenWqes[1]!.hex);
    bytes[47] = 1;
    expect(dumpWqe(bytes)).toEqual([
      '  0x00  08000615 00123404 00000008 00000000  ATOMIC_MASKED_FA index 6 qp 0x1234 ds 4, completion always',
      '  0x10  00007f00 11220004 0000abcd 00000000  remote 0x7f0011220004 rkey 0xabcd',
      '  0x20  fffffff8 00000000 00000000 00000001  4 bytes: add 0xfffffff8, carries stop at 0x0',
      '  0x30  00000004 00005678 00007f00 aabb0004  4 bytes at 0x7f00aabb0004 lkey 0x5678',
      '  ! byte 0x2f: atomic.reserved: expected 0, found 0x1',
    ]);
  });

  it('of an error name the syndrome', () => {
    const lines = dumpCqe(
      encodeCqe({
        kind: 'error',
        side: 'requester',
        qpn: 0x77,
        wqeCounter: 9,
        wqeOpcode: 8,
        userIndex: 3,
        owner: 1,
        syndrome: 0x15,
        vendorSyndrome: 0x81,
      }),
    );
    expect(lines.at(-1)).toContain(
      'requester error 0x15 (transport retries exceeded: the peer does not answer), vendor syndrome 0x81; qp 0x77 RDMA_WRITE index 9 owner 1',
    );
  });

  it('of a command show what is not zero', () => {
    expect(dumpCommand(encodeCommand('rtr2rts-qp', { context: { retryCount: 7 } }))).toEqual([
      'rtr2rts-qp, 272 bytes',
      '  command.opcode               0x504',
      '  context.retryCount           0x7',
    ]);
  });

  it('never fail on a work request, whatever it holds', () => {
    fc.assert(
      fc.property(fc.uint8Array({ minLength: 16, maxLength: 128 }), (bytes) => {
        expect(dumpWqe(bytes).length).toBeGreaterThan(0);
      }),
    );
  });
});
