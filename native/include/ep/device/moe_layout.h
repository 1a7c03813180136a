/* The layout step: which replica serves each choice, and its place among those of this rank to that replica, in token order. No row moves.
 *
 * The j-th choice of an expert (in order of tokens, then of k) goes to candidate number (rank + j) mod how many there are, and is number floor(j / how many) there:
 * docs/moe.md, "Which replica serves a choice". So only j is to be found, and experts can be shared out: to blocks where a block is one lane, to warps otherwise. */
#ifndef EP_DEVICE_MOE_LAYOUT_H
#define EP_DEVICE_MOE_LAYOUT_H

#include "moe_rows.h"

EP_MACHINE_BEGIN

namespace detail {

struct moe_layout_tables {
  const int32_t* topk;
  const uint32_t* begin;
  const uint32_t* candidates;
  int32_t* replica;
  int32_t* slot;
  uint64_t choices;
  uint32_t experts;
  uint32_t rank;

  EP_HD uint32_t copies(uint32_t expert) const { return begin[expert + 1] - begin[expert]; }
  EP_HD bool is_expert(int32_t chosen) const { return chosen >= 0 && static_cast<uint32_t>(chosen) < experts; }
  EP_HD void none(uint64_t choice) const {
    replica[choice] = -1;
    slot[choice] = -1;
  }
  EP_HD void place_at(uint64_t choice, uint32_t p, uint32_t number) const {
    replica[choice] = static_cast<int32_t>(p);
    slot[choice] = static_cast<int32_t>(number);
  }
  EP_HD uint32_t place(uint64_t choice, uint32_t expert, uint32_t j) const {
    const uint32_t count = copies(expert);
    const uint32_t p = count == 1 ? candidates[begin[expert]] : candidates[begin[expert] + (rank + j) % count];
    place_at(choice, p, count == 1 ? j : j / count);
    return p;
  }
};

} // namespace detail

/* Where a choice's header goes, and the count word of a replica; 0: nowhere. */
struct moe_place {
  uint64_t headers;
  uint64_t word;
  int32_t rank; /* of the replica */
};

/* Writes choice_replica, choice_slot and send_words (with the call's epoch). Ends without a barrier: other blocks' parts are there after the next one of the grid.
 *
 * Where blocks have several lanes, others may be told on the way. tell.place_of(replica) is where its headers and its count word go; tell.admit() comes once, by all lanes of a block, behind the first looks and before anything is told;
 * tell.open(place) is what of a place may be told since. Whoever has found a choice's slot then calls tell.told(headers, choice, slot), and whoever has a count word tell.counted(place, word).
 *
 * HAZARD of time alone: place_of looks at memory, several times one after the other, which takes longer than the rest of the layout. So each lane of a warp asks for one of the warp's experts, all of them at once and before
 * credits are awaited; only where an expert has several replicas does whoever has a choice ask for its own. */
