/** The addon of this environment, loaded at the first use: importing an @ep package never loads it. */
import type { Binding } from './binding.js';
import { CallFrame } from './frame.js';
import { loadBinding } from './load.js';
import { Operations } from './operations.js';

export interface Native {
  readonly binding: Binding;
  readonly operations: Operations;
  readonly frame: CallFrame;
}

let loaded: Native | undefined;

/** Throws `EP_NATIVE_LOAD` or `EP_ABI_MISMATCH`. */
export function native(): Native {
  if (loaded === undefined) {
    const binding = loadBinding();
    loaded = { binding, operations: new Operations(binding), frame: new CallFrame(binding.frame) };
  }
  return loaded;
}
