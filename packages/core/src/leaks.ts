/** `EP_DEBUG=leaks`: says which objects were garbage collected without `close()`, and where they were made. */
import { debugs } from './env.js';

interface Birth {
  readonly label: string;
  readonly stack: string;
}

let registry: FinalizationRegistry<Birth> | undefined;

/** Returns what to call when the object is closed. Does nothing unless the switch is on: stacks are dear. */
export function watchForLeak(object: object, label: string): () => void {
  if (!debugs('leaks')) return () => {};
  registry ??= new FinalizationRegistry<Birth>((birth) => {
    process.emitWarning(`${birth.label} was garbage collected without close(); it was made ${birth.stack}`, {
      type: 'EpLeakWarning',
      code: 'EP_LEAK',
    });
  });
  const token = {};
  const stack = (new Error('made').stack ?? '').split('\n').slice(3).join('\n').trim();
  registry.register(object, { label, stack }, token);
  return () => registry?.unregister(token);
}
