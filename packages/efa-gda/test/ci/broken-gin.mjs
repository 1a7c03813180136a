/** The backing `soft` with contexts that are wrong on purpose, one provider for each way. Ranks import this. */
import { breakProvider, ginBreaks } from '@ep/conformance/gin';
import { efaGda } from '@ep/efa-gda';

export const providers = Object.fromEntries(ginBreaks.map((one) => [one.id, breakProvider(efaGda.soft, one)]));
