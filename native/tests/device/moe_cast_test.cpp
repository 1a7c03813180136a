// Casts and sums of rows: the formats by their definitions, and the same bits from every instruction set and from lanes that work together.
#include <bit>
#include <cmath>
#include <limits>

#include "../../core/moe/cast.hpp"
#include "../check.hpp"
#include "world.hpp"

using namespace ep::test;
using ep::moe::isa;

namespace {

constexpr uint32_t dtypes[] = {EP_MOE_F32, EP_MOE_F16, EP_MOE_BF16};
constexpr uint32_t casts[] = {EP_MOE_F8_F32, EP_MOE_F8_F32_POW2, EP_MOE_F8_UE8M0, EP_MOE_LOGFMT10};
constexpr uint64_t widths[] = {1, 2, 3, 4, 5, 127, 128, 129, 130, 259, 1024};
// More blocks than core/moe/cast.cpp takes at once, twice, and a part of one.
constexpr uint64_t widest = 2 * 64 * 128 + 128 + 1;

double e4m3_value(uint32_t code) {
  const double sign = (code & 0x80u) != 0 ? -1.0 : 1.0;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = static_cast<int>(magnitude >> 3);
  if (exponent == 0) return sign * std::ldexp(magnitude & 7u, -9);
  return sign * std::ldexp(8 + (magnitude & 7u), exponent - 10);
}

// Every code both ways; between neighbours the middle goes to the even one, its neighbours to theirs; beyond the largest everything is the largest.
void e4m3_is_the_format() {
  uint32_t wrong = 0;
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = ep::number_e4m3::load(static_cast<uint8_t>(code));
    if (std::isnan(e4m3_value(code))) {
      wrong += std::isnan(value) && ep::number_e4m3::store(value) == code ? 0 : 1;
      continue;
    }
    wrong += static_cast<double>(value) == e4m3_value(code) && std::signbit(value) == (code >= 128) && ep::number_e4m3::store(value) == code ? 0 : 1;
    if ((code & 0x7fu) == 0x7e) continue;
    const float middle = static_cast<float>((e4m3_value(code) + e4m3_value(code + 1)) / 2);
    const uint32_t even = code % 2 == 0 ? code : code + 1;
    wrong += ep::number_e4m3::store(middle) == even ? 0 : 1;
    wrong += ep::number_e4m3::store(std::nextafter(middle, 0.0f)) == code ? 0 : 1;
    wrong += ep::number_e4m3::store(std::nextafter(middle, code < 128 ? INFINITY : -INFINITY)) == code + 1 ? 0 : 1;
  }
  EP_CHECK_EQ(wrong, 0u);
  for (const float large : {449.0f, 464.0f, 480.0f, 1e30f, INFINITY}) {
    EP_CHECK_EQ(ep::number_e4m3::store(large), 0x7e);
    EP_CHECK_EQ(ep::number_e4m3::store(-large), 0xfe);
  }
}

// Powers of two are the least that keep a block within 448; bytes hold their exponents.
void scales() {
  random_source random(7);
  uint32_t wrong = 0;
  for (uint32_t i = 0; i < 200'000; ++i) {
    uint32_t bits = static_cast<uint32_t>(random() % 0x7f800000u);
    if (i % 3 == 0) bits = (bits & 0x7f800000u) | (0x600000u - 1 + i % 4);
    const double amax = std::max(1e-4f, std::bit_cast<float>(bits));
    const ep::e4m3_scale power = ep::e4m3_scale_of(bits, true);
    int exponent = 0;
    wrong += std::frexp(power.scale, &exponent) == 0.5f && static_cast<double>(power.scale) * power.inverse == 1.0 ? 0 : 1;
    wrong += amax <= 448.0 * power.scale && amax > 224.0 * power.scale ? 0 : 1;
    wrong += ep::ue8m0_load(ep::ue8m0_of(power.scale)) == power.scale ? 0 : 1;
    const ep::e4m3_scale exact = ep::e4m3_scale_of(bits, false);
    wrong += exact.scale == static_cast<float>(amax / 448.0) && exact.inverse == static_cast<float>(448.0 / amax) ? 0 : 1;
  }
  EP_CHECK_EQ(wrong, 0u);
  EP_CHECK_EQ(ep::ue8m0_of(NAN), 0xff);
  EP_CHECK(std::isnan(ep::ue8m0_load(0xff)));
  EP_CHECK_EQ(ep::ue8m0_load(0), 0x1p-127f);
}

