// Random calls of a buffer for experts with their plain answer: what must lie in each receive tensor, and what each token's sum is.
#pragma once

#include <atomic>
#include <functional>

#include "ep/device/moe_combine.h"
#include "ep/device/moe_compact.h"
#include "ep/device/moe_dispatch.h"
#include "world.hpp"

namespace ep::test {

struct moe_options {
  int32_t size = 2;
  uint32_t calls = 3;
  uint32_t slots = 2; // calls that may be under way
  uint32_t dtype = EP_MOE_BF16;
  uint32_t payload = EP_MOE_BF16;
  uint32_t result_payload = EP_MOE_BF16;
  bool overlap = true;  // halves of the calls under way in any order; false: one call after the other
  int32_t dead = -1;    // a rank that takes no part, although the others expect it to
  bool masked = false;  // and that they know of
  uint32_t back = UINT32_MAX; // the first call in which it takes part again
  bool compact = false; // high throughput
  uint32_t alignment = 1;
  bool cached = false;  // every other call repeats the routing of the one before it; not with overlap
  bool answered = false; // the dead rank dies when it knows where its rows go: their places stay, as zero rows
  uint32_t tokens = 0;   // of every rank, all to one expert, by one choice; 0 for random calls
  bool zero_copy = false; // results may be offered where they lie: in two of three calls of a rank they are
  int64_t spare = -1;   // compact: rows of the tensor less than the largest call needs; -1 for the tensor of the worst routing
};

inline uint64_t dtype_bytes(uint32_t dtype) { return dtype == EP_MOE_F32 ? 4 : 2; }

inline float load_number(uint32_t dtype, const uint8_t* at) {
  if (dtype == EP_MOE_F32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return dtype == EP_MOE_F16 ? number_f16::load(bits) : number_bf16::load(bits);
}

inline void store_number(uint32_t dtype, uint8_t* at, float value) {
  const uint16_t bits = dtype == EP_MOE_F16 ? number_f16::store(value) : number_bf16::store(value);
  std::memcpy(at, dtype == EP_MOE_F32 ? static_cast<const void*>(&value) : &bits, dtype_bytes(dtype));
}

// A half of a call, in the order in which every rank runs them.
struct moe_step {
  uint32_t call;
  uint32_t half; // 0 dispatch send, 1 its receive, 2 combine send, 3 its receive
};

class moe_case {
 public:
  struct one_rank {
    std::vector<int32_t> topk, replica, slot, src_token, src_choice, recv_count;
    std::vector<uint64_t> send_words, layout_range, ranks;
    std::vector<ep_moe_header> headers;
    std::vector<uint32_t> send_first, block_start, send_start;
    std::vector<float> weights;
    aligned_bytes x, y, out, sum, scales, bias[2];
    uint64_t x_bytes = 0, y_bytes = 0;
    uint32_t tokens = 0;
    bool biases = false;
    ep_moe_dispatch_args dispatch{};
    ep_moe_combine_args combine{};
    ep_kernel_status status{};
    std::vector<int32_t> want_replica, want_slot;
  };

  moe_case(const moe_options& wanted, uint64_t seed) : options(wanted), random(seed) {
    size = static_cast<size_t>(wanted.size);
    top_k = 1 + static_cast<uint32_t>(below(random, 4));
    max_tokens = 1 + static_cast<uint32_t>(below(random, 6));
    static constexpr uint32_t channels[] = {1, 8, 33, 128, 130, 257};
    hidden = channels[below(random, 6)];
    x_gap = below(random, 3);
    if (wanted.tokens != 0) {
      top_k = 1;
      max_tokens = wanted.tokens;
      hidden = 8;
    }
    make_experts();
    lay_out();
    order_halves();
    for (uint32_t call = 0; call < wanted.calls; ++call) make_call(call);
    if (wanted.spare >= 0) {
      largest = 0;
      for (uint32_t call = 0; call < wanted.calls; ++call) {
        for (int32_t r = 0; r < wanted.size; ++r) largest = std::max(largest, block_begin(call, r, local(r)));
      }
      largest -= std::min(largest, static_cast<uint64_t>(wanted.spare));
      memory_bytes = 0;
      lay_out();
    }
    peers.assign(size, std::vector<ep_moe_peer>(size * wanted.slots));
    totals.assign(size, std::vector<uint64_t>(most_local + 1));
    wait_ns.assign(size, std::vector<uint64_t>(size));
  }

  uint64_t bytes() const { return memory_bytes; }
  uint64_t signal_slots() const { return static_cast<uint64_t>(options.slots) * EP_MOE_SIGNAL_KINDS * size; }
  const std::vector<moe_step>& halves() const { return steps; }
  one_rank& at(uint32_t call, int32_t rank) { return calls[call][static_cast<size_t>(rank)]; }
  const ep_moe_buffer& buffer(int32_t rank) const { return buffers[static_cast<size_t>(rank)]; }
  uint64_t total(int32_t rank, uint32_t expert) const { return totals[static_cast<size_t>(rank)][expert]; }
  uint32_t local(int32_t rank) const { return rank_begin[static_cast<size_t>(rank) + 1] - rank_begin[static_cast<size_t>(rank)]; }
  bool is_gone(uint32_t call, int32_t rank) const { return rank == options.dead && call < options.back; }
  uint64_t room() const { return shape.recv_rows; }
  // Rows of one source in the block of local expert e, and the first row of the block; of all blocks for e = local(r).
  uint64_t count_of(uint32_t call, int32_t r, uint32_t e, int32_t s) const {
    const std::vector<int32_t>& theirs = calls[call][static_cast<size_t>(s)].want_replica;
    if (is_gone(call, s) && !options.answered) return 0;
    return static_cast<uint64_t>(std::count(theirs.begin(), theirs.end(), static_cast<int32_t>(rank_begin[static_cast<size_t>(r)] + e)));
  }
  uint64_t block_begin(uint32_t call, int32_t r, uint32_t e) const {
    if (!options.compact) return static_cast<uint64_t>(e) * size * max_tokens;
    uint64_t row = 0;
    for (uint32_t before = 0; before < e; ++before) {
      uint64_t rows = 0;
      for (int32_t s = 0; s < options.size; ++s) rows += count_of(call, r, before, s);
      row += (rows + options.alignment - 1) / options.alignment * options.alignment;
    }
    return row;
  }
  ep_moe_peer& peer(int32_t rank, uint32_t call_slot, int32_t of) {
    return peers[static_cast<size_t>(rank)][call_slot * size + static_cast<size_t>(of)];
  }
  uint64_t sends_to(uint32_t call, int32_t rank, int32_t to) const {
    const auto& sent = calls[call][static_cast<size_t>(rank)].want_replica;
    return static_cast<uint64_t>(std::count_if(sent.begin(), sent.end(), [&](int32_t p) { return p >= 0 && replica_rank[static_cast<size_t>(p)] == to; }));
  }

  // Fills in the arguments and tells the world of what is sent from outside of its memory.
  void bind(world& ranks) {
    for (int32_t r = 0; r < options.size; ++r) {
      buffers.push_back(buffer_of(ranks, r));
      for (uint32_t call = 0; call < options.calls; ++call) bind_call(ranks, call, r);
    }
  }

  uint64_t row_bytes() const { return hidden * dtype_bytes(options.dtype); }
  // The bytes of a call's slot in which a rank may offer results.
  uint64_t offered_bytes() const { return shape.staged_results.stride; }
  uint8_t* offered(world& ranks, uint32_t call, int32_t r) const { return ranks.data(r) + shape.staged_results.offset + call % options.slots * shape.staged_results.stride; }
  bool offers(uint32_t call, int32_t r) const { return options.zero_copy && (call + static_cast<uint32_t>(r)) % 3 != 0; }
  // As experts would write them: y, there.
  void offer(world& ranks, uint32_t call, int32_t r) {
    one_rank& own = at(call, r);
    for (uint64_t row = 0; row < receive_rows(); ++row) std::memcpy(offered(ranks, call, r) + row * shape.result_row_bytes, own.y.get() + row * row_bytes(), row_bytes());
    own.combine.y = reinterpret_cast<uint64_t>(offered(ranks, call, r));
    own.combine.y_stride_bytes = shape.result_row_bytes;
    own.combine.call.flags |= EP_MOE_OFFERED;
  }

  // Every difference is one. `gone`: ranks whose rows were dropped.
  uint32_t wrong_dispatch(uint32_t call, int32_t r) {
    uint32_t wrong = 0;
    one_rank& own = at(call, r);
    const one_rank& routed = at(repeats(call) ? call - 1 : call, r);
    for (size_t i = 0; i < own.want_replica.size(); ++i) wrong += routed.replica[i] != own.want_replica[i] || routed.slot[i] != own.want_slot[i];
    const uint32_t first = rank_begin[static_cast<size_t>(r)];
    for (uint32_t e = 0; e < local(r); ++e) {
      const uint64_t block = block_begin(call, r, e);
      uint64_t row = block;
      uint64_t empty = 0;
      for (int32_t s = 0; s < options.size; ++s) {
        const uint64_t begin = row - block;
        const one_rank& source = at(call, s);
        const uint64_t count = count_of(call, r, e, s);
        wrong += routed.layout_range[e * size + static_cast<size_t>(s)] != (begin << 32 | (is_gone(call, s) ? 0 : count));
        for (uint64_t i = 0; is_gone(call, s) && i < count; ++i, ++row, ++empty) wrong += !is_empty(own, routed, row);
        for (size_t i = 0; !is_gone(call, s) && i < source.want_replica.size(); ++i) {
          if (source.want_replica[i] != static_cast<int32_t>(first + e)) continue;
          wrong += routed.src_token[row] != static_cast<int32_t>(i / top_k) || routed.src_choice[row] != static_cast<int32_t>(i % top_k);
          wrong += !is_row(own, row, payload_of(source.x.get() + i / top_k * x_stride()));
          ++row;
        }
      }
      wrong += routed.recv_count[e] != static_cast<int32_t>(row - block - empty);
      wrong += routed.block_start[e] != block;
      for (; options.compact && row < block_begin(call, r, e + 1); ++row) wrong += !is_empty(own, routed, row);
    }
    if (options.compact) wrong += routed.block_start[local(r)] != block_begin(call, r, local(r));
    return wrong;
  }

  // `without`: a rank whose results were dropped.
  uint32_t wrong_combine(uint32_t call, int32_t r, int32_t without = -1) {
    one_rank& own = at(call, r);
    uint32_t wrong = 0;
    std::vector<uint8_t> expected(row_bytes());
    for (uint32_t t = 0; t < own.tokens; ++t) {
      std::vector<std::vector<float>> rows(top_k);
      float all = 0;
      float left = 0;
      for (uint32_t k = 0; k < top_k; ++k) {
        const size_t i = static_cast<size_t>(t) * top_k + k;
        if (own.topk[i] >= 0) all += own.weights[i];
        const int32_t p = own.want_replica[i];
        if (p < 0 || is_gone(call, replica_rank[static_cast<size_t>(p)]) || replica_rank[static_cast<size_t>(p)] == without) continue;
        left += own.weights[i];
        rows[k] = result_of(call, r, i);
      }
      const bool renormalise = (own.combine.call.flags & EP_MOE_RENORMALISE) != 0;
      const float scale = renormalise && left != 0 ? all / left : 1.0f;
      for (uint32_t h = 0; h < hidden; ++h) {
        const uint64_t at_bias = (static_cast<uint64_t>(t) * hidden + h) * dtype_bytes(options.dtype);
        float sum = 0;
        if (own.biases) sum = load_number(options.dtype, own.bias[0].get() + at_bias);
        if (own.biases) sum = sum + load_number(options.dtype, own.bias[1].get() + at_bias);
        for (uint32_t k = 0; k < top_k; ++k) {
          if (rows[k].empty()) continue;
          volatile float weight = own.weights[static_cast<size_t>(t) * top_k + k] * scale; // volatile: rounded by itself
          volatile float product = (own.combine.weights != 0 ? weight : 1.0f) * rows[k][h];
          sum = sum + product;
        }
        store_number(options.dtype, expected.data() + h * dtype_bytes(options.dtype), sum);
      }
      wrong += std::memcmp(expected.data(), own.sum.get() + t * row_bytes(), row_bytes()) != 0;
    }
    return wrong;
  }

  uint64_t expected_total(int32_t r, uint32_t expert) const {
    uint64_t rows = 0;
    for (uint32_t call = 0; call < options.calls; ++call) {
      for (size_t s = 0; s < size; ++s) {
        if (is_gone(call, static_cast<int32_t>(s))) continue;
        for (const int32_t p : calls[call][s].want_replica) rows += p == static_cast<int32_t>(rank_begin[static_cast<size_t>(r)] + expert);
      }
    }
    return rows;
  }

 private:
  uint64_t x_stride() const { return row_bytes() + x_gap * dtype_bytes(options.dtype); }
  bool casts() const { return options.payload != options.dtype; }
  bool repeats(uint32_t call) const { return options.cached && call % 2 == 1; }
  uint64_t receive_rows() const {
    if (!options.compact) return static_cast<uint64_t>(most_local) * size * max_tokens;
    if (largest != UINT64_MAX) return largest;
    return static_cast<uint64_t>(size) * max_tokens * std::min(top_k, most_local) + most_local * (options.alignment - 1);
  }
  uint64_t code_bytes() const { return payload_code_bytes(options.payload, hidden); }
  uint64_t blocks() const { return (hidden + 127) / 128; }

  // Replicas rank-major, some ranks without any; every expert once at least.
  void make_experts() {
    experts = options.tokens != 0 ? 1 : 1 + static_cast<uint32_t>(below(random, 6));
    const uint64_t replicas = options.tokens != 0 ? 1 : experts + below(random, 4);
    std::vector<std::pair<int32_t, int32_t>> placed;
    for (uint64_t p = 0; p < replicas; ++p) {
      const auto e = static_cast<int32_t>(p < experts ? p : below(random, experts));
      placed.emplace_back(static_cast<int32_t>(below(random, size)), e);
    }
    std::sort(placed.begin(), placed.end());
    rank_begin.assign(size + 1, 0);
    for (const auto& [rank, expert] : placed) {
      replica_rank.push_back(rank);
      replica_expert.push_back(expert);
      ++rank_begin[static_cast<size_t>(rank) + 1];
    }
    for (size_t r = 0; r < size; ++r) {
      most_local = std::max(most_local, rank_begin[r + 1]);
      rank_begin[r + 1] += rank_begin[r];
    }
    candidate_begin.assign(size, {});
    candidates.assign(size, {});
    for (size_t r = 0; r < size; ++r) {
      for (uint32_t e = 0; e < experts; ++e) {
        candidate_begin[r].push_back(static_cast<uint32_t>(candidates[r].size()));
        const bool some = options.tokens == 0 && below(random, 4) == 0; // as 'nearest' would: not all replicas
        for (uint32_t p = 0; p < replica_rank.size(); ++p) {
          const bool unknown = options.masked && (is_gone(0, replica_rank[p]) || is_gone(0, static_cast<int32_t>(r)));
          if (replica_expert[p] == static_cast<int32_t>(e) && !unknown && !(some && below(random, 2) == 0)) candidates[r].push_back(p);
        }
      }
      candidate_begin[r].push_back(static_cast<uint32_t>(candidates[r].size()));
    }
  }

  ep_moe_part component(uint64_t bytes) {
    const ep_moe_part part{memory_bytes, bytes};
    memory_bytes += bytes * options.slots;
    return part;
  }

  void lay_out() {
    ep_moe_buffer& b = shape;
    b.header = {EP_MAGIC_MOE, EP_ABI_MAJOR, EP_ABI_MINOR, options.compact ? EP_MOE_HIGH_THROUGHPUT : EP_MOE_LOW_LATENCY, sizeof b};
    b.payload_bytes = payload_bytes(options.payload, hidden);
    b.row_bytes = aligned_row_bytes(options.payload, hidden);
    b.result_bytes = payload_bytes(options.result_payload, hidden);
    b.result_row_bytes = aligned_row_bytes(options.result_payload, hidden);
    b.received = component(receive_rows() * (16 + b.row_bytes));
    b.returned = component(EP_MOE_BANKS * static_cast<uint64_t>(max_tokens) * top_k * b.result_row_bytes);
    b.staged_tokens = component(max_tokens * (16 + b.row_bytes));
    b.staged_results = component(receive_rows() * b.result_row_bytes);
    b.counts = component(static_cast<uint64_t>(most_local) * size * 8);
    if (options.compact) b.starts = component(replica_rank.size() * 8);
    b.refusals = component(size * 8);
    b.calls = options.slots;
    b.max_tokens = max_tokens;
    b.top_k = top_k;
    b.hidden = hidden;
    b.payload = options.payload;
    b.result_payload = options.result_payload;
    b.recv_rows = receive_rows();
    b.alignment = options.alignment;
    b.flags = options.zero_copy ? EP_MOE_ZERO_COPY : 0;
  }

  // All halves, each call's in order, and no slot before its last call has ended.
  void order_halves() {
    std::vector<uint32_t> next(options.calls, 0);
    uint32_t done = 0;
    while (done < options.calls) {
      const uint32_t reach = std::min<uint32_t>(options.calls, done + (options.overlap ? options.slots : 1));
      const uint32_t call = done + static_cast<uint32_t>(below(random, reach - done));
      if (next[call] == 4) continue;
      steps.push_back({call, next[call]++});
      while (done < options.calls && next[done] == 4) ++done;
    }
  }

  void fill(aligned_bytes& into, uint64_t count) {
    into = make_aligned(count * dtype_bytes(options.dtype));
    for (uint64_t i = 0; i < count; ++i) {
      store_number(options.dtype, into.get() + i * dtype_bytes(options.dtype), (static_cast<float>(below(random, 4001)) - 2000.0f) / 256.0f);
    }
  }

  void make_call(uint32_t call) {
    std::vector<one_rank>& ranks = calls.emplace_back(size);
    for (size_t r = 0; r < size; ++r) {
      one_rank& own = ranks[r];
      const one_rank* before = repeats(call) ? &calls[call - 1][r] : nullptr;
      own.tokens = before != nullptr ? before->tokens : options.tokens != 0 ? options.tokens : static_cast<uint32_t>(below(random, max_tokens + 1));
      const size_t choices = static_cast<size_t>(own.tokens) * top_k;
      std::vector<uint32_t> taken(experts);
      for (uint32_t t = 0; t < own.tokens; ++t) {
        std::vector<int32_t> left;
        for (uint32_t e = 0; e < experts; ++e) left.push_back(static_cast<int32_t>(e));
        std::shuffle(left.begin(), left.end(), random);
        for (uint32_t k = 0; k < top_k; ++k) {
          const bool none = k >= left.size() || (options.tokens == 0 && below(random, 8) == 0);
          const int32_t e = none ? -1 : left[k];
          own.topk.push_back(e);
          own.weights.push_back(static_cast<float>(below(random, 1000)) / 997.0f);
          const uint32_t first = none ? 0 : candidate_begin[r][static_cast<size_t>(e)];
          const uint32_t count = none ? 0 : candidate_begin[r][static_cast<size_t>(e) + 1] - first;
          if (count == 0) {
            own.want_replica.push_back(-1);
            own.want_slot.push_back(-1);
            continue;
          }
          const uint32_t p = candidates[r][first + (r + taken[static_cast<size_t>(e)]++) % count];
          own.want_slot.push_back(static_cast<int32_t>(std::count(own.want_replica.begin(), own.want_replica.end(), static_cast<int32_t>(p))));
          own.want_replica.push_back(static_cast<int32_t>(p));
        }
      }
      if (before != nullptr) {
        own.topk = before->topk;
        own.want_replica = before->want_replica;
        own.want_slot = before->want_slot;
      }
      own.replica.assign(choices + 1, -9);
      own.slot.assign(choices + 1, -9);
      own.replica.resize(choices);
      own.slot.resize(choices);
      own.headers.resize(choices + 1);
      own.send_words.assign(replica_rank.size() + 1, 0);
      own.send_first.assign(replica_rank.size() + 1, 0);
      own.recv_count.assign(most_local + 1, -1);
      own.block_start.assign(most_local + 1, 0);
      own.send_start.assign(replica_rank.size() + 1, 0);
      own.layout_range.assign(static_cast<size_t>(most_local) * size + 1, 0);
      own.src_token.assign(receive_rows() + 1, -1);
      own.src_choice.assign(receive_rows() + 1, -1);
      own.ranks.assign(size, 0);
      if (options.masked) own.ranks[static_cast<size_t>(options.dead)] = EP_MOE_RANK_MASKED;
      own.x_bytes = own.tokens * x_stride();
      fill(own.x, own.tokens * (hidden + x_gap));
      own.y_bytes = receive_rows() * row_bytes();
      fill(own.y, receive_rows() * hidden);
      own.biases = below(random, 2) != 0;
      for (aligned_bytes& bias : own.bias) fill(bias, static_cast<uint64_t>(own.tokens) * hidden);
      own.out = make_aligned(receive_rows() * code_bytes());
      own.scales = make_aligned(receive_rows() * blocks() * 4);
      own.sum = make_aligned(own.tokens * row_bytes());
      own.combine.call.flags = static_cast<uint32_t>(below(random, 2)) * EP_MOE_RENORMALISE | static_cast<uint32_t>(below(random, 2)) * EP_MOE_NON_TEMPORAL |
                               static_cast<uint32_t>(below(random, 2)) * EP_MOE_NON_TEMPORAL_OUT;
      own.combine.weights = below(random, 4) != 0 ? 1 : 0; // the address comes later
    }
  }

  ep_moe_buffer buffer_of(world& ranks, int32_t rank) {
    const auto r = static_cast<size_t>(rank);
    ep_moe_buffer made = shape;
    made.memory = ranks.memory(rank);
    made.peers = address(peers[r]);
    made.experts = {address(replica_rank), address(replica_expert), address(rank_begin), address(candidate_begin[r]), address(candidates[r]), experts,
                    static_cast<uint32_t>(replica_rank.size()), most_local, 0};
    return made;
  }

  template <class T> static uint64_t address(const std::vector<T>& of) { return reinterpret_cast<uint64_t>(of.data()); }
  static uint64_t address(const aligned_bytes& of) { return reinterpret_cast<uint64_t>(of.get()); }

  void bind_call(world& ranks, uint32_t call, int32_t rank) {
    one_rank& own = at(call, rank);
    one_rank& routed = at(repeats(call) ? call - 1 : call, rank);
    ranks.adopt(rank, own.x.get(), own.x_bytes);
    ranks.adopt(rank, own.y.get(), own.y_bytes);
    ranks.adopt(rank, own.headers.data(), own.headers.size() * sizeof(ep_moe_header));
    ranks.adopt(rank, own.send_words.data(), own.send_words.size() * 8);
    ep_moe_call made{};
    made.header = {EP_MAGIC_MOE_CALL, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof made};
    made.slot = call % options.slots;
    made.epoch = call / options.slots + 1;
    made.flags = own.combine.call.flags;
    ep_moe_routing& routing = made.routing;
    routing.topk = address(routed.topk);
    routing.choice_replica = address(routed.replica);
    routing.choice_slot = address(routed.slot);
    routing.send_words = address(routed.send_words);
    routing.send_headers = address(routed.headers);
    routing.send_first = address(routed.send_first);
    routing.recv_count = address(routed.recv_count);
    routing.block_start = address(routed.block_start);
    routing.layout_range = address(routed.layout_range);
    routing.src_token = address(routed.src_token);
    routing.src_choice = address(routed.src_choice);
    routing.send_start = address(routed.send_start);
    routing.tokens = own.tokens;
    made.ranks = address(own.ranks);
    made.wait_ns = address(wait_ns[static_cast<size_t>(rank)]);
    made.status = reinterpret_cast<uint64_t>(&own.status);
    own.dispatch = {made, address(own.x), x_stride(), options.dtype, 1, address(own.out), code_bytes(), casts() ? address(own.scales) : 0, 1, receive_rows(),
                    address(totals[static_cast<size_t>(rank)])};
    if (options.compact) {
      own.dispatch.out = reinterpret_cast<uint64_t>(ranks.data(rank)) + shape.received.offset + made.slot * shape.received.stride;
      own.dispatch.out_stride_bytes = shape.row_bytes;
    }
    if (repeats(call)) own.dispatch.call.flags |= EP_MOE_CACHED;
    const bool weighted = own.combine.weights != 0;
    own.combine = {made, address(own.y), row_bytes(), weighted ? address(own.weights) : 0,
                   {own.biases ? address(own.bias[0]) : 0, own.biases ? address(own.bias[1]) : 0}, address(own.sum), row_bytes(), options.dtype, 0};
    if (!weighted) std::fill(own.weights.begin(), own.weights.end(), 1.0f);
    if (!weighted) own.combine.call.flags &= ~EP_MOE_RENORMALISE;
  }

  std::vector<uint8_t> payload_of(const uint8_t* row) const { return as_payload(row, options.payload); }

  std::vector<uint8_t> as_payload(const uint8_t* row, uint32_t payload) const {
    std::vector<uint8_t> made(aligned_row_bytes(payload, hidden) + 16);
    if (payload == options.dtype) {
      std::memcpy(made.data(), row, row_bytes());
    } else {
      aligned_bytes room = make_aligned(made.size());
      ep_moe_cast_row(options.dtype, row, hidden, payload, room.get());
      std::memcpy(made.data(), room.get(), payload_bytes(payload, hidden));
    }
    return made;
  }

  bool is_empty(const one_rank& own, const one_rank& routed, uint64_t row) const {
    return routed.src_token[row] == -1 && routed.src_choice[row] == -1 && is_row(own, row, std::vector<uint8_t>(shape.row_bytes + 16));
  }

  bool is_row(const one_rank& own, uint64_t row, const std::vector<uint8_t>& payload) const {
    bool ok = std::memcmp(reinterpret_cast<const uint8_t*>(own.dispatch.out) + row * own.dispatch.out_stride_bytes, payload.data(), code_bytes()) == 0;
    const uint64_t scale = payload_scale_bytes(options.payload);
    for (uint64_t b = 0; casts() && b < blocks(); ++b) { // column-major
      ok = ok && std::memcmp(own.scales.get() + (b * receive_rows() + row) * scale, payload.data() + code_bytes() + b * scale, scale) == 0;
    }
    return ok;
  }

  // What the rank of the expert returns for a choice, as fp32.
  std::vector<float> result_of(uint32_t call, int32_t source, size_t choice) {
    const one_rank& own = at(call, source);
    const auto p = static_cast<size_t>(own.want_replica[choice]);
    const int32_t there = replica_rank[p];
    const auto e = static_cast<uint32_t>(p - rank_begin[static_cast<size_t>(there)]);
    uint64_t row = block_begin(call, there, e) + static_cast<uint64_t>(own.want_slot[choice]);
    for (int32_t s = 0; s < source; ++s) row += count_of(call, there, e, s);
    const uint8_t* y = at(call, there).y.get() + row * row_bytes();
    std::vector<float> made(hidden);
    if (options.result_payload == options.dtype) {
      for (uint32_t h = 0; h < hidden; ++h) made[h] = load_number(options.dtype, y + h * dtype_bytes(options.dtype));
      return made;
    }
    const std::vector<uint8_t> payload = as_payload(y, options.result_payload);
    for (uint32_t h = 0; h < hidden; h += 4) detail::load_channels(options.result_payload, hidden, payload.data(), h, std::min(4u, hidden - h), made.data() + h);
    return made;
  }

  moe_options options;
  random_source random;
  size_t size = 0;
  uint32_t experts = 0, most_local = 0, top_k = 0, max_tokens = 0, hidden = 0;
  uint64_t x_gap = 0, memory_bytes = 0, largest = UINT64_MAX;
  ep_moe_buffer shape{};
  std::vector<int32_t> replica_rank, replica_expert;
  std::vector<uint32_t> rank_begin;
  std::vector<std::vector<uint32_t>> candidate_begin, candidates;
  std::vector<std::vector<one_rank>> calls;
  std::vector<std::vector<ep_moe_peer>> peers;
  std::vector<std::vector<uint64_t>> totals, wait_ns;
  std::vector<ep_moe_buffer> buffers;
  std::vector<moe_step> steps;
};

// The four halves as one thing, so that tests can put others in their place.
struct moe_kernels {
  static bool is_compact(const ep_moe_buffer& buffer) { return buffer.header.kind == EP_MOE_HIGH_THROUGHPUT; }
  template <class Ctx, class Endpoint> static bool run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half);
};

// HAZARD: not within the class, where it would be inline: every test would compile it, whatever moe_apart.hpp says.
template <class Ctx, class Endpoint> bool moe_kernels::run(Ctx& ctx, const Endpoint& endpoint, const ep_moe_buffer& buffer, moe_case::one_rank& own, uint32_t half) {
  switch (half) {
    case 0: return is_compact(buffer) ? moe_compact_send(ctx, endpoint, buffer, own.dispatch) : moe_dispatch_send(ctx, endpoint, buffer, own.dispatch);
    case 1: {
      if (is_compact(buffer)) return moe_compact_receive(ctx, endpoint, buffer, own.dispatch);
      const bool ok = moe_dispatch_receive(ctx, endpoint, buffer, own.dispatch);
      ctx.sync_grid();
      return moe_sound(ctx, block_coop<Ctx>{ctx}, moe_view{buffer, own.dispatch.call}) && ok; // a block that ends early does not know
    }
    case 2: return moe_combine_send(ctx, endpoint, buffer, own.combine);
    default: {
      const bool ok = moe_combine_receive(ctx, endpoint, buffer, own.combine);
      ctx.sync_grid();
      if (!is_compact(buffer)) return moe_sound(ctx, block_coop<Ctx>{ctx}, moe_view{buffer, own.combine.call}) && ok; // a block that ends early does not know
      return moe_release(ctx, endpoint, buffer, own.combine.call) && ok;
    }
  }
}

// Calls first to last - 1 of one rank; counts what is not as it should be.
template <class Kernels = moe_kernels, class Ctx, class Endpoint>
bool run_moe(Ctx& ctx, const Endpoint& endpoint, moe_case& plan, int32_t rank, std::atomic<uint32_t>& wrong, uint32_t first = 0, uint32_t last = UINT32_MAX) {
  for (const moe_step& step : plan.halves()) {
    if (step.call < first || step.call >= last) continue;
    moe_case::one_rank& own = plan.at(step.call, rank);
    const bool ok = Kernels::run(ctx, endpoint, plan.buffer(rank), own, step.half);
    ctx.sync_grid();
    if (ctx.block() == 0 && ctx.lane() == 0) {
      if (!ok) wrong.fetch_add(1000);
      if (step.half == 1) wrong.fetch_add(plan.wrong_dispatch(step.call, rank));
      if (step.half == 3) wrong.fetch_add(plan.wrong_combine(step.call, rank));
    }
    ctx.sync_grid();
  }
  return true;
}

} // namespace ep::test
