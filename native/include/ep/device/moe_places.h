/* Where rows of a high-throughput dispatch go: counts to every rank of experts, which places what it will get and answers every source.
 *
 * One rank alone decides where the rows of its tensor lie. Were every source to compute it from everybody's counts, two that disagree about who is still there would write over
 * each other. What does not fit is an answer too, which every rank gets from every other, so all of them fail alike and before any row has moved. Whoever has given up the rank
 * that is full does not get it: the others pass it on, where it awaits their rows. */
#ifndef EP_DEVICE_MOE_PLACES_H
#define EP_DEVICE_MOE_PLACES_H

#include "moe_dispatch.h"

EP_MACHINE_BEGIN

/* In the answer of a rank whose tensor is too small, instead of a row: this, and the rows that are needed; or 0 where a rank that was given up alive may still write into the slot. */
constexpr uint32_t moe_no_room = 0x80000000u;
constexpr uint64_t moe_most_rows = 0x7fffffffu;

namespace detail {

struct compact_view {
  const moe_view& at;
  uint8_t* own;        /* this rank's part */
  int32_t debtor = -1; /* who may still write rows, or results of the bank, of an earlier call into this slot */

  EP_HD uint64_t row(uint64_t index) const { return at.part(at.buffer.received) + index * at.buffer.row_bytes; }
  EP_HD uint64_t header(uint64_t index) const { return row(at.buffer.recv_rows) + index * sizeof(ep_moe_header); }
  EP_HD uint64_t counts(int32_t source) const {
    return at.part(at.buffer.counts) + static_cast<uint64_t>(source) * at.buffer.experts.most_local * sizeof(uint64_t);
  }
  EP_HD uint64_t starts() const { return at.part(at.buffer.starts); }
  EP_HD uint64_t* words(uint64_t offset) const { return reinterpret_cast<uint64_t*>(own + offset); }
  EP_HD uint32_t* start() const { return reinterpret_cast<uint32_t*>(at.call.routing.send_start); }
  EP_HD uint32_t* blocks() const { return reinterpret_cast<uint32_t*>(at.call.routing.block_start); }
  EP_HD uint64_t epoch() const { return static_cast<uint64_t>(at.call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT; }
  EP_HD bool cached() const { return (at.call.flags & EP_MOE_CACHED) != 0; }

  /* Rows that one source sends here, and the puts that bring them, or the signal that there are none. */
  EP_HD uint64_t expects(int32_t source, uint64_t* puts) const {
    uint64_t rows = 0;
    *puts = 0;
    for (uint32_t e = 0; e < at.experts_of(at.self()); ++e) {
      const auto count = static_cast<uint32_t>(*at.range(e, source));
      rows += count;
      *puts += count + (count != 0 && !cached() ? 1u : 0u);
    }
    if (rows == 0) *puts = 1;
    return rows;
  }
  /* The other way round: what a rank expects of this one. */
  EP_HD uint64_t puts_to(int32_t rank) const {
    uint64_t puts = 0;
    for (uint32_t p = at.first_replica(rank); p < at.first_replica(rank + 1); ++p) puts += at.sends(p) + (at.sends(p) != 0 && !cached() ? 1u : 0u);
    return puts != 0 ? puts : 1;
  }
};

template <class Endpoint> EP_HD compact_view compact_view_of(const Endpoint& endpoint, const moe_view& at) {
  return {at, reinterpret_cast<uint8_t*>(reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()].data), -1};
}

/* Awaits words of this call from a rank, by one lane; `counter` is what the rank's word showed before it. The signal of words of a past call, which came when nobody awaited them
 * any more, is counted as well: those of this call have one of their own. */
template <class Ctx, class Endpoint>
EP_HD bool compact_await_words(Ctx& ctx, const Endpoint& endpoint, const compact_view& view, uint32_t kind, uint64_t* counter, int32_t rank, uint64_t words,
                               uint32_t count, uint32_t stage, uint64_t by_ns) {
  for (uint64_t expected = moe_next(endpoint, view.at, rank, *counter, 1);; ++expected) {
    if (!moe_await_alone(ctx, endpoint, view.at, kind, expected, rank, stage, by_ns)) return false;
    bool late = false;
    moe_each_word(ctx, view.words(words), count, 1, [&](uint32_t, uint64_t word) { late = late || word >> EP_MOE_COUNT_EPOCH_SHIFT != view.at.call.epoch; });
    if (late) continue;
    if (!moe_stores(endpoint, rank)) *counter = expected;
    return true;
  }
}

/* The same for a source's count words, which also say where it takes its results. */
template <class Ctx, class Endpoint> EP_HD bool compact_await_counts(Ctx& ctx, const Endpoint& endpoint, const compact_view& view, int32_t source, uint64_t by_ns) {
  ep_moe_peer& peer = view.at.peer(source);
  const uint64_t words = view.counts(source);
  if (!compact_await_words(ctx, endpoint, view, EP_MOE_SIGNAL_COUNTED, &peer.counted, source, words, view.at.experts_of(view.at.self()), EP_STAGE_COUNT, by_ns)) return false;
  peer.bank = static_cast<uint32_t>(load_acquire(ctx, view.words(words))) >> EP_MOE_COUNT_BANK_SHIFT;
  return true;
}

/* This rank's count words to a rank of experts. */
template <class Ctx, class Endpoint>
EP_HD void compact_send_counts(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view, int32_t rank) {
  const moe_view& at = view.at;
  moe_put_words(ctx, coop, endpoint, at, rank, view.counts(at.self()), at.send_words() + at.first_replica(rank), at.experts_of(rank), EP_MOE_SIGNAL_COUNTED);
}

/* Runs of one expert behind each other, in the order of sources; how many rows they span. */
template <class Ctx> EP_HD void compact_place_runs(Ctx& ctx, const compact_view& view, uint32_t expert) {
  const moe_view& at = view.at;
  uint64_t begin = 0;
  moe_each_word(ctx, view.words(view.counts(0)) + expert, static_cast<uint32_t>(at.world()), at.buffer.experts.most_local, [&](uint32_t rank, uint64_t word) {
    const auto source = static_cast<int32_t>(rank);
    uint64_t rows = 0;
    if (source == at.self()) rows = at.sends(at.first_replica(source) + expert);
    else if (moe_takes_part(ctx, at, source)) rows = word & EP_MOE_COUNT_ROWS;
    *at.range(expert, source) = begin << 32 | rows;
    begin = begin + rows < moe_most_rows ? begin + rows : moe_most_rows;
  });
  reinterpret_cast<int32_t*>(at.call.routing.recv_count)[expert] = static_cast<int32_t>(begin);
}

/* Blocks behind each other, by one lane. The last word is what all of them need, whether it is there or not. */
EP_HD void compact_place_blocks(const compact_view& view) {
  const uint32_t experts = view.at.experts_of(view.at.self());
  const uint64_t alignment = view.at.buffer.alignment;
  uint64_t row = 0;
  for (uint32_t e = 0; e < experts; ++e) {
    view.blocks()[e] = static_cast<uint32_t>(row);
    const auto rows = static_cast<uint64_t>(reinterpret_cast<const int32_t*>(view.at.call.routing.recv_count)[e]);
    row += (rows + alignment - 1) / alignment * alignment;
    row = row < moe_most_rows ? row : moe_most_rows;
  }
  view.blocks()[experts] = static_cast<uint32_t>(row);
}

/* What this rank answers to a source about one of its experts. */
EP_HD uint32_t compact_answer(const compact_view& view, uint32_t expert, int32_t source) {
  if (view.debtor >= 0) return moe_no_room;
  const uint32_t needed = view.blocks()[view.at.experts_of(view.at.self())];
  if (needed > view.at.buffer.recv_rows) return moe_no_room | needed;
  return view.blocks()[expert] + static_cast<uint32_t>(*view.at.range(expert, source) >> 32);
}

/* Answers one source. HAZARD: the words are sent from where its counts were; it puts no counts there before it has the answer, and none of a later call without credit. */
template <class Ctx, class Endpoint>
EP_HD void compact_answer_source(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view, int32_t source) {
  const moe_view& at = view.at;
  const uint32_t experts = at.experts_of(at.self());
  uint64_t* words = view.words(view.counts(source));
  for (uint32_t e = coop.lane(); e < experts; e += coop.lanes()) words[e] = view.epoch() | compact_answer(view, e, source);
  fence_system(); /* a NIC or an engine reads them */
  coop.sync();
  const uint64_t to = view.starts() + at.first_replica(at.self()) * sizeof(uint64_t);
  moe_put_words(ctx, coop, endpoint, at, source, to, words, experts, EP_MOE_SIGNAL_PLACED);
}

/* Counts out, counts in, places. */
template <class Ctx, class Endpoint> EP_HD void compact_count(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view) {
  const moe_view& at = view.at;
  const int32_t self = at.self();
  const uint32_t experts = at.experts_of(self);
  const auto lane = static_cast<int32_t>(ctx.block() * coop.lanes() + coop.lane());
  const auto lanes = static_cast<int32_t>(ctx.blocks() * coop.lanes());
  const auto block = static_cast<int32_t>(ctx.block());
  const auto blocks = static_cast<int32_t>(ctx.blocks());
  const bool sound = moe_sound(ctx, coop, at);
  for (int32_t rank = block; sound && rank < at.world(); rank += blocks) {
    if (rank == self || at.experts_of(rank) == 0 || !moe_takes_part(ctx, coop, at, rank)) continue;
    compact_send_counts(ctx, coop, endpoint, view, rank);
  }
  for (int32_t source = lane; sound && experts != 0 && source < at.world(); source += lanes) {
    if (source == self || !moe_takes_part(ctx, at, source)) continue;
    compact_await_counts(ctx, endpoint, view, source, at.call.counts_by_ns);
  }
  ctx.sync_grid();
  for (auto e = static_cast<uint32_t>(lane); e < experts; e += static_cast<uint32_t>(lanes)) compact_place_runs(ctx, view, e);
  ctx.sync_grid();
  if (lane == 0) compact_place_blocks(view);
  ctx.sync_grid();
}

/* Places, answers out, answers in: afterwards send_start holds where each run goes, or the call has failed.
 *
 * HAZARD: a cached call answers nobody who sends no rows. Nothing would keep such an answer behind the source's last call, of which it would then write over the answers. */
template <class Ctx, class Endpoint> EP_HD void compact_agree(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view) {
  const moe_view& at = view.at;
  const int32_t self = at.self();
  const uint32_t experts = at.experts_of(self);
  const auto lane = static_cast<int32_t>(ctx.block() * coop.lanes() + coop.lane());
  const auto lanes = static_cast<int32_t>(ctx.blocks() * coop.lanes());
  const auto block = static_cast<int32_t>(ctx.block());
  const auto blocks = static_cast<int32_t>(ctx.blocks());
  if (!view.cached()) compact_count(ctx, coop, endpoint, view);
  const bool sound = moe_sound(ctx, coop, at);
  for (int32_t source = block; sound && experts != 0 && source < at.world(); source += blocks) {
    uint64_t puts = 0;
    if (source == self || (view.cached() && view.expects(source, &puts) == 0)) continue;
    if (moe_takes_part(ctx, coop, at, source)) compact_answer_source(ctx, coop, endpoint, view, source);
  }
  for (int32_t rank = lane; sound && rank < at.world(); rank += lanes) {
    const uint32_t there = at.experts_of(rank);
    const uint32_t first = at.first_replica(rank);
    const uint64_t words = view.starts() + first * sizeof(uint64_t);
    const bool asks = rank != self && there != 0 && (!view.cached() || at.sends_to(rank) != 0);
    if (asks && moe_takes_part(ctx, at, rank)) {
      if (!compact_await_words(ctx, endpoint, view, EP_MOE_SIGNAL_PLACED, &at.peer(rank).placed, rank, words, there, EP_STAGE_PLACE, at.call.answers_by_ns)) continue;
      moe_each_word(ctx, view.words(words), there, 1, [&](uint32_t e, uint64_t word) { view.start()[first + e] = static_cast<uint32_t>(word); });
    }
    for (uint32_t e = 0; rank == self && e < there; ++e) view.start()[first + e] = compact_answer(view, e, self);
  }
  ctx.sync_grid();
  if (sound && lane == 0 && view.debtor >= 0) {
    const bool rows = at.peer(view.debtor).owed_rows != 0;
    ctx.fail(at.status(), EP_STATUS_BUSY, view.debtor, rows ? EP_STAGE_ARRIVAL : EP_STAGE_RESULT, 0, 0);
  }
  /* The lowest rank without room, on all ranks the same one. */
  for (int32_t rank = 0; sound && lane == 0 && rank < at.world(); ++rank) {
    const bool asked = at.experts_of(rank) != 0 && (rank == self || !view.cached() || at.sends_to(rank) != 0);
    if (!asked || !moe_takes_part(ctx, at, rank)) continue;
    const uint32_t start = view.start()[at.first_replica(rank)];
    if ((start & moe_no_room) == 0) continue;
    const uint32_t needed = start & ~moe_no_room;
    ctx.fail(at.status(), needed == 0 ? EP_STATUS_BUSY : EP_STATUS_CAPACITY, rank, EP_STAGE_PLACE, at.buffer.recv_rows, needed);
    break;
  }
  ctx.sync_grid();
}

/* After compact_agree has found a rank that takes no rows, full or in debt: tells every rank, in the place of rows, so that one which was not told by that rank fails, too. All blocks
 * call it.
 *
 * HAZARD: a rank that was told where to write may do so before it hears of it. So what this rank's next call of the slot awaits first is the end of everybody's rows; a rank that
 * takes none has told nobody. */
template <class Ctx, class Endpoint> EP_HD void compact_refuse(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const compact_view& view) {
  const moe_view& at = view.at;
  const int32_t self = at.self();
  const bool takes_none = view.debtor >= 0 || (!view.cached() && view.blocks()[at.experts_of(self)] > at.buffer.recv_rows);
  if (ctx.block() == 0 && coop.lane() == 0) {
    moe_write_refusal(ctx, endpoint, at, view.debtor >= 0 ? self : at.status()->rank, at.status()->status == EP_STATUS_BUSY);
    moe_leave_bank(at);
  }
  ctx.sync_grid();
  for (auto rank = static_cast<int32_t>(ctx.block()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks())) {
    if (rank == self) continue;
    if (moe_takes_part(ctx, coop, at, rank)) moe_pass_on(ctx, coop, endpoint, at, rank, EP_MOE_SIGNAL_ARRIVED, view.puts_to(rank));
    if (coop.lane() != 0) continue;
    uint64_t puts = 0;
    const bool may_write = view.expects(rank, &puts) != 0 && load_relaxed(ctx, &at.ranks()[rank]) != EP_MOE_RANK_MASKED;
    if (!may_write && !moe_takes_part(ctx, at, rank)) continue;
    ep_moe_peer& peer = at.peer(rank);
    const uint64_t value = moe_next(endpoint, at, rank, peer.arrived, puts);
    if (takes_none) peer.arrived = value;
    else peer.owed_rows = value;
  }
}

} // namespace detail

EP_MACHINE_END

#endif
