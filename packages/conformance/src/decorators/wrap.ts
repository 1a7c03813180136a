/** What decorators share: a transport that stands before another one, member by member. */
import type {
  AbortOptions,
  AllocateOptions,
  Endpoint,
  Need,
  Rank,
  SymmetricMemory,
  Transport,
  TransportProvider,
  WaitOptions,
  Work,
} from '@ep/core';

/** Called around each operation towards a peer. */
export interface Interceptor {
  /** Before the call reaches the wrapped endpoint. What it throws is what the caller sees. */
  readonly before: (op: string, peer: Rank) => void;
  /** With the Work, or undefined for a flush that has ended. */
  readonly after: (op: string, peer: Rank, work: Work<unknown> | undefined) => void;
}

export type Decorate = (rank: Rank) => Interceptor;

function wrapEndpoint<C extends Need>(inner: Endpoint<C>, { before, after }: Interceptor): Endpoint<C> {
  const { peer } = inner;
  const around =
    <A extends readonly unknown[], T>(op: string, call: (...args: A) => Work<T>) =>
    (...args: A): Work<T> => {
      before(op, peer);
      const work = call(...args);
      after(op, peer, work);
      return work;
    };
  return {
    peer,
    get closed() {
      return inner.closed;
    },
    put: around('put', inner.put),
    putValue: around('putValue', inner.putValue),
    signal: around('signal', inner.signal),
    get: around('get', inner.get),
    ...(inner.fetchAdd && { fetchAdd: around('fetchAdd', inner.fetchAdd) }),
    ...(inner.compareSwap && { compareSwap: around('compareSwap', inner.compareSwap) }),
    submit: (batch) => {
      for (const { kind } of batch) before(kind, peer);
      const works = inner.submit(batch);
      for (const work of works) after(work.op, peer, work);
      return works;
    },
    flush: async (options?: WaitOptions) => {
      before('flush', peer);
      await inner.flush(options);
      after('flush', peer, undefined);
    },
    close: (options?: AbortOptions) => inner.close(options),
    [Symbol.asyncDispose]: () => inner[Symbol.asyncDispose](),
  };
}

function wrapTransport<C extends Need>(inner: Transport<C>, interceptor: Interceptor): Transport<C> {
  const endpoints = new WeakMap<Endpoint<C>, Endpoint<C>>();
  return {
    name: inner.name,
    rank: inner.rank,
    worldSize: inner.worldSize,
    capabilities: inner.capabilities,
    get failed() {
      return inner.failed;
    },
    get closed() {
      return inner.closed;
    },
    allocate: (options: AllocateOptions) => inner.allocate(options),
    adopt: (memory) => inner.adopt(memory),
    // The same endpoint again for the same peer, as the wrapped transport gives it.
    connect: async (peer: Rank, options?: AbortOptions) => {
      const found = await inner.connect(peer, options);
      const known = endpoints.get(found) ?? wrapEndpoint(found, interceptor);
      endpoints.set(found, known);
      return known;
    },
    device: (memory: SymmetricMemory) => inner.device(memory),
    close: (options?: AbortOptions) => inner.close(options),
    [Symbol.asyncDispose]: () => inner[Symbol.asyncDispose](),
  };
}

/** A provider whose transports are wrapped. It keeps the name: to whoever uses it, it is the same transport. */
export function wrapProvider<C extends Need, Config extends object>(
  inner: TransportProvider<C, Config>,
  decorate: Decorate,
): TransportProvider<C, Config> {
  return {
    name: inner.name,
    probe: (config) => inner.probe(config),
    open: async (member, options) => wrapTransport(await inner.open(member, options), decorate(member.rank)),
  };
}
