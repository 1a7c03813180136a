/** The machine's own copy by a thread of this rank: what a collective of as many bytes is held against. */
import { allocateHost, native, nativePlaceOf } from '@ep/native';

export class Copies {
  readonly #native = native();
  readonly #stream = new this.#native.binding.HostStream(0);
  readonly #source: Uint8Array;
  readonly #target: Uint8Array;

  constructor(mostBytes: number) {
    this.#source = new Uint8Array(allocateHost(mostBytes));
    this.#target = new Uint8Array(allocateHost(mostBytes));
    this.#source.fill(1);
  }

  /** Something else than what was copied before. */
  renew(bytes: number): void {
    this.#source.fill((this.#source[0]! % 255) + 1, 0, bytes);
  }

  async copy(bytes: number, nonTemporal: boolean): Promise<void> {
    const [from, to] = [nativePlaceOf(this.#source)!, nativePlaceOf(this.#target)!];
    const { status } = await this.#native.operations.run(() =>
      this.#stream.copy(from.operand, from.byteOffset, to.operand, to.byteOffset, bytes, nonTemporal),
    );
    if (status !== 0) throw new Error(`copy of ${bytes} bytes: native status ${status}`);
  }

  check(bytes: number): void {
    if (Buffer.compare(this.#source.subarray(0, bytes), this.#target.subarray(0, bytes)) === 0) return;
    throw new Error(`copy of ${bytes} bytes: the target differs from its source`);
  }

  close(): void {
    this.#stream.close();
  }
}