template <class Ctx, class Tell>
EP_HD void moe_layout(Ctx& ctx, const moe_view& at, Tell& tell) {
  const ep_moe_experts& experts = at.buffer.experts;
  const ep_moe_routing& routing = at.call.routing;
  const detail::moe_layout_tables tables{reinterpret_cast<const int32_t*>(routing.topk),
                                         reinterpret_cast<const uint32_t*>(experts.candidate_begin),
                                         reinterpret_cast<const uint32_t*>(experts.candidates),
                                         reinterpret_cast<int32_t*>(routing.choice_replica),
                                         reinterpret_cast<int32_t*>(routing.choice_slot),
                                         static_cast<uint64_t>(routing.tokens) * at.buffer.top_k,
                                         experts.experts,
                                         static_cast<uint32_t>(at.self())};
  auto* words = reinterpret_cast<uint64_t*>(routing.send_words);
  const auto* expert_of = reinterpret_cast<const int32_t*>(experts.replica_expert);
  const uint64_t word = at.word();
  if constexpr (Ctx::single_lane) {
    const uint32_t blocks = ctx.blocks();
    const auto mine = [&](int32_t expert) { return blocks == 1 || static_cast<uint32_t>(expert) % blocks == ctx.block(); };
    for (uint32_t p = 0; p < experts.replicas; ++p) {
      if (mine(expert_of[p])) words[p] = 0;
    }
    for (uint64_t i = 0; i < tables.choices; ++i) {
      const int32_t e = tables.topk[i];
      const bool chosen = tables.is_expert(e);
      if (!mine(chosen ? e : 0)) continue;
      if (!chosen || tables.copies(static_cast<uint32_t>(e)) == 0) {
        tables.none(i);
        continue;
      }
      /* How many of the expert's choices there were is kept above the count of its first candidate. */
      uint64_t& first = words[tables.candidates[tables.begin[e]]];
      const uint32_t p = tables.place(i, static_cast<uint32_t>(e), static_cast<uint32_t>(first >> 32));
      first += uint64_t{1} << 32;
      words[p] += 1;
    }
    for (uint32_t p = 0; p < experts.replicas; ++p) {
      if (mine(expert_of[p])) words[p] = word | static_cast<uint32_t>(words[p]);
    }
  } else {
    const uint32_t width = ctx.warp_lanes();
    const uint32_t in_warp = ctx.lane() % width;
    const uint32_t warps = ctx.blocks() * (ctx.lanes() / width);
    const uint32_t warp = ctx.block() * (ctx.lanes() / width) + ctx.lane() / width;
    const bool all_taken = tables.begin[experts.experts] == experts.replicas;
    constexpr uint32_t in_flight = 16; /* lines that a warp waits for at once; each has a lane that remembers its hits */
    const uint32_t lines = in_flight < width ? in_flight : width;
    int32_t chosen[in_flight];
    const auto look = [&](uint64_t first) {
      EP_UNROLL for (uint32_t n = 0; n < in_flight; ++n) {
        const uint64_t choice = first + n * width + in_warp;
        chosen[n] = n < lines && choice < tables.choices ? tables.topk[choice] : -1;
      }
    };
    for (uint32_t first = warp;; first += warps * width) {
      look(0); /* before all else: it waits for nothing */
      const uint32_t left = first < experts.experts ? (experts.experts - first + warps - 1) / warps : 0;
      const uint32_t at_once = left < width ? left : width; /* experts of which each has a lane */
      const uint32_t own_expert = first + in_warp * warps;
      const uint32_t own_count = in_warp < at_once ? tables.copies(own_expert) : 0;
      const uint32_t own_only = own_count == 1 ? tables.candidates[tables.begin[own_expert]] : 0;
      moe_place own_place{};
      if (own_count == 1) own_place = tell.place_of(own_only);
      uint32_t own_found = 0;
      if (first == warp) tell.admit();
      if (left == 0) break;
      own_place = tell.open(own_place);
      for (uint64_t i = 0; i < tables.choices; i += lines * width) {
        if (i != 0) {
          look(i); /* in braces: else clang reads the loop below, set in by its macro, as a part of it */
        }
        EP_ONE_CODE for (uint32_t of = 0; of < at_once; ++of) {
          const uint32_t e = first + of * warps;
          uint32_t own_hits = 0; /* lane n has those of line n */
          EP_UNROLL for (uint32_t n = 0; n < in_flight; ++n) {
            const uint32_t hits = ctx.ballot(chosen[n] == static_cast<int32_t>(e));
            if (n == in_warp) own_hits = hits;
          }
          uint32_t hit = ctx.ballot(own_hits != 0);
          if (hit == 0) continue;
          const uint32_t count = ctx.shuffle(own_count, of);
          const uint32_t only = ctx.shuffle(own_only, of);
          const uint64_t headers = ctx.shuffle(own_place.headers, of);
          uint32_t j = ctx.shuffle(own_found, of);
          if (count == 0) continue;
          EP_ONE_CODE for (uint32_t n = 0; hit != 0; hit >>= 1, ++n) {
            if ((hit & 1u) == 0) continue;
            const uint32_t hits = ctx.shuffle(own_hits, n);
            const uint32_t own = j + detail::ones(hits & ((uint32_t{1} << in_warp) - 1));
            const uint64_t choice = i + n * width + in_warp;
            j += detail::ones(hits);
            if ((hits >> in_warp & 1u) == 0) continue;
            if (count == 1) {
              tables.place_at(choice, only, own);
              tell.told(headers, static_cast<uint32_t>(choice), own);
            } else {
              const uint32_t p = tables.place(choice, e, own);
              tell.told(tell.open(tell.place_of(p)).headers, static_cast<uint32_t>(choice), own / count);
            }
          }
          if (in_warp == of) own_found = j;
        }
      }
      if (own_count == 1) {
        store_relaxed(ctx, &words[own_only], word | own_found); /* others of this rank look before it has sent */
        tell.counted(own_place, word | own_found);
      }
      for (uint32_t of = 0, several = ctx.ballot(own_count > 1); several != 0; several >>= 1, ++of) {
        if ((several & 1u) == 0) continue;
        const uint32_t e = first + of * warps;
        const uint32_t count = ctx.shuffle(own_count, of);
        const uint32_t j = ctx.shuffle(own_found, of);
        for (uint32_t c = in_warp; c < count; c += width) {
          /* Candidate c gets numbers j' with (rank + j') mod count == c: the first of them is `lead`. */
          const uint32_t lead = (c + count - tables.rank % count) % count;
          const uint32_t p = tables.candidates[tables.begin[e] + c];
          const uint64_t counted = word | (lead < j ? (j - lead + count - 1) / count : 0);
          store_relaxed(ctx, &words[p], counted);
          tell.counted(tell.open(tell.place_of(p)), counted);
        }
      }
    }
    for (uint64_t i = static_cast<uint64_t>(warp) * width + in_warp; i < tables.choices; i += static_cast<uint64_t>(warps) * width) {
      if (!tables.is_expert(tables.topk[i]) || tables.copies(static_cast<uint32_t>(tables.topk[i])) == 0) tables.none(i);
    }
    if (all_taken) return;
    /* Replicas that this rank does not take get nothing. Whose warp has no part of the expert must not look at its words. */
    for (uint32_t p = in_warp; p < experts.replicas; p += width) {
      const auto e = static_cast<uint32_t>(expert_of[p]);
      if (e % warps != warp) continue;
      bool candidate = false;
      for (uint32_t c = tables.begin[e]; c < tables.begin[e + 1] && !candidate; ++c) candidate = tables.candidates[c] == p;
      if (candidate) continue;
      store_relaxed(ctx, &words[p], word);
      tell.counted(tell.open(tell.place_of(p)), word);
    }
  }
}

/* Where nobody is told on the way. */
struct moe_tells_nobody {
  EP_HD void admit() const {}
  EP_HD moe_place place_of(uint32_t) const { return {}; }
  EP_HD moe_place open(const moe_place& place) const { return place; }
  EP_HD void told(uint64_t, uint32_t, uint32_t) const {}
  EP_HD void counted(const moe_place&, uint64_t) const {}
};
template <class Ctx> EP_HD void moe_layout(Ctx& ctx, const moe_view& at) {
  const moe_tells_nobody nobody{};
  moe_layout(ctx, at, nobody);
}

EP_MACHINE_END

#endif
