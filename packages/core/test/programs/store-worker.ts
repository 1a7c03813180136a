/** One rank of the file store's process tests: does operations until it is killed or has done enough, and prints what came of them. */
import { openFileStore } from '../../src/index.js';

const [path, name, mode, count] = process.argv.slice(2) as [string, string, string, string];
const store = await openFileStore(path);

if (mode === 'add') {
  for (let i = 0; i < Number(count); i++) {
    const sum = await store.add('counter', 1);
    process.stdout.write(`${sum}\n`);
    await store.set(`${name}/${i % 3}`, Buffer.alloc(20_000, i % 256));
  }
} else {
  // Waits for its turn, then passes it on: every step is a wait that only another process can end.
  for (let i = Number(name); i < Number(count); i += 4) {
    await store.get(`turn/${i}`);
    await store.set(`turn/${i + 1}`, Buffer.from(name));
  }
}
await store.close();
