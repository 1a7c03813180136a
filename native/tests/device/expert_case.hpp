// Experts over uneven blocks of rows, and what they should make of them, in fp64. For the host's executors and for a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "../check.hpp"
#include "ep/abi/expert_layer.h"
#include "ep/device/moe_number.h"

namespace ep::test {

class expert_case {
 public:
  ep_expert_args args{};

  expert_case(uint32_t payload, uint32_t dtype, uint32_t hidden, uint32_t intermediate, const std::vector<ep_expert_run>& runs, uint64_t seed) : random_(seed) {
    uint32_t rows = 0;
    for (const ep_expert_run& run : runs) rows = std::max(rows, run.row + run.rows);
    rows_ = rows + 1; // one that is nobody's, behind all
    const uint64_t matrix = uint64_t{runs.size()} * hidden * intermediate;
    for (std::vector<float>* weights : {&gate_, &up_, &down_}) {
      for (uint64_t i = 0; i < matrix; ++i) weights->push_back(draw() / std::sqrt(static_cast<float>(weights == &down_ ? intermediate : hidden)));
    }
    const uint64_t blocks = (hidden + moe_block_channels - 1) / moe_block_channels;
    const bool codes = payload >= EP_MOE_F8_F32;
    const uint64_t bytes = codes ? 1 : payload == EP_MOE_F32 ? 4 : 2;
    const uint64_t out_bytes = dtype == EP_MOE_F32 ? 4 : 2;
    args.x_stride_bytes = hidden * bytes + 16;
    args.y_stride_bytes = hidden * out_bytes + 16;
    args.scale_room = rows_ + 3;
    x_.resize(rows_ * args.x_stride_bytes, 0x5a);
    y_.resize(rows_ * args.y_stride_bytes, 0x5a);
    float_scales_.resize(codes ? blocks * args.scale_room : 0);
    byte_scales_.resize(codes ? blocks * args.scale_room : 0);
    for (uint64_t i = 0; i < float_scales_.size(); ++i) {
      byte_scales_[i] = static_cast<uint8_t>(120 + random_() % 4);
      float_scales_[i] = payload == EP_MOE_F8_UE8M0 ? ue8m0_load(byte_scales_[i]) : 0.01f + std::fabs(draw()) / 64;
    }
    for (uint64_t row = 0; row < rows_; ++row) {
      for (uint32_t h = 0; h < hidden; ++h) {
        uint8_t* to = x_.data() + row * args.x_stride_bytes + h * bytes;
        const float value = draw();
        if (payload == EP_MOE_F32) put(to, value);
        else if (payload == EP_MOE_F16) put(to, number_f16::store(value));
        else if (payload == EP_MOE_BF16) put(to, number_bf16::store(value));
        else *to = number_e4m3::store(32 * value);
      }
    }
    args.gate = at(gate_);
    args.up = at(up_);
    args.down = at(down_);
    args.x = at(x_);
    args.scales = !codes ? 0 : payload == EP_MOE_F8_UE8M0 ? at(byte_scales_) : at(float_scales_);
    args.y = at(y_);
    args.payload = payload;
    args.dtype = dtype;
    args.experts = static_cast<uint32_t>(runs.size());
    args.hidden = hidden;
    args.intermediate = intermediate;
    for (size_t e = 0; e < runs.size(); ++e) {
      args.runs[e] = runs[e];
      args.tiles += (runs[e].rows + EP_EXPERT_ROWS - 1) / EP_EXPERT_ROWS;
    }
  }

  /* The same rows, found by the kernel where they are counted; what is counted beyond `rows` rows is nobody's. Valid as long as the case. */
  ep_expert_args counted(uint32_t rows) {
    counts_.clear();
    starts_.clear();
    for (uint32_t e = 0; e < args.experts; ++e) {
      const ep_expert_run& run = args.runs[e];
      const bool last = run.row + run.rows == rows;
      counts_.push_back(run.rows == 0 ? (e % 2 == 0 ? -3 : 2) : last ? INT32_MAX : static_cast<int32_t>(run.rows));
      starts_.push_back(static_cast<int32_t>(run.rows != 0 ? run.row : e % 2 == 0 ? 0 : rows + 1));
    }
    ep_expert_args made = args;
    for (ep_expert_run& run : made.runs) run = {0, UINT32_MAX};
    made.counts = at(counts_);
    made.starts = at(starts_);
    made.rows = rows;
    made.tiles = rows / EP_EXPERT_ROWS + args.experts;
    return made;
  }

  void clear() { y_.assign(y_.size(), 0x5a); }
  const std::vector<uint8_t>& result() const { return y_; }

