/** What must not compile: an algorithm that needs more than EFA offers. */
import type { SymmetricMemory, Transport } from '@ep/core';
import { expectTypeOf, it } from 'vitest';
import type { EfaEndpoint, EfaTransport } from '../src/index.js';

declare const transport: EfaTransport;
declare const endpoint: EfaEndpoint;
declare const memory: SymmetricMemory;

it('is a transport of what it offers, and of less', () => {
  expectTypeOf(transport).toExtend<Transport<'bundled' | 'inc' | 'add' | 'get'>>();
  expectTypeOf(transport).toExtend<Transport<'bundled'>>();
});

it('is no transport of order, of set, of atomics or of mapped memory', () => {
  expectTypeOf(transport).not.toExtend<Transport<'prior'>>();
  expectTypeOf(transport).not.toExtend<Transport<'bundled' | 'set'>>();
  expectTypeOf(transport).not.toExtend<Transport<'atomics'>>();
  expectTypeOf(transport).not.toExtend<Transport<'load-store'>>();
});

it('takes no signal that it could not keep', () => {
  endpoint.signal(memory, { slot: 0, op: 'add', value: 1n, order: 'bundled' });
  // @ts-expect-error EFA delivers in no order
  endpoint.signal(memory, { slot: 0, op: 'add', value: 1n, order: 'prior' });
  // @ts-expect-error arrivals are counted, not set
  endpoint.signal(memory, { slot: 0, op: 'set', value: 1n });
});
