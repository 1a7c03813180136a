/* The mixture of a token: biases, then weight * row of its choices, first to last, in fp32, every product and every sum rounded by itself, the
 * result rounded once (docs/moe.md, "The order of summation"). */
#ifndef EP_DEVICE_MOE_SUM_H
#define EP_DEVICE_MOE_SUM_H

#include "moe_cast.h"

/* One row of a mixture: a payload as it travelled. */
typedef struct ep_moe_term {
  const void* row;
  float weight;
} ep_moe_term;

/* A mixture; `dtype` is that of `out` and of the biases, which may be null (the second needs the first). */
typedef struct ep_moe_sum {
  uint32_t dtype;
  uint32_t payload;
  uint64_t hidden;
  void* out;
  const void* bias[2];
} ep_moe_sum;

#if !defined(__CUDACC__)
/* core/moe/cast.cpp: the same bits as the templates below, by the widest instructions of this CPU. */
extern "C" void ep_moe_sum_row(const ep_moe_sum* sum, const ep_moe_term* terms, uint32_t count);
/* Room for so many terms, of this thread, until its next call. */
extern "C" ep_moe_term* ep_moe_terms(uint32_t count);
#endif

EP_MACHINE_BEGIN

namespace detail {

/* Channels first .. first + count of a payload row, count <= 4, first a multiple of 4. */
EP_HD void load_channels(uint32_t payload, uint64_t hidden, const void* row, uint64_t first, uint32_t count, float* into) {
  if (payload == EP_MOE_F32) {
    for (uint32_t i = 0; i < count; ++i) into[i] = static_cast<const float*>(row)[first + i];
    return;
  }
  if (payload == EP_MOE_F16) {
    for (uint32_t i = 0; i < count; ++i) into[i] = number_f16::load(static_cast<const uint16_t*>(row)[first + i]);
    return;
  }
  if (payload == EP_MOE_BF16) {
    for (uint32_t i = 0; i < count; ++i) into[i] = number_bf16::load(static_cast<const uint16_t*>(row)[first + i]);
    return;
  }
  const auto* codes = static_cast<const uint8_t*>(row);
  const uint8_t* scale = codes + payload_code_bytes(payload, hidden) + first / EP_MOE_SCALED_CHANNELS * payload_scale_bytes(payload);
  if (payload == EP_MOE_LOGFMT10) {
    const auto pair = static_cast<uint32_t>(load_bytes(scale, 4));
    const bool finite = (pair & 0xffffu) < 0x7f80u;
    const logfmt_block by = finite ? logfmt_block_of(static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)) : logfmt_block{};
    const uint64_t word = load_bytes(codes + first / 4 * 5, (10 * count + 7) / 8);
    for (uint32_t i = 0; i < count; ++i) {
      into[i] = finite ? logfmt_decode(by, static_cast<uint32_t>(word >> (10 * i)) & 0x3ffu) : bits_float(0x7fc00000u);
    }
    return;
  }
  const float by = payload == EP_MOE_F8_UE8M0 ? ue8m0_load(*scale) : bits_float(static_cast<uint32_t>(load_bytes(scale, 4)));
  for (uint32_t i = 0; i < count; ++i) into[i] = product(number_e4m3::load(codes[first + i]), by);
}

/* Channel c of a vector of a row. */
template <class Number> EP_HD float vector_channel(const vector16& held, uint32_t c) {
  if constexpr (sizeof(typename Number::carrier) == 4) return bits_float(held.word[c]);
  else return Number::load(static_cast<typename Number::carrier>(held.word[c / 2] >> (c % 2 * 16)));
}

constexpr uint32_t terms_in_flight = 8;

/* A mixture of at most terms_in_flight rows, of which each lane of a warp knows one: each lane asks the others once, not for each of its vectors (a fifth of the time). `Once`: see
 * load_once. */
