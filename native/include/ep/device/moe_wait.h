/* What the halves of a call for experts have in common: who takes part, how ranks tell each other that a thing is done, and waits that give up a rank instead of
 * failing.
 *
 * HAZARD: no half returns before its last grid barrier, whatever goes wrong: a block that is gone would be missing there for ever. So a failure is noted, work is
 * skipped, and the half says false at its end. For the same reason what a block does together is decided alike by all of its lanes. */
#ifndef EP_DEVICE_MOE_WAIT_H
#define EP_DEVICE_MOE_WAIT_H

#include "endpoint.h"
#include "ep/abi/moe.h"
#include "mlx5_queue.h"

EP_MACHINE_BEGIN

/* A word of refusal: the epoch of the call, this, whether the rank that it names may be written to by one that was given up, and the rank. */
constexpr uint32_t moe_refused = 0x80000000u;
constexpr uint32_t moe_in_debt = 0x40000000u;

/* Whether a peer is stored to directly. Then rows need no signal of their own and words hold epochs, so that a late one of a past call says nothing new. Otherwise
 * ('bundled' order) every put is signalled, and words are running counts, which have no identity: a rank that was given up must be fenced by its transport before it
 * may come back. HAZARD: both ends of a pair of ranks must answer alike, or one counts what the other names. */
template <class Endpoint> EP_HD constexpr bool moe_stores(const Endpoint& endpoint, int32_t peer) {
  if constexpr (__is_base_of(load_store_endpoint, Endpoint)) {
    return true;
  } else if constexpr (requires { endpoint.stores_to(peer); }) {
    return endpoint.stores_to(peer);
  } else {
    return false;
  }
}
/* Whether any peer may be one that is put to. */
template <class Endpoint> constexpr bool moe_puts = !__is_base_of(load_store_endpoint, Endpoint);

/* Bytes of a peer that is stored to. */
template <class Endpoint> EP_HD uint8_t* moe_data(const Endpoint& endpoint, int32_t peer, uint64_t offset) {
  return reinterpret_cast<uint8_t*>(reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[peer].data) + offset;
}

/* A call with its addresses as pointers. */
struct moe_view {
  const ep_moe_buffer& buffer;
  const ep_moe_call& call;

  EP_HD int32_t self() const { return buffer.memory.rank; }
  EP_HD int32_t world() const { return buffer.memory.world_size; }
  EP_HD uint64_t* ranks() const { return reinterpret_cast<uint64_t*>(call.ranks); }
  EP_HD ep_kernel_status* status() const { return reinterpret_cast<ep_kernel_status*>(call.status); }
  EP_HD ep_moe_peer& peer(int32_t rank) const {
    return reinterpret_cast<ep_moe_peer*>(buffer.peers)[static_cast<uint64_t>(call.slot) * static_cast<uint64_t>(world()) + static_cast<uint64_t>(rank)];
  }
  EP_HD uint64_t signal_slot(uint32_t kind, int32_t rank) const {
    return buffer.first_signal + (static_cast<uint64_t>(call.slot) * EP_MOE_SIGNAL_KINDS + kind) * static_cast<uint64_t>(world()) + static_cast<uint64_t>(rank);
  }
  EP_HD uint64_t part(const ep_moe_part& of) const { return of.offset + call.slot * of.stride; }

  EP_HD uint32_t first_replica(int32_t rank) const { return reinterpret_cast<const uint32_t*>(buffer.experts.rank_begin)[rank]; }
  EP_HD uint32_t experts_of(int32_t rank) const { return first_replica(rank + 1) - first_replica(rank); }
  EP_HD int32_t rank_of(int32_t replica) const { return reinterpret_cast<const int32_t*>(buffer.experts.replica_rank)[replica]; }

