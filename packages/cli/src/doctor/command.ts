/** `ep doctor`: what works here, what limits it, and what to do. */
import Table from 'cli-table3';
import { Command } from 'commander';
import pc from 'picocolors';
import { CommandExit, jsonText } from '../failure.js';
import { type Check, checksOf, type Examined, networkText, type Verdict } from './checks.js';
import { examineGpuDriver } from './gpu-driver.js';
import { addonState, findTools, sharedMemorySpace } from './machine.js';
import { gpuDevices, probeGpus, probeProviders } from './providers.js';

const paint: Readonly<Record<Verdict, (text: string) => string>> = {
  ok: pc.green,
  note: pc.dim,
  warn: pc.yellow,
  fail: pc.red,
};

export function doctorCommand(): Command {
  return new Command('doctor')
    .description(
      'probe every transport and show the limits of this machine; status 1 if a transport, Node or the addon fails, not if a device is absent',
    )
    .option('--json', 'everything that was found, as one JSON object')
    .action(async (flags: { readonly json?: boolean }) => {
      const [probes, tools] = await Promise.all([probeProviders(), findTools()]);
      const addon = addonState();
      const { nics = [], gpus = [] } = addon.loaded ? addon.network : {};
      const examined: Examined = {
        node: process.version,
        addon,
        gpu: { driver: examineGpuDriver(gpus), devices: gpuDevices() },
        reach: nics.length === 0 ? [] : await probeGpus(gpus),
        probes,
        shm: sharedMemorySpace(),
        tools,
      };
      const checks = checksOf(examined);
      const healthy = checks.every((check) => check.verdict !== 'fail');
      process.stdout.write(
        flags.json === true
          ? `${jsonText({ healthy, checks, ...examined })}\n`
          : textOf(checks) + networkText(examined),
      );
      if (!healthy) throw new CommandExit(1);
    });
}

function textOf(checks: readonly Check[]): string {
  const border = { top: '', 'top-mid': '', 'top-left': '', 'top-right': '', bottom: '', 'bottom-mid': '' } as const;
  const sides = { 'bottom-left': '', 'bottom-right': '', left: '', 'left-mid': '', mid: '', 'mid-mid': '' } as const;
  const rest = { right: '', 'right-mid': '', middle: ' ' } as const;
  const table = new Table({
    chars: { ...border, ...sides, ...rest },
    style: { 'padding-left': 0, 'padding-right': 1, head: [], border: [] },
  });
  for (const check of checks) {
    const code = check.code === undefined ? '' : ` [${check.code}]`;
    table.push([paint[check.verdict](check.verdict), check.name, `${check.found}${code}`]);
    if (check.remedy !== undefined) table.push(['', '', pc.dim(`-> ${check.remedy}`)]);
  }
  const lines = table.toString().split('\n');
  return `${lines.map((line) => line.trimEnd()).join('\n')}\n`;
}
