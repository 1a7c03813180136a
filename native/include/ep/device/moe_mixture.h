/* The mixtures of a rank's tokens: whose rows each is made of, where they lie, and by whom it is summed. */
#ifndef EP_DEVICE_MOE_MIXTURE_H
#define EP_DEVICE_MOE_MIXTURE_H

#include "moe_offer.h"
#include "moe_rows.h"
#include "moe_sum.h"

EP_MACHINE_BEGIN

namespace detail {

/* Where a row of results is read from: y, or what was cast. */
struct moe_results {
  const uint8_t* y;
  uint64_t stride;
  uint8_t* staged;
  bool cast;
  uint64_t row_bytes;

  EP_HD const uint8_t* row(uint64_t row) const { return cast ? staged + row * row_bytes : y + row * stride; }
};

template <class Endpoint> EP_HD moe_results moe_results_of(const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args) {
  const ep_peer_view& own = reinterpret_cast<const ep_peer_view*>(endpoint.memory.peers)[at.self()];
  return {reinterpret_cast<const uint8_t*>(args.y), args.y_stride_bytes, reinterpret_cast<uint8_t*>(own.data) + at.part(at.buffer.staged_results),
          args.dtype != at.buffer.result_payload, at.buffer.result_row_bytes};
}

/* One token's weights. */
struct moe_mixture {
  const moe_view& at;
  const float* weights; /* of the token, or null */
  uint64_t first;       /* its first choice */
  float scale;

  EP_HD bool is_left(uint32_t k) const {
    const int32_t p = at.replicas()[first + k];
    return p >= 0 && at.ranks()[at.rank_of(p)] == 0;
  }
  EP_HD void renormalise() {
    const auto* topk = reinterpret_cast<const int32_t*>(at.call.routing.topk);
    float all = 0.0f;
    float left = 0.0f;
    for (uint32_t k = 0; k < at.buffer.top_k; ++k) {
      if (topk[first + k] >= 0) all = sum(all, weights[k]);
      if (is_left(k)) left = sum(left, weights[k]);
    }
    if (left != 0.0f) scale = quotient(all, left);
  }
};

/* Who serves a choice: replica p of a rank, to which it is this rank's row number `slot`. */
struct moe_chosen {
  uint32_t p;
  uint32_t slot;
  int32_t rank;
};
/* False: nobody. */
EP_HD bool moe_choice_of(const moe_view& at, uint64_t choice, moe_chosen* chosen) {
  const int32_t p = at.replicas()[choice];
  chosen->slot = static_cast<uint32_t>(at.slots()[choice]); /* both looks at once */
  if (p < 0) return false;
  chosen->p = static_cast<uint32_t>(p);
  chosen->rank = at.rank_of(p);
  return true;
}

/* Where its result lies: at this rank, at the one that offers it, or among those that were sent here. */
template <class Ctx, class Endpoint>
EP_HD const uint8_t* moe_result_of(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const moe_results& results, const uint8_t* returned, uint64_t choice, const moe_chosen& chosen) {
  const auto& [p, slot, rank] = chosen;
  if (rank == at.self()) {
    const uint32_t expert = p - at.first_replica(rank);
    return results.row(at.block_start(expert) + (*at.range(expert, rank) >> 32) + slot);
  }
  if constexpr (moe_pulls<Endpoint>) {
    const uint8_t* offered = moe_may_offer(at) ? moe_offered_result(ctx, endpoint, at, rank, p, slot) : nullptr;
    if (offered != nullptr) return offered;
  }
  return returned + choice * at.buffer.result_row_bytes;
}

/* One token's sum, by a scope without a barrier. */
template <class Ctx, class Coop, class Endpoint>
EP_HD void moe_sum_token(Ctx& ctx, const Coop& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args, const moe_results& results, const uint8_t* returned,
                         uint32_t token) {
  const ep_moe_buffer& buffer = at.buffer;
  const uint64_t bias_stride = payload_bytes(args.dtype, buffer.hidden);
  const uint64_t first = static_cast<uint64_t>(token) * buffer.top_k;
  const auto* weights = args.weights != 0 ? reinterpret_cast<const float*>(args.weights) + first : nullptr;
  moe_mixture mixture{at, weights, first, 1.0f};
  if (weights != nullptr && (args.call.flags & EP_MOE_RENORMALISE) != 0) mixture.renormalise();
  ep_moe_sum sum{};
  sum.dtype = args.dtype;
  sum.payload = buffer.result_payload;
  sum.hidden = buffer.hidden;
  sum.out = reinterpret_cast<uint8_t*>(args.out) + token * args.out_stride_bytes;
  for (uint32_t b = 0; b < 2 && args.bias[b] != 0; ++b) sum.bias[b] = reinterpret_cast<const uint8_t*>(args.bias[b]) + token * bias_stride;
  moe_sum_row(coop, sum, buffer.top_k, [&](uint32_t k, ep_moe_term* term) {
    moe_chosen chosen{};
    if (!moe_choice_of(at, first + k, &chosen) || at.ranks()[chosen.rank] != 0) return false;
    term->row = moe_result_of(ctx, endpoint, at, results, returned, first + k, chosen);
    term->weight = weights == nullptr ? 1.0f : product(weights[k], mixture.scale);
    return true;
  });
}

/* Tokens of a share of warps, their results at `bank`. */
template <class Ctx, class Endpoint>
EP_HD void moe_sum_tokens(Ctx& ctx, const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args, uint32_t bank, const warp_share& share) {
  const moe_results results = moe_results_of(endpoint, at, args);
  const auto* returned = reinterpret_cast<const uint8_t*>(moe_data(endpoint, at.self(), at.results(bank)));
  moe_share_tokens(ctx, share, args.call.routing.tokens, [&](uint32_t token, const team_coop<Ctx>& team) { moe_sum_token(ctx, team, endpoint, at, args, results, returned, token); });
}

/* All tokens of the rank. */
template <class Ctx, class Endpoint>
EP_HD void moe_sum_tokens(Ctx& ctx, const block_coop<Ctx>& coop, const Endpoint& endpoint, const moe_view& at, const ep_moe_combine_args& args, uint32_t bank) {
  if constexpr (!Ctx::single_lane) {
    moe_sum_tokens(ctx, endpoint, at, args, bank, warps_of_grid(ctx));
  } else {
    const moe_results results = moe_results_of(endpoint, at, args);
    const auto* returned = reinterpret_cast<const uint8_t*>(moe_data(endpoint, at.self(), at.results(bank)));
    for (uint32_t token = ctx.block(); token < args.call.routing.tokens; token += ctx.blocks()) moe_sum_token(ctx, coop, endpoint, at, args, results, returned, token);
  }
}

} // namespace detail

EP_MACHINE_END

#endif
