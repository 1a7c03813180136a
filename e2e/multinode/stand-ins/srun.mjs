// Stands for srun: `srun.mjs <address>=<pid>,... [options] command...` starts the tasks of a step in the network namespaces of the hosts' processes, with the variables that Slurm sets for them.
// It knows the options that the suites use, and refuses others.
import { hostname } from 'node:os';
import { enter, placesOf } from './enter.mjs';

const [map, ...args] = process.argv.slice(2);
const places = placesOf(map);
const flags = new Map();
while (args[0]?.startsWith('--')) {
  const [name, value = ''] = args.shift().slice(2).split('=');
  if (!['overlap', 'quiet', 'unbuffered', 'nodes', 'ntasks', 'ntasks-per-node', 'nodelist'].includes(name))
    throw new Error(`the stand-in for srun has no option --${name}`);
  flags.set(name, value);
}
if (!process.env.SLURM_JOB_ID) throw new Error('the stand-in for srun is for allocations: SLURM_JOB_ID is not set');
const nodes = flags.has('nodelist') ? [flags.get('nodelist')] : [...places.keys()].slice(0, Number(flags.get('nodes')));
const perNode = Number(flags.get('ntasks-per-node') ?? Number(flags.get('ntasks')) / nodes.length);
const tasks = nodes.flatMap((node, nodeId) => Array.from({ length: perNode }, (_, local) => ({ node, nodeId, local })));
const list = nodes.length === 1 ? nodes[0] : process.env.SLURM_JOB_NODELIST;
const perNodeText = nodes.length === 1 ? `${perNode}` : `${perNode}(x${nodes.length})`;

const codes = await Promise.all(
  tasks.map(({ node, nodeId, local }, task) =>
    enter(places, node, args, {
      stdin: tasks.length === 1 ? 'inherit' : 'ignore',
      env: {
        ...process.env,
        SLURM_GTIDS: tasks.flatMap((one, at) => (one.nodeId === nodeId ? [at] : [])).join(),
        SLURM_JOBID: process.env.SLURM_JOB_ID,
        SLURM_LAUNCH_NODE_IPADDR: '127.0.0.1',
        SLURM_LOCALID: `${local}`,
        SLURM_NNODES: `${nodes.length}`,
        SLURM_NODEID: `${nodeId}`,
        SLURM_NODELIST: list,
        SLURM_NPROCS: `${tasks.length}`,
        SLURM_NTASKS: `${tasks.length}`,
        SLURM_PROCID: `${task}`,
        SLURM_STEPID: '3',
        SLURM_STEP_ID: '3',
        SLURM_STEP_NODELIST: list,
        SLURM_STEP_NUM_NODES: `${nodes.length}`,
        SLURM_STEP_NUM_TASKS: `${tasks.length}`,
        SLURM_STEP_TASKS_PER_NODE: perNodeText,
        SLURM_SUBMIT_HOST: hostname(),
        SLURM_TASKS_PER_NODE: perNodeText,
        SLURMD_NODENAME: node,
      },
    }),
  ),
);
process.exitCode = Math.max(...codes);
