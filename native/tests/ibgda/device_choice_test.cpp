// Which GID, which port, which device: rules and their refusals.
#include "core/ibgda/device_choice.hpp"

#include "check.hpp"
#include "fake_sysfs.hpp"
#include "scripted_nic.hpp"

namespace {

using namespace ep::ibgda;
using namespace ep::test;
using ep::dl::mlx5_gid_type;
using ep::dl::mlx5_link;
using ep::dl::mlx5_port_state;

bool says(const std::string& message, const std::string& part) {
  const bool found = message.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "  '%s' does not say '%s'\n", message.c_str(), part.c_str());
  return found;
}

// The index that the rule takes of these GIDs, or -1.
int rule(mlx5_link link, std::vector<ep::dl::mlx5_gid> gids, std::optional<uint32_t> wanted = std::nullopt, std::string* message = nullptr, uint32_t* status = nullptr) {
  nic_script script;
  scripted_port port = link == mlx5_link::ethernet ? ethernet_port() : infiniband_port();
  port.gids = std::move(gids);
  port.facts.gid_count = static_cast<uint32_t>(port.gids.size()) + 2; // two empty entries at the end
  script.devices = {{"mlx5_0", {port}}};
  scripted_device device(script, "mlx5_0");
  auto chosen = gid_choose(device, 1, port.facts, wanted);
  if (chosen.ok()) return static_cast<int>(chosen.value().index);
  if (message != nullptr) *message = chosen.why().message;
  if (status != nullptr) *status = chosen.why().status;
  return -1;
}

void chooses_gids_by_rule() {
  using enum mlx5_gid_type;
  const auto v6 = [](mlx5_gid_type type) { return gid_of(type, {0x20, 0x01}, {1}); };
  EP_CHECK_EQ(rule(mlx5_link::ethernet, {local_gid(roce_v1, 1), local_gid(roce_v2, 1), ipv4_gid(roce_v1, 10, 0, 0, 1), ipv4_gid(roce_v2, 10, 0, 0, 1)}), 3);
  EP_CHECK_EQ(rule(mlx5_link::ethernet, {local_gid(roce_v2, 1), v6(roce_v2), ipv4_gid(roce_v2, 10, 0, 0, 1), ipv4_gid(roce_v2, 10, 0, 0, 2)}), 2);
  EP_CHECK_EQ(rule(mlx5_link::ethernet, {local_gid(roce_v2, 1), v6(roce_v1), v6(roce_v2)}), 2);
  EP_CHECK_EQ(rule(mlx5_link::ethernet, {local_gid(roce_v1, 1), local_gid(roce_v2, 1)}), 1);
  EP_CHECK_EQ(rule(mlx5_link::infiniband, {local_gid(infiniband, 7), v6(infiniband)}), 0);
  EP_CHECK_EQ(rule(mlx5_link::infiniband, {{}, local_gid(infiniband, 7)}), 1);
}

void refuses_gids() {
  using enum mlx5_gid_type;
  std::string message;
  uint32_t status = 0;
  // RoCE v1 alone: the rule takes none, and says what there is.
  EP_CHECK_EQ(rule(mlx5_link::ethernet, {ipv4_gid(roce_v1, 10, 1, 2, 3)}, std::nullopt, &message, &status), -1);
  EP_CHECK_EQ(status, uint32_t{EP_STATUS_SYSTEM});
  EP_CHECK(says(message, "0: RoCE v1 ::ffff:10.1.2.3"));
  EP_CHECK_EQ(rule(mlx5_link::infiniband, {}, std::nullopt, &message), -1);
  EP_CHECK(says(message, "it has none"));
}

void lets_the_index_be_named() {
  using enum mlx5_gid_type;
  const std::vector<ep::dl::mlx5_gid> gids{local_gid(roce_v1, 1), local_gid(roce_v2, 1), ipv4_gid(roce_v2, 10, 0, 0, 1)};
  EP_CHECK_EQ(rule(mlx5_link::ethernet, gids, 1), 1);
  EP_CHECK_EQ(rule(mlx5_link::ethernet, gids, 0), 0); // RoCE v1, if one insists
  std::string message;
  uint32_t status = 0;
  EP_CHECK_EQ(rule(mlx5_link::ethernet, gids, 4, &message, &status), -1);
  EP_CHECK_EQ(status, uint32_t{EP_STATUS_INVALID});
  EP_CHECK(says(message, "gid index 4 of mlx5_0 port 1 is empty"));
  EP_CHECK_EQ(rule(mlx5_link::ethernet, gids, 5, &message), -1);
  EP_CHECK(says(message, "0 to 5 (excluded)"));
  EP_CHECK_EQ(rule(mlx5_link::infiniband, gids, 1, &message), -1);
  EP_CHECK(says(message, "RoCE v2, which does not fit an InfiniBand port"));
}

