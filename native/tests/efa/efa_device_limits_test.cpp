// Devices that give something else than they were asked for, or have less of it: deeper rings, few endpoints. And calls that come too early.
#include "efa_ranks.hpp"
#include "nic/efa/soft_device.hpp"

namespace {

using namespace ep::test;
using ep::nic::efa::soft_device;

// A device that makes rings of more requests, or completions, than it is asked for.
struct generosity {
  uint32_t requests = 1;    // times as many, for two of four endpoints
  uint32_t completions = 1; // likewise, for every completion queue
  bool stingy = false;      // completion queues have the depth of the first one, whatever is asked for
};

class generous_device final : public ep::dl::efa_device {
 public:
  generous_device(std::unique_ptr<ep::dl::efa_device> real, const generosity& how) : real_(std::move(real)), how_(how) {}
  soft_device& soft() const { return dynamic_cast<soft_device&>(*real_); }

  ep::result<ep::dl::efa_cq> create_cq(const ep::dl::efa_cq_spec& spec) override {
    ep::dl::efa_cq_spec given = spec;
    if (first_cq_ == 0) first_cq_ = spec.depth;
    given.depth = how_.stingy ? first_cq_ : spec.depth * how_.completions;
    return real_->create_cq(given);
  }
  ep::result<ep::dl::efa_endpoint> create_endpoint(const ep::dl::efa_endpoint_spec& spec) override {
    ep::dl::efa_endpoint_spec given = spec;
    if (spec.arrived.handle == nullptr && made_++ % 4 < 2) given.depth *= how_.requests;
    return real_->create_endpoint(given);
  }

  const std::string& name() const override { return real_->name(); }
  ep::result<ep::nothing> close() override { return real_->close(); }
  const ep::dl::efa_capabilities& capabilities() const override { return real_->capabilities(); }
  ep::result<ep::dl::efa_mr> reg_mr(const ep::dl::efa_memory& memory, uint32_t access) override { return real_->reg_mr(memory, access); }
  ep::result<ep::nothing> dereg_mr(const ep::dl::efa_mr& mr) override { return real_->dereg_mr(mr); }
  ep::result<ep::nothing> destroy_cq(const ep::dl::efa_cq& cq) override { return real_->destroy_cq(cq); }
  ep::result<ep::dl::efa_counter> open_counter(const ep::dl::efa_counter_spec& spec) override { return real_->open_counter(spec); }
  ep::result<ep::nothing> close_counter(const ep::dl::efa_counter& counter) override { return real_->close_counter(counter); }
  // Whoever makes it again gets the same.
  ep::result<ep::nothing> destroy_endpoint(const ep::dl::efa_endpoint& endpoint) override {
    --made_;
    return real_->destroy_endpoint(endpoint);
  }
  ep::result<ep::dl::efa_peer> insert_address(const ep::dl::efa_endpoint& of, const ep::dl::efa_address& address) override {
    return real_->insert_address(of, address);
  }
  ep::result<ep::nothing> remove_address(const ep::dl::efa_peer& peer) override { return real_->remove_address(peer); }
  ep::result<bool> poll_async(ep::dl::efa_event& event) override { return real_->poll_async(event); }

 private:
  std::unique_ptr<ep::dl::efa_device> real_;
  generosity how_;
  uint32_t first_cq_ = 0;
  uint32_t made_ = 0;
};

class generous_driver final : public ep::dl::efa_driver {
 public:
  explicit generous_driver(const generosity& how, const ep::nic::efa::soft_options& soft = {}) : real_(soft), how_(how) {}
  const char* backing() const override { return real_.backing(); }
  ep::result<std::vector<ep::dl::efa_device_info>> list_devices() override { return real_.list_devices(); }
  ep::result<std::unique_ptr<ep::dl::efa_device>> open(const std::string& name) override {
    auto opened = real_.open(name);
    if (!opened.ok()) return opened;
    return std::unique_ptr<ep::dl::efa_device>(std::make_unique<generous_device>(std::move(opened.value()), how_));
  }

