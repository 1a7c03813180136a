// The control path over the software NIC: directly, and through the very libraries' interface by which hardware is reached. InfiniBand and Ethernet, both kinds
// of completion queue; bytes and signals move, and the NIC, which checks every bit, has nothing to object to.
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "check.hpp"
#include "core/ibgda/probe.hpp"
#include "dl/shim/attach.hpp"
#include "nic/mlx5/soft_device.hpp"
#include "two_ranks.hpp"

namespace {

using namespace ep::ibgda;
using namespace ep::test;
using ep::dl::mlx5_device;
using ep::nic::soft_device;

// Remembers the devices it opened, which the shim hides behind its own.
class watched_driver final : public ep::dl::mlx5_driver {
 public:
  explicit watched_driver(bool ethernet) {
    ep::nic::soft_options options;
    options.engine.ethernet = ethernet;
    driver_ = std::make_unique<ep::nic::soft_driver>(options);
  }
  const char* backing() const override { return driver_->backing(); }
  ep::result<std::vector<ep::dl::mlx5_device_info>> list_devices() override { return driver_->list_devices(); }
  ep::result<std::unique_ptr<mlx5_device>> open(const std::string& name) override {
    auto opened = driver_->open(name);
    if (opened.ok()) devices.push_back(dynamic_cast<soft_device*>(opened.value().get()));
    return opened;
  }
  std::vector<soft_device*> devices;

 private:
  std::unique_ptr<ep::nic::soft_driver> driver_;
};

struct setting {
  bool through_shim;
  bool ethernet;
  bool collapsed;
};

// What a test stands on: the software NIC, with the libraries' interface in front of it or not.
struct floor {
  explicit floor(const setting& how) : below(how.ethernet) {
    if (how.through_shim) {
      EP_CHECK(ep::dl::verbs_shim_attach(EP_VERBS_SHIM, &below).ok());
      above = must(ep::dl::mlx5_verbs_driver({EP_VERBS_SHIM, EP_VERBS_SHIM}));
    }
    EP_CHECK_EQ(std::string(driver().backing()), std::string(how.through_shim ? "hardware" : "soft"));
  }
  ~floor() { EP_CHECK(ep::dl::verbs_shim_attach(EP_VERBS_SHIM, nullptr).ok()); }
  ep::dl::mlx5_driver& driver() { return above != nullptr ? *above : static_cast<ep::dl::mlx5_driver&>(below); }

  watched_driver below;
  std::unique_ptr<ep::dl::mlx5_driver> above;
};

struct pair_of_ranks : floor, two_ranks {
  explicit pair_of_ranks(const setting& how) : floor(how), two_ranks(driver(), {}, how.collapsed) {}
};

void expect_no_violations(const pair_of_ranks& world) {
  for (soft_device* device : world.below.devices) {
    for (const auto& what : device->violations()) std::fprintf(stderr, "  %s\n", ep::nic::violation_text(what).c_str());
    EP_CHECK(device->violations().empty());
  }
}

void moves_bytes_and_signals(const setting& how) {
  const pair_of_ranks world(how);
  move_bytes_and_signals(world, 12);
  expect_no_violations(world);
}

// A key that nobody has: the queue pair that asked breaks, with everything that says why; the others go on. In a collapsed CQ the error may be overwritten by
// the flushed request behind it before anybody looks, so it is a ring here.
void breaks_one_queue_pair(const setting& how) {
  const pair_of_ranks world(how);
  ep_kernel_status status{};
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey ^ 0xff00, &status));
  const ep_ibgda_qp& broken = world.qp(0, 2);
  EP_CHECK_EQ(broken.broken, uint64_t{EP_IBGDA_BROKEN});
  EP_CHECK_EQ(broken.syndrome, 0x13u); // remote access
  EP_CHECK_EQ(broken.rkey, world.remote[1].mr.rkey ^ 0xff00);
  EP_CHECK_EQ(world.signal(1), uint64_t{0});
  EP_CHECK_EQ(world.queues[0]->state(2).value(), uint32_t{EP_MLX5_QP_STATE_ERR});
  status = {};
  EP_CHECK(world.put(0, 1, 3, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.signal(1), uint64_t{1});
  // Queue pair 0 of rank 1 leads to the broken one, queue pair 1 to the sound one.
  EP_CHECK(world.put(1, 0, 1, world.remote[0].mr.rkey, &status));
  expect_no_violations(world);
}

