/** What must not compile. Each @ts-expect-error is a promise of transport.ts; the compiler reports those that no longer hold. */
import { describe, expectTypeOf, it } from 'vitest';
import {
  byCapability,
  type ComposedTransport,
  compose,
  createWork,
  type DeviceHandle,
  type DType,
  decode,
  type Endpoint,
  EpError,
  encode,
  type Need,
  offers,
  type Request,
  type RoutePolicy,
  type SignalUpdate,
  type Storage,
  type SymmetricMemory,
  type Tensor,
  type Transport,
  type TransportProvider,
  tensor,
  type Work,
  WorkOwner,
} from '../src/index.js';

declare const efa: Transport<'bundled' | 'add' | 'inc'>;
declare const shm: Transport<'bundled' | 'prior' | 'inc' | 'add' | 'set' | 'get' | 'atomics' | 'load-store'>;
declare const memory: SymmetricMemory;

declare function portable(transport: Transport<'bundled'>): void;
declare function ordered(transport: Transport<'prior'>): void;
declare function both(transport: Transport<'bundled' | 'prior'>): void;
declare function resetting(transport: Transport<'bundled' | 'set'>): void;

describe('a transport', () => {
  it('that offers more is taken where less is needed', () => {
    portable(efa);
    portable(shm);
    ordered(shm);
    both(shm);
    resetting(shm);
  });

  it('without an order or operation is refused where it is needed', () => {
    // @ts-expect-error EFA has no 'prior'
    ordered(efa);
    // @ts-expect-error EFA has no 'prior'
    both(efa);
    // @ts-expect-error EFA has no 'set'
    resetting(efa);
  });

  it('does not lose the check on its way through a wider variable', () => {
    const less: Transport<'bundled'> = shm;
    // @ts-expect-error what was forgotten is not remembered
    ordered(less);
  });
});

describe('endpoints, handles and providers carry the needs too', () => {
  it('endpoint', async () => {
    const narrow = await efa.connect(1);
    const wide = await shm.connect(1);
    const ok: Endpoint<'bundled'> = wide;
    // @ts-expect-error an endpoint of EFA has no 'prior'
    const bad: Endpoint<'prior'> = narrow;
    expectTypeOf(ok).toEqualTypeOf<Endpoint<'bundled'>>();
    expectTypeOf(bad).toEqualTypeOf<Endpoint<'prior'>>();
  });

  it('device handle: a bundled handle does not reach a kernel that needs prior', () => {
    const launch = (_handle: DeviceHandle<'prior'>): void => {};
    launch(shm.device(memory));
    // @ts-expect-error a handle of EFA has no 'prior'
    launch(efa.device(memory));
  });

  it('provider', () => {
    const use = (_provider: TransportProvider<'prior'>): void => {};
    use({} as TransportProvider<'prior' | 'bundled'>);
    // @ts-expect-error
    use({} as TransportProvider<'bundled'>);
  });

  it('signal updates and requests', async () => {
    const endpoint = await efa.connect(1);
    endpoint.signal(memory, { slot: 0, op: 'add', value: 1n });
    endpoint.signal(memory, { slot: 0, op: 'add', value: 1n, order: 'bundled' });
    // @ts-expect-error
    endpoint.signal(memory, { slot: 0, op: 'set', value: 1n });
    // @ts-expect-error
    endpoint.signal(memory, { slot: 0, op: 'add', value: 1n, order: 'prior' });
    // @ts-expect-error 'bundled' is an order, not an operation
    endpoint.signal(memory, { slot: 0, op: 'bundled' });
    // @ts-expect-error
    endpoint.submit([{ kind: 'signal', memory, signal: { slot: 0, op: 'set' } }]);
    expectTypeOf<SignalUpdate<'bundled' | 'add'>['op']>().toEqualTypeOf<'add'>();
    expectTypeOf<Request<'bundled' | 'add'>>().toExtend<Request<'bundled' | 'add' | 'set'>>();
  });
});

describe('variance is computed, not assumed', () => {
  it('is contravariant in both directions for every carrier', () => {
    type Narrow = 'bundled';
    type Wide = 'bundled' | 'prior' | 'add';
    expectTypeOf<Transport<Wide>>().toExtend<Transport<Narrow>>();
    expectTypeOf<Transport<Narrow>>().not.toExtend<Transport<Wide>>();
    expectTypeOf<Endpoint<Wide>>().toExtend<Endpoint<Narrow>>();
    expectTypeOf<Endpoint<Narrow>>().not.toExtend<Endpoint<Wide>>();
    expectTypeOf<DeviceHandle<Wide>>().toExtend<DeviceHandle<Narrow>>();
    expectTypeOf<DeviceHandle<Narrow>>().not.toExtend<DeviceHandle<Wide>>();
    expectTypeOf<TransportProvider<Narrow>>().not.toExtend<TransportProvider<Wide>>();
    expectTypeOf<ComposedTransport<Narrow>>().not.toExtend<ComposedTransport<Wide>>();
    // Orders alone: where `in` is missing, an operation in the set hides that orders are not checked, and the other way round.
    expectTypeOf<Transport<'bundled'>>().not.toExtend<Transport<'prior'>>();
    expectTypeOf<Transport<'bundled' | 'add'>>().not.toExtend<Transport<'bundled' | 'set'>>();
    expectTypeOf<Transport<'bundled'>>().not.toExtend<Transport<'load-store'>>();
  });

  it('methods would let everything through: why the members are function-typed', () => {
    interface Loose<C extends Need> {
      signal(update: SignalUpdate<C>): void;
    }
    interface Strict<C extends Need> {
      readonly signal: (update: SignalUpdate<C>) => void;
    }
    expectTypeOf<Loose<'add' | 'bundled'>>().toExtend<Loose<'add' | 'bundled' | 'prior'>>();
    expectTypeOf<Strict<'add' | 'bundled'>>().not.toExtend<Strict<'add' | 'bundled' | 'prior'>>();
  });
});

