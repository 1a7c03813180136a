import type { ibgda } from '@ep/ibgda';

export declare const hardware: typeof ibgda.hardware;
