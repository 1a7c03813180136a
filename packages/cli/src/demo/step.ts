/**
 * What one rank does in the demo: dispatches its queries, keys and values, computes attention for the queries it serves, returns outputs, goes back
 * the same way with gradients, then compares whole documents with single-rank attention on the host.
 */
import { checkInteger, type Member } from '@ep/core';
import { Clock } from './clock.js';
import { CudaMachine } from './cuda-machine.js';
import { HostMachine } from './host-machine.js';
import type { Machine } from './machine.js';
import type { TurnTimes } from './ping-pong-machine.js';
import { type Compared, type ComparedTensor, Results } from './results.js';
import {
  type DemoDevice,
  type DemoTransport,
  type DemoTransportName,
  openCudaDemoTransport,
  openDemoTransport,
} from './transports.js';
import { type BatchInput, compareDocuments, homeRows } from './verify.js';

export interface StepInput extends BatchInput {
  /** Where tensors lie and kernels run; `transport` is of the host. */
  readonly device: DemoDevice;
  /** Those that ranks take in turn; none on the host. */
  readonly gpus: readonly number[];
  readonly transport: DemoTransportName;
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

/** Of either way to run the step. */
export interface StepResult {
  readonly rank: number;
  readonly pid: number;
  /** Ordinal of its GPU; absent on the host. */
  readonly gpu?: number;
  /** By phase, in order. */
  readonly milliseconds: Readonly<Record<string, number>>;
  /** Sent by this rank, to itself included. */
  readonly bytesSent: { readonly forward: number; readonly backward: number };
  /** Copied because a source was not in native memory: 0 here. */
  readonly stagedBytes: number;
  readonly compared: Readonly<Record<ComparedTensor, Compared>>;
  /** Of two halves in turns. */
  readonly turns?: TurnTimes;
}

async function openMachine(
  member: Member,
  input: StepInput,
): Promise<{ readonly transport: DemoTransport; readonly machine: Machine }> {
  const { plan, shape, threads = 1 } = input;
  if (input.device === 'cuda') {
    const transport = await openCudaDemoTransport(member, input.gpus);
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
    const results = await Results.open(transport, shape, plan);
    const clock = new Clock<Phase>(transport, input.onPhase);
    clock.milliseconds['set-up'] = performance.now() - begin;

    await clock.phase('generate', () => machine.place(homeRows(input, rank)));

    await clock.phase('dispatch', () => machine.dispatch());
    await clock.phase('attention', () => machine.attention());
    await clock.phase('return', () => machine.returnOutputs());
    results.publish('o', await machine.outputs());

    await clock.phase('dispatch dO', () => machine.dispatchGradient());
    await clock.phase('attention backward', () => machine.attentionBackward());
    await clock.phase('return gradients', () => machine.returnGradients());
    const gradients = await machine.gradients();
    for (const name of ['dQ', 'dK', 'dV'] as const) results.publish(name, gradients[name]);

    const compared = await clock.phase('verify', () =>
      compareDocuments(input, { rank, worldSize }, transport, results),
    );
    // Peers may still be reading this rank's results.
    await transport.barrier();
    const { bytesSent, stagedBytes, gpu } = machine;
    await machine.close();
    return {
      rank,
      pid: process.pid,
      ...(gpu !== undefined && { gpu }),
      milliseconds: clock.milliseconds,
      bytesSent,
      stagedBytes,
      compared,
    };
  } finally {
    await transport.close();
  }
}