describe('compose', () => {
  it('offers what all members offer', () => {
    const composed = compose([shm, efa], (_, [first]) => first!);
    expectTypeOf(composed).toEqualTypeOf<ComposedTransport<'bundled' | 'add' | 'inc'>>();
    portable(composed);
    // @ts-expect-error one member has no 'prior'
    ordered(composed);
    const reversed = compose([efa, shm], () => shm);
    const partial = compose(
      [{} as Transport<'bundled' | 'add'>, {} as Transport<'bundled' | 'set'>],
      (_, [first]) => first!,
    );
    expectTypeOf(partial).toEqualTypeOf<ComposedTransport<'bundled'>>();
    const three = compose([shm, efa, {} as Transport<'bundled' | 'prior' | 'inc'>], () => shm);
    expectTypeOf(three).toEqualTypeOf<ComposedTransport<'bundled' | 'inc'>>();
    expectTypeOf(reversed).toEqualTypeOf<ComposedTransport<'bundled' | 'add' | 'inc'>>();
  });

  it('has no atomics of several, which are not atomic against each other', () => {
    const two = compose([shm, shm], (_, [first]) => first!);
    expectTypeOf(two).toEqualTypeOf<ComposedTransport<Exclude<Need, 'atomics'>>>();
    expectTypeOf(compose([shm])).toEqualTypeOf<ComposedTransport<Need>>();
  });

  it('has nothing to offer where members have nothing in common', () => {
    declare_transports((a, b) => {
      const composed = compose([a, b], (_, [first]) => first!);
      expectTypeOf(composed).toEqualTypeOf<ComposedTransport<never>>();
      // @ts-expect-error
      portable(composed);
    });
  });

  it('offers the same where it chooses by capability, also in part', () => {
    expectTypeOf(compose([shm, efa])).toEqualTypeOf<ComposedTransport<'bundled' | 'add' | 'inc'>>();
    const usual = byCapability([0, 1]);
    expectTypeOf(compose([shm, efa], usual)).toEqualTypeOf<ComposedTransport<'bundled' | 'add' | 'inc'>>();
    const composed = compose([shm, efa], (peer, all) => (peer === 0 ? efa : usual(peer, all)));
    expectTypeOf(composed).toEqualTypeOf<ComposedTransport<'bundled' | 'add' | 'inc'>>();
  });

  it('takes the members themselves from its policy', () => {
    expectTypeOf<RoutePolicy<'bundled'>>().returns.toEqualTypeOf<Transport<'bundled'>>();
    const policy: RoutePolicy<'bundled'> = (peer) => (peer === 0 ? shm : efa);
    compose([shm, efa] as [Transport<'bundled'>, Transport<'bundled'>], policy);
  });
});

declare function declare_transports(use: (a: Transport<'bundled'>, b: Transport<'prior'>) => void): void;

describe('offers', () => {
  it('narrows by what was found at run time', () => {
    const transport: Transport<'bundled'> = efa;
    if (offers(transport, 'prior')) {
      both(transport);
      if (offers(transport, 'set')) resetting(transport);
    } else {
      portable(transport);
    }
    // @ts-expect-error not narrowed here
    ordered(transport);
  });
});

describe('Work', () => {
  it('is awaitable and keeps its type', async () => {
    const owner = new WorkOwner('test');
    const { work } = createWork<Float32Array>({ op: 'all-gather', sequence: 0, owner });
    expectTypeOf(work).toEqualTypeOf<Work<Float32Array>>();
    expectTypeOf<Awaited<typeof work>>().toEqualTypeOf<Float32Array>();
    expectTypeOf(work.then((array) => array.length)).toExtend<PromiseLike<number>>();
    expectTypeOf(work.catch(() => 'x' as const)).resolves.toEqualTypeOf<Float32Array | 'x'>();
    expectTypeOf(Promise.all([work, 1 as number])).resolves.toEqualTypeOf<[Float32Array, number]>();
    expectTypeOf<Awaited<ReturnType<Endpoint<'bundled'>['put']>>>().toEqualTypeOf<void>();
  });
});

describe('dtypes', () => {
  it('choose the carrier', () => {
    expectTypeOf(tensor('bf16', [1])).toEqualTypeOf<Tensor<'bf16'>>();
    expectTypeOf<Tensor<'bf16'>['data']>().toEqualTypeOf<Uint16Array>();
    expectTypeOf(encode('f8e4m3', [1])).toEqualTypeOf<Uint8Array>();
    expectTypeOf(decode('f64', new Float64Array(1))).toEqualTypeOf<Float64Array>();
    expectTypeOf(decode('bf16', new Uint16Array(1))).toEqualTypeOf<Float32Array>();
    // @ts-expect-error the carrier of bf16 is a Uint16Array
    tensor('bf16', [1], new Float32Array(1));
    // @ts-expect-error integers need no codec
    encode('i32', [1]);
    expectTypeOf<keyof Storage>().toEqualTypeOf<DType>();
  });
});

describe('errors', () => {
  it('narrow on their code', () => {
    const error = new EpError('EP_TIMEOUT', 'x');
    expectTypeOf(error.code).toEqualTypeOf<'EP_TIMEOUT'>();
    // @ts-expect-error
    new EpError('EP_NONSENSE', 'x');
  });
});
