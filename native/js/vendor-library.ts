/** Libraries of vendors that are opened at run time: where the caller says, else by their names as the loader searches for them. */
import { EpError } from '@ep/core';
import { native } from './native.js';

type Binding = ReturnType<typeof native>['binding'];

/** A library that has been opened; opening it begins nothing. */
export interface VendorLibrary<L> {
  readonly library: L;
  /** As it was opened: a path, or a name that the loader found. */
  readonly path: string;
  /** "2.28.9". */
  readonly version: string;
}

export interface VendorLibraryInit<L> {
  /** For texts. */
  readonly name: string;
  /** What the loader is asked for, in this order, where no path is given. */
  readonly names: readonly string[];
  /** How the library is had. */
  readonly remedy: string;
  /** Throws what the loader, or the library's lack of a symbol, says. */
  readonly open: (binding: Binding, path: string) => L;
}

/** What opens it, once for each path or name. Throws `EP_UNAVAILABLE`, which says what was looked for and why it is of no use. */
export function vendorLibrary<L extends { version(): string }>(
  init: VendorLibraryInit<L>,
): (path: string | undefined) => VendorLibrary<L> {
  const opened = new Map<string, VendorLibrary<L>>();
  return (path) => {
    const { binding } = native();
    const tried = path === undefined ? init.names : [path];
    const reasons: string[] = [];
    for (const name of tried) {
      const known = opened.get(name);
      if (known !== undefined) return known;
      try {
        const library = init.open(binding, name);
        const found = { library, path: name, version: library.version() };
        opened.set(name, found);
        return found;
      } catch (error) {
        reasons.push(error instanceof Error ? error.message : String(error));
      }
    }
    throw new EpError('EP_UNAVAILABLE', `${init.name} cannot be used: ${reasons.join('; ')}; ${init.remedy}`, {
      context: { tried },
    });
  };
}
