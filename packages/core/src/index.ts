export * from './dtype.js';
export * from './errors.js';
export * from './scope.js';
export * from './store.js';
export * from './transport.js';
export * from './work.js';
