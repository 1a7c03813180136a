// What the kernels are made of: whoever links them takes all of these.

/** Kernels, by paths from native/. */
export const kernels = [
  'kernels',
  'attention_kernels',
  'expert_kernels',
  'moe_kernels',
  'moe_low_latency',
  'group_kernels',
].map((name) => `cuda/${name}.cu`);
/** The table of entries that the addon opens. */
export const table = 'cuda/library.cpp';
