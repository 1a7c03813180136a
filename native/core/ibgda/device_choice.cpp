#include "device_choice.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace ep::ibgda {
namespace {

constexpr uint8_t last_port = 2; // of mlx5 devices; those with one refuse the second with EINVAL

struct filter_entry {
  std::string name;
  bool prefix = false;
  uint8_t port = 0; // 0: any
};

failure unreadable(const std::string& filter, const std::string& why) {
  return {EP_STATUS_INVALID, 0, "device filter '" + filter + "' " + why + "; write names like mlx5_0,mlx5_3:2, prefixes like mlx5_*, or ^ in front to exclude"};
}

result<std::vector<filter_entry>> entries_of(const std::string& filter, size_t from) {
  std::vector<filter_entry> entries;
  while (from <= filter.size()) {
    const size_t end = std::min(filter.find(',', from), filter.size());
    filter_entry entry{filter.substr(from, end - from)};
    if (const size_t colon = entry.name.find(':'); colon != std::string::npos) {
      const char* begin = entry.name.data() + colon + 1;
      const char* stop = entry.name.data() + entry.name.size();
      unsigned port = 0;
      const auto read = std::from_chars(begin, stop, port);
      if (read.ec != std::errc() || read.ptr != stop || port < 1 || port > 255) return unreadable(filter, "has a port that is no number from 1 to 255");
      entry.port = static_cast<uint8_t>(port);
      entry.name.resize(colon);
    }
    if (entry.name.ends_with('*')) {
      entry.prefix = true;
      entry.name.pop_back();
    } else if (entry.name.empty()) {
      return unreadable(filter, "has an empty name");
    }
    if (entry.name.find_first_of("*^ ") != std::string::npos) return unreadable(filter, "has a name with '*', '^' or a space inside");
    entries.push_back(std::move(entry));
    from = end + 1;
  }
  return entries;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

const char* link_name(dl::mlx5_link link) { return link == dl::mlx5_link::ethernet ? "Ethernet" : "InfiniBand"; }

const char* state_name(dl::mlx5_port_state state) {
  switch (state) {
    case dl::mlx5_port_state::nop: return "without state";
    case dl::mlx5_port_state::down: return "down";
    case dl::mlx5_port_state::init: return "initializing (no subnet manager?)";
    case dl::mlx5_port_state::armed: return "armed, not yet active";
    case dl::mlx5_port_state::active: return "active";
    case dl::mlx5_port_state::active_defer: return "active, deferred";
  }
  return "in an unknown state";
}

// The first port that works, in order; `why` and the errno say why not, otherwise.
struct port_try {
  bool found = false;
  failure why;
};
port_try try_ports(open_port& candidate, const std::vector<uint8_t>& ports, const device_wish& wish) {
  port_try tried;
  tried.why = {EP_STATUS_SYSTEM, ENODEV, candidate.device->name() + ": no port"};
  std::vector<std::string> reasons;
  for (uint8_t port = 1; port <= (ports.empty() ? last_port : *std::max_element(ports.begin(), ports.end())); ++port) {
    if (!ports.empty() && std::find(ports.begin(), ports.end(), port) == ports.end()) continue;
    auto facts = candidate.device->query_port(port);
    if (!facts.ok()) {
      if (facts.why().sys_errno == EINVAL && ports.empty() && port > 1) break;
      tried.why = facts.why();
      reasons.push_back("port " + std::to_string(port) + ": " + facts.why().message);
      continue;
    }
    if (facts.value().state != dl::mlx5_port_state::active) {
      tried.why = {EP_STATUS_SYSTEM, ENETDOWN, ""};
      reasons.push_back("port " + std::to_string(port) + " is " + state_name(facts.value().state));
      continue;
    }
    if (facts.value().link == dl::mlx5_link::unknown) {
      tried.why = {EP_STATUS_SYSTEM, EPROTONOSUPPORT, ""};
      reasons.push_back("port " + std::to_string(port) + " is neither InfiniBand nor Ethernet");
      continue;
    }
    if (wish.link != dl::mlx5_link::unknown && facts.value().link != wish.link) {
      tried.why = {EP_STATUS_SYSTEM, EPROTONOSUPPORT, ""};
      reasons.push_back("port " + std::to_string(port) + " is " + link_name(facts.value().link) + ", " + link_name(wish.link) + " was asked for");
      continue;
    }
    auto gid = gid_choose(*candidate.device, port, facts.value(), wish.gid_index);
    if (!gid.ok()) {
      tried.why = gid.why();
      reasons.push_back(gid.why().message);
      continue;
    }
    candidate.port = port;
    candidate.facts = facts.value();
    candidate.gid = gid.value();
    tried.found = true;
    return tried;
  }
  tried.why.message = candidate.device->name() + ": " + joined(reasons);
  return tried;
}

} // namespace

result<filter_answer> filter_match(const std::string& filter, const std::string& device) {
  if (filter.empty()) return filter_answer{true, {}};
  const bool excludes = filter.front() == '^';
  auto entries = entries_of(filter, excludes ? 1 : 0);
  if (!entries.ok()) return entries.why();
  filter_answer answer;
  bool any_port = false;
  bool named = false;
  for (const filter_entry& entry : entries.value()) {
    if (entry.prefix ? !device.starts_with(entry.name) : device != entry.name) continue;
    if (excludes && entry.port != 0) return unreadable(filter, "excludes a port: exclude the device, or name the other port");
    named = true;
    if (entry.port == 0) any_port = true;
    else answer.ports.push_back(entry.port);
  }
  answer.passes = named != excludes;
  if (any_port) answer.ports.clear();
  return answer;
}

result<open_port> device_open(dl::mlx5_driver& driver, const device_wish& wish) {
  if (auto readable = filter_match(wish.filter, ""); !readable.ok()) return readable.why();
  auto listed = driver.list_devices();
  if (!listed.ok()) return listed.why();
  const topology machine = topology_read(wish.sysfs);
  const auto distance_of = [&](const dl::mlx5_device_info& info) {
    const auto at = std::find_if(machine.nics.begin(), machine.nics.end(), [&](const nic_place& nic) { return nic.name == info.name; });
    if (at == machine.nics.end()) return distance::unknown;
    return wish.near.path.empty() ? distance_of_node(at->place, wish.near.numa_node) : distance_between(at->place, wish.near);
  };
  std::vector<dl::mlx5_device_info> order = listed.value();
  std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) { return distance_of(a) < distance_of(b); });

  std::vector<std::string> passed_over;
  failure last{EP_STATUS_SYSTEM, ENODEV, ""};
  for (const dl::mlx5_device_info& info : order) {
    auto answer = filter_match(wish.filter, info.name);
    if (!answer.ok()) return answer.why();
    if (!answer.value().passes) {
      passed_over.push_back(info.name + ": not in the device filter '" + wish.filter + "'");
      continue;
    }
    if (!info.supported) {
      passed_over.push_back(info.name + ": " + info.unsupported);
      continue;
    }
    auto device = driver.open(info.name);
    if (!device.ok()) {
      last = device.why();
      passed_over.push_back(info.name + ": " + device.why().message);
      continue;
    }
    open_port candidate;
    candidate.device = std::move(device.value());
    candidate.far = distance_of(info);
    const port_try tried = try_ports(candidate, answer.value().ports, wish);
    if (tried.found) {
      candidate.passed_over = std::move(passed_over);
      return candidate;
    }
    last = tried.why;
    passed_over.push_back(tried.why.message);
  }
  last.message = order.empty() ? std::string("no RDMA device: ") + driver.backing() + " sees none" : "no usable RDMA device among " + std::to_string(order.size()) + ": " + joined(passed_over);
  if (last.status != EP_STATUS_INVALID || !wish.gid_index.has_value()) last.status = EP_STATUS_SYSTEM;
  return last;
}

} // namespace ep::ibgda
