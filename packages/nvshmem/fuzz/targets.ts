/** What arrives from other ranks as bytes and names their memory: handles of control segments, memories and teams; and what ranks that come later find in the store. */
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { bytesTarget, type FuzzSuite } from '@ep/fuzz';
import { type NativeRankContext, native, segmentHandleLayout } from '@ep/native';
import { parseApplication, parseWord } from '@ep/native/ranks';

const { binding } = native();
const { offset } = segmentHandleLayout;

/** No process has such a number. */
const NO_PID = 1 << 30;

const refused = (error: unknown): boolean =>
  isEpError(error) && error.code.startsWith('EP_') && error.code !== 'EP_CLOSED';

/**
 * A handle names a process that lives, so a valid one cannot be kept in a file: an input is what to change of it, by exclusive or. An empty one
 * takes everything away, zeros leave it as it is. HAZARD: of other processes nothing may be opened, whatever the fuzzer makes of the pid.
 */
function changed(valid: Uint8Array, input: Buffer): Uint8Array {
  const handle = Uint8Array.from(input, (byte, i) => byte ^ (valid[i] ?? 0));
  if (handle.byteLength < offset.pid + 4) return handle;
  const view = new DataView(handle.buffer);
  if (view.getInt32(offset.pid, true) !== process.pid)
    view.setInt32(offset.pid, view.getInt32(offset.pid, true) | NO_PID, true);
  return handle;
}

const concatenated = (...parts: readonly Uint8Array[]): Uint8Array => Uint8Array.from(Buffer.concat(parts));

/** Two ranks of this process. */
const contexts = [0, 1].map((rank) => new binding.RankContext(rank, 2, 2)) as [NativeRankContext, NativeRankContext];
for (const context of contexts) context.connect(concatenated(...contexts.map((each) => each.handle())));
const memories = contexts.map((context) => new binding.SymmetricMemory(context, 4096, 4));
const teamHandle = contexts[0].createTeamSegment(2);
const everyone = Int32Array.of(0, 1);

export const suite: FuzzSuite = {
  corpus: join(import.meta.dirname, 'corpus'),
  targets: [
    bytesTarget('members', refused, (input) => {
      const which = input[0] ?? 0;
      const bytes = input.subarray(1);
      if (which % 2 === 0) {
        const { incarnation, facts, control } = parseApplication(bytes);
        if (!Number.isSafeInteger(incarnation)) throw new Error(`incarnation ${incarnation}`);
        Buffer.from(facts + control, 'base64');
        return;
      }
      const word = parseWord(bytes, 4);
      if (!('plan' in word)) return;
      const { members, joining, controls } = word.plan;
      const sound = [...members, ...joining].every((rank) => rank >= 0 && rank < 4 && controls[rank] !== undefined);
      if (!sound) throw new Error(JSON.stringify(word));
    }),
    bytesTarget('control-handle', refused, (input) => {
      const handle = changed(contexts[1].handle(), input);
      const context = new binding.RankContext(0, 2, 2);
      try {
        context.connect(concatenated(context.handle(), handle));
      } finally {
        context.close();
      }
    }),
    bytesTarget('memory-handle', refused, (input) => {
      const handle = changed(memories[1]!.handle(), input);
      const memory = new binding.SymmetricMemory(contexts[0], 4096, 4);
      try {
        memory.connect(concatenated(memory.handle(), handle));
      } finally {
        memory.release();
      }
    }),
    bytesTarget('team-handle', refused, (input) => {
      const handle = changed(teamHandle, input);
      new binding.Team(contexts[0], handle, everyone).release();
    }),
  ],
};
