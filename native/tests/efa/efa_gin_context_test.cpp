// Contexts of the GIN facade over the control path and the software NIC: what they do, what they take of the device and give back, and what is refused.
#include "gin_ranks.hpp"
#include "soft_ranks.hpp"

namespace {

using namespace ep::test;
using ep::efa::gin_context;
using ep::efa::gin_spec;
using ep::nic::efa::soft_device;

void test_traffic() {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    ep::nic::efa::soft_options soft;
    soft.engine.seed = seed;
    soft.engine.fragment_bytes = 8 << seed;
    ep::efa::endpoint_options options;
    options.inline_values = seed % 2 == 0;
    const auto ranks = soft_ranks(soft, options);
    check_gin(*ranks);
    EP_CHECK_EQ(violations(*ranks), 0u);
  }
}

// The pull request's test: right for every seed by the check that looks at every value. Its own check, the eighth for all, is wrong for some.
void test_putvalue() {
  uint64_t behind = 0;
  const uint64_t seeds = 12;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    ep::nic::efa::soft_options soft;
    soft.engine.seed = seed;
    ep::efa::endpoint_options options;
    options.inline_values = seed % 2 == 0;
    options.depth = seed % 3 == 0 ? 8 : 64;
    const auto ranks = soft_ranks(soft, options);
    // Long enough to be looked at: the seventh value of a burst.
    auto& device = dynamic_cast<soft_device&>(ranks->sides[0].nic->endpoints().nic());
    (void)must(device.set_faults("delay stage=land ns=20000000 skip=" + std::to_string(2 + seed % 7) + " count=1"));
    behind += check_putvalue(*ranks, 20);
    EP_CHECK_EQ(violations(*ranks), 0u);
  }
  std::printf("the eighth value came before another one in %llu rounds\n", static_cast<unsigned long long>(behind));
  EP_CHECK(behind != 0);
}

void test_capacity() {
  ep::nic::efa::soft_options soft;
  soft.engine.max_counters = 10;
  const auto ranks = soft_ranks(soft);
  const auto& nic = ranks->sides[0].nic;
  ep::efa::rank_endpoints& endpoints = nic->endpoints();
  const uint32_t endpoints_before = endpoints.endpoints_left();
  EP_CHECK_EQ(endpoints.counters_left(), 6u);
  const auto refused = gin_context::create(nic, {4, 3});
  EP_CHECK(!refused.ok() && refused.why().status == EP_STATUS_CAPACITY && refused.why().message.find("efa_soft0 has 6 left") != std::string::npos);
  EP_CHECK_EQ(endpoints.counters_left(), 6u);
  for (const gin_spec& spec : {gin_spec{4, 2}, gin_spec{0, 0}, gin_spec{0, 6}, gin_spec{6, 0}}) {
    auto made = must(gin_context::create(nic, spec));
    EP_CHECK_EQ(endpoints.counters_left(), 6 - spec.signals - spec.counters);
    EP_CHECK_EQ(endpoints_before - endpoints.endpoints_left(), 1 + std::max(spec.signals, spec.counters));
    EP_CHECK_EQ(made->device().qp_count, 1 + std::max(spec.signals, spec.counters));
    made->close();
    made->close();
    EP_CHECK_EQ(endpoints.counters_left(), 6u);
    EP_CHECK_EQ(endpoints.endpoints_left(), endpoints_before);
  }
  EP_CHECK(!gin_context::create(nic, {ep::efa::gin_max_ids + 1, 0}).ok());
  EP_CHECK(!gin_context::create(nic, {0, 0, 3}).ok());

  // The device itself lacks one in the middle: nothing is kept.
  const auto few = soft_ranks(soft);
  few->sides[0].nic->endpoints().counters_taken(5);
  const auto late = gin_context::create(few->sides[0].nic, {8, 0});
  EP_CHECK(!late.ok() && late.why().sys_errno == ENOMEM);
  EP_CHECK_EQ(few->sides[0].nic->endpoints().counters_left(), 11u);
  EP_CHECK_EQ(few->sides[0].nic->endpoints().endpoints_left(), endpoints_before);
}

void test_refusals() {
  const auto ranks = soft_ranks();
  const auto other = soft_ranks();
  const auto made = must(gin_context::create(ranks->sides[0].nic, {2, 1}));
  const auto odd = must(gin_context::create(ranks->sides[1].nic, {1, 2}));
  const auto mismatch = made->connect(std::vector{made->address(), odd->address()});
  EP_CHECK(!mismatch.ok() && mismatch.why().status == EP_STATUS_MISMATCH && mismatch.why().message.find("rank 1") != std::string::npos);
  EP_CHECK(!made->connect(std::vector<std::vector<uint8_t>>{made->address()}).ok());
  const auto like = must(gin_context::create(ranks->sides[1].nic, {2, 1}));
  EP_CHECK(made->connect(std::vector{made->address(), like->address()}).ok());
  EP_CHECK(!made->connect(std::vector{made->address(), like->address()}).ok());
  EP_CHECK(!made->memory_of(*other->sides[0].memory).ok());
  const auto memory = must(made->memory_of(*ranks->sides[0].memory));
  EP_CHECK_EQ(memory.header.magic, static_cast<uint32_t>(EP_MAGIC_EFA_MEMORY));
  EP_CHECK_EQ(memory.device, reinterpret_cast<uint64_t>(&made->device()));
}

// What is signalled to a context that has gone breaks the sender's queue pair, and says so; a newer context of the same device hears nothing of it.
void test_straggler() {
  const auto ranks = soft_ranks();
  gin_ranks gins(*ranks, {1, 0});
  gins.contexts[1]->close();
  gin_ranks newer(*ranks, {1, 0});
  const auto ended = gins.run([](ep::fast_context& ctx, const ep::efa_gin<>& gin, const ep_efa_memory&, int32_t rank, ep_kernel_status* status) {
    const ep::thread_coop<ep::fast_context> coop{ctx};
    return rank == 1 || (gin.signal(ctx, coop, {nullptr, 2}, 1, ep::gin_signal_inc{0}, {}, status) && gin.flush(ctx, coop, status));
  });
  EP_CHECK_EQ(ended[0].status, static_cast<uint32_t>(EP_STATUS_SYSTEM));
  EP_CHECK_EQ(ended[0].stage, static_cast<uint32_t>(EP_STAGE_NIC));
  EP_CHECK_EQ(ended[0].found >> EP_NIC_FOUND_SYNDROME & 0xff, uint64_t{EP_EFA_STATUS_REMOTE_BAD_DEST_QPN});
  uint64_t heard = 1;
  check_ended(newer.run([&](ep::fast_context& ctx, const ep::efa_gin<>& gin, const ep_efa_memory&, int32_t rank, ep_kernel_status*) {
    if (rank == 1) heard = gin.read_signal(ctx, 0);
    return true;
  }));
  EP_CHECK_EQ(heard, 0u);
}

} // namespace

int main() {
  test_traffic();
  test_putvalue();
  test_capacity();
  test_refusals();
  test_straggler();
  return ep::check::finish();
}
