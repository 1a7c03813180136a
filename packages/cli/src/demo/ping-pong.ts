/** What one rank does in the demo with two halves of the batch in turns: both steps at once, compared; then rounds that are timed by events of the GPU. */
import { checkInteger, type Member } from '@ep/core';
import type { AttentionShape } from '@ep/cuda-kernels';
import { Clock } from './clock.js';
import { ranksOfGpu } from './devices.js';
import { PingPongMachine } from './ping-pong-machine.js';
import { add, COMPARED, type Compared, type ComparedTensor, Results } from './results.js';
import type { StepResult } from './step.js';
import { openCudaDemoTransport } from './transports.js';
import { type BatchInput, compareDocuments, homeRows } from './verify.js';

export interface PingPongInput {
  readonly shape: AttentionShape;
  /** Those that ranks take in turn. */
  readonly gpus: readonly number[];
  readonly halves: readonly [BatchInput, BatchInput];
  /** Timed ones. */
  readonly rounds: number;
  readonly onPhase?: (phase: PingPongPhase) => void;
}

/** In order, each behind a barrier. */
export type PingPongPhase = 'set-up' | 'generate' | 'in turns' | 'timed rounds' | 'verify';

/** Collective: all ranks of `member.worldSize` call it with equal inputs. */
export async function runPingPong(member: Member, input: PingPongInput): Promise<StepResult> {
  const { shape, gpus, halves, rounds } = input;
  const [first, second] = halves;
  const { rank, worldSize } = member;
  checkInteger(rank, 'rank', 'runPingPong', 0, worldSize - 1);
  const begin = performance.now();
  const transport = await openCudaDemoTransport(member, gpus);
  try {
    const machine = await PingPongMachine.open(
      transport,
      [first.plan, second.plan],
      shape,
      ranksOfGpu(gpus, worldSize),
    );
    const results = [
      await Results.open(transport, shape, first.plan),
      await Results.open(transport, shape, second.plan),
    ] as const;
    const clock = new Clock<PingPongPhase>(transport, input.onPhase);
    clock.milliseconds['set-up'] = performance.now() - begin;
    await clock.phase('generate', () => machine.place([homeRows(first, rank), homeRows(second, rank)]));
    // The first round of all: what an event fails to order finds rows that no round has written yet.
    const found = await clock.phase('in turns', () => machine.step());
    for (const [i, half] of results.entries()) for (const name of COMPARED) half.publish(name, found[i]![name]);
    const turns = await clock.phase('timed rounds', () => machine.times(rounds));
    const compared = await clock.phase('verify', async () => {
      const [one, other] = [
        await compareDocuments(first, { rank, worldSize }, transport, results[0]),
        await compareDocuments(second, { rank, worldSize }, transport, results[1]),
      ];
      const sums = COMPARED.map((name) => [name, add(one[name], other[name])]);
      return Object.fromEntries(sums) as Record<ComparedTensor, Compared>;
    });
    // Peers may still be reading this rank's results.
    await transport.barrier();
    const { bytesSent } = machine;
    await machine.close();
    return {
      rank,
      pid: process.pid,
      gpu: transport.deviceIndex,
      milliseconds: clock.milliseconds,
      bytesSent,
      stagedBytes: 0,
      compared,
      turns,
    };
  } finally {
    await transport.close();
  }
}
