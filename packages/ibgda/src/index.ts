/** @ep/ibgda: mlx5 queue pairs posted by kernels. */
export * from './wire/index.js';
