import type { efaGda } from '@ep/efa-gda';

export declare const library: string;
export declare const hardware: typeof efaGda.hardware;
