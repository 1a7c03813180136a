/* Core attention of one server, forward and backward; formulas and rules are those of core/attention/core_attention.hpp, which it is compared with. Blocked with a running
 * maximum (Dao et al., FlashAttention-2): no matrix of queries x keys exists. Sums are fp32, results are rounded once. Blocks wait for nobody, and no two write one
 * row, so that results do not depend on how many run.
 *
 * `scratch` is a block's own, of EP_ATTENTION_FORWARD_FLOATS or EP_ATTENTION_BACKWARD_FLOATS; on a GPU shared memory. A row of a tile is `pitch` floats, an odd number: lanes that read one column of
 * neighbouring rows meet different banks. */
#ifndef EP_DEVICE_CORE_ATTENTION_H
#define EP_DEVICE_CORE_ATTENTION_H

#include <math.h>

#include "attention_scratch.h"
#include "coop.h"
#include "number.h"

EP_MACHINE_BEGIN

namespace attention_tiles {

constexpr uint32_t tile = EP_ATTENTION_TILE;
constexpr uint32_t score_pitch = tile + 1;
constexpr uint32_t score_floats = tile * score_pitch;
constexpr uint32_t slices = EP_ATTENTION_SLICES;

EP_HD uint32_t pitch_of(uint32_t head_dim) { return EP_ATTENTION_PITCH(head_dim); }
EP_HD float scale_of(const ep_attention_args& args) { return detail::bits_float(args.scale_bits); }
EP_HD float minus_infinity() { return detail::bits_float(0xff800000u); }

/* Some rows of one head of a tensor. */
struct tile_at {
  ep_attention_rows of;
  uint64_t row;
  uint32_t rows;
  uint32_t head;
};

template <class Number> EP_HD typename Number::carrier* row_at(const tile_at& at, uint32_t row, uint32_t dim) {
  return reinterpret_cast<typename Number::carrier*>(at.of.address + (at.row + row) * at.of.stride_bytes) + uint64_t{at.head} * dim;
}

/* Rows that the tile lacks are 0. */
template <class Number, class Coop> EP_HD void read_tile(const Coop& coop, const tile_at& at, uint32_t dim, float* into) {
  const uint32_t pitch = pitch_of(dim);
  for (uint32_t i = coop.lane(); i < tile * dim; i += coop.lanes()) {
    const uint32_t row = i / dim;
    const uint32_t column = i - row * dim;
    into[row * pitch + column] = row < at.rows ? Number::load(row_at<Number>(at, row, dim)[column]) : 0.0f;
  }
}

template <class Number, class Coop> EP_HD void write_tile(const Coop& coop, const tile_at& at, uint32_t dim, const float* from, float scale) {
  const uint32_t pitch = pitch_of(dim);
  for (uint32_t i = coop.lane(); i < at.rows * dim; i += coop.lanes()) {
    const uint32_t row = i / dim;
    const uint32_t column = i - row * dim;
    row_at<Number>(at, row, dim)[column] = Number::store(from[row * pitch + column] * scale);
  }
}

template <class Coop> EP_HD void clear(const Coop& coop, float* from, uint32_t count) {
  for (uint32_t i = coop.lane(); i < count; i += coop.lanes()) from[i] = 0.0f;
}

EP_HD float dot(const float* a, const float* b, uint32_t dim) {
  float sum = 0.0f;
  for (uint32_t d = 0; d < dim; ++d) sum += a[d] * b[d];
  return sum;
}

/* Tiles of queries: which rows of which shard, and how many keys each sees. */
struct query_tile {
  ep_attention_shard shard;
  uint64_t first; /* query of the shard */
  uint32_t rows;
  EP_HD int64_t seen_by(uint32_t row) const {
    const int64_t seen = static_cast<int64_t>(shard.kv_length) - static_cast<int64_t>(shard.q_length) + static_cast<int64_t>(first + row) + 1;
    return seen > 0 ? seen : 0;
  }
  EP_HD tile_at rows_of(const ep_attention_rows& of, uint32_t head) const { return {of, shard.q_row + first, rows, head}; }
};

EP_HD query_tile query_tile_at(const ep_attention_shard& shard, uint64_t first) {
  const uint64_t left = shard.q_length - first;
  return {shard, first, static_cast<uint32_t>(left < tile ? left : tile)};
}

EP_HD query_tile query_tile_of(const ep_attention_args& args, uint32_t number) {
  const auto* shards = reinterpret_cast<const ep_attention_shard*>(args.shards);
  uint32_t low = 0;
  uint32_t high = args.shard_count;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (shards[middle].first_tile <= number) low = middle;
    else high = middle;
  }
  return query_tile_at(shards[low], (number - shards[low].first_tile) * uint64_t{tile});
}

