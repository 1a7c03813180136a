// Collective calls on a GPU against the host build of the same kernel: every mode, element and fold, ranks as streams of one GPU; identical bytes. EP_TEST_SEEDS=n: so many
// calls for each number of ranks.
#include <cstdio>
#include <cstring>
#include <vector>

#include "../device/world.hpp"
#include "core/collective/reduce.hpp"
#include "cuda/table.h"
#include "ep/device/group_call.h"

extern "C" const ep_cuda_table* ep_cuda_table_of(uint32_t version);

using namespace ep::test;

namespace {

const ep_cuda_table* table = nullptr;
int failures = 0;

void must(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, table->error_text(error));
  std::exit(1);
}

// Zeroed memory of the device.
class device_bytes {
 public:
  explicit device_bytes(uint64_t bytes) { must(table->memory_allocate(0, std::max<uint64_t>(bytes, 16), &address_), "memory_allocate"); }
  ~device_bytes() { table->memory_free(0, address_); }
  device_bytes(const device_bytes&) = delete;
  uint64_t address() const { return address_; }

 private:
  uint64_t address_ = 0;
};

struct plan {
  uint32_t mode;
  uint32_t element;
  uint32_t fold;
  double factor;
  uint64_t bytes;  // of each piece
  uint64_t offset; // of tensors, from a multiple of 16
};

