/** Handles for kernels, and a kernel over them. The host's own streams launch it, so these cases also need @ep/native. */
import assert from 'node:assert/strict';
import type { TransportCase } from './case.js';
import { checkPattern, fillPattern, ranksOf, refused, rejectsWith } from './expect.js';
import { runDispatch } from './kernel.js';

const lacksDevice: TransportCase['inapplicable'] = ({ initiators }) =>
  initiators.has('device') ? undefined : 'kernels cannot start its operations';

/** Offset of abi_major in `ep_handle_header`. */
const ABI_MAJOR_OFFSET = 4;

export const deviceCases: readonly TransportCase[] = [
  {
    id: 'device/handle',
    sentence: 'a device handle is plain bytes with a version, made only for memory of this transport',
    inapplicable: lacksDevice,
    async body(rank) {
      const [transport, other] = [await rank.open(), await rank.open()];
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const handle = transport.device(memory);
      assert.match(handle.abi, /^\d+\.\d+$/);
      assert.ok(handle.bytes.byteLength >= 16);
      assert.ok(handle.kind.length > 0);
      handle.bytes.fill(0);
      assert.notDeepEqual(transport.device(memory).bytes, handle.bytes, 'a handle is a copy');
      await refused('EP_INVALID_ARGUMENT', () => transport.device({} as never));
      assert.equal(other.closed, false);
      await rank.meet();
    },
  },
  {
    id: 'device/refuses-another-abi',
    sentence: 'a handle of another ABI version is refused and both versions are named; so are bytes that are no handle',
    inapplicable: lacksDevice,
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 2 * rank.worldSize });
      const { bytes, abi } = transport.device(memory);
      const launch = (handle: Uint8Array) => runDispatch({ rank, handle, memory, chunks: [] });
      const foreign = bytes.slice();
      new DataView(foreign.buffer).setUint16(ABI_MAJOR_OFFSET, 77, true);
      const error = await refused('EP_ABI_MISMATCH', () => launch(foreign));
      assert.match(error.message, /77\./);
      assert.ok(error.message.includes(abi), error.message);
      await refused('EP_INVALID_ARGUMENT', () => launch(new Uint8Array(bytes.byteLength)));
      await refused('EP_INVALID_ARGUMENT', () => launch(bytes.subarray(0, 20)));
      await refused('EP_INVALID_ARGUMENT', () => launch(new Uint8Array(0)));
      await rank.meet();
      await memory.close();
      await refused(['EP_CLOSED', 'EP_INVALID_ARGUMENT'], () => launch(bytes));
    },
  },
  {
    id: 'device/kernel-all-to-all',
    sentence: 'a kernel sends to every rank through the handle, counts what arrives, and finds it whole',
    inapplicable: lacksDevice,
    async body(rank) {
      const { worldSize } = rank;
      const row = 96;
      const rows = 33;
      const part = rows * row;
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 2 * worldSize * part, signalSlots: 2 * worldSize });
      const { bytes: handle } = transport.device(memory);
      for (let call = 1; call <= 5; call++) {
        for (const peer of ranksOf(worldSize)) fillPattern(memory, peer * part, part, rank.rank, call * 8 + peer);
        await rank.meet();
        await runDispatch({
          rank,
          handle,
          memory,
          rowBytes: row,
          targetOffset: worldSize * part,
          call,
          chunks: ranksOf(worldSize).map((peer) => ({
            peer,
            fromRow: peer * rows,
            toRow: rank.rank * rows,
            rows,
          })),
        });
        for (const peer of ranksOf(worldSize)) {
          const what = `call ${call}, from rank ${peer}`;
          checkPattern(memory, (worldSize + peer) * part, part, peer, call * 8 + rank.rank, what);
        }
        await rank.meet();
      }
    },
  },
  {
    id: 'device/kernel-aborted',
    sentence: "a caller's abort ends a kernel that waits for a rank which sends nothing, and what it had sent is whole",
    inapplicable: lacksDevice,
    async body(rank) {
      const { worldSize } = rank;
      const part = 64 * 40;
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 2 * worldSize * part, signalSlots: 2 * worldSize });
      const { bytes: handle } = transport.device(memory);
      fillPattern(memory, 0, part, rank.rank, 6);
      await rank.meet();
      const controller = new AbortController();
      const reason = { mine: true };
      const launch = () =>
        runDispatch({
          rank,
          handle,
          memory,
          rowBytes: 64,
          targetOffset: worldSize * part,
          chunks: [{ peer: rank.next, fromRow: 0, toRow: 0, rows: 40 }],
          signal: controller.signal,
        });
      const ended = rank.rank === 0 ? rejectsWith(reason, launch) : undefined;
      if (rank.rank === 1) {
        await memory.signals.until(0, { cmp: 'ge', value: 8n }, { peers: [0] });
        checkPattern(memory, worldSize * part, part, 0, 6, 'what the kernel sent before it waited');
      }
      await rank.meet();
      controller.abort(reason);
      await ended;
      await rank.meet();
    },
  },
];
