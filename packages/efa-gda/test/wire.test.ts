import fc from 'fast-check';
import { describe, expect, it, test } from 'vitest';
import {
  type Cqe,
  type CqeBytes,
  decodeCqe,
  decodeReceive,
  decodeWqe,
  dumpCqe,
  dumpReceive,
  dumpWqe,
  encodeCqe,
  encodeReceive,
  encodeWqe,
  statusName,
  type Wqe,
  type WqeBytes,
} from '../src/index.js';
import { fromMemory, goldenCqe, goldenWqes, hexBytes, hexText, inlineWrite } from './golden.js';

const u16 = fc.integer({ min: 0, max: 0xffff });
const u32 = fc.integer({ min: 0, max: 0xffff_ffff });
const u64 = fc.bigInt({ min: 0n, max: 0xffff_ffff_ffff_ffffn });
const bit = fc.constantFrom(0 as const, 1 as const);
const imm = fc.option(u32, { nil: undefined });
const remote = fc.record({ address: u64, rkey: u32 });
const segments = (most: number) =>
  fc.array(
    fc.record({
      address: u64,
      lkey: fc.integer({ min: 0, max: 0xff_ffff }),
      byteLength: fc.integer({ min: 0, max: 0x4000_0000 }),
    }),
    { maxLength: most },
  );
const inline = (most: number) => fc.record({ inline: fc.uint8Array({ maxLength: most }) });

/** What an entry of this size can say. */
const bodies = (byteLength: WqeBytes) => {
  const wide = byteLength === 128;
  const ofSend = fc.oneof(fc.record({ segments: segments(2) }), inline(wide ? 80 : 32));
  const ofWrite = wide
    ? fc.oneof(fc.record({ segments: segments(1) }), inline(80))
    : fc.record({ segments: segments(1) });
  return fc.oneof(
    fc.record({ op: fc.constant('send' as const), payload: ofSend, imm }),
    fc.record({ op: fc.constant('write' as const), remote, payload: ofWrite, imm }),
    fc.record({ op: fc.constant('read' as const), remote, into: segments(1) }),
  );
};

const present = (value: object): object =>
  Object.fromEntries(Object.entries(value).filter(([, field]) => field !== undefined));

const heads = fc.record({
  requestId: u64,
  phase: bit,
  qpn: u16,
  ah: u16,
  qkey: u32,
  completion: fc.boolean(),
  hints: fc.constantFrom(undefined, 1, 2, 3),
});

const anyEntry: fc.Arbitrary<{ readonly wqe: Wqe; readonly byteLength: WqeBytes }> = fc
  .constantFrom(64 as const, 128 as const)
  .chain((byteLength) =>
    fc
      .tuple(heads, bodies(byteLength))
      .map(([head, body]) => ({ byteLength, wqe: present({ ...head, ...body }) as Wqe })),
  );

describe('T1: work requests', () => {
  test.each(goldenWqes)('$name has its golden bytes', ({ wqe, byteLength, bytes }) => {
    expect(hexText(encodeWqe(wqe, byteLength))).toBe(hexText(bytes));
    expect(decodeWqe(bytes)).toEqual({ wqe, opcode: 2, byteLength, violations: [] });
  });

  it('without bytes have one segment of length 0', () => {
    const segment = { address: 0x1000n, lkey: 5, byteLength: 0 };
    const bytes = encodeWqe({ ...fromMemory.wqe, payload: { segments: [segment] } });
    expect(hexText(bytes.subarray(4, 8))).toBe('04030100');
    expect(hexText(bytes.subarray(32, 36))).toBe('00000000');
    expect(decodeWqe(bytes)).toMatchObject({ wqe: { payload: { segments: [segment] } }, violations: [] });
  });

  it('have the constant bytes that the format asks for', () => {
    const head = (wqe: Wqe) => hexText(encodeWqe(wqe).subarray(2, 4));
    const { op: _, payload, ...rest } = fromMemory.wqe;
    const remoteOf = { remote: rest.remote };
    expect(head({ ...rest, op: 'send', payload })).toBe('801c');
    expect(head({ ...rest, ...remoteOf, op: 'read', into: [] })).toBe('811c');
    expect(head({ ...rest, ...remoteOf, op: 'write', payload, imm: 1 })).toBe('921c');
    expect(head({ ...rest, op: 'send', payload, completion: false, phase: 1 })).toBe('800d');
  });

  it('have 64 bits of request id in two places', () => {
    const bytes = encodeWqe({ ...fromMemory.wqe, requestId: 0x1122_3344_5566_7788n });
    expect(hexText(bytes.subarray(0, 2))).toBe('8877');
    expect(hexText(bytes.subarray(26, 32))).toBe('665544332211');
  });
});

