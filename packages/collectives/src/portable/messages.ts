/**
 * Point to point. The sender offers a message (a record); the receiver matches offers with its receives, by tag, the oldest first, and grants; only then the
 * bytes come, through the bounded slots of a lane of their own. So no message waits in anybody's memory but its sender's, an offer that nobody takes
 * holds up nothing else, and collectives and messages do not wait for each other.
 *
 * Between tensors of GPUs the bytes go their own way (device/freight.ts); a message from one kind of memory to the other is a mismatch.
 *
 * A message that fails (time, abort, mismatch) fails alone, on both sides: the other one is told.
 */
import { EpError, formatRanks } from '@ep/core';
import { DeviceElements } from '../device/elements.js';
import type { Cargo, Freight } from '../device/freight.js';
import type { Data, Elements, RecvCall, RecvEnd, SendCall } from '../engine.js';
import { bytesOf, readChunk, Stream } from './chunks.js';
import { IncomingMessage, MessageQueues, OutgoingMessage } from './message-queues.js';
import {
  type ControlRecord,
  describeError,
  type OfferRecord,
  type PieceRecord,
  type RefusalRecord,
} from './records.js';
import type { Traces } from './traces.js';

const ANY_SOURCE = -1;

export interface MessagesInit {
  readonly rank: number;
  readonly size: number;
  readonly traces: Traces;
  readonly isGone: (peer: number) => boolean;
  readonly tell: (peer: number, record: ControlRecord) => void;
  readonly send: (peer: number, stream: Stream) => void;
}

interface Offer {
  readonly from: number;
  readonly record: OfferRecord;
}

export class Messages {
  readonly #init: MessagesInit;
  /** By peer, then id: messages of this rank that have not ended. */
  readonly #outgoing: readonly Map<number, OutgoingMessage>[];
  /** By peer, then id: granted messages. */
  readonly #granted: readonly Map<number, IncomingMessage>[];
  /** In the order in which they came or were posted. */
  readonly #offers: Offer[] = [];
  readonly #posted: IncomingMessage[] = [];
  readonly #queues = new MessageQueues();
  #nextId = 1;
  #freight: Freight | undefined;
  #broken: { readonly error: unknown } | undefined;

  constructor(init: MessagesInit) {
    this.#init = init;
    this.#outgoing = Array.from({ length: init.size }, () => new Map());
    this.#granted = Array.from({ length: init.size }, () => new Map());
  }

  /** From now on messages are also of tensors on its GPU. */
  carry(freight: Freight): void {
    this.#freight = freight;
  }