void logarithms() {
  random_source random(9);
  double log_error = 0;
  double exp_error = 0;
  for (uint32_t i = 0; i < 400'000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(1 + random() % 0x7f7fffffu));
    const double exact = std::log2(static_cast<double>(value));
    log_error = std::max(log_error, std::abs(ep::moe_log2(value) - exact) / std::max(1.0, std::abs(exact)));
    const float power = static_cast<float>(static_cast<double>(random() % 2'530'000) / 1e4 - 125.0);
    exp_error = std::max(exp_error, std::abs(ep::moe_exp2(power) / std::exp2(static_cast<double>(power)) - 1));
  }
  EP_CHECK(log_error < 2e-7);
  EP_CHECK(exp_error < 3e-7);
  EP_CHECK_EQ(ep::moe_log2(1.0f), 0.0f);
  EP_CHECK_EQ(ep::moe_log2(0x1p-133f), -133.0f);
  EP_CHECK_EQ(ep::moe_exp2(-133.0f), 0x1p-133f);
}

struct row {
  std::vector<uint32_t> words; // room for fp32 of any alignment that the carriers need
  std::vector<float> values;
};

// `kind` 0: like activations; 1: tiny and large together, with zeros; 2: all magnitudes equal; 3: zeros; 4: with a NaN or an infinity in one block.
row make_row(random_source& random, uint32_t dtype, uint64_t hidden, uint32_t kind) {
  row made;
  made.words.resize(hidden);
  for (uint64_t c = 0; c < hidden; ++c) {
    const double unit = static_cast<double>(random() % 2'000'001) / 1e6 - 1.0;
    double value = kind == 1 ? std::ldexp(unit, static_cast<int>(random() % 60) - 45) : unit * 8;
    if (kind == 1 && random() % 5 == 0) value = 0;
    if (kind == 2) value = unit < 0 ? -1.75 : 1.75;
    if (kind == 3) value = unit < 0 ? -0.0 : 0.0;
    if (kind == 4 && c == hidden / 2) value = unit < 0 ? NAN : INFINITY;
    const auto single = static_cast<float>(value);
    auto* bytes = reinterpret_cast<uint8_t*>(made.words.data());
    if (dtype == EP_MOE_F32) std::memcpy(bytes + 4 * c, &single, 4);
    const uint16_t half = dtype == EP_MOE_F16 ? ep::number_f16::store(single) : ep::number_bf16::store(single);
    if (dtype != EP_MOE_F32) std::memcpy(bytes + 2 * c, &half, 2);
    made.values.push_back(dtype == EP_MOE_F32 ? single : dtype == EP_MOE_F16 ? ep::number_f16::load(half) : ep::number_bf16::load(half));
  }
  return made;
}

std::vector<uint8_t> cast_by(isa which, uint32_t dtype, const row& from, uint64_t hidden, uint32_t payload) {
  std::vector<uint8_t> out(ep::payload_bytes(payload, hidden) + 16, 0xcd);
  ep::moe::cast_row_with(which, dtype, from.words.data(), hidden, payload, out.data());
  return out;
}

std::vector<uint8_t> cast_by_lanes(uint32_t dtype, const row& from, uint64_t hidden, uint32_t payload, uint32_t lanes, uint32_t warp) {
  std::vector<uint8_t> out(ep::payload_bytes(payload, hidden) + 16, 0xcd);
  world one({1, 64, 1, false, 1});
  const auto result = one.run_simt(shape(1, lanes, warp), seeded(hidden + lanes), [&](auto& ctx, int32_t) {
    const ep::block_coop<std::remove_reference_t<decltype(ctx)>> coop{ctx};
    ep::moe_cast_row(ctx, coop, dtype, from.words.data(), hidden, payload, out.data());
    return true;
  });
  EP_CHECK_EQ(result.report, "");
  return out;
}

float decoded(uint32_t payload, uint64_t hidden, const std::vector<uint8_t>& payload_row, uint64_t channel) {
  float four[4];
  const uint64_t first = channel / 4 * 4;
  ep::detail::load_channels(payload, hidden, payload_row.data(), first, static_cast<uint32_t>(std::min<uint64_t>(4, hidden - first)), four);
  return four[channel - first];
}