EP_HD uint32_t at_most_tile(int64_t left) { return static_cast<uint32_t>(left < static_cast<int64_t>(tile) ? left : static_cast<int64_t>(tile)); }

/* Scratch of a forward block: q, o, k, v, scores, then by row the maximum so far, the sum so far and by how much this step shrinks what was summed before. */
struct forward_parts {
  float *q, *o, *k, *v, *scores, *most, *total, *shrink;
  EP_HD forward_parts(float* scratch, uint32_t pitch)
      : q(scratch), o(q + tile * pitch), k(o + tile * pitch), v(k + tile * pitch), scores(v + tile * pitch), most(scores + score_floats), total(most + tile),
        shrink(total + tile) {}
};

template <class Coop> EP_HD void soften(const Coop& coop, const forward_parts& m, const query_tile& queries, int64_t key) {
  for (uint32_t row = coop.lane(); row < tile; row += coop.lanes()) {
    float top = m.most[row];
    for (uint32_t c = 0; c < tile; ++c) top = m.scores[row * score_pitch + c] > top ? m.scores[row * score_pitch + c] : top;
    /* A row whose every score is -inf has no finite maximum to subtract; with 0 its probabilities are 0 instead of NaN. */
    m.shrink[row] = top == minus_infinity() ? 0.0f : expf(m.most[row] - top);
    m.most[row] = top;
  }
  coop.sync();
  for (uint32_t i = coop.lane(); i < tile * tile; i += coop.lanes()) {
    const uint32_t row = i / tile;
    const uint32_t c = i % tile;
    const float top = m.most[row];
    float* score = m.scores + row * score_pitch + c;
    *score = key + c < queries.seen_by(row) ? expf(*score - (top == minus_infinity() ? 0.0f : top)) : 0.0f;
  }
  coop.sync();
  for (uint32_t row = coop.lane(); row < tile; row += coop.lanes()) {
    float sum = m.total[row] * m.shrink[row];
    for (uint32_t c = 0; c < tile; ++c) sum += m.scores[row * score_pitch + c];
    m.total[row] = sum;
  }
}