describe('T2: work requests', () => {
  it('survive writing and reading, whatever they are', () => {
    fc.assert(
      fc.property(anyEntry, ({ wqe, byteLength }) => {
        const bytes = encodeWqe(wqe, byteLength);
        const remoteLength = new DataView(bytes.buffer).getUint32(32, true);
        const decoded = decodeWqe(bytes);
        expect(decoded.violations).toEqual([]);
        expect(decoded.wqe).toEqual(wqe);
        expect(decoded.byteLength).toBe(byteLength);
        if (wqe.op === 'read') expect(remoteLength).toBe(wqe.into[0]?.byteLength ?? 0);
      }),
      { numRuns: 500 },
    );
  });

  it('with any one bit flipped differ, or break the format', () => {
    const byteAndBit = fc.tuple(fc.nat({ max: 127 }), fc.nat({ max: 7 }));
    fc.assert(
      fc.property(anyEntry, byteAndBit, ({ wqe, byteLength }, [byte, position]) => {
        const bytes = encodeWqe(wqe, byteLength);
        bytes[byte % byteLength]! ^= 1 << position;
        const decoded = decodeWqe(bytes);
        if (decoded.violations.length > 0) return;
        expect(decoded.wqe).not.toEqual(wqe);
        expect(hexText(encodeWqe(decoded.wqe!, byteLength))).toBe(hexText(bytes));
      }),
      { numRuns: 1000 },
    );
  });

  const changed = (golden: Uint8Array, at: number, hex: string): Uint8Array => {
    const bytes = golden.slice();
    bytes.set(hexBytes(hex), at);
    return bytes;
  };

  test.each([
    ['an unknown opcode', changed(fromMemory.bytes, 2, '87'), 'meta.opcode'],
    ['the extension bit', changed(fromMemory.bytes, 2, 'c2'), 'meta reserved bits'],
    ['no meta_desc', changed(fromMemory.bytes, 2, '02'), 'meta.meta_desc'],
    ['a reserved bit beside the phase', changed(fromMemory.bytes, 3, '1e'), 'meta reserved bits'],
    ['no first', changed(fromMemory.bytes, 3, '18'), 'meta.first'],
    ['no last', changed(fromMemory.bytes, 3, '14'), 'meta.last'],
    ['two segments of a write', changed(fromMemory.bytes, 6, '0200'), 'meta.length'],
    ['immediate data that is not announced', changed(fromMemory.bytes, 8, '01'), 'meta.imm'],
    ['an unknown hint', changed(fromMemory.bytes, 14, '04'), 'meta reserved bits'],
    ['a reserved byte of the head', changed(fromMemory.bytes, 15, '01'), 'meta reserved bits'],
    ['a reserved byte behind the qkey', changed(fromMemory.bytes, 25, '01'), 'meta reserved bits'],
    ['another length at the peer', changed(fromMemory.bytes, 32, '00200000'), 'remote.length'],
    ['a key of 25 bits', changed(fromMemory.bytes, 55, '01'), 'data.lkey'],
    ['an inline write of 64 bytes', changed(fromMemory.bytes, 2, 'a2'), 'meta.inline'],
    ['a read that is inline', changed(inlineWrite.bytes, 2, 'a1'), 'meta.inline'],
    ['a read with immediate data', changed(fromMemory.bytes, 2, '91'), 'meta.has_imm'],
    ['more inline bytes than there is room', changed(inlineWrite.bytes, 6, '5100'), 'meta.length'],
    ['bytes behind inline ones', changed(inlineWrite.bytes, 53, '01'), 'bytes behind the payload'],
    ['bytes at the end', changed(inlineWrite.bytes, 127, '01'), 'bytes behind the payload'],
  ])('with %s are told as a violation', (_, bytes, field) => {
    expect(decodeWqe(bytes).violations.map((violation) => violation.field)).toContain(field);
  });

  it.each([0, 16, 63, 65, 127, 192])('of %i bytes are refused', (byteLength) => {
    expect(() => decodeWqe(new Uint8Array(byteLength))).toThrow(`64 or 128 of them, found ${byteLength}`);
  });

  const { wqe } = fromMemory;
  const segment = { address: 0n, lkey: 1, byteLength: 8 };
  test.each([
    ['a queue pair of 17 bits', { qpn: 0x1_0000 }, 'qpn: expected an integer of at most 16 bits, found 65536'],
    ['a request id of 65 bits', { requestId: 1n << 64n }, 'requestId must be an unsigned bigint of 8 bytes'],
    ['two segments', { payload: { segments: [segment, segment] } }, 'number of data segments must be'],
    ['a key of 25 bits', { payload: { segments: [{ ...segment, lkey: 0x100_0000 }] } }, 'lkey must be'],
    ['inline bytes in 64', { payload: { inline: new Uint8Array(4) } }, 'an entry of 64 bytes has no room for them'],
  ])('are not made with %s', (_, change, message) => {
    expect(() => encodeWqe({ ...wqe, ...change } as Wqe)).toThrow(message);
  });

  it('carry 80 inline bytes and no more', () => {
    const full = encodeWqe({ ...wqe, payload: { inline: new Uint8Array(80).fill(0xab) } }, 128);
    expect(full[127]).toBe(0xab);
    expect(() => encodeWqe({ ...wqe, payload: { inline: new Uint8Array(81) } }, 128)).toThrow('at most 80');
  });
});