// How far a decoded channel may be from what was cast, by the definition of its format.
void near(uint32_t payload, uint64_t hidden, const row& from, const std::vector<uint8_t>& out) {
  uint32_t wrong = 0;
  for (uint64_t first = 0; first < hidden; first += 128) {
    const uint64_t end = std::min(hidden, first + 128);
    float amax = 0;
    bool finite = true;
    for (uint64_t c = first; c < end; ++c) {
      finite = finite && std::isfinite(from.values[c]);
      amax = std::max(amax, std::abs(from.values[c]));
    }
    for (uint64_t c = first; c < end; ++c) {
      const double found = decoded(payload, hidden, out, c);
      const double value = from.values[c];
      if (!finite) {
        wrong += std::isnan(found) ? 0 : 1;
        continue;
      }
      // e4m3: half of 2^-3 of a number, or half of the last place of the subnormals. LogFMT: half a step of at most 32/510 binades, and what bf16 rounds, 2^-8.
      const double scale = std::max(1e-4f, amax) / 448.0 * 2;
      const double bound = payload == EP_MOE_LOGFMT10 ? std::abs(value) * ((std::exp2(32.0 / 510) - 1) / 2 + 0x1p-8) + std::ldexp(amax, -32) + 1e-40
                                                      : std::max(std::abs(value) * 0x1p-4 * 1.0001, scale * 0x1p-10);
      wrong += std::abs(found - value) <= bound ? 0 : 1;
    }
  }
  EP_CHECK_EQ(wrong, 0u);
}

void rows_cast_alike() {
  random_source random(11);
  std::vector<uint64_t> all(std::begin(widths), std::end(widths));
  all.push_back(widest);
  for (const uint64_t hidden : all) {
    for (const uint32_t dtype : dtypes) {
      for (uint32_t kind = 0; kind < 5; ++kind) {
        const row from = make_row(random, dtype, hidden, kind);
        for (const uint32_t payload : casts) {
          const std::vector<uint8_t> out = cast_by(isa::portable, dtype, from, hidden, payload);
          near(payload, hidden, from, out);
          const auto end = out.begin() + static_cast<ptrdiff_t>(ep::payload_bytes(payload, hidden));
          EP_CHECK(std::all_of(end, out.end(), [](uint8_t byte) { return byte == 0xcd; }));
          for (const isa which : {isa::avx2, isa::avx512}) {
            if (ep::moe::isa_usable(which)) EP_CHECK(cast_by(which, dtype, from, hidden, payload) == out);
          }
          if (hidden > 300 && (kind != 1 || hidden == widest)) continue; // fibers are slow
          EP_CHECK(cast_by_lanes(dtype, from, hidden, payload, 8, hidden % 2 == 0 ? 4 : 8) == out);
        }
      }
    }
  }
}

// Small magnitudes of a block survive LogFMT: nothing but 0 becomes 0, unless it is below 2^-32 of the largest.
void logfmt_keeps_small_ones() {
  for (const float least : {0x1p-30f, 0x1p-34f, 0x1p-120f}) {
    row from;
    from.words.resize(128);
    auto* codes = reinterpret_cast<uint16_t*>(from.words.data());
    for (uint32_t c = 0; c < 128; ++c) codes[c] = ep::number_bf16::store(c == 0 ? 1.5f : c == 1 ? 0.0f : c % 2 == 0 ? least : 0.75f);
    const std::vector<uint8_t> out = cast_by(isa::portable, EP_MOE_BF16, from, 128, EP_MOE_LOGFMT10);
    EP_CHECK(std::abs(decoded(EP_MOE_LOGFMT10, 128, out, 0) / 1.5f - 1) < 1e-5);
    EP_CHECK_EQ(decoded(EP_MOE_LOGFMT10, 128, out, 1), 0.0f);
    if (least > 0x1p-32f) EP_CHECK(std::abs(decoded(EP_MOE_LOGFMT10, 128, out, 2) / least - 1) < 1e-5);
    else EP_CHECK(decoded(EP_MOE_LOGFMT10, 128, out, 2) == 0.0f || least > 0x1p-35f);
  }
  // Neighbouring bf16 far from 1, where the logarithm's own error is as large as a step.
  row from;
  from.words.resize(2);
  auto* codes = reinterpret_cast<uint16_t*>(from.words.data());
  for (uint32_t code = 0x100; code < 0x7f00; code += 13) {
    codes[0] = static_cast<uint16_t>(code);
    codes[1] = static_cast<uint16_t>(code + 1);
    const std::vector<uint8_t> out = cast_by(isa::portable, EP_MOE_BF16, from, 2, EP_MOE_LOGFMT10);
    if (std::abs(decoded(EP_MOE_LOGFMT10, 2, out, 0) / ep::number_bf16::load(codes[0]) - 1) > 1e-3) EP_CHECK_EQ(code, 0u);
  }
}

