#include "topology.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace ep::ibgda {
namespace {

namespace fs = std::filesystem;

constexpr const char* vendor_nvidia = "0x10de";
// PCI base class 3: display controllers, and the 3D controllers that accelerators without a monitor are.
constexpr const char* class_display = "0x03";

std::string first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) found.push_back(at->path());
  return found;
}

// "0000:83:00.0"
bool is_pci_function(const std::string& name) {
  if (name.size() < 12 || name[name.size() - 2] != '.') return false;
  return std::all_of(name.begin(), name.end(), [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) || c == ':' || c == '.'; });
}

pci_place place_of(const fs::path& device) {
  pci_place place;
  std::error_code error;
  const fs::path real = fs::canonical(device, error);
  if (error) return place;
  for (const fs::path& part : real) {
    const std::string name = part.string();
    if (place.path.empty() ? name.starts_with("pci") && name.find(':') != std::string::npos : is_pci_function(name)) place.path.push_back(name);
  }
  // A virtual device (soft-RoCE) hangs under a network interface: its chain, if any, is that interface's and ends in no PCI function of its own.
  if (place.path.size() < 2) place.path.clear();
  const std::string node = first_line(real / "numa_node");
  if (!node.empty()) place.numa_node = std::atoi(node.c_str());
  return place;
}

// mlx5_2 before mlx5_10.
bool natural_less(const std::string& a, const std::string& b) {
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (std::isdigit(static_cast<unsigned char>(a[i])) && std::isdigit(static_cast<unsigned char>(b[j]))) {
      const unsigned long left = std::strtoul(a.c_str() + i, nullptr, 10);
      const unsigned long right = std::strtoul(b.c_str() + j, nullptr, 10);
      if (left != right) return left < right;
      while (i < a.size() && std::isdigit(static_cast<unsigned char>(a[i]))) ++i;
      while (j < b.size() && std::isdigit(static_cast<unsigned char>(b[j]))) ++j;
      continue;
    }
    if (a[i] != b[j]) return a[i] < b[j];
    ++i;
    ++j;
  }
  return a.size() - i < b.size() - j;
}

// All functions of one device share everything up to the dot.
std::string device_of(const std::string& function) { return function.substr(0, function.rfind('.')); }

// "0-3,8-11"
cpu_set_t cpus_of(const std::string& list) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  std::istringstream in(list);
  for (std::string range; std::getline(in, range, ',');) {
    int first = 0;
    int last = 0;
    const int read = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    if (read < 1 || first < 0) continue;
    for (int cpu = first; cpu <= (read == 2 ? last : first) && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &cpus);
  }
  return cpus;
}

} // namespace

const char* distance_name(distance value) {
  switch (value) {
    case distance::same: return "same";
    case distance::switched: return "switch";
    case distance::bridged: return "bridges";
    case distance::root: return "root";
    case distance::node: return "node";
    case distance::system: return "system";
    case distance::unknown: return "unknown";
  }
  return "unknown";
}

distance distance_between(const pci_place& a, const pci_place& b) {
  if (a.path.empty() || b.path.empty()) return distance::unknown;
  if (a.path.front() != b.path.front()) {
    // Silent firmware says -1 for every device: that two of them "agree" tells nothing.
    return a.numa_node >= 0 && a.numa_node == b.numa_node ? distance::node : distance::system;
  }
  size_t common = 0;
  while (common < a.path.size() && common < b.path.size() && a.path[common] == b.path[common]) ++common;
  if (common == a.path.size() || common == b.path.size()) return distance::same;
  if (common == a.path.size() - 1 && common == b.path.size() - 1 && device_of(a.path.back()) == device_of(b.path.back())) return distance::same;
  // path[0] is the host bridge, path[1] the root port. Sharing no root port, two functions meet in the root complex.
  if (common < 2) return distance::root;
  // A switch shows as one upstream port with a downstream port for each of its links: below the last common port at most (downstream port, function).
  const bool one_switch = a.path.size() - common <= 2 && b.path.size() - common <= 2;
  return one_switch ? distance::switched : distance::bridged;
}

