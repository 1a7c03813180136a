/** A store in this thread's memory: for ranks that share one event loop, and for tests. */
import { type Operation, type Outcome, Replica, ReplicaStore } from './replica.js';

export class MemoryStore extends ReplicaStore {
  constructor(replica: Replica = new Replica()) {
    super('memory store', replica);
  }

  /** Another handle on the same keys, closed on its own: one for each rank. */
  handle(): MemoryStore {
    this.checkOpen('handle');
    return new MemoryStore(this.replica);
  }

  protected override commit(operation: Operation): Outcome {
    return this.replica.apply(operation);
  }

  protected override refresh(): void {}

  protected override follow(): () => void {
    return () => {};
  }

  protected override release(): void {}
}

export function memoryStore(): MemoryStore {
  return new MemoryStore();
}
