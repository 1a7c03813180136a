// Attention and its gradient in fp64, one (query, key) pair at a time, straight from the formulas: what the blocked kernels are compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../core/attention/core_attention.hpp"

namespace ep::attention::test {

inline float bf16_to_float(uint16_t carrier) {
  const uint32_t bits = static_cast<uint32_t>(carrier) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

/// A strided matrix in the caller's format, every byte outside the elements (and every element at first) a mark: as a
/// float or bf16 about 1e16, so that a row left unwritten is a large error.
class matrix {
 public:
  static constexpr unsigned char mark = 0x5A;

  matrix(dtype type, int64_t rows, int64_t columns, int64_t spare)
      : type_(type), rows_(rows), columns_(columns), size_(type == dtype::f32 ? 4 : 2), stride_((columns + spare) * size_) {
    bytes_.assign(static_cast<size_t>(rows * stride_), mark);
  }

  input_rows in() const { return {bytes_.data(), stride_}; }
  output_rows out() { return {bytes_.data(), stride_}; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  double at(int64_t row, int64_t column) const {
    const unsigned char* p = bytes_.data() + row * stride_ + column * size_;
    float value;
    if (type_ == dtype::f32) {
      std::memcpy(&value, p, 4);
      return value;
    }
    uint16_t carrier;
    std::memcpy(&carrier, p, 2);
    return bf16_to_float(carrier);
  }

  /// Values for bf16 are cut, not rounded: what counts is that both sides read the same carrier.
  void set(int64_t row, int64_t column, float value) {
    unsigned char* p = bytes_.data() + row * stride_ + column * size_;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto carrier = static_cast<uint16_t>(bits >> 16);
    if (type_ == dtype::f32) {
      std::memcpy(p, &bits, 4);
    } else {
      std::memcpy(p, &carrier, 2);
    }
  }

  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) set(r, c, normal(random));
    }
  }

  bool row_marked(int64_t row) const {
    for (int64_t i = row * stride_; i < row * stride_ + columns_ * size_; ++i) {
      if (bytes_[static_cast<size_t>(i)] != mark) return false;
    }
    return true;
  }

  bool gaps_marked() const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t i = r * stride_ + columns_ * size_; i < (r + 1) * stride_; ++i) {
        if (bytes_[static_cast<size_t>(i)] != mark) return false;
      }
    }
    return true;
  }

 private:
  dtype type_;
  int64_t rows_;
  int64_t columns_;
  int64_t size_;
  int64_t stride_;
  std::vector<unsigned char> bytes_;
};

struct reference {
  std::vector<double> o, lse, delta, d_q, d_k, d_v;  // dense, shapes of their tensors
  std::vector<bool> owned;                           // per query row
};

inline reference compute_reference(const problem& w, const matrix& q, const matrix& k, const matrix& v, const matrix& d_o) {
  const int64_t dim = w.head_dim, group = w.q_heads / w.kv_heads, q_width = w.q_heads * dim, kv_width = w.kv_heads * dim;
  reference r;
  r.o.assign(static_cast<size_t>(w.q_rows * q_width), 0.0);
  r.d_q = r.o;
  r.lse.assign(static_cast<size_t>(w.q_rows * w.q_heads), 0.0);
  r.delta = r.lse;
  r.d_k.assign(static_cast<size_t>(w.kv_rows * kv_width), 0.0);
  r.d_v = r.d_k;
  r.owned.assign(static_cast<size_t>(w.q_rows), false);
  for (int64_t s = 0; s < w.shard_count; ++s) {
    const query_shard& shard = w.shards[s];
    std::vector<int64_t> keys;
    for (int64_t j = 0; j < shard.piece_count; ++j) {
      const piece& p = w.pieces[shard.first_piece + j];
      for (int64_t i = 0; i < p.length; ++i) keys.push_back(p.row + i);
    }
    for (int64_t t = 0; t < shard.q_length; ++t) {
      const int64_t row = shard.q_row + t;
      const int64_t seen = static_cast<int64_t>(keys.size()) - shard.q_length + t + 1;
      r.owned[static_cast<size_t>(row)] = true;
      for (int64_t h = 0; h < w.q_heads; ++h) {
        const int64_t qc = h * dim, kc = h / group * dim;
        std::vector<double> p, dp;
        double most = -std::numeric_limits<double>::infinity(), total = 0, delta = 0;
        for (int64_t j = 0; j < seen; ++j) {
          double dot = 0, slope = 0;
          for (int64_t d = 0; d < dim; ++d) {
            dot += q.at(row, qc + d) * k.at(keys[static_cast<size_t>(j)], kc + d);
            slope += d_o.at(row, qc + d) * v.at(keys[static_cast<size_t>(j)], kc + d);
          }
          p.push_back(dot * static_cast<double>(w.scale));
          dp.push_back(slope);
          most = std::fmax(most, p.back());
        }
        for (double& x : p) total += x = std::exp(x - most);
        r.lse[static_cast<size_t>(row * w.q_heads + h)] = seen > 0 ? most + std::log(total) : most;
        for (size_t j = 0; j < p.size(); ++j) delta += (p[j] /= total) * dp[j];
        r.delta[static_cast<size_t>(row * w.q_heads + h)] = delta;
        for (size_t j = 0; j < p.size(); ++j) {
          const double ds = p[j] * (dp[j] - delta) * static_cast<double>(w.scale);
          for (int64_t d = 0; d < dim; ++d) {
            const auto at_q = static_cast<size_t>(row * q_width + qc + d), at_k = static_cast<size_t>(keys[j] * kv_width + kc + d);
            r.o[at_q] += p[j] * v.at(keys[j], kc + d);
            r.d_q[at_q] += ds * k.at(keys[j], kc + d);
            r.d_k[at_k] += ds * q.at(row, qc + d);
            r.d_v[at_k] += p[j] * d_o.at(row, qc + d);
          }
        }
      }
    }
  }
  return r;
}

/// Relative error by norm over the chosen rows; the absolute norm where the reference is zero.
inline double relative_error(const matrix& got, const std::vector<double>& want, const std::vector<bool>* rows) {
  double error = 0, norm = 0;
  for (int64_t r = 0; r < got.rows(); ++r) {
    if (rows != nullptr && !(*rows)[static_cast<size_t>(r)]) continue;
    for (int64_t c = 0; c < got.columns(); ++c) {
      const double w = want[static_cast<size_t>(r * got.columns() + c)], g = got.at(r, c);
      if (std::isinf(w) && g == w) continue;
      error += (g - w) * (g - w);
      norm += w * w;
    }
  }
  return std::sqrt(norm > 0 ? error / norm : error);
}

}  // namespace ep::attention::test
