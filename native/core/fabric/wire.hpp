// What engines of different hosts say to each other. All of these hosts store numbers the little-endian way; an engine of another ABI is refused at rendezvous.
//
// A request is announced by one message and its bytes travel in as many writes ("pieces") as the message says, or within the message if they are few; a short message of a request ("brief") is mostly
// a write itself, into the mailbox of its target, or a part of that of the last piece. All may arrive in any
// order, so the target counts: a request is whole when its message and all of its pieces are there, and requests of one source are carried out in the order of their numbers.
//
// Whoever finds an endpoint can send to it: a message counts only with the tag (tag.hpp) of the rank that it names as its source. Pieces carry none: a write needs the key of the
// memory, which only ranks are told.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

namespace ep::fabric {

inline constexpr uint32_t wire_magic = 0x37424645; // "EFB7"
inline constexpr uint32_t inline_bytes = 952;
// Requests to one peer that it has not carried out yet. HAZARD: a write names its request by 19 bits: more could not be told apart.
inline constexpr uint64_t request_window = 4096;
inline constexpr int32_t most_ranks = 4096;

enum class message_kind : uint8_t {
  request = 1,
  alive = 2,   // nothing but `acked`
  bye = 3,     // the source leaves; `value` is its EP_LIFE_*
  byed = 4,    // heard
  retire = 5,  // the source gives its part of `memory` up: nothing may be written there
  retired = 6, // everything that was under way to `memory` has landed, nothing will follow
};

// With the operation of a request: the source waits for its end. With a sign of life: it waits for the ends of all before.
inline constexpr uint8_t wire_asks = 0x80;

struct wire_message {
  uint32_t magic;
  message_kind kind;
  uint8_t op; // signal_op, and `wire_asks`
  uint16_t payload_bytes;
  int32_t source;
  uint32_t pieces;
  uint64_t acked;    // requests of the receiver that have been carried out
  uint64_t sequence; // of a request
  uint64_t memory;   // by the number that its owner gave it
  uint64_t offset;   // of the payload
  uint64_t slot;
  uint64_t value;
  uint64_t tag; // of all bytes of the message, with 0 here
  uint8_t payload[inline_bytes];
};
inline constexpr uint32_t head_bytes = sizeof(wire_message) - inline_bytes;
static_assert(head_bytes == 72 && sizeof(wire_message) == 1024);

// Of this kind, and nothing else; the payload is left as it is, since most of it is not sent.
inline void begin_message(wire_message& message, message_kind kind) {
  std::memset(&message, 0, head_bytes);
  message.kind = kind;
}

// The same in fewer bytes, where its numbers fit: that of a request goes into a slot of its target's mailbox where one is free; others are messages, and the shortest of them are what providers take at once
// (fi_inject: some 64 bytes), without a buffer that has to stay and without an event. Numbers that only grow go by their lower halves. The tag is that of the message which it stands for, so neither form can be made of the other, nor an old one pass where the lower halves come round.
inline constexpr uint16_t brief_magic = 0x6245; // "Eb"; HAZARD: no message begins so
inline constexpr uint32_t brief_payload_bytes = 208;
inline constexpr uint32_t brief_pieces = UINT8_MAX;

struct wire_brief {
  uint16_t magic;
  message_kind kind;
  uint8_t op;
  uint16_t source;
  uint8_t payload_bytes;
  uint8_t pieces;
  uint32_t acked;
  uint32_t sequence;
  uint32_t memory;
  uint32_t slot;
  uint64_t offset;
  uint64_t value;
  uint64_t tag;
  uint8_t payload[brief_payload_bytes];
};
inline constexpr uint32_t brief_head_bytes = sizeof(wire_brief) - brief_payload_bytes;
static_assert(brief_head_bytes == 48 && sizeof(wire_brief) == 256 && brief_payload_bytes <= UINT8_MAX && (wire_magic & 0xffff) != brief_magic && most_ranks <= UINT16_MAX + 1);

// Nothing: it does not fit. With its tag, of a message that has one.
inline std::optional<wire_brief> brief_of(const wire_message& message) {
  if (message.payload_bytes > brief_payload_bytes || message.pieces > brief_pieces || message.memory > UINT32_MAX || message.slot > UINT32_MAX) return std::nullopt;
  wire_brief made{brief_magic, message.kind, message.op, static_cast<uint16_t>(message.source), static_cast<uint8_t>(message.payload_bytes), static_cast<uint8_t>(message.pieces), static_cast<uint32_t>(message.acked),
                  static_cast<uint32_t>(message.sequence), static_cast<uint32_t>(message.memory), static_cast<uint32_t>(message.slot), message.offset, message.value, message.tag, {}};
  std::memcpy(made.payload, message.payload, message.payload_bytes);
  return made;
}

// The number with these lower bits that is next to `near`.
constexpr uint64_t widened(uint32_t low, uint64_t near) { return near + static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(low - static_cast<uint32_t>(near)))); }

// Fills in all but what lies behind the payload. `acked` and `applied`: what the receiver knows of these numbers. HAZARD: only requests have a number; that of anything else is 0, which is next to no number beyond 2^31.
inline void expand(const wire_brief& brief, uint64_t acked, uint64_t applied, wire_message& message) {
  message.magic = wire_magic;
  message.kind = brief.kind;
  message.op = brief.op;
  message.payload_bytes = brief.payload_bytes;
  message.source = brief.source;
  message.pieces = brief.pieces;
  message.acked = widened(brief.acked, acked);
  message.sequence = brief.kind == message_kind::request ? widened(brief.sequence, applied) : brief.sequence;
  message.memory = brief.memory;
  message.offset = brief.offset;
  message.slot = brief.slot;
  message.value = brief.value;
  message.tag = brief.tag;
  std::memcpy(message.payload, brief.payload, brief.payload_bytes);
}

// The 4 bytes that a write carries: whose it is, whether it is a brief in the mailbox or a piece, and the lower bits of its request's number.
inline constexpr uint32_t source_shift = 20;
inline constexpr uint32_t mail_bit = 1u << 19;
inline constexpr uint32_t sequence_mask = mail_bit - 1;
static_assert(request_window * 2 <= sequence_mask && (most_ranks - 1) <= (UINT32_MAX >> source_shift));

constexpr uint32_t piece_data(int32_t source, uint64_t sequence) {
  return static_cast<uint32_t>(source) << source_shift | (static_cast<uint32_t>(sequence) & sequence_mask);
}
constexpr uint32_t mail_data(int32_t source, uint64_t sequence) { return piece_data(source, sequence) | mail_bit; }
constexpr bool is_mail(uint32_t data) { return (data & mail_bit) != 0; }
constexpr int32_t writer_of(uint32_t data) { return static_cast<int32_t>(data >> source_shift); }
// How far behind `first` the write's request is.
constexpr uint64_t write_distance(uint32_t data, uint64_t first) { return (data - static_cast<uint32_t>(first)) & sequence_mask; }

} // namespace ep::fabric
