/** Words for numbers, and for bytes that break their format. */

export const hex = (value: number | bigint, digits = 1): string => `0x${value.toString(16).padStart(digits, '0')}`;

/** What a value is called; one without a name is told in hexadecimal, after what it is. */
export const named =
  (names: ReadonlyMap<number, string>, what: string) =>
  (value: number): string =>
    names.get(value) ?? `${what} ${hex(value)}`;

/** What makes bytes no valid instance of their format. */
export interface Violation {
  /** Byte of the format, of the dword or the field. */
  readonly offset: number;
  readonly field: string;
  readonly expected: string;
  readonly found: string;
}

export const violationText = ({ offset, field, expected, found }: Violation): string =>
  `byte ${hex(offset)}: ${field}: expected ${expected}, found ${found}`;
