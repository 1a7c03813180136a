/** One rank of the demo: the program that processes run, and the module that worker threads load. */
import { demoShape, TokenRows } from './inputs.js';
import { readJob } from './job.js';
import { runPingPong } from './ping-pong.js';
import { runRankProgram } from './rank-main.js';
import { runStep, type StepResult } from './step.js';

await runRankProgram<string, StepResult>((member, jobPath, onPhase) => {
  const { dtype, plan, seed, documents, device, gpus, transport, turns } = readJob(jobPath);
  const shape = { ...demoShape, dtype };
  const batch = { plan, shape, source: new TokenRows(seed, documents) };
  if (turns === undefined) return runStep(member, { ...batch, device, gpus, transport, onPhase });
  const { rounds, other } = turns;
  const second = { plan: other.plan, shape, source: new TokenRows(seed, other.documents) };
  return runPingPong(member, { shape, gpus, halves: [batch, second], rounds, onPhase });
});
