/** @ep/efa-gda: requests and completions of EFA, as bytes and as values. */
export * from './wire/index.js';