  void check(double bound) const {
    double error = 0;
    double all = 0;
    std::vector<bool> written(rows_, false);
    for (uint32_t e = 0; e < args.experts; ++e) {
      for (uint32_t row = args.runs[e].row; row < args.runs[e].row + args.runs[e].rows; ++row) {
        written[row] = true;
        const std::vector<double> wanted = expected(e, row);
        for (uint32_t h = 0; h < args.hidden; ++h) {
          const double off = output(row, h) - wanted[h];
          error += off * off;
          all += wanted[h] * wanted[h];
        }
      }
    }
    const bool close = std::sqrt(error) <= bound * std::sqrt(all); // false of a NaN
    if (!close) std::fprintf(stderr, "payload %u, dtype %u: relative error %g\n", args.payload, args.dtype, std::sqrt(error / all));
    EP_CHECK(close);
    uint64_t touched = 0;
    const uint64_t row_bytes = uint64_t{args.hidden} * (args.dtype == EP_MOE_F32 ? 4 : 2);
    for (uint64_t i = 0; i < y_.size(); ++i) {
      const bool mine = written[i / args.y_stride_bytes] && i % args.y_stride_bytes < row_bytes;
      touched += !mine && y_[i] != 0x5a;
    }
    EP_CHECK_EQ(touched, 0u);
  }

 private:
  float draw() { return std::normal_distribution<float>()(random_); }
  template <class T> static void put(uint8_t* to, T value) { __builtin_memcpy(to, &value, sizeof value); }
  template <class T> static T get(const uint8_t* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  template <class T> static uint64_t at(const std::vector<T>& of) { return reinterpret_cast<uint64_t>(of.data()); }

  double input(uint64_t row, uint32_t h) const {
    const uint8_t* from = x_.data() + row * args.x_stride_bytes;
    if (args.payload == EP_MOE_F32) return get<float>(from + 4 * h);
    if (args.payload == EP_MOE_F16) return number_f16::load(get<uint16_t>(from + 2 * h));
    if (args.payload == EP_MOE_BF16) return number_bf16::load(get<uint16_t>(from + 2 * h));
    return static_cast<double>(number_e4m3::load(from[h])) * float_scales_[h / moe_block_channels * args.scale_room + row];
  }
  double output(uint64_t row, uint32_t h) const {
    const uint8_t* from = y_.data() + row * args.y_stride_bytes;
    if (args.dtype == EP_MOE_F32) return get<float>(from + 4 * h);
    const auto carrier = get<uint16_t>(from + 2 * h);
    return args.dtype == EP_MOE_F16 ? number_f16::load(carrier) : number_bf16::load(carrier);
  }
  std::vector<double> expected(uint32_t expert, uint64_t row) const {
    const uint64_t first = uint64_t{expert} * args.hidden * args.intermediate;
    std::vector<double> between(args.intermediate);
    for (uint32_t i = 0; i < args.intermediate; ++i) {
      double a = 0;
      double b = 0;
      for (uint32_t h = 0; h < args.hidden; ++h) {
        const double x = input(row, h);
        a += gate_[first + uint64_t{i} * args.hidden + h] * x;
        b += up_[first + uint64_t{i} * args.hidden + h] * x;
      }
      between[i] = a / (1 + std::exp(-a)) * b;
    }
    std::vector<double> out(args.hidden);
    for (uint32_t h = 0; h < args.hidden; ++h) {
      for (uint32_t i = 0; i < args.intermediate; ++i) out[h] += down_[first + uint64_t{h} * args.intermediate + i] * between[i];
    }
    return out;
  }

  std::mt19937_64 random_;
  uint64_t rows_ = 0;
  std::vector<float> gate_, up_, down_, float_scales_;
  std::vector<uint8_t> x_, y_, byte_scales_;
  std::vector<int32_t> counts_, starts_;
};

struct expert_formats {
  uint32_t payload;
  uint32_t dtype;
  double bound;
};
inline constexpr expert_formats expert_pairs[] = {
    {EP_MOE_F32, EP_MOE_F32, 1e-5},    {EP_MOE_F16, EP_MOE_F16, 1e-3},         {EP_MOE_BF16, EP_MOE_BF16, 4e-3},
    {EP_MOE_F8_F32, EP_MOE_BF16, 4e-3}, {EP_MOE_F8_F32_POW2, EP_MOE_F32, 1e-5}, {EP_MOE_F8_UE8M0, EP_MOE_F16, 1e-3},
};
/* Rows of experts behind each other, apart, and of none. */
inline const std::vector<ep_expert_run> expert_runs = {{0, 5}, {5, 0}, {8, 9}, {17, 1}};

} // namespace ep::test
