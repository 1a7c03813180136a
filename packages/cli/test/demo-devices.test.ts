/** The demos on several GPUs: what `--device` takes, where ranks go, and that they compute there what they compute elsewhere. */
import { fileURLToPath } from 'node:url';
import { describe, expect, it } from 'vitest';
import { deviceOption, type GpuOfMachine, placementFacts, placeRanks, sharesOf } from '../src/demo/devices.js';
import { reportText } from '../src/demo/report.js';
import { type MoeDemoReport, moeReportText } from '../src/demo-moe/report.js';
import { runEp } from './ep.js';
import { demo } from './small-demo.js';

const root = fileURLToPath(new URL('../../..', import.meta.url));
// Two GPUs whose kernels run on host threads: everything above them is what runs on real ones.
const twoGpus = {
  EP_CUDA_PATH: fileURLToPath(new URL('../../../native/build/Release/libep_cuda_host.so', import.meta.url)),
  EP_CUDA_HOST_DEVICES: '2',
};

const gpu = (peers: readonly number[], more?: Partial<GpuOfMachine>): GpuOfMachine => ({
  ...{ name: 'H', ipc: true, exclusive: false, peers },
  ...more,
});
const pair = [gpu([1]), gpu([0])];
const place = (text: string, ranks: number, machine: readonly GpuOfMachine[], threads = false) =>
  placeRanks('demo', { ...deviceOption(text), ranks, threads }, () => machine);

describe('--device', () => {
  it.each([
    ['host', { device: 'host' }],
    ['cuda', { device: 'cuda' }],
    ['cuda:3', { device: 'cuda', gpus: [3] }],
    ['cuda:2,0', { device: 'cuda', gpus: [2, 0] }],
  ])('reads %s', (text, choice) => {
    expect(deviceOption(text)).toEqual(choice);
  });

  it.each(['', 'gpu', 'cuda:', 'cuda:-1', 'cuda:0,', 'cuda:0 1', 'cuda0', 'cuda:0,0', 'cuda:12345'])(
    'refuses "%s"',
    (text) => {
      expect(() => deviceOption(text)).toThrow(/expected/);
    },
  );

  it.each([
    ['cuda', 2, pair, false, { rankMode: 'processes', gpus: [0, 1] }],
    // Ranks that share a GPU share a process.
    ['cuda', 4, pair, false, { rankMode: 'process-per-gpu', gpus: [0, 1] }],
    ['cuda:1,0', 3, pair, false, { rankMode: 'process-per-gpu', gpus: [1, 0] }],
    // Ranks that would be alone on the machine's GPUs, and those who want to share one.
    ['cuda', 1, pair, false, { rankMode: 'threads', gpus: [0] }],
    ['cuda', 4, pair, true, { rankMode: 'threads', gpus: [0] }],
    ['cuda', 4, [gpu([])], false, { rankMode: 'threads', gpus: [0] }],
    [
      'cuda',
      4,
      [gpu([1, 2], { unusable: 'broken' }), gpu([2]), gpu([1])],
      false,
      { rankMode: 'process-per-gpu', gpus: [1, 2] },
    ],
    ['cuda:1', 4, pair, false, { rankMode: 'threads', gpus: [1] }],
    ['cuda:1,0', 2, pair, false, { rankMode: 'processes', gpus: [1, 0] }],
  ] as const)('places %s, %i ranks', (text, ranks, machine, threads, found) => {
    expect(place(text, ranks, machine, threads)).toEqual({ device: 'cuda', ...found });
  });

  it('leaves GPUs alone on the host', () => {
    const never = () => expect.unreachable();
    const host = { device: 'host', ranks: 2, threads: false } as const;
    expect(placeRanks('demo', host, never)).toEqual({ device: 'host', rankMode: 'processes', gpus: [] });
    expect(placeRanks('demo', { ...host, threads: true }, never)).toMatchObject({ rankMode: 'threads' });
  });

  it.each([
    ['cuda:2', 4, pair, false, 'EP_INVALID_ARGUMENT', /among GPUs 0 to 1.*cuda:2/],
    ['cuda:0,1', 1, pair, false, 'EP_INVALID_ARGUMENT', /at most 1 GPUs/],
    ['cuda:0,1', 4, pair, true, 'EP_INVALID_ARGUMENT', /one GPU with --threads/],
    [
      'cuda:1',
      4,
      [gpu([]), gpu([], { unusable: 'fell off the bus' })],
      false,
      'EP_UNAVAILABLE',
      /cuda:1: fell off the bus/,
    ],
    // Only one of the two ways is missing.
    [
      'cuda',
      4,
      [gpu([1]), gpu([])],
      false,
      'EP_UNSUPPORTED',
      /GPU 1 does not reach the memory of GPU 0.*--device cuda:1/,
    ],
    [
      'cuda',
      4,
      [gpu([1]), gpu([0], { ipc: false })],
      false,
      'EP_UNSUPPORTED',
      /GPU 1 shares no memory between processes/,
    ],
  ] as const)('refuses %s, %i ranks, where they cannot run', (text, ranks, machine, threads, code, message) => {
    const error = expect.objectContaining({ code, message: expect.stringMatching(message) });
    expect(() => place(text, ranks, machine, threads)).toThrow(error);
  });

  it.each([2, 5])('takes GPUs that are for one process, of which each has one: %i ranks', (ranks) => {
    const alone = [gpu([1], { exclusive: true }), gpu([0], { exclusive: true })];
    expect(place('cuda', ranks, alone)).toMatchObject({ gpus: [0, 1] });
  });

  it('tells which ranks are where', () => {
    // Rank 2 has died.
    const results = [
      { rank: 0, gpu: 1, pid: 7 },
      { rank: 1, gpu: 0, pid: 8 },
      { rank: 3, gpu: 0, pid: 9 },
      { rank: 4, gpu: 1, pid: 7 },
    ];
    const shares = sharesOf([1, 0], 5, results, () => pair);
    expect(shares).toEqual([
      { gpu: 1, name: 'H', ranks: [0, 2, 4], processes: [[0, 4]] },
      { gpu: 0, name: 'H', ranks: [1, 3], processes: [[1], [3]] },
    ]);
    expect(placementFacts(shares).map(([, text]) => text)).toEqual([
      'cuda:1, H: ranks 0, 2, 4, as streams of one process',
      'cuda:0, H: ranks 1, 3',
      expect.stringMatching(/peer access/),
    ]);
    expect(placementFacts(sharesOf([1], 3, [], () => pair))).toEqual([
      ['kernels on', 'cuda:1, H, ranks as its streams'],
    ]);
    expect(placementFacts([])).toEqual([]);
  });
});