template <class Number, bool Once, class Coop> EP_HD void sum_few_vectors(const Coop& coop, const ep_moe_sum& sum, uint32_t count, uint64_t own_row, float own_weight) {
  constexpr uint32_t channels = sizeof(vector16) / sizeof(typename Number::carrier);
  auto& ctx = coop.ctx;
  const vector16* rows[terms_in_flight];
  float weight[terms_in_flight];
  EP_UNROLL for (uint32_t i = 0; i < terms_in_flight; ++i) {
    rows[i] = i < count ? reinterpret_cast<const vector16*>(ctx.shuffle(own_row, i)) : nullptr;
    weight[i] = i < count ? ctx.shuffle(own_weight, i) : 0.0f;
  }
  const uint64_t vectors = sum.hidden / channels;
  for (uint64_t at = coop.lane(); at < vectors; at += coop.lanes()) {
    vector16 held[terms_in_flight] = {};
    EP_UNROLL for (uint32_t i = 0; i < terms_in_flight; ++i) {
      if (rows[i] != nullptr) held[i] = Once ? load_once(rows[i] + at) : rows[i][at];
    }
    float all[channels] = {};
    for (uint32_t b = 0; b < 2 && sum.bias[b] != nullptr; ++b) {
      const vector16 bias = static_cast<const vector16*>(sum.bias[b])[at];
      for (uint32_t c = 0; c < channels; ++c) all[c] = b == 0 ? vector_channel<Number>(bias, c) : detail::sum(all[c], vector_channel<Number>(bias, c));
    }
    EP_UNROLL for (uint32_t i = 0; i < terms_in_flight; ++i) {
      if (rows[i] == nullptr) continue;
      for (uint32_t c = 0; c < channels; ++c) all[c] = detail::sum(all[c], product(weight[i], vector_channel<Number>(held[i], c)));
    }
    vector16 made{};
    for (uint32_t c = 0; c < channels; ++c) {
      if constexpr (channels == 4) made.word[c] = float_bits(all[c]);
      else made.word[c / 2] |= static_cast<uint32_t>(Number::store(all[c])) << (c % 2 * 16);
    }
    auto* to = static_cast<vector16*>(sum.out) + at;
    if constexpr (Once) store_once(to, made);
    else *to = made;
  }
}

/* Rows that travel as they are, of whole vectors: each lane of a warp asks for one term, and all have several rows in flight. False: not such rows. */
template <class Number, class Coop, class Terms> EP_HD bool sum_row_vectors(const Coop& coop, const ep_moe_sum& sum, uint32_t count, const Terms& term) {
  constexpr uint32_t channels = sizeof(vector16) / sizeof(typename Number::carrier);
  auto& ctx = coop.ctx;
  const uint32_t width = ctx.warp_lanes();
  if (sum.payload != sum.dtype || sum.hidden % channels != 0 || count > width) return false;
  ep_moe_term own{nullptr, 0.0f};
  const uint32_t lane = ctx.lane() % width;
  const bool is_term = lane < count && term(lane, &own);
  const uint64_t address = is_term ? reinterpret_cast<uint64_t>(own.row) : 0;
  const uint64_t others = reinterpret_cast<uint64_t>(sum.out) | reinterpret_cast<uint64_t>(sum.bias[0]) | reinterpret_cast<uint64_t>(sum.bias[1]);
  if (ctx.ballot(((address | others) & 15u) != 0) != 0) return false;
  if (count <= terms_in_flight) {
    if (coop.lanes() > width) sum_few_vectors<Number, true>(coop, sum, count, address, own.weight); /* few tokens: each multiprocessor sees little of them */
    else sum_few_vectors<Number, false>(coop, sum, count, address, own.weight);
    return true;
  }
  const uint32_t terms = ctx.ballot(is_term);
  const uint64_t vectors = sum.hidden / channels;
  for (uint64_t at = coop.lane(); at - coop.lane() < vectors; at += coop.lanes()) {
    const bool here = at < vectors;
    float all[channels] = {};
    for (uint32_t b = 0; here && b < 2 && sum.bias[b] != nullptr; ++b) {
      const vector16 held = static_cast<const vector16*>(sum.bias[b])[at];
      for (uint32_t c = 0; c < channels; ++c) all[c] = b == 0 ? vector_channel<Number>(held, c) : detail::sum(all[c], vector_channel<Number>(held, c));
    }
    for (uint32_t first = 0; first < count; first += terms_in_flight) {
      vector16 held[terms_in_flight] = {};
      float weight[terms_in_flight] = {};
      EP_UNROLL for (uint32_t i = 0; i < terms_in_flight; ++i) {
        if (first + i >= count) continue;
        const auto* row = reinterpret_cast<const vector16*>(ctx.shuffle(address, first + i));
        weight[i] = ctx.shuffle(own.weight, first + i);
        if (here && (terms >> (first + i) & 1u) != 0) held[i] = row[at];
      }
      EP_UNROLL for (uint32_t i = 0; i < terms_in_flight; ++i) {
        if (first + i >= count || !here || (terms >> (first + i) & 1u) == 0) continue;
        for (uint32_t c = 0; c < channels; ++c) all[c] = detail::sum(all[c], product(weight[i], vector_channel<Number>(held[i], c)));
      }
    }
    if (!here) continue;
    vector16 made{};
    for (uint32_t c = 0; c < channels; ++c) {
      if constexpr (channels == 4) made.word[c] = float_bits(all[c]);
      else made.word[c / 2] |= static_cast<uint32_t>(Number::store(all[c])) << (c % 2 * 16);
    }
    static_cast<vector16*>(sum.out)[at] = made;
  }
  return true;
}

