// The hardware backing of EFA through the real path (dlopen, the library's structs and tables, its ways to fail), over the shim and the software NIC; and each thing that a machine
// may lack.
#include "../efa/gin_ranks.hpp"
#include "dl/efa_libfabric.hpp"
#include "dl/shim/fabric_attach.hpp"
#include "nic/efa/soft_device.hpp"

namespace {

using namespace ep::test;
using ep::nic::efa::soft_driver;
using ep::nic::efa::soft_options;

bool says(const ep::failure& why, int sys_errno, const std::string& part) {
  const bool right = why.sys_errno == sys_errno && why.message.find(part) != std::string::npos;
  if (!right) std::fprintf(stderr, "  errno %d '%s' does not say %d '%s'\n", why.sys_errno, why.message.c_str(), sys_errno, part.c_str());
  return right;
}

ep::efa::emulator_hooks no_hooks(ep::dl::efa_device&) { return {}; } // hardware has none

// The suites of the rank NIC and of the GIN facade, by way of the library.
void test_requests() {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    soft_options soft;
    soft.engine.seed = seed;
    soft.engine.fragment_bytes = 64;
    soft_driver below(soft);
    EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, &below).ok());
    efa_ranks ranks(2, {}, 8192, 4, [] { return must(ep::dl::efa_libfabric_driver(EP_FABRIC_SHIM)); }, no_hooks);
    EP_CHECK_EQ(std::string(ranks.sides[0].nic->endpoints().nic().name()), std::string(ep::nic::efa::soft_device_name));
    // Without inline writes, which the library does not tell of, values wait in memory.
    EP_CHECK(ranks.sides[0].nic->endpoints().kernel_qp(0).values != 0);
    check_gin(ranks);
    (void)check_putvalue(ranks, 10);
    check_requests(ranks);
    check_burst(ranks, 300);
  }
}

void test_what_is_missing() {
  const auto nowhere = ep::dl::efa_libfabric_driver("libfabric-of-nobody.so.1");
  EP_CHECK(!nowhere.ok() && says(nowhere.why(), ELIBACC, "libfabric-of-nobody.so.1"));
  const auto another = ep::dl::efa_libfabric_driver("libm.so.6");
  EP_CHECK(!another.ok() && says(another.why(), ELIBBAD, "lacks fi_version, fi_getinfo, fi_freeinfo, fi_dupinfo, fi_fabric, fi_strerror"));

  soft_options soft;
  soft_driver below(soft);
  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, &below, {.version = 1u << 16 | 17}).ok());
  const auto old = ep::dl::efa_libfabric_driver(EP_FABRIC_SHIM);
  EP_CHECK(!old.ok() && says(old.why(), ELIBBAD, "libfabric 1.17: requests that kernels post need 2.5 or newer"));

  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, nullptr).ok());
  const auto bare = must(ep::dl::efa_libfabric_driver(EP_FABRIC_SHIM));
  EP_CHECK(must(bare->list_devices()).empty());
  const auto none = ep::efa::device_open(*bare, "");
  EP_CHECK(!none.ok() && says(none.why(), ENODEV, "no EFA device can be used: there is none"));

  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, &below, {.gda = false}).ok());
  const auto plain = ep::efa::device_open(*must(ep::dl::efa_libfabric_driver(EP_FABRIC_SHIM)), "");
  EP_CHECK(!plain.ok() && says(plain.why(), EOPNOTSUPP, "has no operations for requests that a GPU posts"));

  soft.engine.counters = false;
  soft_driver uncounted(soft);
  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, &uncounted).ok());
  const auto driver = must(ep::dl::efa_libfabric_driver(EP_FABRIC_SHIM));
  const auto blind = ep::efa::rank_endpoints::create(must(ep::efa::device_open(*driver, "")), {}, {}, nullptr);
  EP_CHECK(!blind.ok() && says(blind.why(), EOPNOTSUPP, "has no completion counters in memory"));
  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, nullptr).ok());
}

// A device is not closed under what lives on it, and leaves nothing behind.
void test_lifetime() {
  soft_options soft;
  soft_driver below(soft);
  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, &below).ok());
  const auto driver = must(ep::dl::efa_libfabric_driver(EP_FABRIC_SHIM));
  const auto device = must(driver->open(ep::nic::efa::soft_device_name));
  alignas(64) static uint8_t bytes[4096];
  const auto mr = must(device->reg_mr({reinterpret_cast<uint64_t>(bytes), sizeof bytes}, ep::dl::EFA_ACCESS_LOCAL_WRITE));
  EP_CHECK(mr.lkey != 0 && mr.rkey != mr.lkey);
  const auto busy = device->close();
  EP_CHECK(!busy.ok() && says(busy.why(), EBUSY, "1 objects of it live"));
  EP_CHECK(device->dereg_mr(mr).ok());
  EP_CHECK(!device->reg_mr({}, 0).ok());
  EP_CHECK(device->close().ok());
  EP_CHECK(!driver->open("rdmap0s0").ok());
  EP_CHECK(ep::dl::fabric_shim_attach(EP_FABRIC_SHIM, nullptr).ok());
}

} // namespace

int main() {
  test_requests();
  test_what_is_missing();
  test_lifetime();
  return ep::check::finish();
}
