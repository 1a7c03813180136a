/** The program of a process that holds handles of stores: it carries out what a test asks of them. */
import { isEpError, type Store } from '@ep/core';
import { type FromStoreProcess, openPlace, type SentFailure, type ToStoreProcess } from './stores/protocol.js';

const handles: Store[] = [];
const waits = new Map<number, AbortController>();
const ABORTED = { told: 'by the test' };

const tell = (message: FromStoreProcess): void => void process.send!(message);

function failureOf(error: unknown): SentFailure {
  if (error === ABORTED) return { message: 'aborted', aborted: true };
  if (!(error instanceof Error)) return { message: `not an error: ${String(error)}`, aborted: false };
  if (!isEpError(error)) return { message: error.stack ?? error.message, aborted: false };
  return { code: error.code, message: error.message, context: error.context, aborted: false };
}

async function answer(message: Exclude<ToStoreProcess, { kind: 'abort' }>): Promise<unknown> {
  if (message.kind === 'open') return handles.push(await openPlace(message.place)) - 1;
  const { id, method, options } = message;
  const args = [...message.args];
  if (options !== undefined) {
    const { abortable, ...limits } = options;
    const controller = new AbortController();
    if (abortable) waits.set(id, controller);
    args.push(abortable ? { ...limits, signal: controller.signal } : limits);
  }
  try {
    const store = handles[message.handle]!;
    return await (store[method] as (...args: readonly unknown[]) => Promise<unknown>).apply(store, args);
  } finally {
    waits.delete(id);
  }
}

process.on('message', (message: ToStoreProcess) => {
  if (message.kind === 'abort') {
    waits.get(message.id)?.abort(ABORTED);
    return;
  }
  const { id } = message;
  answer(message).then(
    (value) => tell({ kind: 'value', id, value }),
    (error: unknown) => tell({ kind: 'failure', id, failure: failureOf(error) }),
  );
});
// A parent that is gone asks nothing any more.
process.on('disconnect', () => process.exit());