distance distance_of_node(const pci_place& nic, int numa_node) {
  if (nic.numa_node < 0 || numa_node < 0) return distance::unknown;
  return nic.numa_node == numa_node ? distance::node : distance::system;
}

topology topology_read(const std::string& root) {
  topology machine;
  for (const fs::path& entry : entries_of(fs::path(root) / "class/infiniband")) {
    machine.nics.push_back({entry.filename().string(), place_of(entry / "device")});
  }
  for (const fs::path& entry : entries_of(fs::path(root) / "bus/pci/devices")) {
    if (first_line(entry / "vendor") != vendor_nvidia || !first_line(entry / "class").starts_with(class_display)) continue;
    machine.gpus.push_back({entry.filename().string(), place_of(entry)});
  }
  for (const fs::path& entry : entries_of(fs::path(root) / "devices/system/node")) {
    const std::string name = entry.filename().string();
    if (name.starts_with("node") && name.size() > 4 && std::isdigit(static_cast<unsigned char>(name[4]))) {
      machine.numa_nodes.push_back(std::atoi(name.c_str() + 4));
    }
  }
  std::sort(machine.nics.begin(), machine.nics.end(), [](const nic_place& a, const nic_place& b) { return natural_less(a.name, b.name); });
  std::sort(machine.gpus.begin(), machine.gpus.end(), [](const gpu_place& a, const gpu_place& b) { return a.address < b.address; });
  std::sort(machine.numa_nodes.begin(), machine.numa_nodes.end());
  return machine;
}

result<pci_place> poster_place(const std::string& root, const std::string& gpu, const cpu_set_t& cpus) {
  const topology machine = topology_read(root);
  if (!gpu.empty()) {
    std::string known;
    for (const gpu_place& one : machine.gpus) {
      if (one.address == gpu) return one.place;
      known += (known.empty() ? "" : ", ") + one.address;
    }
    return failure{EP_STATUS_INVALID, 0, "no GPU has the PCI address '" + gpu + "'; there " + (known.empty() ? "are none" : "are: " + known)};
  }
  pci_place place;
  for (const int node : machine.numa_nodes) {
    const cpu_set_t of_node = cpus_of(first_line(fs::path(root) / "devices/system/node" / ("node" + std::to_string(node)) / "cpulist"));
    cpu_set_t both;
    CPU_AND(&both, &of_node, &cpus);
    if (CPU_EQUAL(&both, &cpus) && CPU_COUNT(&cpus) != 0) place.numa_node = node;
  }
  return place;
}

std::vector<std::string> nics_by_distance(const topology& machine, const pci_place& to) {
  std::vector<const nic_place*> order;
  for (const nic_place& nic : machine.nics) order.push_back(&nic);
  const auto far = [&](const nic_place* nic) {
    // Host memory has a node and no PCI path.
    return to.path.empty() ? distance_of_node(nic->place, to.numa_node) : distance_between(nic->place, to);
  };
  std::stable_sort(order.begin(), order.end(), [&](const nic_place* a, const nic_place* b) { return far(a) < far(b); });
  std::vector<std::string> names;
  for (const nic_place* nic : order) names.push_back(nic->name);
  return names;
}

std::string topology_text(const topology& machine) {
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> head{""};
  for (const nic_place& nic : machine.nics) head.push_back(nic.name);
  rows.push_back(head);
  for (const gpu_place& gpu : machine.gpus) {
    std::vector<std::string> row{"gpu " + gpu.address};
    for (const nic_place& nic : machine.nics) row.push_back(distance_name(distance_between(nic.place, gpu.place)));
    rows.push_back(row);
  }
  for (const int numa : machine.numa_nodes) {
    std::vector<std::string> row{"cpu node " + std::to_string(numa)};
    for (const nic_place& nic : machine.nics) row.push_back(distance_name(distance_of_node(nic.place, numa)));
    rows.push_back(row);
  }
  std::vector<size_t> width(head.size(), 0);
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) width[column] = std::max(width[column], row[column].size());
  }
  std::ostringstream out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      line += row[column] + std::string(width[column] - row[column].size() + 2, ' ');
    }
    out << line.substr(0, line.find_last_not_of(' ') + 1) << '\n';
  }
  return out.str();
}

} // namespace ep::ibgda
