/** Dumps of flight recorders from files and folders: of each rank of a world one. */
import { readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { readTraceDump, type TraceDump } from '@ep/collectives/trace';
import { EpError, invalid } from '@ep/core';
import { fileError } from '../failure.js';
import { parseJson } from '../json-fault.js';
import { countText } from './words.js';

export interface DumpFile {
  readonly path: string;
  readonly dump: TraceDump;
}

export interface Dumps {
  /** By world, then by rank. */
  readonly files: readonly DumpFile[];
  /** Files of folders that are left out: the same rank has a newer one there. */
  readonly older: readonly string[];
}

const largestFile = 256 * 2 ** 20;

/** Throws `EP_INVALID_ARGUMENT` naming the file and where in it. */
export function parseDump(text: string, where: string): TraceDump {
  return readTraceDump(parseJson(text, where), where);
}

/**
 * Files as they are named, and of each folder the latest dump of each rank of each world. Throws `EP_INVALID_ARGUMENT` for a file that is no dump, a folder
 * without any, and two dumps of one rank; `EP_SYSTEM` for what cannot be read.
 */
export function readDumps(paths: readonly string[]): Dumps {
  const chosen = new Map<string, DumpFile>();
  const older: string[] = [];
  for (const path of paths) {
    const found = isFolder(path) ? latest(path, older) : [readDump(path)];
    for (const file of found) {
      const { world, rank } = file.dump;
      const other = chosen.get(keyOf(file));
      if (other !== undefined) {
        throw new EpError(
          'EP_INVALID_ARGUMENT',
          `${other.path} and ${file.path} are both of rank ${rank} of ${JSON.stringify(world)}: name one of them, or their folder, of which the latest is taken`,
          { context: { rank, world, paths: [other.path, file.path] } },
        );
      }
      chosen.set(keyOf(file), file);
    }
  }
  const files = [...chosen.values()].sort(
    (a, b) => Number(a.dump.world > b.dump.world) - Number(a.dump.world < b.dump.world) || a.dump.rank - b.dump.rank,
  );
  return { files, older: older.sort() };
}

const keyOf = ({ dump }: DumpFile): string => `${dump.rank} ${dump.world}`;

function latest(folder: string, older: string[]): DumpFile[] {
  let names: string[];
  try {
    names = readdirSync(folder);
  } catch (error) {
    throw fileError('read', folder, error);
  }
  const newest = new Map<string, DumpFile>();
  for (const name of names.filter((one) => /^ep-trace-.*\.json$/.test(one)).sort()) {
    const file = readDump(join(folder, name));
    const other = newest.get(keyOf(file));
    const later = other === undefined || file.dump.clock.wallUs >= other.dump.clock.wallUs;
    if (later) newest.set(keyOf(file), file);
    if (other !== undefined) older.push(later ? other.path : file.path);
  }
  if (newest.size === 0) {
    throw invalid('the folder', {
      where: folder,
      expected: 'one with dumps, ep-trace-….json',
      found: countText(names.length, 'other file'),
    });
  }
  return [...newest.values()];
}

function isFolder(path: string): boolean {
  try {
    return statSync(path).isDirectory();
  } catch (error) {
    throw fileError('read', path, error);
  }
}

function readDump(path: string): DumpFile {
  let bytes: Buffer;
  try {
    bytes = readFileSync(path);
  } catch (error) {
    throw fileError('read', path, error);
  }
  if (bytes.length > largestFile) {
    throw invalid('the file', { where: path, expected: `at most ${largestFile} bytes`, found: bytes.length });
  }
  return { path, dump: parseDump(new TextDecoder('utf-8').decode(bytes), path) };
}
