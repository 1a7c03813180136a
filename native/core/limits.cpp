#include "limits.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

namespace ep {
namespace {

constexpr uint64_t none = UINT64_MAX;

std::string file_read(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

uint64_t number_or(const std::string& text, uint64_t otherwise) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return otherwise;
  return std::strtoull(text.c_str(), nullptr, 10);
}

// "Key:   123 kB" lines of /proc/meminfo, in bytes.
uint64_t meminfo(const std::string& text, const std::string& key) {
  const size_t at = text.find(key + ":");
  if (at == std::string::npos) return none;
  return std::strtoull(text.c_str() + at + key.size() + 1, nullptr, 10) * 1024;
}

// "Key:  value" of /proc/self/status; empty: there is no such line.
std::string status_value(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.compare(0, key.size() + 1, key + ":") != 0) continue;
    const size_t first = line.find_first_not_of(" \t", key.size() + 1);
    return first == std::string::npos ? "" : line.substr(first);
  }
  return "";
}

// Every cgroup from this process's own up to the root can hold a limit; the tightest counts.
template <class Visit> void cgroup_walk(const std::string& base, Visit visit) {
  std::istringstream lines(file_read(base + "/proc/self/cgroup"));
  std::string line;
  while (std::getline(lines, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    std::string root;
    if (controllers.empty()) root = "/sys/fs/cgroup";
    else if (controllers.find("memory") != std::string::npos) root = "/sys/fs/cgroup/memory";
    else if (controllers.find("cpu") != std::string::npos && controllers.find("cpuset") == std::string::npos) root = "/sys/fs/cgroup/cpu";
    else continue;
    for (;;) {
      visit(base + root + (path == "/" ? "" : path));
      if (path.empty() || path == "/") break;
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(std::max<size_t>(slash, 1));
    }
  }
}

uint64_t rlimit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return none;
  return limit.rlim_cur;
}

int affinity_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return CPU_COUNT(&set);
}

} // namespace

double cpu_quota(const std::string& root) {
  double cores = 0;
  const auto tighten = [&cores](double found) {
    if (found > 0 && (cores == 0 || found < cores)) cores = found;
  };
  cgroup_walk(root, [&](const std::string& folder) {
    std::istringstream v2(file_read(folder + "/cpu.max"));
    std::string quota;
    double period = 0;
    if (v2 >> quota >> period && quota != "max" && period > 0) tighten(std::strtod(quota.c_str(), nullptr) / period);
    const std::string v1 = file_read(folder + "/cpu.cfs_quota_us");
    const uint64_t v1_period = number_or(file_read(folder + "/cpu.cfs_period_us"), 0);
    if (v1_period > 0 && number_or(v1, 0) > 0) tighten(static_cast<double>(number_or(v1, 0)) / static_cast<double>(v1_period));
  });
  return cores;
}

namespace {

struct cgroup_memory {
  uint64_t limit = none;
  uint64_t used = 0;
};

cgroup_memory cgroup_memory_read(const std::string& root) {
  cgroup_memory tightest;
  uint64_t room = none;
  cgroup_walk(root, [&](const std::string& folder) {
    for (const auto& [limit_file, used_file] : {std::pair{"/memory.max", "/memory.current"},
                                                std::pair{"/memory.limit_in_bytes", "/memory.usage_in_bytes"}}) {
      const uint64_t limit = number_or(file_read(folder + limit_file), none);
      // v1 writes "no limit" as a number close to 2^63.
      if (limit == none || limit > (uint64_t{1} << 60)) continue;
      const uint64_t used = number_or(file_read(folder + used_file), 0);
      const uint64_t left = limit > used ? limit - used : 0;
      if (left < room) {
        room = left;
        tightest = {limit, used};
      }
    }
  });
  return tightest;
}

uint64_t address_space_used() {
  std::istringstream statm(file_read("/proc/self/statm"));
  uint64_t pages = 0;
  statm >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

} // namespace

int quota_cores() {
  static const int cores = [] {
    const double quota = cpu_quota();
    return quota > 0 ? std::max(1, static_cast<int>(std::ceil(quota - 1e-9))) : 0;
  }();
  return cores;
}

int usable_cores() {
  static const int cores = [] {
    const int affinity = affinity_cores();
    const int quota = quota_cores();
    return std::max(1, quota > 0 ? std::min(affinity, quota) : affinity);
  }();
  return cores;
}

memory_limit memory_limit_now(const std::string& root) {
  memory_limit tightest{none, "no limit found"};
  const auto tighten = [&tightest](uint64_t bytes, const char* source) {
    if (bytes < tightest.bytes) tightest = {bytes, source};
  };
  tighten(meminfo(file_read(root + "/proc/meminfo"), "MemAvailable"), "MemAvailable");
  const cgroup_memory group = cgroup_memory_read(root);
  if (group.limit != none) tighten(group.limit > group.used ? group.limit - group.used : 0, "the cgroup's memory limit");
  const uint64_t space = rlimit_of(RLIMIT_AS);
  if (space != none) {
    const uint64_t used = address_space_used();
    tighten(space > used ? space - used : 0, "RLIMIT_AS");
  }
  const uint64_t file = rlimit_of(RLIMIT_FSIZE);
  if (file != none) tighten(file, "RLIMIT_FSIZE");
  return tightest;
}

memory_limit pin_limit_now(const std::string& root) {
  constexpr uint64_t cap_ipc_lock = 14;
  const std::string status = file_read(root + "/proc/self/status");
  const uint64_t capabilities = std::strtoull(status_value(status, "CapEff").c_str(), nullptr, 16);
  const uint64_t limit = rlimit_of(RLIMIT_MEMLOCK);
  if (limit == none || ((capabilities >> cap_ipc_lock) & 1) != 0) return {none, "no limit found"};
  // VmPin and not VmLck: drivers count what they pin apart from what mlock() holds, against the same limit.
  const uint64_t pinned = number_or(status_value(status, "VmPin"), 0) * 1024;
  return {limit > pinned ? limit - pinned : 0, "RLIMIT_MEMLOCK"};
}

host_facts host_facts_read() {
  host_facts facts{};
  facts.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  facts.affinity_cores = affinity_cores();
  facts.quota_cores = cpu_quota();
  facts.usable_cores = usable_cores();
  const std::string memory = file_read("/proc/meminfo");
  facts.memory_total = meminfo(memory, "MemTotal");
  facts.memory_available = meminfo(memory, "MemAvailable");
  const cgroup_memory group = cgroup_memory_read("");
  facts.cgroup_limit = group.limit;
  facts.cgroup_used = group.used;
  facts.address_space = rlimit_of(RLIMIT_AS);
  facts.memlock = rlimit_of(RLIMIT_MEMLOCK);
  facts.open_files = rlimit_of(RLIMIT_NOFILE);
  facts.map_count = number_or(file_read("/proc/sys/vm/max_map_count"), none);
  utsname name{};
  if (uname(&name) == 0) facts.kernel = std::string(name.sysname) + " " + name.release;
  const std::string cpu = file_read("/proc/cpuinfo");
  const size_t at = cpu.find("model name");
  if (at != std::string::npos) {
    const size_t colon = cpu.find(':', at);
    facts.cpu_model = cpu.substr(colon + 2, cpu.find('\n', colon) - colon - 2);
  }
  return facts;
}

} // namespace ep
