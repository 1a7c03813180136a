/** Whether the NVIDIA driver would let a GPU map a network card's doorbells (I/O memory), which kernels on GPUs need to ring them. */
import { readFileSync } from 'node:fs';

/** The options that the driver was loaded with, a line each. */
const PARAMETERS = '/proc/driver/nvidia/params';

/** @param parameters What the driver's file of options says; undefined: there is no driver. */
export function peerMapping(parameters: string | undefined): string {
  if (parameters === undefined) return 'no NVIDIA driver';
  const dwords = /^RegistryDwords:\s*"(.*)"/m.exec(parameters)?.[1] ?? '';
  const set = dwords.split(';').some((dword) => /^\s*PeerMappingOverride\s*=\s*(0x)?0*1\s*$/.test(dword));
  return set
    ? 'allowed'
    : 'load the NVIDIA driver with NVreg_RegistryDwords="PeerMappingOverride=1;" for GPUs to ring doorbells';
}

export function driverParameters(path: string = PARAMETERS): string | undefined {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return undefined; // whatever keeps it from being read: nothing is known of a driver
  }
}