template <class Number, class Ctx> EP_HD void forward_tile(Ctx& ctx, const ep_attention_args& args, const query_tile& queries, uint32_t head, float* scratch) {
  const block_coop<Ctx> coop{ctx};
  const uint32_t dim = args.head_dim;
  const uint32_t pitch = pitch_of(dim);
  const uint32_t kv_head = head / (args.q_heads / args.kv_heads);
  const forward_parts m(scratch, pitch);
  read_tile<Number>(coop, queries.rows_of(args.q, head), dim, m.q);
  clear(coop, m.o, tile * pitch);
  clear(coop, m.total, tile);
  for (uint32_t row = coop.lane(); row < tile; row += coop.lanes()) m.most[row] = minus_infinity();
  const int64_t visible = queries.seen_by(queries.rows - 1);
  for (int64_t key = 0; key < visible; key += tile) {
    const uint32_t keys = at_most_tile(visible - key);
    const uint64_t row_of_key = queries.shard.kv_row + static_cast<uint64_t>(key);
    read_tile<Number>(coop, {args.k, row_of_key, keys, kv_head}, dim, m.k);
    read_tile<Number>(coop, {args.v, row_of_key, keys, kv_head}, dim, m.v);
    coop.sync();
    for (uint32_t i = coop.lane(); i < tile * tile; i += coop.lanes()) {
      const uint32_t row = i / tile;
      const uint32_t c = i % tile;
      const bool seen = row < queries.rows && key + c < queries.seen_by(row);
      m.scores[row * score_pitch + c] = seen ? scale_of(args) * dot(m.q + row * pitch, m.k + c * pitch, dim) : minus_infinity();
    }
    coop.sync();
    soften(coop, m, queries, key);
    for (uint32_t i = coop.lane(); i < tile * dim; i += coop.lanes()) {
      const uint32_t row = i / dim;
      const uint32_t d = i - row * dim;
      float sum = m.o[row * pitch + d] * m.shrink[row];
      for (uint32_t c = 0; c < keys; ++c) sum += m.scores[row * score_pitch + c] * m.v[c * pitch + d];
      m.o[row * pitch + d] = sum;
    }
    coop.sync();
  }
  coop.sync();
  const tile_at o = queries.rows_of(args.o, head);
  for (uint32_t i = coop.lane(); i < queries.rows * dim; i += coop.lanes()) {
    const uint32_t row = i / dim;
    const uint32_t d = i - row * dim;
    const float total = m.total[row];
    row_at<Number>(o, row, dim)[d] = Number::store(total == 0.0f ? 0.0f : m.o[row * pitch + d] / total);
  }
  const tile_at lse = queries.rows_of(args.lse, head);
  for (uint32_t row = coop.lane(); row < queries.rows; row += coop.lanes()) {
    *row_at<number_f32>(lse, row, 1) = m.total[row] == 0.0f ? minus_infinity() : m.most[row] + logf(m.total[row]);
  }
  coop.sync(); /* the scratch is the next tile's */
}

/* Scratch of a backward block: q, dO, k, v and two tiles of gradients; probabilities, slopes of scores; by row LSE and the product of O and dO. */
struct backward_parts {
  float *q, *d_o, *k, *v, *first, *second, *p, *d_s, *lse, *delta, *partial;
  EP_HD backward_parts(float* scratch, uint32_t pitch)
      : q(scratch), d_o(q + tile * pitch), k(d_o + tile * pitch), v(k + tile * pitch), first(v + tile * pitch), second(first + tile * pitch), p(second + tile * pitch),
        d_s(p + score_floats), lse(d_s + score_floats), delta(lse + tile), partial(delta + tile) {}
};

/* Q, dO, LSE and delta of a tile. Ends with a barrier. */
template <class Number, class Coop>
EP_HD void read_queries(const Coop& coop, const ep_attention_args& args, const query_tile& queries, uint32_t head, const backward_parts& m) {
  const uint32_t dim = args.head_dim;
  const uint32_t pitch = pitch_of(dim);
  read_tile<Number>(coop, queries.rows_of(args.q, head), dim, m.q);
  read_tile<Number>(coop, queries.rows_of(args.d_o, head), dim, m.d_o);
  const tile_at lse = queries.rows_of(args.lse, head);
  for (uint32_t row = coop.lane(); row < tile; row += coop.lanes()) m.lse[row] = row < queries.rows ? *row_at<number_f32>(lse, row, 1) : minus_infinity();
  coop.sync();
  const tile_at o = queries.rows_of(args.o, head);
  for (uint32_t i = coop.lane(); i < queries.rows * slices; i += coop.lanes()) {
    const uint32_t row = i / slices;
    float sum = 0.0f;
    for (uint32_t d = i % slices; d < dim; d += slices) sum += Number::load(row_at<Number>(o, row, dim)[d]) * m.d_o[row * pitch + d];
    m.partial[i] = sum;
  }
  coop.sync();
  for (uint32_t row = coop.lane(); row < tile; row += coop.lanes()) {
    float sum = 0.0f;
    for (uint32_t slice = 0; row < queries.rows && slice < slices; ++slice) sum += m.partial[row * slices + slice];
    m.delta[row] = sum;
  }
  coop.sync();
}