describe('ep demo on two GPUs', () => {
  it.each([
    [
      'whose ranks are its streams',
      ['-n', '3'],
      'process-per-gpu',
      [
        [0, [0, 2], [[0, 2]]],
        [1, [1], [[1]]],
      ],
      ', as streams of one process',
    ],
    [
      'of one rank',
      ['-n', '2'],
      'processes',
      [
        [0, [0], [[0]]],
        [1, [1], [[1]]],
      ],
      '',
    ],
  ])('passes with a process on each, %s', async (_, ranks, mode, places, shared) => {
    const job = ['attention', ...ranks, '--dtype', 'f32'];
    const report = await demo([...job, '--device', 'cuda'], twoGpus);
    expect(report).toMatchObject({ pass: true, mode, device: 'cuda', transport: 'cuda' });
    expect(report.gpus.map(({ gpu, ranks, processes }) => [gpu, ranks, processes])).toEqual(places);
    // Neither the plan nor what it moves knows where rows lie.
    expect(report.bytes).toEqual((await demo([...job, '--device', 'cuda:1'], twoGpus)).bytes);
    expect(reportText(report)).toMatch(
      new RegExp(
        `cuda:0, .*: ranks? 0(, 2)?${shared}\\n +cuda:1, .*: rank 1\\n *peers +by memory that each process maps`,
      ),
    );
  });

  it.each([
    [
      'of two halves in turns, with the very numbers of the steps',
      ['--ping-pong', '--mode', 'high-throughput', '--dtype', 'fp8', '-n', '2'],
      [[0], [1]],
    ],
    [
      'of two halves in turns, ranks of a GPU as streams of one process',
      ['--ping-pong', '--mode', 'low-latency', '-n', '4'],
      [
        [0, 2],
        [1, 3],
      ],
    ],
    ['without a process that dies', ['--kill', '1', '-n', '2'], [[0], [1]]],
    [
      'without a stream that dies',
      ['--kill', '0', '-n', '4'],
      [
        [0, 2],
        [1, 3],
      ],
    ],
    ['of which one dies alone in its process', ['--kill', '1', '-n', '3'], [[0, 2], [1]]],
  ])('passes with experts, %s', { timeout: 60_000 }, async (_, more, ranksOf) => {
    const args = ['demo', 'moe', '--small', '--from', root, '--json', '--no-svg', '--device', 'cuda:1,0', ...more];
    const { code, stdout, stderr } = await runEp(args, twoGpus);
    expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
    const report = JSON.parse(stdout) as MoeDemoReport;
    const rankMode = report.ranks > 2 ? 'process-per-gpu' : 'processes';
    expect(report).toMatchObject({ pass: true, rankMode });
    expect(report.gpus.map(({ gpu, ranks }) => [gpu, ranks])).toEqual([1, 0].map((gpu, i) => [gpu, ranksOf[i]]));
    const victim = more.includes('--kill') ? Number(more[1]) : undefined;
    const lives = (ranks: readonly number[]) => ranks.filter((rank) => rank !== victim);
    expect(report.gpus.map(({ processes }) => processes)).toEqual(
      ranksOf.map(lives).map((ranks) => (ranks.length > 0 ? [ranks] : [])),
    );
    if (victim !== 0) expect(report.routes).toEqual(['memory of its own GPU', 'mapped memory of cuda:0']);
    if (victim !== undefined) {
      expect(report.losses.map(({ seenBy, rank, why }) => [seenBy, rank, why])).toEqual(
        lives([...Array(report.ranks).keys()]).map((rank) => [rank, victim, 'EP_PEER_LOST']),
      );
    } else {
      expect(report.turns).toMatchObject({ rounds: 2, differ: 0 });
    }
    expect(moeReportText(report)).toMatch(/experts on +the GPUs of their ranks/);
  });

  it.each([
    [['--device', 'cuda:5'], {}, 1, /among GPUs 0 to 1.*\[EP_INVALID_ARGUMENT\]/],
    [['--device', 'cuda:0,1', '--threads'], {}, 2, /one GPU with --threads/],
    [['--device', 'cuda:one'], {}, 2, /expected host, cuda, cuda:<GPU>/],
    [['--device', 'cuda'], { EP_CUDA_HOST_NO_PEERS: '1' }, 1, /no peer access.*\[EP_UNSUPPORTED\]/],
  ])('explains why not: %s', async (args, env, status, text) => {
    const { code, stdout, stderr } = await runEp(['demo', 'moe', '--small', ...args], { ...twoGpus, ...env });
    expect({ code, stdout }).toEqual({ code: status, stdout: '' });
    expect(stderr).toMatch(text);
  });
});
