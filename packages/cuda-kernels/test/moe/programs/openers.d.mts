import type { Member, OpenOptions } from '@ep/core';
import type { DispatchTransport } from '../../../src/index.js';

export type Way = 'shm' | 'ibgda' | 'efa' | 'shm+ibgda' | 'shm+efa';

export declare const openers: Readonly<
  Record<Way, (member: Member, options: OpenOptions) => Promise<DispatchTransport>>
>;
