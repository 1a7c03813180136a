// The addon comes from the prebuilt platform package; memory of it is shared with JavaScript without a copy.
import { isEpError } from '@ep/core';
import { allocateHost, loadBinding, nativePlaceOf, platformPackage } from '@ep/native';

const words = new BigInt64Array(allocateHost(4096), 64, 8);
words.fill(7n);
const place = nativePlaceOf(words);
if (place?.byteOffset !== 64) throw new Error(`the view lies at ${place?.byteOffset}, expected 64`);
if (words.reduce((left, right) => left + right) !== 56n) throw new Error(`memory gave back ${words}`);

const { sharedObjects } = process.report.getReport() as { readonly sharedObjects: readonly string[] };
const addons = sharedObjects.filter((path) => path.endsWith('ep.node'));
if (addons.length !== 1 || !addons[0]?.includes(platformPackage())) {
  throw new Error(`expected the addon of ${platformPackage()}, found ${addons}`);
}

try {
  loadBinding({ EP_NATIVE_PATH: '/nowhere/ep.node' });
  throw new Error('an addon that does not exist was loaded');
} catch (error) {
  if (!isEpError(error) || error.code !== 'EP_NATIVE_LOAD') throw error;
}
console.log('used');