  EP_HD const int32_t* replicas() const { return reinterpret_cast<const int32_t*>(call.routing.choice_replica); }
  EP_HD const int32_t* slots() const { return reinterpret_cast<const int32_t*>(call.routing.choice_slot); }
  EP_HD const uint64_t* send_words() const { return reinterpret_cast<const uint64_t*>(call.routing.send_words); }
  EP_HD uint32_t sends(uint32_t replica) const { return static_cast<uint32_t>(send_words()[replica]) & EP_MOE_COUNT_ROWS; }
  /* Low latency: this rank can take no results, and sends no rows. */
  EP_HD bool refuses() const { return (send_words()[0] & EP_MOE_COUNT_REFUSES) != 0; }
  /* A count word of this rank without its rows. */
  EP_HD uint64_t word() const {
    return static_cast<uint64_t>(call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT | static_cast<uint64_t>(peer(self()).bank) << EP_MOE_COUNT_BANK_SHIFT;
  }
  /* Where results go that a rank takes in a bank of its part. */
  EP_HD uint64_t results(uint32_t bank) const {
    return part(buffer.returned) + static_cast<uint64_t>(bank) * buffer.max_tokens * buffer.top_k * buffer.result_row_bytes;
  }
  EP_HD uint64_t* range(uint32_t expert, int32_t source) const {
    return reinterpret_cast<uint64_t*>(call.routing.layout_range) + static_cast<uint64_t>(expert) * static_cast<uint64_t>(world()) + static_cast<uint64_t>(source);
  }
  EP_HD uint32_t block_start(uint32_t expert) const { return reinterpret_cast<const uint32_t*>(call.routing.block_start)[expert]; }

  /* Rows that this rank sends to one, over all of its experts. */
  EP_HD uint64_t sends_to(int32_t rank) const {
    uint64_t rows = 0;
    for (uint32_t p = first_replica(rank); p < first_replica(rank + 1); ++p) rows += sends(p);
    return rows;
  }
  /* Where a rank says that a call is refused. HAZARD: a word for each: one that was given up may say it calls later, and would write over what another has just said. */
  EP_HD uint64_t refusal(int32_t rank) const { return part(buffer.refusals) + static_cast<uint64_t>(rank) * sizeof(uint64_t); }
  /* Where the run of local expert `expert` of a rank and of source `source` begins in that rank's memory. */
  EP_HD uint64_t run(uint32_t expert, int32_t source) const {
    const uint64_t runs = static_cast<uint64_t>(expert) * static_cast<uint64_t>(world()) + static_cast<uint64_t>(source);
    return part(buffer.received) + runs * buffer.max_tokens * (sizeof(ep_moe_header) + buffer.row_bytes);
  }
  /* Low latency where rows stay with their source (moe_pulls): where a rank's rows lie, by token, until all that they go to have read them. No row of a rank itself needs its run. */
  EP_HD uint64_t offered(int32_t rank) const { return run(0, rank) + buffer.max_tokens * sizeof(ep_moe_header); }
};

template <class Ctx> EP_HD bool moe_takes_part(Ctx& ctx, const moe_view& at, int32_t rank) { return load_relaxed(ctx, &at.ranks()[rank]) == 0; }

/* The same answer for all lanes of the block, also while another block gives the rank up. */
template <class Ctx> EP_HD bool moe_takes_part(Ctx& ctx, const block_coop<Ctx>& coop, const moe_view& at, int32_t rank) {
  return coop.sync_and(coop.lane() != 0 || moe_takes_part(ctx, at, rank));
}

/* Whether nothing has failed, asked by all lanes of the block. */
template <class Ctx> EP_HD bool moe_sound(Ctx& ctx, const block_coop<Ctx>& coop, const moe_view& at) {
  ctx.point();
  return coop.sync_and(coop.lane() != 0 || detail::half_ref(at.status()->status).load(detail::acquire) == EP_STATUS_OK);
}

/* Whether nothing has failed when a send half ends; `before` was read before its last barrier of the grid. HAZARD: where a receive half follows in the same launch a faster block may fail
 * there already, and one that left for that would be missing at barriers. Where all peers are stored to nothing of a send half fails once rows are written, so that what was read before is
 * what all blocks have read. */
template <class Endpoint, class Ctx> EP_HD bool moe_agreed(Ctx& ctx, const block_coop<Ctx>& coop, const moe_view& at, bool before) {
  if constexpr (moe_puts<Endpoint>) return moe_sound(ctx, coop, at);
  else return before;
}

/* Whether a NIC has refused what was asked of it here, which no peer is to blame for. */
EP_HD bool moe_own_nic(const ep_kernel_status& why) {
  return why.stage == EP_STAGE_NIC && why.status == EP_STATUS_SYSTEM && mlx5_is_local(static_cast<uint32_t>(why.found >> EP_NIC_FOUND_SYNDROME) & 0xffu);
}

/* Whether a call goes on without a rank. HAZARD: over EFA it must not: queue pairs there are for all peers, so a request that one of them does not answer breaks them for all, and
 * arrivals do not say which call they are of. A failure is fenced by opening the transport anew. */
EP_HD bool moe_leaves_out(const ep_memory_handle& memory) { return memory.header.kind != EP_MEMORY_EFA && memory.header.kind != EP_MEMORY_MIXED_EFA; }

/* Whether a peer that is put to is missing for a reason that lies here. A NIC that reaches nobody would blame all of them. A rank that is known to be dead is missing, whatever else. */
template <class Ctx> EP_HD bool moe_own_fault(Ctx& ctx, const moe_view& at, int32_t rank, const ep_kernel_status& why) {
  if (moe_own_nic(why)) return true;
  const bool stored_to = reinterpret_cast<const ep_peer_view*>(at.buffer.memory.peers)[rank].data != 0;
  if (stored_to || (why.stage != EP_STAGE_NIC && why.status != EP_STATUS_TIMEOUT)) return false;
  if constexpr (requires { ctx.own_fault(why.found); }) {
    return ctx.own_fault(why.stage == EP_STAGE_NIC ? why.found : 0);
  } else {
    return false;
  }
}

/* A wait or a put for `rank` has ended as `why` says. Late and lost ranks are given up where a call can go on without; anything else ends the call: with stage NIC and nothing found
 * where one's own NIC reaches nobody. HAZARD: what other blocks await may not come any more, from ranks that have failed alike and send nothing, so their waits end, too. */
template <class Ctx> EP_HD void moe_give_up(Ctx& ctx, const moe_view& at, int32_t rank, const ep_kernel_status& why) {
  const bool stopped = why.status == EP_STATUS_ABORTED || why.status == EP_STATUS_CLOSED;
  const bool missing = !stopped && (why.status == EP_STATUS_TIMEOUT || why.status == EP_STATUS_PEER_LOST || why.stage == EP_STAGE_NIC);
  const bool own = missing && moe_own_fault(ctx, at, rank, why);
  const bool goes_on = missing && !own && moe_leaves_out(at.buffer.memory);
  if (own) {
    const bool refused = moe_own_nic(why); /* else what the NIC has told last is of a request that was flushed, and of no use */
    ctx.fail(at.status(), EP_STATUS_SYSTEM, why.rank, EP_STAGE_NIC, refused ? why.expected : 0, refused ? why.found : 0);
  } else if (!goes_on) {
    ctx.fail(at.status(), why.status, why.rank, why.stage, why.expected, why.found);
  }
  if constexpr (requires { ctx.stop_waits(); }) {
    if (!goes_on) ctx.stop_waits();
  }
  const bool late = why.status == EP_STATUS_TIMEOUT;
  store_release(ctx, &at.ranks()[rank], static_cast<uint64_t>(late ? EP_STATUS_TIMEOUT : EP_STATUS_PEER_LOST));
}

/* A word that is reached, or a time that is past. */
template <class Ctx> struct moe_look_until {
  const Ctx* ctx;
  const uint64_t* word;
  uint64_t value;
  uint64_t by_ns;
  EP_HD bool operator()(uint64_t* found) const {
    *found = detail::word_ref(*const_cast<uint64_t*>(word)).load(detail::acquire);
    return *found >= value || ctx->clock_ns() >= by_ns;
  }
};

/* Whether a word has reached `value`, by `by_ns` if that is not 0. HAZARD: where a context can sleep until the word changes it must: ranks await each other in order, and where they
 * outnumber cores those that look again and again leave nobody a core (128 threads on two cores: minutes). */
template <class Ctx>
EP_HD bool moe_wait_by(Ctx& ctx, const uint64_t* word, uint64_t value, uint64_t by_ns, int32_t rank, uint32_t stage, ep_kernel_status* why) {
  if (by_ns == 0) return ctx.wait(word, value, rank, stage, why);
  if constexpr (requires { ctx.wait_by(word, value, by_ns, rank, stage, why); }) {
    return ctx.wait_by(word, value, by_ns, rank, stage, why);
  } else {
    if (!ctx.wait_for(moe_look_until<Ctx>{&ctx, word, value, by_ns}, value, rank, stage, why)) return false;
    const uint64_t found = load_acquire(ctx, word);
    if (found < value) *why = {EP_STATUS_TIMEOUT, rank, stage, 0, value, found};
    return found >= value;
  }
}

/* Whether `rank`'s word of a kind has reached `value`, by `by_ns` if that is not 0; a rank that does not get there is given up. */
template <class Ctx, class Endpoint>
EP_HD bool moe_await(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, uint32_t kind, uint64_t value, int32_t rank, uint32_t stage, uint64_t by_ns = 0) {
  const uint64_t* word = endpoint.local_signal(at.signal_slot(kind, rank));
  ep_kernel_status why{};
  if (moe_wait_by(ctx, word, value, by_ns, rank, stage, &why)) return true;
  moe_give_up(ctx, at, rank, why);
  return false;
}

/* The same, by the only one who waits for this rank in this half: counts the time. */
template <class Ctx, class Endpoint>
EP_HD bool moe_await_alone(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, uint32_t kind, uint64_t value, int32_t rank, uint32_t stage, uint64_t by_ns = 0) {
  if (at.call.wait_ns == 0) return moe_await(ctx, endpoint, at, kind, value, rank, stage, by_ns);
  const uint64_t start = ctx.clock_ns();
  const bool ok = moe_await(ctx, endpoint, at, kind, value, rank, stage, by_ns);
  reinterpret_cast<uint64_t*>(at.call.wait_ns)[rank] += ctx.clock_ns() - start;
  return ok;
}

/* What all lanes of the block have written is ordered before what lane 0 releases after this. Of several lanes that only store the barrier alone does it: a release of system scope orders
 * whatever happened before it, other lanes' stores too, and a fence by each of them would await them once more. */
template <class Endpoint, class Ctx> EP_HD void moe_written(const block_coop<Ctx>& coop, bool non_temporal) {
  if constexpr (Ctx::single_lane || moe_puts<Endpoint>) copy_rows_done(coop, non_temporal);
  else coop.sync();
}

/* By one lane, where the peer is stored to: see moe_say. */
template <class Ctx, class Endpoint> EP_HD void moe_say_stored(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, uint32_t kind, int32_t peer) {
  const ep_peer_view& view = reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[peer];
  store_release(ctx, reinterpret_cast<uint64_t*>(view.signals) + at.signal_slot(kind, at.self()), static_cast<uint64_t>(at.call.epoch));
  if constexpr (!requires { Ctx::wakes_nobody; }) {
    fence_system(); /* this half of the eventcount: publish before looking for sleepers */
    ctx.wake(view.wake);
  }
}

/* Tells a peer that what `kind` stands for is done. Everything that it stands for has been written, by this block or before a grid barrier. All lanes call it. */
template <class Ctx, class Endpoint>
EP_HD void moe_say(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, uint32_t kind, int32_t peer) {
  if (moe_stores(endpoint, peer)) {
    if (coop.lane() == 0) moe_say_stored(ctx, endpoint, at, kind, peer);
  } else {
    ep_kernel_status why{};
    if (!endpoint.signal(ctx, coop, peer, at.signal_slot(kind, at.self()), 1, &why) && coop.lane() == 0) moe_give_up(ctx, at, peer, why);
  }
}

/* Adds to the word of `kind` at a peer that counts, whatever one request may add at most. All lanes call it. */
template <class Ctx, class Endpoint>
EP_HD void moe_add(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, uint32_t kind, int32_t peer, uint64_t add) {
  uint64_t most = UINT64_MAX;
  if constexpr (requires { Endpoint::max_add; }) most = Endpoint::max_add;
  ep_kernel_status why{};
  for (bool ok = true; ok && add != 0;) {
    const uint64_t now = add < most ? add : most;
    ok = endpoint.signal(ctx, coop, peer, at.signal_slot(kind, at.self()), now, &why);
    if (!ok && coop.lane() == 0) moe_give_up(ctx, at, peer, why);
    add -= now;
  }
}

/* What a word of a peer, or here by a peer, shows after this call: the epoch, or `more` than it was. */
template <class Endpoint> EP_HD uint64_t moe_next(const Endpoint& endpoint, const moe_view& at, int32_t peer, uint64_t before, uint64_t more) {
  return moe_stores(endpoint, peer) ? at.call.epoch : before + more;
}

/* Words that a signal has said are there, `apart` from each other: each(i, word), several loads in flight. */
template <class Ctx, class Each> EP_HD void moe_each_word(Ctx& ctx, const uint64_t* words, uint32_t count, uint64_t apart, const Each& each) {
  constexpr uint32_t in_flight = 16;
  for (uint32_t first = 0; first < count; first += in_flight) {
    uint64_t held[in_flight];
    for (uint32_t i = 0; i < in_flight; ++i) held[i] = first + i < count ? load_relaxed(ctx, &words[(first + i) * apart]) : 0;
    for (uint32_t i = 0; i < in_flight; ++i) {
      if (first + i < count) each(first + i, held[i]);
    }
  }
}

/* `count` words to a peer, and that they are there: where it counts, by `add`. They lie in registered memory where a NIC sends. All lanes call it. */
template <class Ctx, class Endpoint>
EP_HD void moe_put_words(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, int32_t peer, uint64_t to, const uint64_t* words, uint32_t count,
                         uint32_t kind, uint64_t add = 1) {
  if (moe_stores(endpoint, peer)) {
    auto* there = reinterpret_cast<uint64_t*>(moe_data(endpoint, peer, to));
    for (uint32_t i = coop.lane(); i < count; i += coop.lanes()) store_relaxed(ctx, &there[i], words[i]);
    moe_written<Endpoint>(coop, false);
    moe_say(ctx, coop, endpoint, at, kind, peer);
  } else {
    ep_kernel_status why{};
    const uint64_t bytes = count * sizeof(uint64_t);
    bool ok = true;
    if constexpr (requires { Endpoint::max_add; }) { /* only the sum says that the words are there, so the rest may come first */
      for (; ok && add > Endpoint::max_add; add -= Endpoint::max_add) {
        ok = endpoint.signal(ctx, coop, peer, at.signal_slot(kind, at.self()), Endpoint::max_add, &why);
      }
    }
    ok = ok && endpoint.put_rows(ctx, coop, peer, to, words, bytes, bytes, 1, false, at.signal_slot(kind, at.self()), add, &why);
    if (!ok && coop.lane() == 0) moe_give_up(ctx, at, peer, why);
  }
}

/* Where the headers of each replica's rows begin among those that are put. By lane 0. */
template <class Coop> EP_HD void moe_first_headers(const Coop& coop, const moe_view& at) {
  if (coop.lane() != 0) return;
  auto* first = reinterpret_cast<uint32_t*>(at.call.routing.send_first);
  uint32_t before = 0;
  for (uint32_t p = 0; p < at.buffer.experts.replicas; ++p) {
    first[p] = before;
    before += at.sends(p);
  }
}

/* This rank's own word of refusal, from which others get theirs. By one lane; they are told after a barrier of the grid. */
template <class Ctx, class Endpoint> EP_HD void moe_write_refusal(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t for_whom, bool debt) {
  auto* own = reinterpret_cast<uint64_t*>(moe_data(endpoint, at.self(), at.refusal(at.self())));
  store_release(ctx, own, static_cast<uint64_t>(at.call.epoch) << EP_MOE_COUNT_EPOCH_SHIFT | moe_refused | (debt ? moe_in_debt : 0) | static_cast<uint32_t>(for_whom));
  fence_system(); /* a NIC or an engine reads it */
}

/* Tells one rank what this rank's own word of refusal says, in the place of what it awaits: where it counts, `puts`. */
template <class Ctx, class Endpoint>
EP_HD void moe_pass_on(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, int32_t rank, uint32_t kind, uint64_t puts) {
  const uint64_t to = at.refusal(at.self());
  moe_put_words(ctx, coop, endpoint, at, rank, to, reinterpret_cast<const uint64_t*>(moe_data(endpoint, at.self(), to)), 1, kind, puts);
}

/* Whether a rank has said that the call is refused; it then fails. By whoever awaited what that rank says it in the place of. */
template <class Ctx, class Endpoint> EP_HD bool moe_hears_refusal(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, int32_t rank) {
  const uint64_t word = load_acquire(ctx, reinterpret_cast<const uint64_t*>(moe_data(endpoint, at.self(), at.refusal(rank))));
  if (word >> EP_MOE_COUNT_EPOCH_SHIFT != at.call.epoch || (word & moe_refused) == 0) return false;
  const uint32_t why = (word & moe_in_debt) != 0 ? EP_STATUS_BUSY : EP_STATUS_CAPACITY;
  ctx.fail(at.status(), why, static_cast<int32_t>(word & (moe_in_debt - 1)), EP_STAGE_PLACE, at.buffer.recv_rows, 0);
  return true;
}

/* Whether nothing of a dead rank can land here any more. HAZARD: a NIC outlives its rank, and carries out what it had taken over: results that were owed would come into another's place. So does a GPU: the
 * rank is dead as soon as its thread is, and its kernels run until the driver has taken them away, those of a thread of a living process to their end. Nobody here hears of either, so the debt stays. */
template <class Ctx, class Endpoint> EP_HD bool moe_ended(Ctx& ctx, const Endpoint& endpoint, int32_t rank) {
  if constexpr (requires { Ctx::outlives_ranks; }) {
    return false;
  } else {
    return moe_stores(endpoint, rank) || ctx.end_way(rank);
  }
}

/* Whether a rank that was given up alive has written what it owed, or is dead and its way here ended. A debt that is not settled when credit should be there is the slot's loss: the call is refused on
 * all ranks (moe_places.h, moe_dispatch.h), and the next one takes another slot. */
template <class Ctx, class Endpoint>
EP_HD bool moe_settled(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, uint32_t kind, uint64_t owed, int32_t rank, uint32_t stage) {
  const uint64_t* word = endpoint.local_signal(at.signal_slot(kind, rank));
  ep_kernel_status why{};
  if (moe_wait_by(ctx, word, owed, at.call.credits_by_ns, rank, stage, &why)) return true;
  if (why.status == EP_STATUS_PEER_LOST) return moe_ended(ctx, endpoint, rank);
  if (why.status != EP_STATUS_TIMEOUT) ctx.fail(at.status(), why.status, why.rank, why.stage, why.expected, why.found);
  return false;
}

/* The lowest rank that may still write results of an earlier call into the bank, or rows into the slot, after it was awaited; -1: none. */
EP_HD int32_t moe_debtor(const moe_view& at) {
  for (int32_t rank = 0; rank < at.world(); ++rank) {
    const ep_moe_peer& peer = at.peer(rank);
    if (peer.owed_rows != 0 || peer.owed[at.peer(at.self()).bank] != 0) return rank;
  }
  return -1;
}

/* The same by all lanes of a block, of which each warp looks at all ranks. */
template <class Ctx> EP_HD int32_t moe_debtor(const block_coop<Ctx>& coop, const moe_view& at) {
  if constexpr (Ctx::single_lane) {
    return moe_debtor(at);
  } else {
    const uint32_t width = coop.ctx.warp_lanes();
    const uint32_t bank = at.peer(at.self()).bank;
    for (int32_t first = 0; first < at.world(); first += static_cast<int32_t>(width)) {
      const int32_t rank = first + static_cast<int32_t>(coop.lane() % width);
      const bool owes = rank < at.world() && (at.peer(rank).owed_rows != 0 || at.peer(rank).owed[bank] != 0);
      const uint32_t all = coop.ctx.ballot(owes);
      for (uint32_t lane = 0; all != 0; ++lane) {
        if ((all >> lane & 1u) != 0) return first + static_cast<int32_t>(lane);
      }
    }
    return -1;
  }
}

/* At the end of a call, by one lane: where the bank is in debt, the slot's next call takes its results in the other one. */
EP_HD void moe_leave_bank(const moe_view& at) {
  uint32_t& bank = at.peer(at.self()).bank;
  bool owed = false;
  for (int32_t rank = 0; rank < at.world(); ++rank) owed = owed || at.peer(rank).owed[bank] != 0;
  if (owed) bank = (bank + 1) % EP_MOE_BANKS;
}

/* The same by a warp. */
template <class Ctx> EP_HD void moe_leave_bank(Ctx& ctx, const moe_view& at) {
  if constexpr (Ctx::single_lane) {
    moe_leave_bank(at);
  } else {
    uint32_t& bank = at.peer(at.self()).bank;
    bool owed = false;
    for (uint32_t rank = ctx.lane() % ctx.warp_lanes(); rank < static_cast<uint32_t>(at.world()); rank += ctx.warp_lanes()) owed = owed || at.peer(static_cast<int32_t>(rank)).owed[bank] != 0;
    if (ctx.ballot(owed) != 0 && ctx.lane() % ctx.warp_lanes() == 0) bank = (bank + 1) % EP_MOE_BANKS;
  }
}

/* Low latency: a rank with experts tells all others in combine, also those that it has no results for, since one may not know yet that the call is refused: without experts it hears
 * from nobody in dispatch, and it may have given up the rank that refuses. High throughput tells all in dispatch. */
EP_HD bool moe_tells_all(const moe_view& at, int32_t rank) { return at.buffer.header.kind == EP_MOE_LOW_LATENCY && at.experts_of(rank) != 0; }
/* Puts that this rank awaits of another in combine. */
EP_HD uint64_t moe_returns(const moe_view& at, int32_t rank) {
  const uint64_t rows = at.sends_to(rank);
  return rows == 0 && moe_tells_all(at, rank) ? 1 : rows;
}
/* Rows of a rank that came here. */
EP_HD uint64_t moe_rows_of(const moe_view& at, int32_t rank) {
  uint64_t rows = 0;
  for (uint32_t e = 0; e < at.experts_of(at.self()); ++e) rows += static_cast<uint32_t>(*at.range(e, rank));
  return rows;
}
/* Puts that another rank awaits of this one in combine: what moe_returns is over there. */
EP_HD uint64_t moe_returns_to(const moe_view& at, int32_t rank) {
  const uint64_t rows = moe_rows_of(at, rank);
  return rows == 0 && moe_tells_all(at, at.self()) ? 1 : rows;
}

/* A rank may write results of this call yet, until its word shows `value`. HAZARD: so an older debt of it ends then, too: a count may reach what is older by results of this call. */
EP_HD void moe_owes(const moe_view& at, int32_t rank, uint64_t value) {
  ep_moe_peer& peer = at.peer(rank);
  for (uint32_t bank = 0; bank < EP_MOE_BANKS; ++bank) {
    if (bank == at.peer(at.self()).bank || peer.owed[bank] != 0) peer.owed[bank] = value;
  }
}

/* Before anything is written: every block awaits the credit of all ranks of experts, since credit that another block has seen orders nothing here. Whether this block has that of all, and leaves none out. */
template <class Ctx, class Endpoint> EP_HD bool moe_await_credits(Ctx& ctx, const Endpoint& endpoint, const moe_view& at) {
  const block_coop<Ctx> coop{ctx};
  bool whole = true;
  for (int32_t rank = static_cast<int32_t>(coop.lane()); rank < at.world(); rank += static_cast<int32_t>(coop.lanes())) {
    ep_moe_peer& peer = at.peer(rank);
    /* All looks at once: one after the other each would wait for memory. */
    const uint64_t credited = peer.credited;
    const uint32_t experts = at.experts_of(rank);
    const bool takes_part = moe_takes_part(ctx, at, rank);
    uint64_t granted = 0;
    if constexpr (!moe_puts<Endpoint>) granted = load_acquire(ctx, endpoint.local_signal(at.signal_slot(EP_MOE_SIGNAL_CREDIT, rank)));
    whole = whole && takes_part;
    if (rank != at.self() && granted < credited && experts != 0 && takes_part) {
      whole = moe_await(ctx, endpoint, at, EP_MOE_SIGNAL_CREDIT, credited, rank, EP_STAGE_CREDIT, at.call.credits_by_ns) && whole;
    }
    uint64_t& owed = peer.owed[at.peer(at.self()).bank];
    /* HAZARD: rows of results lie by token, not by rank. One that was given up alive and still writes to them would write over another's. So the call that leaves such a debt
     * leaves its bank to it; only when both banks are in debt is there something to wait for. */
    if (ctx.block() == 0 && owed != 0 && moe_settled(ctx, endpoint, at, EP_MOE_SIGNAL_RETURNED, owed, rank, EP_STAGE_RESULT)) owed = 0;
  }
  return coop.sync_and(whole);
}

/* Grants the credit of the call's slot to all that take part: nobody here reads their rows any more. After a grid barrier. */
template <class Ctx, class Endpoint> EP_HD bool moe_release(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_call& call) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, call};
  if (at.experts_of(at.self()) != 0) {
    for (int32_t rank = static_cast<int32_t>(ctx.block()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks())) {
      if (rank != at.self() && moe_takes_part(ctx, coop, at, rank)) moe_say(ctx, coop, endpoint, at, EP_MOE_SIGNAL_CREDIT, rank);
    }
  }
  return moe_sound(ctx, coop, at);
}

