/** One rank of `ep demo moe`: the program that processes run, and the module that worker threads load. */
import { runRankProgram } from '../demo/rank-main.js';
import { readMoeJob } from './job.js';
import { type MoePhase, type MoeRankResult, runMoeRank } from './step.js';

await runRankProgram<MoePhase, MoeRankResult>((member, jobPath, onPhase) =>
  runMoeRank(member, readMoeJob(jobPath), onPhase),
);
