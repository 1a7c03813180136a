/**
 * Ends the ranks when the launcher itself was killed. Node has no prctl(PR_SET_PDEATHSIG), so a small shell outlives the launcher: it reads
 * a pipe of which only the launcher has the other end. End of file without `done` means that the launcher is gone.
 */
import { type ChildProcess, spawn } from 'node:child_process';

/** From the launcher's death and SIGTERM of its ranks to their SIGKILL, in seconds: all have ended within one. */
const guardianGraceSeconds = 0.8;

// A session of its own, and deaf to what a terminal or a CI system sends to the launcher's group.
const SCRIPT = `
trap '' HUP INT QUIT TERM PIPE
groups=' '
while read -r word group; do
  case "$word" in
    add) groups="$groups$group " ;;
    gone) case "$groups" in *" $group "*) groups="\${groups%% $group *} \${groups#* $group }" ;; esac ;;
    done) exit 0 ;;
  esac
done
for group in $groups; do kill -s TERM -- "-$group"; done 2>/dev/null
rm -rf -- "$1"
[ "$groups" = ' ' ] && exit 0
sleep ${guardianGraceSeconds} || sleep 1
for group in $groups; do kill -s KILL -- "-$group"; done 2>/dev/null
# A rank that lived on may have put a file there in the middle of the removal.
rm -rf -- "$1"
`;

export interface Guardian {
  /** A process group to end. */
  add(group: number): void;
  /** HAZARD: a group that ended must be taken out, or a later process with the same number would be killed. */
  gone(group: number): void;
  /** The launcher ends in order: leave everything alone. */
  done(): void;
}

/** `scratch`, which need not exist yet, is removed if the launcher dies. */
export function startGuardian(scratch: string): Guardian {
  // Without a guardian the job still runs; only the launcher's own SIGKILL would then leave its ranks behind.
  const shell = startShell(scratch);
  shell?.on('error', () => {});
  // HAZARD: null or undefined where descriptors ran out.
  const stdin = shell?.stdin;
  stdin?.on('error', () => {});
  shell?.unref();
  const say = (line: string): void => {
    stdin?.write(`${line}\n`);
  };
  return {
    add: (group) => say(`add ${group}`),
    gone: (group) => say(`gone ${group}`),
    done: () => {
      say('done');
      stdin?.end();
    },
  };
}

function startShell(scratch: string): ChildProcess | undefined {
  try {
    return spawn('/bin/sh', ['-c', SCRIPT, 'ep-guardian', scratch], {
      detached: true,
      stdio: ['pipe', 'ignore', 'ignore'],
    });
  } catch {
    return undefined;
  }
}