 private:
  ep::nic::efa::soft_driver real_;
  generosity how_;
};

soft_device& soft_of(ep::dl::efa_device& opened) { return dynamic_cast<generous_device&>(opened).soft(); }

ep::efa::emulator_hooks hooks_of(ep::dl::efa_device& opened) {
  soft_device* device = &soft_of(opened);
  ep::efa::emulator_hooks hooks;
  hooks.doorbell_wake = reinterpret_cast<uint64_t>(device->doorbell_wake());
  hooks.region_wake = [device](const ep::dl::efa_mr& mr, const ep_wake_word* wake) { return device->region_wake(mr, wake); };
  hooks.counter_wake = [device](const ep::dl::efa_counter& counter, const ep_wake_word* wake) { return device->counter_wake(counter, wake); };
  hooks.cq_wake = [device](const ep::dl::efa_cq& cq, ep_wake_word* wake) { return device->cq_wake(cq, wake); };
  hooks.cq_consumer = [device](const ep::dl::efa_cq& cq, const uint64_t* polled) { return device->cq_polled(cq, polled); };
  return hooks;
}

struct bytes_range {
  uint64_t begin;
  uint64_t end;
};

// What posters of the rank's queue pairs write to, by the depth that they go round by.
std::vector<bytes_range> written_by_posters(const ep::efa::rank_endpoints& endpoints, uint32_t pairs) {
  std::vector<bytes_range> all;
  for (uint32_t i = 0; i < pairs; ++i) {
    const ep_efa_qp& qp = endpoints.kernel_qp(i);
    const auto at = reinterpret_cast<uint64_t>(&qp);
    all.push_back({at, at + sizeof qp});
    all.push_back({qp.finished, qp.finished + (uint64_t{qp.depth} + 63) / 64 * 8});
    all.push_back({qp.marks, qp.marks + (uint64_t{qp.depth} + 63) / 64 * 8});
    all.push_back({qp.requests, qp.requests + uint64_t{qp.depth} * sizeof(ep_efa_request)});
    if (qp.values != 0) all.push_back({qp.values, qp.values + uint64_t{qp.depth} * 8});
  }
  const ep_efa_device& device = endpoints.device();
  all.push_back({reinterpret_cast<uint64_t>(&device), reinterpret_cast<uint64_t>(&device + 1)});
  all.push_back({device.scratch, device.scratch + 8});
  return all;
}

void test_deeper_rings(bool inline_values, const generosity& how) {
  ep::efa::endpoint_options options;
  options.queue_pairs = 3;
  options.depth = 8;
  options.inline_values = inline_values;
  efa_ranks ranks(2, options, 8192, 4, [&] { return std::make_unique<generous_driver>(how); }, hooks_of);
  const ep::efa::rank_endpoints& endpoints = ranks.sides[0].nic->endpoints();
  std::vector<bytes_range> all = written_by_posters(endpoints, 5);
  for (uint32_t i = 0; i < 5; ++i) {
    const ep_efa_qp& qp = endpoints.kernel_qp(i);
    EP_CHECK_EQ(qp.depth, i % 4 < 2 ? 8 * how.requests : 8u);
    EP_CHECK(qp.cq_depth >= qp.depth);
    EP_CHECK_EQ(qp.values == 0, inline_values);
  }
  std::sort(all.begin(), all.end(), [](const bytes_range& a, const bytes_range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < all.size(); ++i) EP_CHECK(all[i - 1].end <= all[i].begin);
  check_requests(ranks);
  check_burst(ranks, 1000);
  EP_CHECK_EQ(soft_of(ranks.sides[0].nic->endpoints().nic()).counts().violations, 0u);
}

void test_no_place_for_completions() {
  ep::efa::endpoint_options options;
  options.depth = 8;
  generous_driver driver({.requests = 4, .completions = 1, .stingy = true});
  auto opened = must(driver.open(ep::nic::efa::soft_device_name));
  auto hooks = hooks_of(*opened);
  const auto refused = ep::efa::rank_endpoints::create(std::move(opened), options, std::move(hooks), nullptr);
  EP_CHECK(!refused.ok() && refused.why().sys_errno == EOPNOTSUPP);
  EP_CHECK(!refused.ok() && refused.why().message.find("a ring of 32 requests and one of 8 completions") != std::string::npos);

  options.depth = 32768;
  ep::nic::efa::soft_options large;
  large.engine.max_depth = 1 << 18;
  generous_driver deep({.requests = 2}, large);
  opened = must(deep.open(ep::nic::efa::soft_device_name));
  hooks = hooks_of(*opened);
  const auto deeper = ep::efa::rank_endpoints::create(std::move(opened), options, std::move(hooks), nullptr);
  EP_CHECK(!deeper.ok() && deeper.why().message.find("a ring of 65536 requests for the 32768 that were asked for") != std::string::npos);
}

// Each signal slot takes an endpoint, which run out before the counters do.
void test_few_endpoints() {
  ep::nic::efa::soft_options soft;
  soft.engine.max_endpoints = 4 + 2 + 4 + 3;
  efa_ranks ranks(2, {}, 8192, 4, [&] { return std::make_unique<generous_driver>(generosity{}, soft); }, hooks_of);
  const ep::efa::rank_endpoints& endpoints = ranks.sides[0].nic->endpoints();
  EP_CHECK_EQ(endpoints.signal_slots_left(), 3u);
  auto more = must(ep::symmetric_memory::create(ranks.sides[0].context, 64, 4));
  const size_t before = soft_of(ranks.sides[0].nic->endpoints().nic()).counts().doorbells;
  const auto refused = ranks.sides[0].nic->add_memory(*more);
  EP_CHECK(!refused.ok() && refused.why().status == EP_STATUS_BUSY);
  EP_CHECK(!refused.ok() && refused.why().message.find("4 signal slots need as many endpoints, and efa_soft0 has 3 left") != std::string::npos);
  EP_CHECK_EQ(soft_of(ranks.sides[0].nic->endpoints().nic()).counts().doorbells, before);
  auto few = must(ep::symmetric_memory::create(ranks.sides[0].context, 64, 3));
  EP_CHECK(ranks.sides[0].nic->add_memory(*few).ok());
  EP_CHECK_EQ(endpoints.signal_slots_left(), 0u);
  ranks.sides[0].nic->remove_memory(*few);
  ranks.sides[0].nic->remove_memory(*ranks.sides[0].memory);
  EP_CHECK_EQ(endpoints.signal_slots_left(), 7u);
}

// Nothing is routed before the ranks know each other, nor by half.
void test_too_early() {
  std::vector<ep_segment_handle> handles;
  std::vector<std::shared_ptr<ep::rank_context>> contexts;
  for (int32_t rank = 0; rank < 2; ++rank) {
    contexts.push_back(must(ep::rank_context::create(rank, 2, 2)));
    handles.push_back(contexts.back()->handle());
  }
  std::vector<std::shared_ptr<ep::efa::rank_nic>> nics;
  std::vector<ep::efa::rank_address> addresses;
  for (const auto& context : contexts) {
    (void)must(context->connect(handles));
    auto driver = std::make_unique<generous_driver>(generosity{});
    auto device = must(driver->open(ep::nic::efa::soft_device_name));
    auto hooks = hooks_of(*device);
    nics.push_back(must(ep::efa::rank_nic::create(context, std::move(driver), std::move(device), {}, std::move(hooks))));
    addresses.push_back(nics.back()->endpoints().address());
  }
  const auto memory = must(ep::symmetric_memory::create(contexts[0], 64, 2));
  const auto other = must(ep::symmetric_memory::create(contexts[1], 64, 2));
  std::vector<std::vector<uint8_t>> parts{must(nics[0]->add_memory(*memory)), must(nics[1]->add_memory(*other))};
  const auto early = [&] {
    const auto routed = nics[0]->route(*memory, parts);
    return !routed.ok() && routed.why().status == EP_STATUS_INVALID && routed.why().message.find("connect() comes first") != std::string::npos;
  };
  EP_CHECK(early());
  auto odd = addresses;
  odd[1].data.bytes[15] ^= 0x5a; // nobody has this address, after that of rank 0 was taken
  EP_CHECK(!nics[0]->endpoints().connect(odd).ok());
  EP_CHECK(!nics[0]->endpoints().connected());
  EP_CHECK(early());
  (void)must(nics[0]->endpoints().connect(addresses));
  EP_CHECK(!nics[0]->endpoints().connect(addresses).ok());

  auto half = parts;
  half[1].pop_back();
  EP_CHECK(!nics[0]->route(*memory, half).ok());
  EP_CHECK(!nics[0]->knows(*memory));
  EP_CHECK(nics[0]->route(*memory, parts).ok());
  EP_CHECK(!nics[0]->route(*memory, parts).ok());
  for (const auto& nic : nics) nic->stop();
  for (const auto& context : contexts) context->leave(true);
}

} // namespace

int main() {
  test_deeper_rings(true, {});
  test_deeper_rings(true, {.requests = 8});
  test_deeper_rings(false, {.requests = 8});
  test_deeper_rings(false, {.requests = 2, .completions = 16});
  test_no_place_for_completions();
  test_few_endpoints();
  test_too_early();
  return ep::check::finish();
}