/* P and dS of a tile of queries against the tile of keys whose first is key `key` of the shard, which may be before its first one. Ends with a barrier. */
template <class Coop>
EP_HD void differentiate(const Coop& coop, const ep_attention_args& args, const query_tile& queries, int64_t key, uint32_t keys, const backward_parts& m) {
  const uint32_t dim = args.head_dim;
  const uint32_t pitch = pitch_of(dim);
  for (uint32_t i = coop.lane(); i < tile * tile; i += coop.lanes()) {
    const uint32_t row = i / tile;
    const uint32_t c = i % tile;
    const int64_t mine = key + c;
    const bool seen = row < queries.rows && c < keys && mine >= 0 && mine < queries.seen_by(row) && m.lse[row] != minus_infinity();
    const float p = seen ? expf(scale_of(args) * dot(m.q + row * pitch, m.k + c * pitch, dim) - m.lse[row]) : 0.0f;
    m.p[row * score_pitch + c] = p;
    m.d_s[row * score_pitch + c] = seen ? p * (dot(m.d_o + row * pitch, m.v + c * pitch, dim) - m.delta[row]) : 0.0f;
  }
  coop.sync();
}

template <class Number, class Ctx> EP_HD void query_gradient(Ctx& ctx, const ep_attention_args& args, const query_tile& queries, uint32_t head, float* scratch) {
  const block_coop<Ctx> coop{ctx};
  const uint32_t dim = args.head_dim;
  const uint32_t pitch = pitch_of(dim);
  const uint32_t kv_head = head / (args.q_heads / args.kv_heads);
  const backward_parts m(scratch, pitch);
  clear(coop, m.first, tile * pitch);
  read_queries<Number>(coop, args, queries, head, m);
  const int64_t visible = queries.seen_by(queries.rows - 1);
  for (int64_t key = 0; key < visible; key += tile) {
    const uint32_t keys = at_most_tile(visible - key);
    const uint64_t row_of_key = queries.shard.kv_row + static_cast<uint64_t>(key);
    read_tile<Number>(coop, {args.k, row_of_key, keys, kv_head}, dim, m.k);
    read_tile<Number>(coop, {args.v, row_of_key, keys, kv_head}, dim, m.v);
    coop.sync();
    differentiate(coop, args, queries, key, keys, m);
    for (uint32_t i = coop.lane(); i < tile * dim; i += coop.lanes()) {
      const uint32_t row = i / dim;
      const uint32_t d = i - row * dim;
      float sum = m.first[row * pitch + d];
      for (uint32_t c = 0; c < keys; ++c) sum += m.d_s[row * score_pitch + c] * m.k[c * pitch + d];
      m.first[row * pitch + d] = sum;
    }
    coop.sync();
  }
  write_tile<Number>(coop, queries.rows_of(args.d_q, head), dim, m.first, scale_of(args));
  coop.sync();
}