const cqeHead = {
  status: fc.integer({ min: 0, max: 255 }),
  phase: bit,
  qpn: u16,
  opcode: fc.integer({ min: 0, max: 7 }),
  unsolicited: fc.constantFrom(undefined, true as const),
};

const receivedCqe = (entryBytes: CqeBytes) =>
  fc
    .record({
      kind: fc.constant('received' as const),
      ...cqeHead,
      requestId: fc.bigInt({ min: 0n, max: 0xffffn }),
      byteCount: u32,
      sourceQpn: u16,
      ah: fc.option(fc.integer({ min: 0, max: 0xfffe }), { nil: undefined }),
      imm,
      sourceAddress: fc.option(fc.uint8Array({ minLength: 16, maxLength: 16 }), { nil: undefined }),
    })
    .map((cqe) => {
      const isWrite = cqe.opcode === 2;
      const long = entryBytes === 32 && isWrite;
      const hasAddress = entryBytes === 32 && !isWrite && cqe.sourceAddress?.some((byte) => byte !== 0);
      return present({
        ...cqe,
        byteCount: long ? cqe.byteCount : cqe.byteCount % 0x1_0000,
        sourceAddress: hasAddress ? cqe.sourceAddress : undefined,
      }) as Cqe;
    });

const anyCqe: fc.Arbitrary<{ readonly cqe: Cqe; readonly entryBytes: CqeBytes }> = fc
  .constantFrom(8 as const, 16 as const, 32 as const)
  .chain((entryBytes) => {
    const requestId = entryBytes === 8 ? fc.bigInt({ min: 0n, max: 0xffffn }) : u64;
    const sent = fc
      .record({ kind: fc.constant('sent' as const), requestId, ...cqeHead })
      .map((cqe) => present(cqe) as Cqe);
    const empty = fc.constant<Cqe>({ kind: 'empty' });
    const kinds = entryBytes === 8 ? fc.oneof(empty, sent) : fc.oneof(empty, sent, receivedCqe(entryBytes));
    return kinds.map((cqe) => ({ cqe, entryBytes }));
  });

describe('T1: completions', () => {
  it('have their golden bytes', () => {
    expect(hexText(encodeCqe(goldenCqe.cqe))).toBe(hexText(goldenCqe.bytes));
    expect(decodeCqe(goldenCqe.bytes)).toEqual(goldenCqe.cqe);
    expect(decodeCqe(goldenCqe.bytes.subarray(0, 8))).toEqual(goldenCqe.cqe);
  });

  it('survive writing and reading in entries of every size', () => {
    fc.assert(
      fc.property(anyCqe, ({ cqe, entryBytes }) => {
        const bytes = encodeCqe(cqe, entryBytes);
        expect(bytes.byteLength).toBe(entryBytes);
        expect(decodeCqe(bytes)).toEqual(cqe);
      }),
      { numRuns: 500 },
    );
  });

  it('have the upper bits of a written length behind the first 16 bytes', () => {
    const bytes = hexBytes(`0100 00 2d 2200 3412 ffff 0700 78563412 0100 ${'00'.repeat(14)}`);
    expect(decodeCqe(bytes)).toEqual({
      kind: 'received',
      requestId: 1n,
      status: 0,
      phase: 1,
      qpn: 0x22,
      opcode: 2,
      byteCount: 0x1_1234,
      sourceQpn: 7,
      imm: 0x1234_5678,
    });
  });

  test.each([
    ['7 bytes', '00'.repeat(7), '8, 16 or 32 of them, found 7'],
    ['neither queue', '0100000700000000', 'queue must be 1 (send)'],
    ['a receive in 8 bytes', '0100000500000000', 'queue must be 1 (send) in an entry of 8 bytes'],
    ['immediate data of a send', `0100000b${'00'.repeat(12)}`, 'has_imm must be 0'],
  ])('with %s are refused', (_, hex, message) => {
    expect(() => decodeCqe(hexBytes(hex))).toThrow(message);
  });

  test.each([
    ['a wide id in 8 bytes', { requestId: 0x1_0000n }, 8, 'of 16 bits in this entry'],
    ['a receive in 8 bytes', { kind: 'received' }, 8, '16 or 32 of a receive'],
    ['a length of 17 bits in 16 bytes', { kind: 'received', byteCount: 0x1_0000, sourceQpn: 0 }, 16, 'byteCount'],
    ['a status of 9 bits', { status: 256 }, 16, 'status: expected an integer of at most 8 bits'],
  ] as const)('are not made with %s', (_, change, entryBytes, message) => {
    expect(() => encodeCqe({ ...goldenCqe.cqe, ...change } as Cqe, entryBytes)).toThrow(message);
  });

  it('name each status', () => {
    const known = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 18];
    expect(new Set(known.map(statusName)).size).toBe(known.length);
    expect(known.map(statusName).filter((name) => name.startsWith('status'))).toEqual([]);
    expect(statusName(16)).toBe('status 0x10');
  });
});

