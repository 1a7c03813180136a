/** What this process holds of shared segments. */
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { native } from '@ep/native';

const linkOf = (fd) => {
  try {
    return readlinkSync(`/proc/self/fd/${fd}`);
  } catch {
    return ''; // closed since it was listed
  }
};

export const footprint = () => ({
  mapped: readFileSync('/proc/self/maps', 'utf8')
    .split('\n')
    .filter((line) => line.includes('ep-segment')).length,
  descriptors: readdirSync('/proc/self/fd').filter((fd) => linkOf(fd).includes('ep-segment')).length,
  segments: native().binding.leaks().segments,
  pending: native().binding.leaks().pending,
});
