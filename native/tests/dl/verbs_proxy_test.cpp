// The `verbs` backing. Its data path needs a real RDMA device: tests/verbs-guest boots a kernel with two soft-RoCE devices and runs this program there.
// Arguments: the names of two devices that reach each other. Without, what needs none is tested, and the rest is said not to be.
#include "nic/verbs/proxy.hpp"

#include <cerrno>

#include "two_ranks.hpp"

namespace {

using namespace ep::ibgda;
using namespace ep::test;

constexpr uint8_t short_timeout = 14; // 67 ms a try

std::array<device_wish, 2> wishes(const char* first, const char* second) {
  std::array<device_wish, 2> both;
  both[0].filter = first;
  both[1].filter = second;
  return both;
}

void says_what_is_missing() {
  auto absent = ep::nic::verbs_proxy_driver("libep-no-such-library.so.1");
  EP_CHECK(!absent.ok() && absent.why().sys_errno == ELIBACC);
  auto other = ep::nic::verbs_proxy_driver("libm.so.6");
  EP_CHECK(!other.ok() && other.why().sys_errno == ELIBBAD && says(other.why().message, "ibv_create_qp@IBVERBS_1.1"));
}

void moves_bytes(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  for (const bool collapsed : {true, false}) {
    const two_ranks world(driver, wishes(first, second), collapsed, short_timeout);
    move_bytes_and_signals(world, 12);
  }
}

// As with the software NIC: one queue pair breaks, and says why; the others go on.
void breaks_one_queue_pair(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  const two_ranks world(driver, wishes(first, second), false, short_timeout);
  ep_kernel_status status{};
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey ^ 0xff00, &status));
  const ep_ibgda_qp& broken = world.qp(0, 2);
  EP_CHECK_EQ(broken.broken, uint64_t{EP_IBGDA_BROKEN});
  EP_CHECK_EQ(broken.syndrome, 0x13u); // remote access
  EP_CHECK_EQ(world.signal(1), uint64_t{0});
  EP_CHECK_EQ(world.queues[0]->state(2).value(), uint32_t{EP_MLX5_QP_STATE_ERR});
  status = {};
  EP_CHECK(world.put(0, 1, 3, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.signal(1), uint64_t{1});
}

void cuts_a_peer_off(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  const two_ranks world(driver, wishes(first, second), false, short_timeout);
  EP_CHECK(world.queues[0]->cut(1).ok());
  ep_kernel_status status{};
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(0, 2).syndrome, 0x05u); // flushed
  status = {};
  EP_CHECK(!world.put(1, 0, 0, world.remote[0].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(1, 0).syndrome, 0x15u); // retries exceeded
}

void revokes_keys(ep::dl::mlx5_driver& driver, const char* first, const char* second) {
  const two_ranks world(driver, wishes(first, second), false, short_timeout);
  ep_kernel_status status{};
  EP_CHECK(world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK(world.queues[1]->release_memory(world.remote[1]).ok());
  EP_CHECK(!world.put(0, 1, 2, world.remote[1].mr.rkey, &status));
  EP_CHECK_EQ(world.qp(0, 2).syndrome, 0x13u);
  EP_CHECK_EQ(world.signal(1), uint64_t{1});
}

} // namespace

int main(int count, char** arguments) {
  says_what_is_missing();
  if (count == 3) {
    auto driver = must(ep::nic::verbs_proxy_driver());
    for (const auto& test : {moves_bytes, breaks_one_queue_pair, cuts_a_peer_off, revokes_keys}) test(*driver, arguments[1], arguments[2]);
  } else {
    std::printf("NOT run over a device: none was named\n");
  }
  return ep::check::finish();
}
