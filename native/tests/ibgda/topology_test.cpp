// Distances, on a sysfs of our own making.
#include "core/ibgda/topology.hpp"

#include <algorithm>

#include "check.hpp"
#include "fake_sysfs.hpp"

namespace {

using namespace ep::ibgda;

const nic_place& nic(const topology& machine, const std::string& name) {
  return *std::find_if(machine.nics.begin(), machine.nics.end(), [&](const nic_place& one) { return one.name == name; });
}
const gpu_place& gpu(const topology& machine, const std::string& address) {
  return *std::find_if(machine.gpus.begin(), machine.gpus.end(), [&](const gpu_place& one) { return one.address == address; });
}
std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

void finds_what_is_there() {
  const ep::test::fake_sysfs sys;
  ep::test::two_sockets(sys);
  const topology machine = topology_read(sys.root());
  std::vector<std::string> nics;
  for (const nic_place& one : machine.nics) nics.push_back(one.name);
  EP_CHECK_EQ(joined(nics), "mlx5_0 mlx5_1 mlx5_2 mlx5_10 rxe0");
  std::vector<std::string> gpus;
  for (const gpu_place& one : machine.gpus) gpus.push_back(one.address);
  EP_CHECK_EQ(joined(gpus), "0000:13:00.0 0000:21:00.0 0000:86:00.0");
  EP_CHECK_EQ(machine.numa_nodes.size(), size_t{2});
  EP_CHECK_EQ(nic(machine, "mlx5_10").place.numa_node, 1);
  EP_CHECK(nic(machine, "rxe0").place.path.empty());
}

void measures_every_distance() {
  const ep::test::fake_sysfs sys;
  ep::test::two_sockets(sys);
  const topology machine = topology_read(sys.root());
  const auto between = [&](const std::string& name, const std::string& address) {
    return distance_between(nic(machine, name).place, gpu(machine, address).place);
  };
  EP_CHECK_EQ(distance_between(nic(machine, "mlx5_0").place, nic(machine, "mlx5_1").place), distance::same);
  EP_CHECK_EQ(between("mlx5_0", "0000:13:00.0"), distance::switched);
  EP_CHECK_EQ(between("mlx5_10", "0000:86:00.0"), distance::bridged);
  EP_CHECK_EQ(between("mlx5_2", "0000:13:00.0"), distance::root);
  EP_CHECK_EQ(between("mlx5_0", "0000:21:00.0"), distance::node);
  EP_CHECK_EQ(between("mlx5_10", "0000:21:00.0"), distance::system);
  EP_CHECK_EQ(between("rxe0", "0000:21:00.0"), distance::unknown);
  EP_CHECK_EQ(distance_of_node(nic(machine, "mlx5_0").place, 0), distance::node);
  EP_CHECK_EQ(distance_of_node(nic(machine, "mlx5_0").place, 1), distance::system);
  EP_CHECK_EQ(distance_of_node(nic(machine, "mlx5_0").place, -1), distance::unknown);
}

// Near the GPU that is named; near the memory of the CPUs that the process is held to, unless those are of several nodes.
void places_posters() {
  const ep::test::fake_sysfs sys;
  ep::test::two_sockets(sys);
  const auto node_of = [&](std::initializer_list<int> allowed) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (const int cpu : allowed) CPU_SET(cpu, &cpus);
    return poster_place(sys.root(), "", cpus).value().numa_node;
  };
  EP_CHECK_EQ(node_of({1, 4}), 0);
  EP_CHECK_EQ(node_of({2, 7}), 1);
  EP_CHECK_EQ(node_of({1, 2}), -1);
  EP_CHECK_EQ(node_of({8}), -1);
  EP_CHECK_EQ(node_of({}), -1);
  const cpu_set_t none{};
  EP_CHECK_EQ(poster_place(sys.root(), "0000:86:00.0", none).value().path.back(), "0000:86:00.0");
  auto missing = poster_place(sys.root(), "0000:99:00.0", none);
  EP_CHECK(!missing.ok() && missing.why().status == EP_STATUS_INVALID);
  EP_CHECK(missing.why().message.find("0000:13:00.0, 0000:21:00.0, 0000:86:00.0") != std::string::npos);
}

void orders_by_distance() {
  const ep::test::fake_sysfs sys;
  ep::test::two_sockets(sys);
  const topology machine = topology_read(sys.root());
  EP_CHECK_EQ(joined(nics_by_distance(machine, gpu(machine, "0000:13:00.0").place)), "mlx5_0 mlx5_1 mlx5_2 mlx5_10 rxe0");
  EP_CHECK_EQ(joined(nics_by_distance(machine, gpu(machine, "0000:86:00.0").place)), "mlx5_10 mlx5_0 mlx5_1 mlx5_2 rxe0");
  EP_CHECK_EQ(joined(nics_by_distance(machine, pci_place{{}, 1})), "mlx5_10 mlx5_0 mlx5_1 mlx5_2 rxe0");
}

// Firmware that is silent says -1 for all: two host bridges are then as far as can be, not "one node".
void trusts_no_silent_firmware() {
  const ep::test::fake_sysfs sys;
  sys.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", -1);
  sys.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", -1);
  const topology machine = topology_read(sys.root());
  EP_CHECK_EQ(distance_between(machine.nics[0].place, machine.gpus[0].place), distance::system);
}

void an_empty_tree_is_no_error() {
  const ep::test::fake_sysfs sys;
  const topology machine = topology_read(sys.root() + "/nothing");
  EP_CHECK(machine.nics.empty() && machine.gpus.empty() && machine.numa_nodes.empty());
}

void prints_a_table() {
  const ep::test::fake_sysfs sys;
  ep::test::two_sockets(sys);
  EP_CHECK_EQ(topology_text(topology_read(sys.root())),
              "                  mlx5_0  mlx5_1  mlx5_2  mlx5_10  rxe0\n"
              "gpu 0000:13:00.0  switch  switch  root    system   unknown\n"
              "gpu 0000:21:00.0  node    node    node    system   unknown\n"
              "gpu 0000:86:00.0  system  system  system  bridges  unknown\n"
              "cpu node 0        node    node    node    system   unknown\n"
              "cpu node 1        system  system  system  node     unknown\n");
}

} // namespace

int main() {
  finds_what_is_there();
  measures_every_distance();
  places_posters();
  orders_by_distance();
  trusts_no_silent_firmware();
  an_empty_tree_is_no_error();
  prints_a_table();
  return ep::check::finish();
}