void reads_filters() {
  const auto passes = [](const std::string& filter, const std::string& device) {
    auto answer = filter_match(filter, device);
    EP_CHECK(answer.ok());
    return answer.value().passes;
  };
  EP_CHECK(passes("", "mlx5_0"));
  EP_CHECK(passes("mlx5_0,mlx5_3", "mlx5_3"));
  EP_CHECK(!passes("mlx5_1", "mlx5_10"));
  EP_CHECK(passes("mlx5_*", "mlx5_10"));
  EP_CHECK(!passes("mlx5_*", "irdma0"));
  EP_CHECK(!passes("^mlx5_0,mlx5_1", "mlx5_1"));
  EP_CHECK(passes("^mlx5_0,mlx5_1", "mlx5_2"));
  EP_CHECK_EQ(filter_match("mlx5_0:2", "mlx5_0").value().ports.size(), size_t{1});
  EP_CHECK_EQ(filter_match("mlx5_0:2,mlx5_0", "mlx5_0").value().ports.size(), size_t{0});
  for (const char* bad : {",", "mlx5_0,", "mlx5_0:x", "mlx5_0:0", "mlx5_0:256", "ml*x5", "mlx5_0, mlx5_1", "^", "a^b"}) {
    auto answer = filter_match(bad, "mlx5_0");
    EP_CHECK(!answer.ok() && answer.why().status == EP_STATUS_INVALID);
    if (!answer.ok()) EP_CHECK(says(answer.why().message, std::string("device filter '") + bad + "'"));
  }
  auto port_excluded = filter_match("^mlx5_0:1", "mlx5_0");
  EP_CHECK(!port_excluded.ok());
}

void takes_the_nearest_that_works() {
  const fake_sysfs sys;
  two_sockets(sys);
  nic_script script;
  scripted_port down = ethernet_port();
  down.facts.state = mlx5_port_state::down;
  script.devices = {{"irdma0", {ethernet_port()}}, {"mlx5_0", {down}}, {"mlx5_1", {ethernet_port()}}, {"mlx5_10", {ethernet_port()}}, {"mlx5_2", {ethernet_port()}}};
  script.unsupported = {{"irdma0", "a device of another vendor"}};
  scripted_driver driver(script);
  const topology machine = topology_read(sys.root());
  const auto open = [&](const std::string& gpu, const std::string& filter) {
    device_wish wish;
    wish.sysfs = sys.root();
    wish.filter = filter;
    for (const gpu_place& one : machine.gpus) {
      if (one.address == gpu) wish.near = one.place;
    }
    return device_open(driver, wish);
  };
  auto first = open("0000:13:00.0", "");
  EP_CHECK(first.ok());
  EP_CHECK_EQ(first.value().device->name(), "mlx5_1");
  EP_CHECK_EQ(first.value().far, distance::switched);
  EP_CHECK_EQ(first.value().gid.index, 3u);
  EP_CHECK_EQ(first.value().passed_over.size(), size_t{1});
  EP_CHECK(says(first.value().passed_over.at(0), "mlx5_0: port 1 is down"));
  auto second = open("0000:86:00.0", "");
  EP_CHECK(second.ok());
  EP_CHECK_EQ(second.value().device->name(), "mlx5_10");
  auto named = open("0000:86:00.0", "mlx5_2");
  EP_CHECK(named.ok());
  EP_CHECK_EQ(named.value().device->name(), "mlx5_2");
  EP_CHECK_EQ(named.value().far, distance::system);
}

void takes_the_second_port_if_the_first_is_down() {
  nic_script script;
  scripted_port down = infiniband_port();
  down.facts.state = mlx5_port_state::init;
  script.devices = {{"mlx5_0", {down, infiniband_port()}}};
  scripted_driver driver(script);
  auto opened = device_open(driver, {});
  EP_CHECK(opened.ok());
  EP_CHECK_EQ(int{opened.value().port}, 2);
  device_wish first_only;
  first_only.filter = "mlx5_0:1";
  auto refused = device_open(driver, first_only);
  EP_CHECK(!refused.ok() && refused.why().sys_errno == ENETDOWN);
  if (!refused.ok()) EP_CHECK(says(refused.why().message, "no subnet manager?"));
}

void says_why_nothing_fits() {
  nic_script none;
  none.devices.clear();
  scripted_driver empty(none);
  auto nothing_there = device_open(empty, {});
  EP_CHECK(!nothing_there.ok() && nothing_there.why().sys_errno == ENODEV);

  nic_script script;
  script.devices = {{"irdma0", {ethernet_port()}}, {"mlx5_0", {ethernet_port()}}, {"mlx5_1", {ethernet_port()}}};
  script.unsupported = {{"irdma0", "a device of another vendor"}};
  script.fails = [](const std::string& call, int) {
    return call == "open mlx5_0" ? ep::failure{EP_STATUS_SYSTEM, EPERM, "the kernel does not let this user use DevX"} : ep::failure{EP_STATUS_OK, 0, ""};
  };
  scripted_driver driver(script);
  device_wish wish;
  wish.filter = "mlx5_0,irdma0";
  auto refused = device_open(driver, wish);
  EP_CHECK(!refused.ok());
  EP_CHECK_EQ(refused.why().sys_errno, EPERM);
  EP_CHECK(says(refused.why().message, "irdma0: a device of another vendor"));
  EP_CHECK(says(refused.why().message, "mlx5_0: the kernel does not let this user use DevX"));
  EP_CHECK(says(refused.why().message, "mlx5_1: not in the device filter 'mlx5_0,irdma0'"));
  device_wish unreadable;
  unreadable.filter = "mlx5_0:none";
  auto invalid = device_open(driver, unreadable);
  EP_CHECK(!invalid.ok() && invalid.why().status == EP_STATUS_INVALID);
}

} // namespace

int main() {
  chooses_gids_by_rule();
  refuses_gids();
  lets_the_index_be_named();
  reads_filters();
  takes_the_nearest_that_works();
  takes_the_second_port_if_the_first_is_down();
  says_why_nothing_fits();
  return ep::check::finish();
}
