// Entry of a rank's worker thread: node runs no TypeScript in workers, and `--import tsx` does not reach them.
import { register } from 'tsx/esm/api';

register();
await import('./rank.ts');
