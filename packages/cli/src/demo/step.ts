/**
 * What one rank does in the demo: dispatches its queries, keys and values, computes attention for the queries it serves, returns outputs, goes back
 * the same way with gradients, then compares whole documents with single-rank attention on the host.
 */
import { checkInteger, type Member, type Tensor } from '@ep/core';
import {
  type AttentionGroups,
  type AttentionShape,
  attentionBackward,
  attentionForward,
  HostStream,
} from '@ep/cuda-kernels';
import type { AttentionPlan } from '@ep/plan';
import { CudaMachine } from './cuda-machine.js';
import { HostMachine } from './host-machine.js';
import type { Machine } from './machine.js';
import { partsOfDocuments, verifierOf } from './parts.js';
import { add, COMPARED, type Compared, type ComparedTensor, compare, Results } from './results.js';
import { asFloats, generate, hostRows, type RowKind, type RowSource } from './rows.js';
import {
  type DemoDevice,
  type DemoTransport,
  type DemoTransportName,
  openCudaDemoTransport,
  openDemoTransport,
} from './transports.js';

export interface StepInput {
  readonly plan: AttentionPlan;
  readonly shape: AttentionShape;
  readonly source: RowSource;
  /** Where tensors lie and kernels run; `transport` is of the host. */
  readonly device: DemoDevice;
  readonly transport: DemoTransportName;
  /** Threads of this rank's attention on the host. */
  readonly threads?: number;
  /** Called when a phase begins. */
  readonly onPhase?: (phase: Phase) => void;
}

/** In order. Each begins with a barrier, so that a phase's time is its own and not the wait for a slower rank's last one. */
export const PHASES = [
  'set-up',
  'generate',
  'dispatch',
  'attention',
  'return',
  'dispatch dO',
  'attention backward',
  'return gradients',
  'verify',
] as const;
export type Phase = (typeof PHASES)[number];

export interface StepResult {
  readonly rank: number;
  readonly milliseconds: Readonly<Record<Phase, number>>;
  /** Sent by this rank, to itself included. */
  readonly bytesSent: { readonly forward: number; readonly backward: number };
  /** Copied because a source was not in native memory: 0 here. */
  readonly stagedBytes: number;
  readonly compared: Readonly<Record<ComparedTensor, Compared>>;
}

class Clock {
  readonly milliseconds: Record<string, number> = {};
  readonly #transport: DemoTransport;
  readonly #onPhase: ((phase: Phase) => void) | undefined;

  constructor(transport: DemoTransport, onPhase: ((phase: Phase) => void) | undefined) {
    this.#transport = transport;
    this.#onPhase = onPhase;
  }

  async phase<T>(name: Phase, body: () => Promise<T> | T): Promise<T> {
    await this.#transport.barrier();
    this.#onPhase?.(name);
    const begin = performance.now();
    const value = await body();
    this.milliseconds[name] = performance.now() - begin;
    return value;
  }
}

/** Single-rank attention over one whole document in f32, from the same (rounded) inputs. */
async function referenceOf(input: StepInput, document: number, tokens: number, stream: HostStream) {
  const { shape } = input;
  const whole = [{ document, from: 0, count: tokens }];
  const widen = (kind: RowKind): Tensor<'f32'> => {
    const rounded = generate(input, kind, whole);
    const wide = hostRows('f32', rounded.shape);
    wide.data.set(asFloats(shape.dtype, rounded.data));
    return wide;
  };
  const [q, k, v, dO] = [widen('q'), widen('k'), widen('v'), widen('dO')];
  const like = (other: Tensor<'f32'>) => hostRows('f32', other.shape);
  const [o, dQ, dK, dV] = [like(q), like(q), like(k), like(v)];
  const lse = hostRows('f32', [tokens, shape.queryHeads]);
  const groups: AttentionGroups = {
    qRow: Int32Array.of(0),
    qLength: Int32Array.of(tokens),
    kvRow: Int32Array.of(0),
    kvLength: Int32Array.of(tokens),
  };
  const threads = input.threads ?? 1;
  await attentionForward(stream, groups, { q, k, v, o, lse }, { threads });
  await attentionBackward(stream, groups, { q, k, v, o, lse, dO, dQ, dK, dV }, { threads });
  return { o, dQ, dK, dV };
}

