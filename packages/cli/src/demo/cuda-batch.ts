/** A batch on a GPU: its dispatches, attention between them, and the tensors that both work on. */
import { type DeviceTensor, elementBytes, elementCount, type Storage, viewStorage } from '@ep/core';
import {
  type AttentionDType,
  type AttentionShape,
  bindDeviceAttention,
  type CudaAttention,
  type CudaDevice,
  type DeviceAttentionDispatch,
  type DeviceDispatcher,
  groupsOfServer,
  readTensor,
  writeTensor,
} from '@ep/cuda-kernels';
import { type AttentionPlan, serverLayout } from '@ep/plan';
import type { HomeRows } from './machine.js';
import type { RowKind } from './rows.js';

type Computed = 'o' | 'lse' | 'dQ' | 'dK' | 'dV';

export interface CudaBatch {
  readonly moves: DeviceAttentionDispatch;
  readonly core: CudaAttention;
  readonly home: Readonly<Record<RowKind, DeviceTensor>>;
  readonly computed: Readonly<Record<Computed, DeviceTensor>>;
}

/** Collective. All memory is made here: later, kernels may be waiting for what this rank does next, and allocating may wait for them. */
export async function bindCudaBatch(
  device: CudaDevice,
  dispatcher: DeviceDispatcher,
  { plan, shape, rank }: { readonly plan: AttentionPlan; readonly shape: AttentionShape; readonly rank: number },
): Promise<CudaBatch> {
  const { dtype, queryHeads, kvHeads, headDim } = shape;
  const moves = await bindDeviceAttention(dispatcher, plan, shape);
  const make = <D extends AttentionDType | 'f32'>(of: D, rows: number, ...row: number[]): DeviceTensor => {
    const extents = [rows, ...row];
    return device.allocate(Math.max(16, elementCount(extents) * elementBytes(of))).tensor(of, extents);
  };
  const query = (rows: number): DeviceTensor => make(dtype, rows, queryHeads, headDim);
  const keyValue = (rows: number): DeviceTensor => make(dtype, rows, kvHeads, headDim);
  const [homeQ, homeKv] = [plan.fwdQ.sendTokens[rank]!, plan.fwdKv.sendTokens[rank]!];
  const [queryRows, kvRows] = [plan.fwdQ.recvTokens[rank]!, plan.fwdKv.recvTokens[rank]!];
  return {
    moves,
    core: device.attention(groupsOfServer(serverLayout(plan.layout, rank)), { ...shape, queryRows, kvRows }),
    home: { q: query(homeQ), k: keyValue(homeKv), v: keyValue(homeKv), dO: query(homeQ) },
    computed: {
      ...{ o: query(queryRows), dQ: query(queryRows), dK: keyValue(kvRows), dV: keyValue(kvRows) },
      lse: make('f32', queryRows, queryHeads),
    },
  };
}

export async function placeRows(rows: HomeRows, home: CudaBatch['home']): Promise<void> {
  for (const name of ['q', 'k', 'v', 'dO'] as const) await writeTensor(rows[name].data, home[name]);
}

export async function readRows(tensor: DeviceTensor): Promise<Storage[AttentionDType]> {
  const bytes = await readTensor(tensor);
  return viewStorage(tensor.dtype as AttentionDType, bytes.buffer, 0, elementCount(tensor.shape));
}
