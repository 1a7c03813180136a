// node e2e/gpu/main.mjs [TEXT]: runs every case on this machine's GPU, or those whose names hold the text. Where there is none, or it cannot do what a case needs, cases are listed as unavailable, with the
// reason; `gpu` in EP_REQUIRE makes that a failure.
import { openGpus, openNccl, openNvshmem } from '@ep/native';
import { isRequired } from '../../tools/required.mjs';
import { cases as all, measurements } from './cases.mjs';
import { ncclCases, ncclMeasurements } from './nccl-cases.mjs';
import { nvshmemCases } from './nvshmem-cases.mjs';
import { severalGpuMeasurements, severalGpus } from './several-gpus.mjs';

const [text = ''] = process.argv.slice(2);
const wanted = (/** @type {readonly import('./cases.mjs').Case[]} */ list) =>
  list.filter(({ name }) => name.includes(text));
const cases = [...wanted(all)];

/** Which GPU does not reach another one's memory, in words; empty: all do. @param {readonly number[]} usable */
function farFrom(usable) {
  for (const gpu of usable) {
    const far = usable.filter((other) => other !== gpu && !gpus.devices[gpu].peers.includes(other));
    if (far.length > 0) return `GPU ${gpu} does not reach the memory of GPU ${far.join(', ')} (no peer access)`;
  }
  return '';
}

let gpus;
try {
  gpus = openGpus();
} catch (error) {
  const reason = error instanceof Error ? error.message : String(error);
  const every = [...cases, ...wanted(severalGpus(2))];
  for (const { name } of every) console.log(`unavailable  ${name}`);
  console.log(`0 passed, 0 failed, ${every.length} unavailable: ${reason}`);
  process.exit(isRequired('gpu') ? 1 : 0);
}
const [first] = gpus.devices;
if (first?.runsOn === 'cuda') cases.push(...wanted(measurements));
const usable = [...gpus.devices.entries()].flatMap(([gpu, { unusable }]) => (unusable === undefined ? [gpu] : []));
const several = wanted([
  ...severalGpus(Math.max(2, usable.length)),
  ...(first?.runsOn === 'cuda' ? severalGpuMeasurements(Math.max(2, usable.length)) : []),
]);
/** Why the cases for several GPUs do not run, if they do not. */
const alone = usable.length > 1 ? farFrom(usable) : 'here is one GPU';
if (alone === '') cases.push(...several);
const nccl = wanted([...ncclCases(Math.max(2, usable.length), true), ...ncclMeasurements(usable.length)]);
/** Why the cases of NCCL do not run, if they do not. */
let missing = usable.length > 1 ? '' : 'NCCL takes one rank of each GPU, and here is one';
try {
  const { version, path } = openNccl();
  console.log(`NCCL ${version}, ${path}`);
} catch (error) {
  missing = error instanceof Error ? error.message : String(error);
}
if (missing === '') cases.push(...nccl);
const symmetric = wanted(nvshmemCases(usable.length > 1));
/** Why the cases of NVSHMEM do not run, if they do not. */
let lacking = '';
try {
  const { version, path } = openNvshmem();
  console.log(`NVSHMEM ${version}, ${path}`);
  cases.push(...symmetric);
} catch (error) {
  lacking = error instanceof Error ? error.message : String(error);
}
console.log(`${first?.name}, driver for CUDA ${first?.driver}, ${gpus.path}`);
let [passed, failed, unavailable] = [0, 0, 0];
for (const [list, reason] of /** @type {const} */ ([
  [several, alone],
  [symmetric, lacking],
  [nccl, missing],
])) {
  if (reason === '') continue;
  unavailable += list.length;
  for (const { name } of list) console.log(`unavailable  ${name}: ${reason}`);
}
for (const { name, run, processes } of cases) {
  if (processes === true && first?.ipc !== true) {
    unavailable++;
    console.log(`unavailable  ${name}: this device shares no memory between processes`);
    continue;
  }
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
console.log(`${passed} passed, ${failed} failed, ${unavailable} unavailable`);
process.exit(failed === 0 && !(unavailable > 0 && isRequired('gpu')) ? 0 : 1);