  /** Throws `EP_INVALID_ARGUMENT` for a tensor that is not on the group's GPU. */
  send(call: SendCall<Data>): Promise<void> {
    const { rank, traces, isGone, tell } = this.#init;
    const { peer, tag, data } = call;
    const cargo = this.#load(data);
    traces.call('send');
    return new Promise((resolve, reject) => {
      const id = this.#nextId++;
      const message = new OutgoingMessage(id, call, this.#queues, { resolve, reject }, cargo);
      if (this.#broken !== undefined) return message.fail(this.#broken.error);
      if (isGone(peer)) return message.fail(lostError(`send to rank ${peer}`, [peer]));
      if (call.signal?.aborted === true) return message.fail(call.signal.reason);
      this.#outgoing[peer]!.set(id, message);
      message.onEnd = () => this.#outgoing[peer]!.delete(id);
      message.onCut = (error) => tell(peer, { kind: 'cancel', id, ...describeError(error) });
      const record: OfferRecord = { kind: 'offer', id, tag, dtype: dtypeOf(data), bytes: data.byteLength };
      message.enqueue();
      if (peer === rank) {
        message.onCut = (error) => this.onCancel(rank, { kind: 'cancel', id, ...describeError(error) });
        this.onOffer(rank, record);
      } else {
        traces.signalled('send');
        tell(peer, record);
      }
    });
  }

  /** As `send`. */
  recv(call: RecvCall<Data>): Promise<RecvEnd> {
    const cargo = this.#load(call.data);
    this.#init.traces.call('recv');
    return new Promise((resolve, reject) => {
      const message = new IncomingMessage(call, this.#queues, { resolve, reject }, cargo);
      if (this.#broken !== undefined) return message.fail(this.#broken.error);
      if (call.signal?.aborted === true) return message.fail(call.signal.reason);
      const index = this.#offers.findIndex((offer) => matches(message, offer));
      // What a peer offered before it went cannot come any more.
      if (index < 0 && this.#unreachable(message)) return message.fail(this.#lostFor(message));
      message.onEnd = () => {
        const at = this.#posted.indexOf(message);
        if (at >= 0) this.#posted.splice(at, 1);
      };
      this.#posted.push(message);
      message.enqueue();
      if (index >= 0) this.#match(message, this.#offers.splice(index, 1)[0]!);
    });
  }

  onOffer(from: number, record: OfferRecord): void {
    const offer = { from, record };
    const message = this.#posted.find((posted) => matches(posted, offer));
    if (message === undefined) this.#offers.push(offer);
    else this.#match(message, offer);
  }

  onGrant(from: number, id: number): void {
    const message = this.#outgoing[from]!.get(id);
    if (message === undefined) return;
    const { data } = message.call;
    const onSent = (byteLength: number): void => this.#init.traces.wrote('send', byteLength);
    const onConsumed = (): void => message.end();
    if (data.byteLength !== message.byteLength) {
      message.gone();
    } else if (data.byteLength === 0) {
      message.end();
    } else if (message.cargo !== undefined) {
      message.sending = this.#freight!.send(from, {
        cargo: message.cargo,
        onPiece: (piece) => {
          onSent(piece.bytes);
          this.#init.tell(from, { kind: 'piece', id, ...piece });
        },
        onConsumed,
        onFailed: (error) => message.cut(error),
        hold: (copy) => message.hold(copy),
      });
    } else {
      const onGone = (): void => message.gone();
      const stream = new Stream({ id, stream: 0, bytes: bytesOf(data as Elements), onSent, onConsumed, onGone });
      message.sending = stream;
      this.#init.send(from, stream);
    }
  }

  /** HAZARD: whatever has become of the message, the peer must hear when the piece is not read any more: until then it keeps the room. */
  onPiece(from: number, piece: PieceRecord): void {
    const message = this.#granted[from]!.get(piece.id);
    const taken = (): void => this.#init.tell(from, { kind: 'taken', at: piece.at });
    if (message?.cargo === undefined) {
      taken();
      return;
    }
    const copy = this.#freight!.receive(from, piece, message.cargo);
    message.hold(copy);
    copy
      .then(
        () => message.took(piece.bytes),
        (error) => message.cut(error),
      )
      .finally(taken);
  }

  onTaken(from: number, at: number): void {
    this.#freight?.onTaken(from, at);
  }

  onCancel(from: number, record: RefusalRecord): void {
    const index = this.#offers.findIndex((offer) => offer.from === from && offer.record.id === record.id);
    if (index >= 0) this.#offers.splice(index, 1);
    const message = this.#granted[from]!.get(record.id);
    message?.fail(given(`recv from rank ${from}`, from, record));
  }

  onRefuse(from: number, record: RefusalRecord): void {
    const message = this.#outgoing[from]!.get(record.id);
    message?.fail(given(`send to rank ${from}`, from, record));
  }

  /** Chunks of a message that has ended here fall away. */
  onChunk(from: number, slot: Uint8Array, release: () => void): boolean {
    const chunk = readChunk(slot);
    const message = this.#granted[from]!.get(chunk.id);
    if (message !== undefined) message.take(chunk);
    release();
    return true;
  }

  onLost(rank: number): void {
    for (const message of [...this.#outgoing[rank]!.values()]) {
      message.fail(lostError(`send to rank ${rank}`, [rank]));
    }
    for (const message of [...this.#granted[rank]!.values()]) {
      message.fail(lostError(`recv from rank ${rank}`, [rank]));
    }
    for (let i = this.#offers.length - 1; i >= 0; i--) if (this.#offers[i]!.from === rank) this.#offers.splice(i, 1);
    for (const message of [...this.#posted]) {
      if (this.#unreachable(message)) message.fail(this.#lostFor(message));
    }
  }

  /** Of a rank that comes back: there are none of before. */
  reopen(): void {
    this.#broken = undefined;
  }

  /** Nothing works any more: every message ends with `error`. */
  fail(error: unknown): void {
    if (this.#broken !== undefined) return;
    this.#broken = { error };
    for (const messages of [...this.#outgoing, ...this.#granted]) {
      for (const message of [...messages.values()]) message.fail(error);
    }
    for (const message of [...this.#posted]) message.fail(error);
    this.#offers.length = 0;
  }

  #match(message: IncomingMessage, { from, record }: Offer): void {
    const { rank, tell, traces } = this.#init;
    const { id, dtype, bytes } = record;
    const { data, tag } = message.call;
    const mine = dtypeOf(data);
    const granted = this.#granted[from]!;
    message.onEnd();
    message.onCut = (error) => this.#refuse(from, id, error);
    if (data.byteLength !== message.room) {
      message.gone();
      return;
    }
    if (dtype !== mine || bytes > data.byteLength) {
      const expected = `${mine} of at most ${data.byteLength} bytes`;
      const found = `${dtype} of ${bytes} bytes`;
      const error = new EpError(
        'EP_MISMATCH',
        `message with tag ${tag} from rank ${from} to rank ${rank}: expected ${expected}, found ${found}`,
        { context: { ranks: [from, rank], sequence: id, tag, expected, found } },
      );
      this.#refuse(from, id, error);
      message.fail(error);
      return;
    }
    granted.set(id, message);
    message.match(from, bytes);
    message.onEnd = () => granted.delete(id);
    if (from === rank) {
      this.#pass(message, this.#outgoing[rank]!.get(id)!);
      return;
    }
    const grant = (): void => {
      if (granted.get(id) !== message) return;
      traces.signalled('recv');
      tell(from, { kind: 'grant', id });
      if (bytes === 0) message.end();
    };
    // Not before its bytes may come: those that could not be taken yet would hold up other messages.
    if (message.cargo === undefined || bytes === 0) grant();
    else message.cargo.ready.then(grant, (error) => message.cut(error));
  }

  /** From this rank to itself. */
  #pass(message: IncomingMessage, sent: OutgoingMessage): void {
    const { data } = sent.call;
    const end = (): void => {
      message.end();
      sent.end();
    };
    if (data.byteLength !== sent.byteLength) {
      sent.gone();
    } else if (message.cargo === undefined || sent.cargo === undefined) {
      bytesOf(message.call.data as Elements).set(bytesOf(data as Elements));
      end();
    } else if (data.byteLength === 0) {
      end();
    } else {
      void this.#passOnDevice(message, message.cargo, sent, sent.cargo).then(end, (error) => message.cut(error));
    }
  }

  async #passOnDevice(message: IncomingMessage, to: Cargo, sent: OutgoingMessage, from: Cargo): Promise<void> {
    await Promise.all([to.ready, from.ready]);
    if (this.#granted[this.#init.rank]!.get(sent.id) !== message) return;
    const copy = this.#freight!.pass(from, to);
    message.hold(copy);
    sent.hold(copy);
    await copy;
  }

  #load(data: Data): Cargo | undefined {
    return data instanceof DeviceElements ? this.#freight!.load(data) : undefined;
  }

  #refuse(from: number, id: number, error: unknown): void {
    const record: RefusalRecord = { kind: 'refuse', id, ...describeError(error) };
    if (from === this.#init.rank) this.onRefuse(from, record);
    else this.#init.tell(from, record);
  }

  /** Nobody is left who could send it. A rank can send to itself. */
  #unreachable({ call: { peer } }: IncomingMessage): boolean {
    const { rank, size, isGone } = this.#init;
    if (peer !== ANY_SOURCE) return isGone(peer);
    if (size === 1) return false;
    return Array.from({ length: size }, (_, other) => other).every((other) => other === rank || isGone(other));
  }

  #lostFor({ call: { peer } }: IncomingMessage): EpError {
    const { rank, size } = this.#init;
    if (peer !== ANY_SOURCE) return lostError(`recv from rank ${peer}`, [peer]);
    return lostError(
      'recv from any rank',
      Array.from({ length: size }, (_, other) => other).filter((other) => other !== rank),
    );
  }
}

function matches({ call }: IncomingMessage, { from, record }: Offer): boolean {
  return (call.peer === from || call.peer === ANY_SOURCE) && call.tag === record.tag;
}

/** Elements carry no dtype of their own: their array type is what both sides can compare. */
function dtypeOf(data: Data): string {
  if (data instanceof DeviceElements) return `${data.dtype} on a GPU`;
  return data instanceof Uint8Array ? 'Uint8Array' : data.constructor.name;
}

function lostError(where: string, lost: readonly number[]): EpError<'EP_PEER_LOST'> {
  return new EpError('EP_PEER_LOST', `${where}: ${formatRanks(lost)} died or left`, { context: { lost } });
}

/** What the peer said about the end of a message. */
function given(where: string, from: number, { code, text, context }: RefusalRecord): EpError {
  if (code === 'EP_MISMATCH') return new EpError(code, text, { context });
  return new EpError('EP_ABORTED', `${where}: rank ${from} gave up: ${text}`, {
    context: { ...context, ranks: [from], reason: code },
  });
}