/* Low latency, the end of a call of which nothing is combined. HAZARD: a rank that was refused says so in the place of results (moe_refuse), also to one that has not heard of it. Where
 * puts are counted that one would take them, in the slot's next combine, for results that are still to come; and the refused one would await its results for ever. So whoever ends such a
 * call tells others as many as it owes them, and counts as many of theirs, refused or not. */
template <class Ctx, class Endpoint> EP_HD bool moe_release_uncombined(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, const ep_moe_call& call) {
  const block_coop<Ctx> coop{ctx};
  const moe_view at{buffer, call};
  for (auto rank = static_cast<int32_t>(ctx.block()); rank < at.world(); rank += static_cast<int32_t>(ctx.blocks())) {
    if (rank == at.self() || moe_stores(endpoint, rank)) continue;
    const uint64_t puts = moe_returns_to(at, rank);
    if (puts != 0 && moe_takes_part(ctx, coop, at, rank)) moe_add(ctx, coop, endpoint, at, EP_MOE_SIGNAL_RETURNED, rank, puts);
    ep_moe_peer& peer = at.peer(rank);
    if (coop.lane() != 0 || peer.told != call.epoch) continue;
    peer.returned += moe_returns(at, rank);
    for (uint64_t& owed : peer.owed) owed = owed != 0 ? peer.returned : 0; /* as in moe_owes: what is counted for this call must not pass for an older debt */
  }
  return moe_sound(ctx, coop, at);
}

EP_MACHINE_END

#endif
