/** The demo's step on host threads. */
import type { Member, Storage, Tensor } from '@ep/core';
import {
  type AttentionDispatch,
  type AttentionDType,
  type AttentionGroups,
  type AttentionShape,
  attentionBackward,
  attentionForward,
  attentionLeaseBytes,
  bindAttention,
  type Dispatcher,
  groupsOfServer,
  HostStream,
  type Lease,
  openDispatcher,
} from '@ep/cuda-kernels';
import { type AttentionPlan, serverLayout } from '@ep/plan';
import type { HomeRows, Machine } from './machine.js';
import { hostRows } from './rows.js';
import type { DemoTransport } from './transports.js';

interface HostMachineInit {
  readonly dispatcher: Dispatcher;
  readonly stream: HostStream;
  readonly attention: AttentionDispatch;
  readonly groups: AttentionGroups;
  readonly shape: AttentionShape;
  /** Of the attention kernel. */
  readonly threads: number;
}

type Rows = Tensor<AttentionDType>;

export class HostMachine implements Machine {
  stagedBytes = 0;
  readonly #init: HostMachineInit;
  #home: HomeRows | undefined;
  #served: { readonly lease: Lease; readonly q: Rows; readonly k: Rows; readonly v: Rows } | undefined;
  #made: { readonly o: Rows; readonly lse: Tensor<'f32'> } | undefined;
  #back: Lease | undefined;
  #arrived: Lease | undefined;
  #slopes: { readonly dQ: Rows; readonly dK: Rows; readonly dV: Rows } | undefined;

  private constructor(init: HostMachineInit) {
    this.#init = init;
  }

  /** Collective. */
  static async open(
    transport: DemoTransport,
    { rank }: Member,
    {
      plan,
      shape,
      threads,
    }: { readonly plan: AttentionPlan; readonly shape: AttentionShape; readonly threads: number },
  ): Promise<HostMachine> {
    const stream = new HostStream();
    const dispatcher = await openDispatcher(transport, {
      leaseBytes: attentionLeaseBytes(plan, shape),
      leases: 4,
      stream,
    });
    const attention = await bindAttention(dispatcher, plan, shape);
    const groups = groupsOfServer(serverLayout(plan.layout, rank));
    return new HostMachine({ dispatcher, stream, attention, groups, shape, threads });
  }

  get bytesSent() {
    return this.#init.attention.bytesSent;
  }

  async place(rows: HomeRows): Promise<void> {
    this.#home = rows;
  }

  async dispatch(): Promise<void> {
    const { q, k, v } = this.#home!;
    const lease = this.#note(await this.#init.attention.queryKeyValue({ q, k, v }));
    this.#served = { lease, ...(lease.tensors as Record<'q' | 'k' | 'v', Rows>) };
  }

  async attention(): Promise<void> {
    const { stream, groups, shape, threads } = this.#init;
    const { q, k, v } = this.#served!;
    const o = hostRows(shape.dtype, q.shape);
    const lse = hostRows('f32', [q.shape[0]!, shape.queryHeads]);
    await attentionForward(stream, groups, { q, k, v, o, lse }, { threads });
    this.#made = { o, lse };
  }

  async returnOutputs(): Promise<void> {
    this.#back = this.#note(await this.#init.attention.output({ o: this.#made!.o }));
  }

  async outputs(): Promise<Storage[AttentionDType]> {
    const lease = this.#back!;
    const rows = (lease.tensors.o as Rows).data.slice();
    lease.release();
    return rows;
  }

  async dispatchGradient(): Promise<void> {
    this.#arrived = this.#note(await this.#init.attention.outputGradient({ dO: this.#home!.dO }));
  }

  async attentionBackward(): Promise<void> {
    const { stream, groups, shape, threads } = this.#init;
    const { lease, q, k, v } = this.#served!;
    const dO = this.#arrived!.tensors.dO as Rows;
    const like = (other: Rows): Rows => hostRows(shape.dtype, other.shape);
    const slopes = { dQ: like(q), dK: like(k), dV: like(v) };
    await attentionBackward(stream, groups, { q, k, v, ...this.#made!, dO, ...slopes }, { threads });
    this.#slopes = slopes;
    this.#arrived!.release();
    lease.release();
  }

  async returnGradients(): Promise<void> {
    this.#back = this.#note(await this.#init.attention.gradients(this.#slopes!));
  }

  async gradients() {
    const lease = this.#back!;
    const { dQ, dK, dV } = lease.tensors as Record<'dQ' | 'dK' | 'dV', Rows>;
    const rows = { dQ: dQ.data.slice(), dK: dK.data.slice(), dV: dV.data.slice() };
    lease.release();
    return rows;
  }

  async close(): Promise<void> {
    await this.#init.dispatcher.close();
    await this.#init.stream.close();
  }

  #note<L extends Lease>(lease: L): L {
    this.stagedBytes += lease.stagedBytes;
    return lease;
  }
}
