/** @ep/cli: the `ep` command, and the launcher behind `ep run` for programs that start ranks themselves. */
export { createProgram, main } from './program.js';
export {
  exitCodeOf,
  type LaunchEvent,
  type LaunchOptions,
  type LaunchResult,
  launchRanks,
  type RankExit,
} from './run/launch.js';
