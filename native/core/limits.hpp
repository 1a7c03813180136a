// What this process may really use: cores by affinity and cgroup quota, memory by every limit that could stop it.
#pragma once

#include <cstdint>
#include <string>

namespace ep {

// min(affinity mask, ceil(cgroup CPU quota)), at least 1. Cached: read once.
int usable_cores();

// ceil(cgroup CPU quota), 0: none. Cached: read once.
int quota_cores();

// Cores by the cgroups' quota, 0: none. `root` is a folder with "proc" and "sys/fs/cgroup" in it, here and below: tests make one up.
double cpu_quota(const std::string& root = "");

struct memory_limit {
  uint64_t bytes;     // how much more may be allocated; UINT64_MAX: unknown, or no limit
  const char* source; // "MemAvailable", "cgroup memory.max", "RLIMIT_AS", ...
};
// The tightest limit right now.
memory_limit memory_limit_now(const std::string& root = "");
// How much more a NIC's driver may pin for this process. Who has CAP_IPC_LOCK has no limit.
memory_limit pin_limit_now(const std::string& root = "");

struct host_facts {
  int online_cores;
  int affinity_cores;
  double quota_cores; // 0: no quota
  int usable_cores;
  uint64_t memory_total;
  uint64_t memory_available;
  uint64_t cgroup_limit; // UINT64_MAX: none
  uint64_t cgroup_used;
  uint64_t address_space; // RLIMIT_AS, UINT64_MAX: none
  uint64_t memlock;       // RLIMIT_MEMLOCK, UINT64_MAX: none
  uint64_t open_files;    // RLIMIT_NOFILE
  uint64_t map_count;     // vm.max_map_count
  std::string kernel;
  std::string cpu_model;
};
host_facts host_facts_read();

} // namespace ep
