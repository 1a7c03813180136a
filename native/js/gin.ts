/** Calls to a context of the GIN facade, as a list that a kernel carries out: `ep_gin_step` in native/include/ep/abi/gin_program.h, for people. */

interface GinRequest {
  /** Rank that it is for. */
  readonly peer: number;
  /** The doorbell may be left to a later call, or to a flush. */
  readonly aggregate?: boolean;
}

interface GinSignalled extends GinRequest {
  /** Of the peer; none unless given. */
  readonly signal?: number;
  /** Arrivals at the signal, 1 unless given. Of more than one, only the last says that the bytes are there. */
  readonly add?: number;
}

/** Offsets and lengths are in bytes, of parts of the memory that the list runs with. */
export type GinCall =
  /** `counter` ticks when the source may be reused. */
  | (GinSignalled & {
      readonly op: 'put';
      readonly from: number;
      readonly to: number;
      readonly bytes: number;
      readonly counter?: number;
    })
  /** The lowest `bytes` bytes of `value`. */
  | (GinSignalled & {
      readonly op: 'putValue';
      readonly to: number;
      readonly bytes: 1 | 2 | 4 | 8;
      readonly value: bigint;
    })
  /** From the peer's part to this rank's; there after a flush. */
  | (GinRequest & { readonly op: 'get'; readonly from: number; readonly to: number; readonly bytes: number })
  | (GinSignalled & { readonly op: 'signal' })
  /** Until sources of all that was put may be reused, and all that was got is there. */
  | { readonly op: 'flush' }
  /** Until the count is at least `value`. */
  | { readonly op: 'waitSignal'; readonly signal: number; readonly value: bigint }
  | { readonly op: 'waitCounter'; readonly counter: number; readonly value: bigint }
  /** Gives the count. */
  | { readonly op: 'readSignal'; readonly signal: number }
  | { readonly op: 'readCounter'; readonly counter: number }
  /** Gives the count as it is found through the address that the facade hands out: 31 bits of it. */
  | { readonly op: 'lookSignal'; readonly signal: number }
  | { readonly op: 'lookCounter'; readonly counter: number }
  /** The count begins at zero again. Not while it moves, nor beside a wait for it. */
  | { readonly op: 'resetSignal'; readonly signal: number }
  | { readonly op: 'resetCounter'; readonly counter: number };
