/** A program that holds handles of stores, in a worker thread or in a process: it carries out what a test asks of them. */
import { isEpError, type Store } from '@ep/core';
import {
  type FromStoreProgram,
  openPlace,
  type SentFailure,
  type StoreRequest,
  type ToStoreProgram,
} from './stores/protocol.js';
import { hearLauncher } from './world/launch.js';

const handles: Store[] = [];
const waits = new Map<number, AbortController>();
const ABORTED = { told: 'by the test' };

function failureOf(error: unknown): SentFailure {
  if (error === ABORTED) return { message: 'aborted', aborted: true };
  if (!(error instanceof Error)) return { message: `not an error: ${String(error)}`, aborted: false };
  if (!isEpError(error)) return { message: error.stack ?? error.message, aborted: false };
  return { code: error.code, message: error.message, context: error.context, aborted: false };
}

async function answer(message: Exclude<StoreRequest, { kind: 'abort' }>): Promise<unknown> {
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

function receive(request: StoreRequest): void {
  if (request.kind === 'abort') {
    waits.get(request.id)?.abort(ABORTED);
    return;
  }
  const { id } = request;
  answer(request).then(
    (value) => tell({ kind: 'value', id, value }),
    (error: unknown) => tell({ kind: 'failure', id, failure: failureOf(error) }),
  );
}

const tell = hearLauncher<ToStoreProgram, FromStoreProgram>(({ requests }) => requests.forEach(receive));
