// node e2e/gpu/main.mjs [TEXT]: runs every case on this machine's GPU, or those whose names hold the text. Where there is none, or it cannot do what a case needs, cases are listed as unavailable, with the
// reason; `gpu` in EP_REQUIRE makes that a failure. Status 2: no case's name holds the text.
import { openGpus, openNccl, openNvshmem } from '@ep/native';
import { isRequired } from '../../tools/required.mjs';
import { cases as all, measurements } from './cases.mjs';
import { ncclCases, ncclMeasurements } from './nccl-cases.mjs';
import { nvshmemCases } from './nvshmem-cases.mjs';
import { severalGpuMeasurements, severalGpus } from './several-gpus.mjs';
import { isBundled, suiteCases } from './suite.mjs';
import { findTorch, torchCases } from './torch-cases.mjs';

const [text = ''] = process.argv.slice(2);
const messageOf = (/** @type {unknown} */ error) => (error instanceof Error ? error.message : String(error));

/** @type {readonly import('@ep/native').GpuFacts[]} */
let devices = [];
/** Why no case runs, if none does. */
let none = '';
try {
  const gpus = openGpus();
  devices = gpus.devices;
  console.log(`${devices[0]?.name}, driver for CUDA ${devices[0]?.driver}, ${gpus.path}`);
} catch (error) {
  none = messageOf(error);
}
const [first] = devices;
const usable = [...devices.entries()].flatMap(([gpu, { unusable }]) => (unusable === undefined ? [gpu] : []));
const ranks = Math.max(2, usable.length);

/** Which GPU does not reach another one's memory, in words; empty: all do. */
function farFrom() {
  for (const gpu of usable) {
    const far = usable.filter((other) => other !== gpu && !devices[gpu]?.peers.includes(other));
    if (far.length > 0) return `GPU ${gpu} does not reach the memory of GPU ${far.join(', ')} (no peer access)`;
  }
  return '';
}

/** Why NVIDIA's library is of no use; empty: it is. @param {string} name @param {() => { version: string, path: string }} open */
function lacking(name, open) {
  try {
    const { version, path } = open();
    console.log(`${name} ${version}, ${path}`);
    return '';
  } catch (error) {
    return messageOf(error);
  }
}

const alone = usable.length > 1 ? farFrom() : 'here is one GPU';
const untimed = first?.runsOn === 'cuda' ? '' : `what is timed says nothing of ${first?.runsOn}`;
const noNccl =
  none || (usable.length > 1 ? lacking('NCCL', openNccl) : 'NCCL takes one rank of each GPU, and here is one');
const noNvshmem = none || lacking('NVSHMEM', openNvshmem);
const asksTorch = torchCases([], true).some(({ name }) => name.includes(text));
const torch = none === '' && asksTorch ? findTorch() : { unavailable: none };

/** Every case, with why it cannot run here; empty: it can. */
const wanted = /** @type {const} */ ([
  [all, ''],
  [suiteCases(), isBundled() ? '' : 'it is not bundled: node e2e/gpu/bundle-suite.mjs'],
  [measurements, untimed],
  [severalGpus(ranks), alone],
  [severalGpuMeasurements(ranks), alone || untimed],
  [ncclCases(ranks, true), noNccl],
  [ncclMeasurements(ranks), noNccl || untimed],
  [nvshmemCases(usable.length > 1), noNvshmem],
  [torchCases('peer' in torch ? torch.peer : [], true), none || ('peer' in torch ? '' : torch.unavailable)],
]).flatMap(([list, reason]) =>
  list
    .filter(({ name }) => name.includes(text))
    .map((one) => ({
      ...one,
      reason:
        none ||
        reason ||
        ('processes' in one && one.processes === true && first?.ipc !== true
          ? 'this device shares no memory between processes'
          : ''),
    })),
);
if (wanted.length === 0) {
  console.error(`no case's name holds ${JSON.stringify(text)}: without TEXT, all of them are run or listed`);
  process.exit(2);
}

const unavailable = wanted.filter(({ reason }) => reason !== '');
for (const { name, reason } of unavailable) console.log(`unavailable  ${name}: ${reason}`);
let [passed, failed] = [0, 0];
for (const { name, run } of wanted.filter(({ reason }) => reason === '')) {
  const began = performance.now();
  try {
    const said = await run();
    passed++;
    console.log(`ok    ${name} (${((performance.now() - began) / 1000).toFixed(1)} s)`);
    if (said !== undefined) console.log(`      ${said}`);
  } catch (error) {
    failed++;
    console.log(`FAIL  ${name}\n${error instanceof Error ? error.stack : error}`);
  }
}
// HAZARD: to end before all lines are written loses those that whoever reads them has not taken yet.
const code = failed === 0 && !(unavailable.length > 0 && isRequired('gpu')) ? 0 : 1;
process.stdout.write(`${passed} passed, ${failed} failed, ${unavailable.length} unavailable\n`, () =>
  process.exit(code),
);