/* dK and dV of a tile of key-value rows: over the shards that read them in the order of the list, and over the query heads of the group. */
template <class Number, class Ctx> EP_HD void key_gradient(Ctx& ctx, const ep_attention_args& args, uint64_t first_row, uint32_t kv_head, float* scratch) {
  const block_coop<Ctx> coop{ctx};
  const uint32_t dim = args.head_dim;
  const uint32_t pitch = pitch_of(dim);
  const uint32_t group = args.q_heads / args.kv_heads;
  const uint32_t keys = at_most_tile(static_cast<int64_t>(args.kv_rows - first_row));
  const backward_parts m(scratch, pitch);
  clear(coop, m.first, tile * pitch);
  clear(coop, m.second, tile * pitch);
  read_tile<Number>(coop, {args.k, first_row, keys, kv_head}, dim, m.k);
  read_tile<Number>(coop, {args.v, first_row, keys, kv_head}, dim, m.v);
  const auto* shards = reinterpret_cast<const ep_attention_shard*>(args.shards);
  for (uint32_t s = 0; s < args.shard_count; ++s) {
    const ep_attention_shard shard = shards[s];
    if (shard.kv_row >= first_row + keys || first_row >= shard.kv_row + shard.kv_length) continue;
    const int64_t key = static_cast<int64_t>(first_row) - static_cast<int64_t>(shard.kv_row);
    /* The first query that sees the first of these keys. */
    const int64_t from = (key > 0 ? key : 0) - (static_cast<int64_t>(shard.kv_length) - static_cast<int64_t>(shard.q_length));
    for (uint32_t member = 0; member < group; ++member) {
      const uint32_t head = kv_head * group + member;
      for (uint64_t first = from > 0 ? static_cast<uint64_t>(from) : 0; first < shard.q_length; first += tile) {
        const query_tile queries = query_tile_at(shard, first);
        read_queries<Number>(coop, args, queries, head, m);
        differentiate(coop, args, queries, key, keys, m);
        for (uint32_t i = coop.lane(); i < keys * dim; i += coop.lanes()) {
          const uint32_t c = i / dim;
          const uint32_t d = i - c * dim;
          float d_k = m.first[c * pitch + d];
          float d_v = m.second[c * pitch + d];
          for (uint32_t row = 0; row < queries.rows; ++row) {
            d_k += m.d_s[row * score_pitch + c] * m.q[row * pitch + d];
            d_v += m.p[row * score_pitch + c] * m.d_o[row * pitch + d];
          }
          m.first[c * pitch + d] = d_k;
          m.second[c * pitch + d] = d_v;
        }
        coop.sync();
      }
    }
  }
  coop.sync();
  write_tile<Number>(coop, {args.d_k, first_row, keys, kv_head}, dim, m.first, scale_of(args));
  write_tile<Number>(coop, {args.d_v, first_row, keys, kv_head}, dim, m.second, 1.0f);
  coop.sync();
}

template <class Number, class Ctx> EP_HD void forward_all(Ctx& ctx, const ep_attention_args& args, float* scratch) {
  const uint64_t items = uint64_t{args.tiles} * args.q_heads;
  for (uint64_t item = ctx.block(); item < items; item += ctx.blocks()) {
    forward_tile<Number>(ctx, args, query_tile_of(args, static_cast<uint32_t>(item / args.q_heads)), static_cast<uint32_t>(item % args.q_heads), scratch);
  }
}

template <class Number, class Ctx> EP_HD void backward_all(Ctx& ctx, const ep_attention_args& args, float* scratch) {
  const uint64_t of_keys = (args.kv_rows + tile - 1) / tile * args.kv_heads;
  const uint64_t items = of_keys + uint64_t{args.tiles} * args.q_heads;
  for (uint64_t item = ctx.block(); item < items; item += ctx.blocks()) {
    if (item < of_keys) {
      key_gradient<Number>(ctx, args, item / args.kv_heads * tile, static_cast<uint32_t>(item % args.kv_heads), scratch);
    } else {
      const uint64_t rest = item - of_keys;
      query_gradient<Number>(ctx, args, query_tile_of(args, static_cast<uint32_t>(rest / args.q_heads)), static_cast<uint32_t>(rest % args.q_heads), scratch);
    }
  }
}

} // namespace attention_tiles

/* Writes the O and LSE rows of the shards, and no other. */
template <class Ctx> EP_HD void core_attention_forward(Ctx& ctx, const ep_attention_args& args, float* scratch) {
  if (args.dtype == EP_DTYPE_F32) attention_tiles::forward_all<number_f32>(ctx, args, scratch);
  if (args.dtype == EP_DTYPE_BF16) attention_tiles::forward_all<number_bf16>(ctx, args, scratch);
}

/* Writes the dQ rows of the shards, and every row of dK and dV. */
template <class Ctx> EP_HD void core_attention_backward(Ctx& ctx, const ep_attention_args& args, float* scratch) {
  if (args.dtype == EP_DTYPE_F32) attention_tiles::backward_all<number_f32>(ctx, args, scratch);
  if (args.dtype == EP_DTYPE_BF16) attention_tiles::backward_all<number_bf16>(ctx, args, scratch);
}

EP_MACHINE_END

#endif