// Sums against a loop that is nothing but the rule; with a payload of every kind, of another type than the result and of the same, 0 to 40 terms and 0 to 2 biases.
// The first row may hold an infinity or a NaN.
void sums_alike() {
  random_source random(13);
  constexpr uint32_t payloads[] = {EP_MOE_F32, EP_MOE_F16, EP_MOE_BF16, EP_MOE_F8_F32, EP_MOE_F8_UE8M0, EP_MOE_LOGFMT10, EP_MOE_BF16, EP_MOE_BF16, EP_MOE_F16};
  for (const uint64_t hidden : widths) {
    for (uint32_t turn = 0; turn < std::size(payloads); ++turn) {
      const uint32_t payload = payloads[turn];
      const uint32_t dtype = turn < 6 ? dtypes[below(random, 3)] : payload;
      const auto count = static_cast<uint32_t>(hidden == 259 ? 40 : below(random, 5));
      std::vector<std::vector<uint8_t>> rows;
      std::vector<ep_moe_term> terms;
      for (uint32_t i = 0; i < count; ++i) {
        const row from = make_row(random, payload <= EP_MOE_BF16 ? payload : EP_MOE_BF16, hidden, static_cast<uint32_t>(below(random, i == 0 ? 5 : 3)));
        if (payload > EP_MOE_BF16) {
          rows.push_back(cast_by(isa::portable, EP_MOE_BF16, from, hidden, payload));
          continue;
        }
        const auto* bytes = reinterpret_cast<const uint8_t*>(from.words.data());
        rows.emplace_back(bytes, bytes + ep::payload_bytes(payload, hidden));
      }
      for (const std::vector<uint8_t>& bytes : rows) terms.push_back({bytes.data(), static_cast<float>(below(random, 1000)) / 999.0f});
      const uint64_t biases = below(random, 3);
      const row bias[2] = {make_row(random, dtype, hidden, 0), make_row(random, dtype, hidden, 1)};
      std::vector<uint8_t> expected(4 * hidden + 16, 0xcd);
      for (uint64_t c = 0; c < hidden; ++c) {
        volatile float all = biases > 0 ? bias[0].values[c] : 0.0f; // volatile: each step is rounded, whatever the flags
        if (biases > 1) all = all + bias[1].values[c];
        for (uint32_t i = 0; i < count; ++i) {
          volatile float term = terms[i].weight * decoded(payload, hidden, rows[i], c);
          all = all + term;
        }
        const float single = all;
        const uint16_t half = dtype == EP_MOE_F16 ? ep::number_f16::store(single) : ep::number_bf16::store(single);
        if (dtype == EP_MOE_F32) std::memcpy(expected.data() + 4 * c, &single, 4);
        else std::memcpy(expected.data() + 2 * c, &half, 2);
      }
      const auto job = [&](std::vector<uint8_t>& out) {
        return ep_moe_sum{dtype, payload, hidden, out.data(), {biases > 0 ? bias[0].words.data() : nullptr, biases > 1 ? bias[1].words.data() : nullptr}};
      };
      for (const isa which : {isa::portable, isa::avx2, isa::avx512}) {
        if (!ep::moe::isa_usable(which)) continue;
        std::vector<uint8_t> out(4 * hidden + 16, 0xcd);
        ep::moe::sum_row_with(which, job(out), terms.data(), count);
        EP_CHECK(out == expected);
      }
      std::vector<uint8_t> out(4 * hidden + 16, 0xcd);
      world one({1, 64, 1, false, 1});
      // Every other choice is skipped: what its row holds is not looked at.
      const auto result = one.run_simt(shape(1, 8, 4), seeded(hidden), [&](auto& ctx, int32_t) {
        ep::moe_sum_row(ep::block_coop<std::remove_reference_t<decltype(ctx)>>{ctx}, job(out), 2 * count, [&](uint32_t i, ep_moe_term* term) {
          *term = terms[i / 2];
          return i % 2 == 1;
        });
        return true;
      });
      EP_CHECK_EQ(result.report, "");
      EP_CHECK(out == expected);
    }
  }
}