plan any_plan(random_source& random) {
  plan made{static_cast<uint32_t>(below(random, 3)), 0, 0, 0.1 * static_cast<double>(below(random, 40)), 0, 0};
  do {
    made.element = static_cast<uint32_t>(below(random, EP_ELEMENT_U8 + 1));
    made.fold = static_cast<uint32_t>(below(random, EP_FOLD_PREMUL_SUM + 1));
  } while (!ep::reduces(static_cast<ep::reduce_op>(made.fold), static_cast<ep::element_type>(made.element)));
  const uint64_t each = ep::element_bytes(static_cast<ep::element_type>(made.element));
  const uint64_t pick = below(random, 4);
  made.bytes = each * (pick == 0 ? below(random, 3) : pick == 1 ? 1 + below(random, 100) : 1 + below(random, 200'000 / each));
  made.offset = below(random, 2) == 0 ? 0 : each * below(random, 3);
  return made;
}

// W pieces in, W pieces out, one behind the other, at any multiple of an element.
struct layout {
  uint64_t piece;
  explicit layout(const plan& call) : piece((call.offset + call.bytes + 31) / 16 * 16) {}
  uint64_t in(uint64_t base, int32_t i, const plan& call) const { return base + static_cast<uint64_t>(i) * piece + call.offset; }
  uint64_t bytes(int32_t size) const { return static_cast<uint64_t>(size) * piece; }
};

void describe(ep_group_args& args, const plan& call, int32_t size, uint64_t in, uint64_t out) {
  const layout at(call);
  args.mode = call.mode;
  args.element = call.element;
  args.fold = call.fold;
  std::memcpy(&args.factor_bits, &call.factor, sizeof call.factor);
  args.signature = 7;
  for (int32_t i = 0; i < size && call.bytes != 0; ++i) {
    args.sends[i] = {at.in(in, i, call), call.bytes};
    args.takes[i] = {call.mode == EP_GROUP_EXCHANGE ? at.in(out, i, call) : 0, call.bytes};
  }
  if (call.mode != EP_GROUP_EXCHANGE && call.bytes != 0) args.out = {at.in(out, 0, call), call.bytes};
}

void compare(int32_t size, uint64_t seeds) {
  constexpr uint32_t blocks = 8;
  constexpr uint32_t lanes = 128;
  constexpr uint64_t slot_bytes = 8192;
  const auto world_size = static_cast<uint64_t>(size);
  const uint64_t staging = 2 * blocks * world_size * slot_bytes;
  const uint64_t words = blocks * world_size;
  random_source random(static_cast<uint64_t>(size));
  world host({size, staging, words});
  std::vector<std::vector<uint64_t>> host_rounds(world_size, std::vector<uint64_t>(blocks));
  device_bytes parts(world_size * (staging + words * 8));
  device_bytes rounds(world_size * blocks * 8);
  device_bytes views(world_size * sizeof(ep_peer_view));
  std::vector<ep_peer_view> where;
  std::vector<void*> streams(world_size);
  for (uint64_t rank = 0; rank < world_size; ++rank) {
    const uint64_t part = parts.address() + rank * (staging + words * 8);
    where.push_back({part, part + staging, 0, 0});
    must(table->stream_create(0, 0, &streams[rank]), "stream_create");
  }
  must(table->copy(streams[0], views.address(), reinterpret_cast<uint64_t>(where.data()), where.size() * sizeof(ep_peer_view)), "copy");
  must(table->stream_finish(streams[0]), "stream_finish");
  uint64_t status_address = 0;
  must(table->pinned_allocate(0, world_size * sizeof(ep_kernel_status), &status_address), "pinned_allocate");
  auto* status = reinterpret_cast<ep_kernel_status*>(status_address);
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const plan call = any_plan(random);
    const layout at(call);
    const uint64_t bytes = at.bytes(size);
    std::vector<std::vector<uint8_t>> in(world_size, std::vector<uint8_t>(bytes + 16));
    std::vector<std::vector<uint8_t>> out(world_size, std::vector<uint8_t>(bytes + 16, 0x11));
    for (auto& each : in) {
      for (uint8_t& value : each) value = static_cast<uint8_t>(random());
    }
    device_bytes device_in(world_size * bytes);
    device_bytes device_out(world_size * bytes);
    const auto aligned = [](std::vector<uint8_t>& of) { return (reinterpret_cast<uint64_t>(of.data()) + 15) / 16 * 16; };
    std::vector<ep_group_args> host_args(world_size);
    std::vector<ep_kernel_status> host_status(world_size);
    for (uint64_t rank = 0; rank < world_size; ++rank) {
      ep_group_args args{};
      args.slot_bytes = slot_bytes;
      args.blocks = blocks;
      args.memory = host.memory(static_cast<int32_t>(rank));
      args.rounds = reinterpret_cast<uint64_t>(host_rounds[rank].data());
      args.status = reinterpret_cast<uint64_t>(&host_status[rank]);
      describe(args, call, size, aligned(in[rank]), aligned(out[rank]));
      host_args[rank] = args;
      args = {};
      args.slot_bytes = slot_bytes;
      args.blocks = blocks;
      args.memory = host.memory(static_cast<int32_t>(rank));
      args.memory.peers = views.address();
      args.rounds = rounds.address() + rank * blocks * 8;
      args.status = status_address + rank * sizeof(ep_kernel_status);
      describe(args, call, size, device_in.address() + rank * bytes, device_out.address() + rank * bytes);
      if (bytes != 0) {
        must(table->copy(streams[rank], device_in.address() + rank * bytes, aligned(in[rank]), bytes), "copy");
        must(table->fill(streams[rank], device_out.address() + rank * bytes, 0x11, bytes), "fill");
      }
      const ep_cuda_launch launch{streams[rank], blocks, lanes, uint64_t{60} * 2'000'000'000, 0, 0};
      must(table->group_call(&launch, &args), "group_call");
    }
    const bool ran = host.run_fast(blocks, [&](auto& ctx, int32_t rank) {
      const ep_group_args& args = host_args[static_cast<size_t>(rank)];
      return ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args);
    });
    for (uint64_t rank = 0; rank < world_size; ++rank) {
      must(table->stream_finish(streams[rank]), "stream_finish");
      std::vector<uint8_t> found(bytes);
      if (bytes != 0) must(table->copy(streams[rank], reinterpret_cast<uint64_t>(found.data()), device_out.address() + rank * bytes, bytes), "copy");
      must(table->stream_finish(streams[rank]), "stream_finish");
      const bool same = bytes == 0 || std::memcmp(found.data(), reinterpret_cast<const void*>(aligned(out[rank])), bytes) == 0;
      if (ran && same && status[rank].status == EP_STATUS_OK) continue;
      ++failures;
      std::fprintf(stderr, "%d ranks, call %llu, rank %llu: mode %u, element %u, fold %u, %llu bytes at %llu: host %d, same %d, status %u\n", size, static_cast<unsigned long long>(seed),
                   static_cast<unsigned long long>(rank), call.mode, call.element, call.fold, static_cast<unsigned long long>(call.bytes),
                   static_cast<unsigned long long>(call.offset), ran ? 1 : 0, same ? 1 : 0, status[rank].status);
    }
  }
  for (void* stream : streams) table->stream_destroy(stream);
  table->pinned_free(0, status_address);
}

} // namespace

int main() {
  table = ep_cuda_table_of(EP_CUDA_TABLE_VERSION);
  int devices = 0;
  if (table == nullptr || table->device_count(&devices) != 0 || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  const uint64_t seeds = seeds_of(300);
  for (const int32_t size : {1, 2, 3, 4, 7}) compare(size, seeds);
  std::printf("%llu calls for each number of ranks, %d failures\n", static_cast<unsigned long long>(seeds), failures);
  return failures == 0 ? 0 : 1;
}
