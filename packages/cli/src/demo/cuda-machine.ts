/** The demo's step on a GPU, as one rank makes it: a stream of its GPU. */
import type { DeviceTensor, Storage } from '@ep/core';
import {
  type AttentionDType,
  type AttentionShape,
  attentionLeaseBytes,
  CudaDevice,
  type CudaStream,
  type DeviceDispatcher,
  type DeviceLease,
  openDeviceDispatcher,
} from '@ep/cuda-kernels';
import type { AttentionPlan } from '@ep/plan';
import { bindCudaBatch, type CudaBatch, placeRows, readRows } from './cuda-batch.js';
import type { HomeRows, Machine } from './machine.js';
import type { CudaDemoTransport } from './transports.js';

interface CudaMachineInit extends CudaBatch {
  readonly device: CudaDevice;
  readonly dispatcher: DeviceDispatcher;
  readonly stream: CudaStream;
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

  /** Collective. */
  static async open(
    transport: CudaDemoTransport,
    { plan, shape }: { readonly plan: AttentionPlan; readonly shape: AttentionShape },
  ): Promise<CudaMachine> {
    const { rank } = transport;
    const device = new CudaDevice(transport.deviceIndex);
    const stream = device.stream();
    const leaseBytes = attentionLeaseBytes(plan, shape);
    const dispatcher = await openDeviceDispatcher(transport, { leaseBytes, leases: 4, stream });
    const batch = await bindCudaBatch(device, dispatcher, { plan, shape, rank });
    return new CudaMachine({ device, dispatcher, stream, ...batch });
  }

  get gpu(): number {
    return this.#init.device.index;
  }

  get bytesSent() {
    return this.#init.moves.bytesSent;
  }

  async place(rows: HomeRows): Promise<void> {
    await placeRows(rows, this.#init.home);
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
    const rows = await readRows(this.#back!.tensors.o!);
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
    const rows = { dQ: await readRows(dQ!), dK: await readRows(dK!), dV: await readRows(dV!) };
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