// Scales of received rows by row, by column, and by column with four bytes to a word; by one lane, by a warp, by a block of many.
void scales_go_where_wanted() {
  constexpr uint64_t hidden = 700;
  constexpr uint64_t rows = 37;
  constexpr uint64_t first = 3;
  random_source random(17);
  for (const uint32_t payload : {EP_MOE_F8_F32, EP_MOE_F8_UE8M0}) {
    const uint64_t blocks = ep::payload_blocks(hidden);
    const uint64_t bytes = ep::payload_scale_bytes(payload);
    const uint64_t stride = ep::aligned_row_bytes(payload, hidden);
    std::vector<uint8_t> payloads(rows * stride);
    for (uint8_t& byte : payloads) byte = static_cast<uint8_t>(random());
    struct layout {
      uint64_t row;
      uint64_t block;
      uint32_t group;
    };
    for (const layout& wanted : {layout{blocks, 1, 1}, layout{1, rows + first, 1}, layout{4, 4 * (rows + first), 4}}) {
      ep_moe_dispatch_args args{};
      args.scale_row_stride = wanted.row;
      args.scale_block_stride = wanted.block;
      args.scale_group = wanted.group;
      for (const uint32_t lanes : {0u, 4u, 32u}) {
        std::vector<uint8_t> out((rows + first) * (blocks + 4) * bytes, 0xcd);
        args.out_scales = reinterpret_cast<uint64_t>(out.data());
        std::vector<uint8_t> expected(out.size(), 0xcd);
        for (uint64_t r = 0; r < rows; ++r) {
          for (uint64_t b = 0; b < blocks; ++b) {
            const uint64_t at = (first + r) * args.scale_row_stride + b / args.scale_group * args.scale_block_stride + b % args.scale_group;
            std::memcpy(expected.data() + at * bytes, payloads.data() + r * stride + hidden + b * bytes, bytes);
          }
        }
        const auto copy = [&](auto& ctx) {
          ep::moe_copy_scales(ep::block_coop<std::remove_reference_t<decltype(ctx)>>{ctx}, args, payload, hidden, payloads.data(), stride, first, rows);
          return true;
        };
        world one({1, 64, 1, false, 1});
        if (lanes == 0) one.run_fast(1, [&](auto& ctx, int32_t) { return copy(ctx); });
        else EP_CHECK_EQ(one.run_simt(shape(1, lanes, 4), seeded(lanes), [&](auto& ctx, int32_t) { return copy(ctx); }).report, "");
        EP_CHECK(out == expected);
      }
    }
  }
}

// The bits that @ep/plan/reference must give as well (packages/plan/test/moe/payload.test.ts has the same numbers).
void goldens() {
  constexpr uint64_t hidden = 300;
  row from;
  from.words.resize(hidden);
  uint32_t state = 1;
  for (uint64_t c = 0; c < hidden; ++c) {
    state = state * 1664525u + 1013904223u;
    // Exponents 2^-20 .. 2^11, all signs and fractions; every 17th is 0.
    const uint32_t bits = c % 17 == 0 ? 0 : (state & 0x807fffffu) | ((107u + (state >> 23) % 32u) << 23);
    from.words[c] = bits;
    from.values.push_back(std::bit_cast<float>(bits));
  }
  constexpr uint32_t expected[] = {4265769606u, 229374468u, 3927291269u, 63459384u};
  for (uint32_t i = 0; i < 4; ++i) {
    const std::vector<uint8_t> out = cast_by(isa::portable, EP_MOE_F32, from, hidden, casts[i]);
    uint32_t hash = 2166136261u; // FNV-1a of the payload and of the bits that it decodes to
    const auto add = [&](uint32_t byte) { hash = (hash ^ byte) * 16777619u; };
    for (uint64_t b = 0; b < ep::payload_bytes(casts[i], hidden); ++b) add(out[b]);
    for (uint64_t c = 0; c < hidden; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(decoded(casts[i], hidden, out, c));
      for (uint32_t b = 0; b < 4; ++b) add(bits >> (8 * b) & 0xffu);
    }
    EP_CHECK_EQ(hash, expected[i]);
  }
}

} // namespace

int main() {
  e4m3_is_the_format();
  scales();
  logarithms();
  rows_cast_alike();
  logfmt_keeps_small_ones();
  sums_alike();
  scales_go_where_wanted();
  goldens();
  return ep::check::finish();
}
