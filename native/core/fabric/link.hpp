// What an engine knows of one peer.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "dl/fabric.hpp"
#include "mailbox.hpp"
#include "memory.hpp"
#include "tag.hpp"
#include "wire.hpp"

namespace ep::fabric {

// A peer's part of a memory, as it told.
struct remote_part {
  uint64_t memory;
  uint64_t base;
  uint64_t key;
  uint64_t byte_length;
};

enum class remote_atomic : uint8_t { none, fetch_add, compare_swap };

// One put or read, and a signal. Rows may be strided here and are packed there. Or an atomic: on a word of 8 bytes at `offset`, what it was lands at `local`; `word` is the addend, or
// what is stored where the word is `compare`.
struct request {
  int32_t peer = 0;
  bool reads = false;
  bool nowhere = false; // a put whose target has gone: ends in its turn, and nothing is sent
  uint64_t local = 0;
  uint64_t stride = 0;
  uint64_t row_bytes = 0;
  uint64_t rows = 0;
  uint64_t offset = 0; // in the peer's part
  uint64_t word = 0;   // of so many bytes, instead of rows
  uint32_t word_bytes = 0;
  remote_atomic atomic = remote_atomic::none;
  uint64_t compare = 0;
  signal_op op = signal_op::none;
  uint64_t slot = 0;
  uint64_t value = 0;
  std::shared_ptr<const void> keep; // holds the local bytes
  bool of_gpu = false;              // the local bytes lie in a GPU, in a region of the port with this descriptor
  void* descriptor = nullptr;
  bool unawaited = false;           // nobody waits for its end: the target need not tell of it at once
  bool eager = false;               // whoever posts it has nothing else to do: it is never too long for a thread that waits, and its end wakes nobody

  // The port brings something back, and its event is the end: the target's engine hears nothing of it.
  bool answers() const { return reads || atomic != remote_atomic::none; }
  uint64_t bytes() const { return word_bytes != 0 ? word_bytes : row_bytes * rows; }
  // Too long for a thread that has something else to do.
  static constexpr uint64_t long_bytes = 64u << 10;
  bool heavy() const { return bytes() >= long_bytes && !eager; }
};

inline constexpr uint64_t no_number = UINT64_MAX;

// A request on its way.
struct outgoing {
  request wanted;
  remote_part part{};
  std::shared_ptr<symmetric_memory> memory;
  uint64_t ring = no_number; // number in the ring of kernels
  uint64_t host = no_number; // number among the host's requests to this peer
  uint64_t sequence = 0;     // on the wire, if it is numbered there
  uint64_t next = 0;         // bytes that have been posted, or copied here
  uint32_t pieces = 0;
  uint32_t under_way = 0;    // pieces without an event yet
  bool announced = false;    // its last piece took what it is along
  bool in_gpu = false;       // `part` is memory of a GPU
  bool here = false;         // of the rank for itself, and the port is not asked
  bool numbered() const { return !wanted.answers() && !wanted.nowhere && !here; }
  // HAZARD: while a heavy request is under way, nobody carries in the thread's stead: its end must not wait for a moment.
  bool asks() const { return !wanted.unawaited || wanted.heavy(); }
};

// A request that arrives.
struct incoming {
  bool announced = false;
  uint32_t pieces = 0;
  wire_message message{};
};

// What the engine says of itself.
struct control_message {
  message_kind kind;
  uint8_t op;
  uint64_t value;
  uint64_t memory;
};

// A read or write goes in pieces of at most so many bytes. HAZARD: a peer is heard of when a piece of its has arrived whole, and its signs of life come behind the pieces that it has posted: a way on which a piece takes longer than
// `silenceMs` (1.7 Mbit/s of each connection, at 5 s) loses peers that live.
inline constexpr uint64_t largest_piece = 1u << 20;

enum class link_state : uint8_t { up, left, failed };

struct link {
  uint64_t to = 0; // the port's name of the peer
  mailbox_place mail; // the peer's
  tagger tag_out;
  tagger tag_in;
  link_state state = link_state::up;
  int64_t heard_ns = 0;
  int64_t spoke_ns = 0; // something was sent of which a failure would be told
  bool byed = false;

  std::deque<control_message> control; // goes out before anything else
  std::deque<outgoing> out;         // in the order in which they were taken; the first `posted` wholly posted
  uint64_t base = 0;                // number of the first
  size_t posted = 0;
  uint64_t next_sequence = 0;
  uint64_t acked = 0; // ours that the peer has carried out
  bool unasked = false; // the last one sent was one that nobody waited for

  std::deque<incoming> in;
  uint64_t applied = 0; // the peer's that have been carried out here
  uint64_t told = 0;    // of them, what the peer knows
  bool asked = false;   // it waits to hear of one of them
  int64_t owes_ns = 0;  // since when there is something to tell

  struct retirement {
    uint64_t memory;
    uint64_t number; // requests below it come first
  };
  std::vector<retirement> retiring; // memories of the peer

  std::atomic<bool> wants_end{false}; // somebody waits after all, for all that was accepted

  // Read by other threads.
  std::atomic<uint64_t> host_ended{0};
  std::atomic<bool> broken{false}; // some request to it has failed, and all later ones will
};

} // namespace ep::fabric
