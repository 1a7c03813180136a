/** `ep trace merge`: joins the dumps of the ranks' flight recorders and says where the ranks differ. */
import { Argument, Command, Option } from 'commander';
import { CommandExit, jsonText } from '../failure.js';
import { integerOption } from '../options.js';
import { readDumps } from './dumps.js';
import { mergeDumps } from './merge.js';
import { reportText } from './report.js';

interface MergeFlags {
  readonly calls: number;
  readonly json?: boolean;
}

export function traceCommand(): Command {
  const merge = new Command('merge')
    .description('join the dumps of all ranks and name who differs; status 1 if something does')
    .addArgument(new Argument('<path...>', 'dumps, or folders of which the latest of each rank is taken'))
    .addOption(
      new Option('--calls <count>', 'calls of each rank to list').argParser(integerOption(0, 1_000_000)).default(10),
    )
    .option('--json', 'the report as one JSON object')
    .action((paths: string[], flags: MergeFlags) => {
      const { files, older } = readDumps(paths);
      const worlds = mergeDumps(files, flags.calls);
      const differs = worlds.some((world) => world.findings.length > 0);
      process.stdout.write(
        flags.json === true ? `${jsonText({ differs, worlds, older })}\n` : reportText(worlds, older),
      );
      if (differs) throw new CommandExit(1);
    });
  return new Command('trace').description('what ranks of process groups were doing').addCommand(merge);
}
