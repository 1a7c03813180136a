/** The demo's step on a GPU: the ranks are streams of one process. */
import { type DeviceTensor, elementBytes, elementCount, type Storage, viewStorage } from '@ep/core';
import {
  type AttentionDType,
  type AttentionShape,
  attentionLeaseBytes,
  bindDeviceAttention,
  type CudaAttention,
  CudaDevice,
  type CudaStream,
  type DeviceAttentionDispatch,
  type DeviceDispatcher,
  type DeviceLease,
  groupsOfServer,
  openDeviceDispatcher,
  readTensor,
  writeTensor,
} from '@ep/cuda-kernels';
import { type AttentionPlan, serverLayout } from '@ep/plan';
import type { HomeRows, Machine } from './machine.js';
import type { RowKind } from './rows.js';
import type { CudaDemoTransport } from './transports.js';

type Computed = 'o' | 'lse' | 'dQ' | 'dK' | 'dV';

interface CudaMachineInit {
  readonly device: CudaDevice;
  readonly dispatcher: DeviceDispatcher;
  readonly stream: CudaStream;
  readonly moves: DeviceAttentionDispatch;
  readonly core: CudaAttention;
  readonly home: Readonly<Record<RowKind, DeviceTensor>>;
  readonly computed: Readonly<Record<Computed, DeviceTensor>>;
}

export class CudaMachine implements Machine {
  readonly stagedBytes = 0;
  readonly #init: CudaMachineInit;
  #served: DeviceLease | undefined;
  #arrived: DeviceLease | undefined;
  #back: DeviceLease | undefined;

  private constructor(init: CudaMachineInit) {
    this.#init = init;
  }

  /** Collective. All memory is made here: later, kernels may be waiting for what this rank does next, and allocating may wait for them. */
  static async open(
    transport: CudaDemoTransport,
    { plan, shape }: { readonly plan: AttentionPlan; readonly shape: AttentionShape },
  ): Promise<CudaMachine> {
    const { rank } = transport;
    const { dtype, queryHeads, kvHeads, headDim } = shape;
    const device = new CudaDevice(transport.deviceIndex);
    const stream = device.stream();
    const dispatcher = await openDeviceDispatcher(transport, {
      leaseBytes: attentionLeaseBytes(plan, shape),
      leases: 4,
      stream,
    });
    const moves = await bindDeviceAttention(dispatcher, plan, shape);
    const make = <D extends AttentionDType | 'f32'>(of: D, rows: number, ...row: number[]): DeviceTensor => {
      const shape = [rows, ...row];
      return device.allocate(Math.max(16, elementCount(shape) * elementBytes(of))).tensor(of, shape);
    };
    const query = (rows: number): DeviceTensor => make(dtype, rows, queryHeads, headDim);
    const keyValue = (rows: number): DeviceTensor => make(dtype, rows, kvHeads, headDim);
    const [homeQ, homeKv] = [plan.fwdQ.sendTokens[rank]!, plan.fwdKv.sendTokens[rank]!];
    const [queryRows, kvRows] = [plan.fwdQ.recvTokens[rank]!, plan.fwdKv.recvTokens[rank]!];
    const core = device.attention(groupsOfServer(serverLayout(plan.layout, rank)), { ...shape, queryRows, kvRows });
    return new CudaMachine({
      ...{ device, dispatcher, stream, moves, core },
      home: { q: query(homeQ), k: keyValue(homeKv), v: keyValue(homeKv), dO: query(homeQ) },
      computed: {
        ...{ o: query(queryRows), dQ: query(queryRows), dK: keyValue(kvRows), dV: keyValue(kvRows) },
        lse: make('f32', queryRows, queryHeads),
      },
    });
  }

  get bytesSent() {
    return this.#init.moves.bytesSent;
  }

  async place(rows: HomeRows): Promise<void> {
    for (const name of ['q', 'k', 'v', 'dO'] as const) await writeTensor(rows[name].data, this.#init.home[name]);
  }

  async dispatch(): Promise<void> {
    const { q, k, v } = this.#init.home;
    this.#served = await this.#init.moves.queryKeyValue({ q, k, v });
  }

  async attention(): Promise<void> {
    const { core, stream, computed } = this.#init;
    const { q, k, v } = this.#servedRows();
    await core.forward(stream, { q, k, v, o: computed.o, lse: computed.lse });
  }

  async returnOutputs(): Promise<void> {
    this.#back = await this.#init.moves.output({ o: this.#init.computed.o });
  }

  async outputs(): Promise<Storage[AttentionDType]> {
    const rows = await read(this.#back!.tensors.o!);
    this.#back!.release();
    return rows;
  }

  async dispatchGradient(): Promise<void> {
    this.#arrived = await this.#init.moves.outputGradient({ dO: this.#init.home.dO });
  }

  async attentionBackward(): Promise<void> {
    const { core, stream, computed } = this.#init;
    const { q, k, v } = this.#servedRows();
    await core.backward(stream, { q, k, v, ...computed, dO: this.#arrived!.tensors.dO! });
    this.#arrived!.release();
    this.#served!.release();
  }

  async returnGradients(): Promise<void> {
    const { dQ, dK, dV } = this.#init.computed;
    this.#back = await this.#init.moves.gradients({ dQ, dK, dV });
  }

  async gradients() {
    const { dQ, dK, dV } = this.#back!.tensors;
    const rows = { dQ: await read(dQ!), dK: await read(dK!), dV: await read(dV!) };
    this.#back!.release();
    return rows;
  }

  async close(): Promise<void> {
    await this.#init.dispatcher.close();
    await this.#init.device.close();
  }

  #servedRows(): { readonly q: DeviceTensor; readonly k: DeviceTensor; readonly v: DeviceTensor } {
    const { q, k, v } = this.#served!.tensors;
    return { q: q!, k: k!, v: v! };
  }
}

async function read(tensor: DeviceTensor): Promise<Storage[AttentionDType]> {
  const bytes = await readTensor(tensor);
  return viewStorage(tensor.dtype as AttentionDType, bytes.buffer, 0, elementCount(tensor.shape));
}
