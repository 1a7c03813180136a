// What a member of a process group shares with the others on its host: one segment per rank and group. A rank writes its own segment only, so
// that whatever a removed or stopped rank still does is inert; the one exception are results that a reduction pushes (see collective_run).
#pragma once

#include <cstdint>

#include "ep/abi/rank.h"
#include "ep/abi/segment.h"

namespace ep {

constexpr int32_t group_ranks = 128;  // most ranks of a group
constexpr uint64_t group_inline_bytes = 48;  // payload that travels in the line of a step itself
constexpr uint64_t group_small_bytes = 8192;  // payload of calls that are one step
constexpr uint64_t group_ring = 16;           // steps whose lines are kept: a rank is at most that many ahead of another, less one
constexpr uint64_t group_chunk_bytes = 131072;  // payload of one step of larger calls: two of them stay in a second-level cache
constexpr uint64_t group_chunk_places = 16;     // at most: see group_board::chunk
constexpr uint32_t group_allocations = 128;  // segments of group memory of one rank
constexpr uint64_t group_views = 64;  // decisions kept; a member is never that many behind
constexpr uint64_t group_first_epoch = 1;

// Every call is one or more steps, the same number on all ranks. A step is entered by writing `tick`, and left when all active ranks have entered it; those of a
// small broadcast or scatter when the root has, so that ranks run ahead of each other there. `tick` = the low 16 bits of the epoch << 48 | number of the step in its
// epoch, in line number % group_ring: a rank enters step n + group_ring only after all have entered step n + 1, and it has compared what they made of step n with its own.
// Peers may write two marks into a line. `group_frozen`, in all lines of a rank: it cannot enter any step then, and counts as dead. `group_cut`, in place of the number: it
// cannot enter this step of this epoch any more, because the next epoch has been decided.
constexpr uint64_t group_frozen = uint64_t{1} << 47;
constexpr uint64_t group_cut = uint64_t{1} << 46;
constexpr uint64_t group_marks = group_frozen | group_cut;
struct group_line {
  uint64_t tick;      // written last, by compare-and-swap, sequentially consistent
  uint32_t signature; // of the call that begins with this step; 0 for its later steps
  uint32_t flags;     // group_flag_*; 0 for its later steps
  uint8_t payload[group_inline_bytes];
};
static_assert(sizeof(group_line) == 64, "tick and small payload are one cache line: one miss for both");

// A call that was given up, by its number. HAZARD: whether it was one that repairs counts: others may agree anew under the very number of a call that was given up before.
constexpr uint64_t group_fault(uint64_t sequence, bool repairs) { return sequence << 1 | (repairs ? 1 : 0); }
// Of a call up to `sequence`, and of none that was over when the ranks agreed anew under the number `repaired`.
constexpr bool group_fault_counts(uint64_t fault, uint64_t sequence, uint64_t repaired) { return fault != 0 && fault >> 1 <= sequence && fault > group_fault(repaired, false); }

constexpr uint32_t group_no_segment = 0xffffffffu;
constexpr uint32_t group_flag_input = 1;  // all that this rank gives lies in group memory
constexpr uint32_t group_flag_output = 2; // all that it takes does
constexpr uint32_t group_flag_data = 4;   // all that it gives came with the step

// The call that begins with a step, for peers that must name it or reach its memory. One for each line.
struct group_call {
  uint64_t sequence;
  uint32_t kind;
  uint32_t dtype;
  uint32_t reduce_op;
  int32_t root;
  uint64_t bytes;   // of one block: what the signature covers; 0 for all-to-all; of a membership call, with `factor`, a mask of those who are taken out
  uint64_t longest; // bytes of the longest block that this rank gives
  uint64_t factor;  // bits of a double
  uint32_t pad;
  uint32_t output_segment; // index of the allocation that the output lies in
  uint64_t output_offset;
};
static_assert(sizeof(group_call) == 64, "one cache line");

// One block that a rank gives: to all (block 0), or to the rank of its index. Where it is not in group memory, only `bytes` counts.
struct group_block {
  uint64_t bytes;
  uint64_t offset;
  uint32_t segment;
  uint32_t pad;
};
static_assert(sizeof(group_block) == 24, "two tables of group_ranks");

// Who is active from an epoch on, as one rank proposes it. Written before `decided` names the proposer, never after.
struct group_view {
  uint64_t epoch;
  uint64_t active[group_ranks / 64];
  uint64_t failed_sequence;   // calls up to this one that had not ended, end with the change
  uint64_t repaired_sequence; // the call that made ranks agree again after failed ones; 0: none yet
  uint64_t sequence;          // of the call that took members in; their own calls are numbered from here on
  int32_t size;               // ranks of the group, active or not
  uint32_t pad;
  uint32_t incarnation[group_ranks]; // of each active rank: which of the processes that have had this rank
};
static_assert(sizeof(group_view) == 56 + 4 * group_ranks, "words of 8 bytes: copied as such");

// What a rank knows of another one, for calls that ask all of them.
enum class peer_state : uint32_t { absent = 0, connected = 1, joining = 2, active = 3 };
struct group_peer {
  peer_state state;
  uint32_t incarnation;
};
static_assert(sizeof(group_peer) * group_ranks <= group_small_bytes, "a small call");

constexpr uint64_t message_notes = 8;              // announcements that the receiver has not looked at
constexpr uint64_t message_chunks = 8;             // of a rank's pool, for messages to all peers
constexpr uint64_t message_chunk_bytes = 65536;

struct message_note {
  uint64_t number;
  int64_t tag;
  uint64_t bytes;
  uint64_t offset;
  uint32_t dtype;
  uint32_t segment; // group_no_segment: it comes in chunks
  uint64_t pad[3];
};
static_assert(sizeof(message_note) == 64, "one cache line");

// What a rank says to one peer about messages: as their sender, then as their receiver. Numbers of messages and chunks begin at 1 and only grow.
struct message_lane {
  uint64_t announced; // notes written
  uint64_t filled;    // chunks written
  uint64_t refused;   // the granted message of this number was withdrawn
  uint32_t chunk[2];  // place in the pool of chunk n, by n modulo 2
  uint64_t pad0[4];
  uint64_t seen;     // notes read
  uint64_t granted;  // the message that may come now
  uint64_t drained;  // chunks read
  uint64_t finished; // the last message that was taken
  uint64_t rejected; // it did not fit what was to be received
  uint64_t pad1[3];
  message_note notes[message_notes];
};
static_assert(sizeof(message_lane) == 128 + message_notes * sizeof(message_note), "both sides begin a cache line");

struct group_member {
  ep_handle_header header; // EP_MAGIC_GROUP
  int32_t rank;
  int32_t capacity;     // ranks that the group may grow to: what the segment is laid out for
  uint64_t group_nonce; // equal on all members
  uint32_t incarnation; // of this segment: a rank that comes back has a new one
  uint32_t joining;     // asks to be taken in
  uint64_t pushing;     // writes into others' memory
  uint32_t core;        // that it last waited on, counted from 1; 0: none yet
  uint8_t pad0[12];
  ep_life_word life;
  ep_wake_word wake;
  ep_core_set cores;
  struct {
    group_line line;
    uint8_t pad[64]; // the prefetcher takes lines in pairs
  } steps[group_ring];
  group_call calls[group_ring];
  uint64_t ready_epoch; // this rank takes part in that epoch
  // What this rank gave up, 0: nothing; see group_fault. It does not come to later calls either.
  uint64_t fault;
  uint32_t fault_status; // EP_STATUS_*
  uint32_t frozen;       // all lines are: written behind the last of them
  int32_t fault_rank;    // who gave it up first, for whoever hears of it from this rank
  uint8_t pad2[36];
  // By epoch modulo group_views: epoch << 16 | rank of the proposer + 1, of the view that follows one in which this rank is the first active one, whoever
  // writes them.
  uint64_t decided[group_views];
  group_view proposed[group_views];
  // The last two views that this rank has adopted, by epoch modulo 2, for ranks that join: `epoch` is 0 while the rest changes.
  group_view adopted[2];
  group_block blocks[group_ring][group_ranks];
  uint64_t allocations; // entries of the table below that are valid
  uint64_t moved;       // how often entries have been replaced
  uint8_t pad3[48];
  uint32_t attached[group_ranks]; // by rank: the latest incarnation of whose segment this rank has mapped
  ep_segment_handle allocation[group_allocations];
};

// Behind it, each at a multiple of 4096: a small slot for each line, places for chunks, a message_lane for each rank of the group, the pool of message chunks.

} // namespace ep
