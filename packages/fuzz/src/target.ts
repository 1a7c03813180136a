import { mutateBytes, mutateText } from './mutate.js';

/** What became of an input; whatever a target throws is a finding. */
export type Outcome = 'used' | 'refused';

/** A parser or validator under test. Its inputs are bytes in the corpus; text is UTF-8. */
export interface FuzzTarget {
  readonly name: string;
  /** Ending of its files in the corpus. */
  readonly ending: 'txt' | 'bin';
  readonly run: (input: Buffer) => Outcome;
  readonly mutate: (input: Buffer, other: Buffer, pick: (below: number) => number) => Buffer;
}

/** Whether what was thrown is the documented refusal of an input, which names what is wrong. */
export type Refusal = (error: unknown) => boolean;

function outcomeOf(use: () => void, isRefusal: Refusal): Outcome {
  try {
    use();
    return 'used';
  } catch (error) {
    if (isRefusal(error) && (error as Error).message.length > 0) return 'refused';
    throw error;
  }
}

export function textTarget(name: string, isRefusal: Refusal, use: (text: string) => void): FuzzTarget {
  return {
    name,
    ending: 'txt',
    run: (input) => outcomeOf(() => use(input.toString('utf8')), isRefusal),
    mutate: (input, other, pick) => Buffer.from(mutateText(input.toString('utf8'), other.toString('utf8'), pick)),
  };
}

export function bytesTarget(name: string, isRefusal: Refusal, use: (bytes: Buffer) => void): FuzzTarget {
  return { name, ending: 'bin', run: (input) => outcomeOf(() => use(input), isRefusal), mutate: mutateBytes };
}
