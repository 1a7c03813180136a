import type { Member, OpenOptions } from '@ep/core';
import type { DispatchTransport } from '../../../src/index.js';

export type Way = 'shm' | 'ibgda' | 'efa' | 'efa (hardware)' | 'shm+ibgda' | 'shm+efa';

/** Ways over which ranks come in the place of dead ones. */
export type ElasticWay = Way;

export declare const openers: Readonly<
  Record<Way, (member: Member, options: OpenOptions) => Promise<DispatchTransport>>
>;

export declare const rejoiners: Readonly<
  Record<ElasticWay, (member: Member, options: OpenOptions) => Promise<DispatchTransport>>
>;
