/** One rank of the demo: the program that processes run, and the module that worker threads load. */
import { demoShape, TokenRows } from './inputs.js';
import { readJob } from './job.js';
import { runRankProgram } from './rank-main.js';
import { type Phase, runStep, type StepResult } from './step.js';

await runRankProgram<Phase, StepResult>((member, jobPath, onPhase) => {
  const { dtype, plan, seed, documents, device, transport } = readJob(jobPath);
  const source = new TokenRows(seed, documents);
  return runStep(member, { plan, shape: { ...demoShape, dtype }, source, device, transport, onPhase });
});