template <class Number, class Coop, class Terms>
EP_HD void sum_row_lanes(const Coop& coop, const ep_moe_sum& sum, uint32_t count, const Terms& term) {
  using carrier = typename Number::carrier;
  if (sum_row_vectors<Number>(coop, sum, count, term)) return;
  for (uint64_t first = 4 * static_cast<uint64_t>(coop.lane()); first < sum.hidden; first += 4 * static_cast<uint64_t>(coop.lanes())) {
    const auto channels = static_cast<uint32_t>(sum.hidden - first < 4 ? sum.hidden - first : 4);
    float all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t b = 0; b < 2 && sum.bias[b] != nullptr; ++b) {
      for (uint32_t i = 0; i < channels; ++i) {
        const float value = Number::load(static_cast<const carrier*>(sum.bias[b])[first + i]);
        all[i] = b == 0 ? value : detail::sum(all[i], value);
      }
    }
    for (uint32_t t = 0; t < count; ++t) {
      ep_moe_term one;
      if (!term(t, &one)) continue;
      float row[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      load_channels(sum.payload, sum.hidden, one.row, first, channels, row);
      for (uint32_t i = 0; i < channels; ++i) all[i] = detail::sum(all[i], product(one.weight, row[i]));
    }
    for (uint32_t i = 0; i < channels; ++i) static_cast<carrier*>(sum.out)[first + i] = Number::store(all[i]);
  }
}

} // namespace detail

/* Sums a token's rows. `term(i, &t)` fills in the i-th of `count` choices, or is false for one that is skipped; lanes may ask for any of them at any time.
 * All lanes of the scope call it. `out` may be no row and no bias. */
template <class Coop, class Terms> EP_HD void moe_sum_row(const Coop& coop, const ep_moe_sum& sum, uint32_t count, const Terms& term) {
#if !defined(__CUDACC__)
  if constexpr (Coop::single) {
    ep_moe_term* terms = ep_moe_terms(count);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; ++i) kept += term(i, &terms[kept]) ? 1u : 0u;
    ep_moe_sum_row(&sum, terms, kept);
    return;
  }
#endif
  if (sum.dtype == EP_MOE_F32) detail::sum_row_lanes<number_f32>(coop, sum, count, term);
  else if (sum.dtype == EP_MOE_F16) detail::sum_row_lanes<number_f16>(coop, sum, count, term);
  else detail::sum_row_lanes<number_bf16>(coop, sum, count, term);
}

EP_MACHINE_END

#endif