// What was sent to a peer that was cut off is flushed at once; the peer sends on to others.
void cuts_a_peer_off(const setting& how) {
  const pair_of_ranks world(how);
  EP_CHECK(world.queues[0]->cut(1).ok());
  EP_CHECK_EQ(world.queues[0]->state(2).value(), uint32_t{EP_MLX5_QP_STATE_ERR});
  EP_CHECK_EQ(world.queues[0]->state(0).value(), uint32_t{EP_MLX5_QP_STATE_RTS});
  ep_kernel_status status{};
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(0, 2).syndrome, 0x05u); // flushed
  EP_CHECK_EQ(world.signal(1), uint64_t{0});
  // Nobody answers there any more for the peer's queue pair.
  EP_CHECK(!world.put(1, 0, 0, world.remote[0].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(1, 0).syndrome, 0x15u); // retries exceeded
}

void meets_again(const setting& how) {
  const pair_of_ranks world(how);
  move_bytes_and_signals(world, 3);
  break_and_meet_again(world);
  expect_no_violations(world);
}

void revokes_keys(const setting& how) {
  pair_of_ranks world(how);
  ep_kernel_status status{};
  EP_CHECK(world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK(world.queues[1]->release_memory(world.remote[1]).ok());
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(0, 2).syndrome, 0x13u);
  EP_CHECK_EQ(world.signal(1), uint64_t{1});
}

void tells_of_the_link(const setting& how) {
  const pair_of_ranks world(how);
  while (world.queues[0]->next_event().value().has_value()) {}
  world.below.devices[0]->set_link(false);
  auto told = must(world.queues[0]->next_event());
  EP_CHECK(told.has_value());
  if (told.has_value()) EP_CHECK(told->event.kind == ep::dl::mlx5_event_kind::port_down && says(told->text, "port 1 is down"));
  world.below.devices[0]->set_link(true);
  told = must(world.queues[0]->next_event());
  EP_CHECK(told.has_value() && told->event.kind == ep::dl::mlx5_event_kind::port_up);
}

void probes_the_software(bool ethernet) {
  watched_driver driver(ethernet);
  const probe_report report = probe_driver(driver, {});
  EP_CHECK_EQ(report.what, missing::nothing);
  EP_CHECK_EQ(report.device, std::string(ep::nic::soft_device_name));
  EP_CHECK(report.link == (ethernet ? ep::dl::mlx5_link::ethernet : ep::dl::mlx5_link::infiniband));
  // By the rule: RoCE v2 with an IPv4 address, or the first one of InfiniBand.
  EP_CHECK_EQ(report.gid.index, ethernet ? 3u : 0u);
  EP_CHECK(!ethernet || says(gid_text(report.gid.gid.raw), "::ffff:10."));
}

// Nothing stays behind: descriptors are what segments, ports and events take.
void leaks_nothing() {
  const auto descriptors = [] {
    long count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
    return count;
  };
  const long before = descriptors();
  const uint64_t segments = ep::segment_count();
  for (const bool through_shim : {false, true}) moves_bytes_and_signals({through_shim, true, true});
  EP_CHECK_EQ(descriptors(), before);
  EP_CHECK_EQ(ep::segment_count(), segments);
}

} // namespace

int main() {
  for (const bool through_shim : {false, true}) {
    for (const bool ethernet : {false, true}) {
      for (const bool collapsed : {false, true}) moves_bytes_and_signals({through_shim, ethernet, collapsed});
      breaks_one_queue_pair({through_shim, ethernet, false});
    }
    cuts_a_peer_off({through_shim, true, false});
    for (const bool collapsed : {false, true}) meets_again({through_shim, collapsed, collapsed});
    revokes_keys({through_shim, false, false});
    tells_of_the_link({through_shim, true, true});
  }
  probes_the_software(true);
  probes_the_software(false);
  leaks_nothing();
  return ep::check::finish();
}