describe('receive buffers', () => {
  it('survive writing and reading, and tell bits that no field names', () => {
    const buffer = fc.record({
      address: u64,
      lkey: fc.integer({ min: 0, max: 0xff_ffff }),
      byteLength: u16,
      requestId: u16,
      first: fc.boolean(),
      last: fc.boolean(),
    });
    fc.assert(
      fc.property(buffer, (receive) => {
        expect(decodeReceive(encodeReceive(receive))).toEqual({ receive, violations: [] });
      }),
    );
    const bytes = hexBytes('8877665599 7f0000 0201 0010 ccbbaac1');
    expect(decodeReceive(bytes)).toEqual({
      receive: {
        address: 0x7f9955667788n,
        lkey: 0xaabbcc,
        byteLength: 0x1000,
        requestId: 0x0102,
        first: true,
        last: true,
      },
      violations: [{ offset: 12, field: 'reserved bits', expected: '0', found: '0x01000000' }],
    });
  });

  it('of another length are refused', () => {
    expect(() => decodeReceive(new Uint8Array(15))).toThrow('16 of them, found 15');
  });
});

describe('dumps', () => {
  it('of a work request show bytes, meaning and violations', () => {
    const bytes = fromMemory.bytes.slice();
    bytes[55] = 1;
    expect(dumpWqe(bytes)).toEqual([
      '  0x00  0201821c 04030100 00000000 06050000  RDMA_WRITE request 0x102 to qp 0x304 ah 0x506, phase 0, completion',
      '  0x10  0a090807 00000000 00000000 00000000  qkey 0x0708090a',
      '  0x20  00100000 44332211 88776655 997f0000  4096 bytes, remote 0x7f9955667788 rkey 0x11223344',
      '  0x30  00100000 ccbbaa01 00ffeedd 127e0000  4096 bytes at 0x7e12ddeeff00 lkey 0xaabbcc',
      '  ! byte 0x34: data.lkey: expected 24 bits, found 0x1aabbcc',
    ]);
  });

  it('of an inline write show where the bytes begin', () => {
    expect(dumpWqe(inlineWrite.bytes)[3]).toBe('  0x30  00004444 00000000 00000000 00000000  4 bytes inline');
  });

  it('of a completion name the status', () => {
    expect(dumpCqe(goldenCqe.bytes)).toEqual([
      '  0x00  02010023 04030000 00000000 00000000  done RDMA_WRITE request 0x102, qp 0x304, phase 1',
    ]);
    const failed = dumpCqe(encodeCqe({ ...goldenCqe.cqe, status: 14 } as Cqe))[0];
    expect(failed).toContain(
      'failed RDMA_WRITE request 0x102, status 14 (the peer has no address handle for this side)',
    );
    expect(dumpCqe(new Uint8Array(16))[0]).toContain('empty: never written');
  });

  it('of a received message name the sender', () => {
    const sender = { sourceQpn: 7, ah: 3, sourceAddress: new Uint8Array(16).fill(0xfe) };
    const cqe = { ...goldenCqe.cqe, kind: 'received', opcode: 0, byteCount: 64, imm: 5, ...sender } as Cqe;
    expect(dumpCqe(encodeCqe(cqe, 32))).toEqual([
      '  0x00  0201000d 04034000 03000700 05000000  received SEND request 0x102, qp 0x304, phase 1, 64 bytes from qp 0x7 ah 0x3, imm 0x00000005',
      '  0x10  fefefefe fefefefe fefefefe fefefefe  address of the sender',
    ]);
  });

  it('of a receive buffer show its parts', () => {
    const receive = { address: 0x1000n, lkey: 9, byteLength: 64, requestId: 3, first: true, last: false };
    expect(dumpReceive(encodeReceive(receive))[0]).toContain('request 0x3: 64 bytes at 0x000000001000 lkey 0x9, first');
  });

  it('never fail on a work request, whatever it holds', () => {
    const entries = fc.constantFrom(64, 128).chain((size) => fc.uint8Array({ minLength: size, maxLength: size }));
    fc.assert(
      fc.property(entries, (bytes) => {
        expect(dumpWqe(bytes).length).toBeGreaterThan(0);
      }),
    );
  });
});