async function openMachine(
  member: Member,
  input: StepInput,
): Promise<{ readonly transport: DemoTransport; readonly machine: Machine }> {
  const { plan, shape, threads = 1 } = input;
  if (input.device === 'cuda') {
    const transport = await openCudaDemoTransport(member);
    return closedOnFailure(transport, () => CudaMachine.open(transport, { plan, shape }));
  }
  const transport = await openDemoTransport(input.transport, member);
  return closedOnFailure(transport, () => HostMachine.open(transport, member, { plan, shape, threads }));
}

async function closedOnFailure(transport: DemoTransport, open: () => Promise<Machine>) {
  try {
    return { transport, machine: await open() };
  } catch (error) {
    await transport.close();
    throw error;
  }
}

/** Collective: all ranks of `member.worldSize` call it with equal inputs. */
export async function runStep(member: Member, input: StepInput): Promise<StepResult> {
  const { plan, shape } = input;
  const { rank, worldSize } = member;
  checkInteger(rank, 'rank', 'runStep', 0, worldSize - 1);
  const begin = performance.now();
  const { transport, machine } = await openMachine(member, input);
  try {
    const parts = partsOfDocuments(plan);
    const tokensOf = parts.map((document) => document.reduce((sum, part) => sum + part.tokens, 0));
    const results = await Results.open(transport, shape, Math.max(...plan.fwdQ.sendTokens), Math.max(0, ...tokensOf));
    const clock = new Clock(transport, input.onPhase);
    clock.milliseconds['set-up'] = performance.now() - begin;

    const home = parts
      .flatMap((document, d) => document.map((part) => ({ ...part, document: d })))
      .filter((part) => part.rank === rank)
      .sort((a, b) => a.row - b.row)
      .map((part) => ({ document: part.document, from: part.token, count: part.tokens }));
    const made = (kind: RowKind) => generate(input, kind, home);
    await clock.phase('generate', () => machine.place({ q: made('q'), k: made('k'), v: made('v'), dO: made('dO') }));

    await clock.phase('dispatch', () => machine.dispatch());
    await clock.phase('attention', () => machine.attention());
    await clock.phase('return', () => machine.returnOutputs());
    results.publish('o', await machine.outputs());

    await clock.phase('dispatch dO', () => machine.dispatchGradient());
    await clock.phase('attention backward', () => machine.attentionBackward());
    await clock.phase('return gradients', () => machine.returnGradients());
    const gradients = await machine.gradients();
    for (const name of ['dQ', 'dK', 'dV'] as const) results.publish(name, gradients[name]);

    const verifier = verifierOf(parts, worldSize);
    const none: Compared = { elements: 0, squaredError: 0, squaredReference: 0, largest: 0 };
    const compared: Record<ComparedTensor, Compared> = { o: none, dQ: none, dK: none, dV: none };
    const stream = new HostStream();
    await clock.phase('verify', async () => {
      for (const [document, tokens] of tokensOf.entries()) {
        if (verifier[document] !== rank || tokens === 0) continue;
        const reference = await referenceOf(input, document, tokens, stream);
        for (const name of COMPARED) {
          const found = asFloats(shape.dtype, await results.fetch(transport, name, parts[document]!));
          compared[name] = add(compared[name], compare(found, reference[name].data));
        }
      }
    });
    // Peers may still be reading this rank's results.
    await transport.barrier();
    const { bytesSent, stagedBytes } = machine;
    await stream.close();
    await machine.close();
    return { rank, milliseconds: clock.milliseconds as Record<Phase, number>, bytesSent, stagedBytes, compared };
  } finally {
    await transport.close();
  }
}
