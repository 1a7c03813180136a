// Sums of replicas against a plain loop: fp32, replica 0 first, rounded once; and whole gradients on their way home.
#include <cmath>
#include <cstring>

#include "../check.hpp"
#include "dispatch_case.hpp"
#include "ep/device/replica_sum.h"

using namespace ep::test;

namespace {

template <class Number> struct sums {
  using carrier = typename Number::carrier;

  std::vector<uint64_t> shard_row, shard_rows, begin, replica_row;
  std::vector<carrier> src;
  std::vector<carrier> dst;
  std::vector<carrier> expected;
  uint64_t elements = 0;
  uint64_t stride = 0; // elements between rows of dst

  static carrier random_value(random_source& random) {
    const uint64_t pick = below(random, 16);
    if (pick == 0) return Number::store(-0.0f);
    // Different magnitudes, so that the order of additions shows in the result.
    const float value = static_cast<float>(static_cast<int64_t>(below(random, 2001)) - 1000);
    return Number::store(value * (pick < 8 ? 1.0f : 0.0009765625f));
  }

  explicit sums(uint64_t seed) {
    random_source random(seed);
    elements = 1 + below(random, 20);
    stride = elements + below(random, 3);
    uint64_t home = below(random, 2);
    uint64_t rows = 0;
    const uint64_t shards = below(random, 5);
    begin.push_back(0);
    for (uint64_t shard = 0; shard < shards; ++shard) {
      shard_row.push_back(home);
      shard_rows.push_back(below(random, 4));
      home += shard_rows.back() + below(random, 2);
      for (uint64_t replica = below(random, 5); replica > 0; --replica) {
        replica_row.push_back(rows);
        rows += shard_rows.back();
      }
      begin.push_back(replica_row.size());
    }
    src.resize(rows * elements);
    for (carrier& value : src) value = random_value(random);
    dst.resize(home * stride);
    for (carrier& value : dst) std::memset(&value, 0x5a, sizeof value);
    expected = dst;
    for (uint64_t shard = 0; shard < shards; ++shard) {
      for (uint64_t row = 0; row < shard_rows[shard]; ++row) {
        for (uint64_t i = 0; i < elements; ++i) {
          float sum = 0.0f;
          for (uint64_t j = begin[shard]; j < begin[shard + 1]; ++j) {
            const float value = Number::load(src[(replica_row[j] + row) * elements + i]);
            sum = j == begin[shard] ? value : sum + value;
          }
          expected[(shard_row[shard] + row) * stride + i] = Number::store(sum);
        }
      }
    }
  }

  ep_replica_sum_args args(uint32_t dtype) {
    ep_replica_sum_args made{};
    made.src = reinterpret_cast<uint64_t>(src.data());
    made.dst = reinterpret_cast<uint64_t>(dst.data());
    made.dst_stride_bytes = stride * sizeof(carrier);
    made.row_elements = elements;
    made.shard_row = reinterpret_cast<uint64_t>(shard_row.data());
    made.shard_rows = reinterpret_cast<uint64_t>(shard_rows.data());
    made.replica_begin = reinterpret_cast<uint64_t>(begin.data());
    made.replica_row = reinterpret_cast<uint64_t>(replica_row.data());
    made.shard_count = shard_row.size();
    made.dtype = dtype;
    return made;
  }

  // Bits, so that -0.0 counts; gaps between rows and shards included.
  bool right() const { return dst.empty() || std::memcmp(dst.data(), expected.data(), dst.size() * sizeof(carrier)) == 0; }
};

template <class Number> void sums_match(uint32_t dtype) {
  const ep::kernel_environment environment{};
  for (uint64_t seed = 0; seed < 150; ++seed) {
    sums<Number> many(seed);
    const ep_replica_sum_args wide = many.args(dtype);
    const auto result = ep::simt_run(ep::simt_options{1 + static_cast<uint32_t>(seed % 3), 8, 4, seed, 0.5}, environment,
                                     [&](ep::simt_context& ctx) { ep::replica_sum(ctx, wide); });
    EP_CHECK(result.ok && many.right());
    sums<Number> one(seed);
    const ep_replica_sum_args narrow = one.args(dtype);
    for (uint32_t block = 0; block < 2; ++block) {
      ep::fast_context ctx{environment, block, 2, nullptr};
      ep::replica_sum(ctx, narrow);
    }
    EP_CHECK(one.right());
  }
}

// One replica whose value is -0.0 stays -0.0; no replica at all gives zeros.
void zeros() {
  const ep::kernel_environment environment{};
  ep::fast_context ctx{environment, 0, 1, nullptr};
  float src[1] = {-0.0f};
  float dst[2] = {1.0f, 1.0f};
  uint64_t row[2] = {0, 1};
  uint64_t rows[2] = {1, 1};
  uint64_t begin[3] = {0, 1, 1};
  uint64_t replica[1] = {0};
  ep_replica_sum_args args{};
  args.src = reinterpret_cast<uint64_t>(src);
  args.dst = reinterpret_cast<uint64_t>(dst);
  args.dst_stride_bytes = 4;
  args.row_elements = 1;
  args.shard_row = reinterpret_cast<uint64_t>(row);
  args.shard_rows = reinterpret_cast<uint64_t>(rows);
  args.replica_begin = reinterpret_cast<uint64_t>(begin);
  args.replica_row = reinterpret_cast<uint64_t>(replica);
  args.shard_count = 2;
  args.dtype = EP_DTYPE_F32;
  ep::replica_sum(ctx, args);
  EP_CHECK(dst[0] == 0.0f && std::signbit(dst[0]));
  EP_CHECK(dst[1] == 0.0f && !std::signbit(dst[1]));
}

// Two servers return gradients of one rank's shard; the sum must see both rows complete, whatever the schedule.
template <class Endpoint> void gradient_home(bool proxy, uint64_t seed) {
  constexpr uint64_t elements = 12;
  constexpr uint64_t rows = 5;
  random_source random(seed);
  world ranks({3, 2 * rows * elements * 4, 6, proxy, 2});
  std::vector<float> source[3];
  ep_dispatch_entry entries[3] = {};
  ep_dispatch_part parts[3] = {};
  ep_kernel_status status[3] = {};
  const uint64_t owed[3][3] = {{0, 3, 3}, {0, 0, 0}, {0, 0, 0}};
  const uint64_t credits[3] = {};
  ep_dispatch_args args[3] = {};
  for (int32_t rank = 1; rank < 3; ++rank) {
    for (uint64_t i = 0; i < rows * elements; ++i) source[rank].push_back(static_cast<float>(below(random, 1000)) * 0.37f);
    entries[rank] = {0, static_cast<uint64_t>(rank - 1) * rows, rows, 0, 0};
    parts[rank] = {reinterpret_cast<uint64_t>(source[rank].data()), elements * 4, elements * 4, 0, reinterpret_cast<uint64_t>(&entries[rank]), 1, 2, 3, 0};
  }
  for (int32_t rank = 0; rank < 3; ++rank) {
    args[rank].memory = ranks.memory(rank);
    args[rank].parts = reinterpret_cast<uint64_t>(&parts[rank]);
    args[rank].part_count = rank == 0 ? 0 : 1;
    args[rank].credit_slot = 3;
    args[rank].arrivals = reinterpret_cast<uint64_t>(owed[rank]);
    args[rank].credits = reinterpret_cast<uint64_t>(credits);
    args[rank].status = reinterpret_cast<uint64_t>(&status[rank]);
  }
  std::vector<float> home(rows * elements);
  uint64_t first = 0;
  uint64_t count = rows;
  uint64_t begin[2] = {0, 2};
  uint64_t replica[2] = {0, rows};
  const ep_replica_sum_args sum{reinterpret_cast<uint64_t>(ranks.data(0)), reinterpret_cast<uint64_t>(home.data()), elements * 4, elements,
                                reinterpret_cast<uint64_t>(&first), reinterpret_cast<uint64_t>(&count), reinterpret_cast<uint64_t>(begin),
                                reinterpret_cast<uint64_t>(replica), 1, EP_DTYPE_F32, 0};
  const auto result = ranks.run_simt(shape(2, 8, 4), seeded(seed), [&](auto& ctx, int32_t rank) {
    return ep::attention_gradient(ctx, Endpoint{args[rank].memory}, args[rank], &sum, rank == 0 ? 1u : 0u);
  });
  EP_CHECK_EQ(result.report, "");
  uint32_t wrong = 0;
  for (uint64_t i = 0; i < rows * elements; ++i) wrong += home[i] != source[1][i] + source[2][i];
  EP_CHECK_EQ(wrong, 0u);
}

} // namespace

int main() {
  sums_match<ep::number_f32>(EP_DTYPE_F32);
  sums_match<ep::number_f16>(EP_DTYPE_F16);
  sums_match<ep::number_bf16>(EP_DTYPE_BF16);
  zeros();
  for (uint64_t seed = 0; seed < 100 / seed_share; ++seed) {
    gradient_home<ep::load_store_endpoint>(false, seed);
    gradient_home<ep::proxy_endpoint>(true, seed);
  }
  return ep::check::finish();
}
