// Limits as the kernel tells of them: made-up files of cgroups of both versions, limits of the process itself, and memory that is granted close to one.
#include "limits.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "host_memory.hpp"
#include "skip.hpp"

namespace {

constexpr uint64_t none = UINT64_MAX;
constexpr uint64_t mib = uint64_t{1} << 20;

// A folder with "proc" and "sys/fs/cgroup" in it.
class made_up_machine {
 public:
  made_up_machine() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ep-limits-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~made_up_machine() { std::filesystem::remove_all(root_); }
  made_up_machine(const made_up_machine&) = delete;
  made_up_machine& operator=(const made_up_machine&) = delete;

  made_up_machine& file(const std::string& path, const std::string& text) {
    const std::filesystem::path at = root_ + "/" + path;
    std::filesystem::create_directories(at.parent_path());
    std::ofstream(at) << text << "\n";
    return *this;
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

void limit_is(const made_up_machine& machine, uint64_t bytes, const char* source) {
  const ep::memory_limit found = ep::memory_limit_now(machine.root());
  EP_CHECK_EQ(found.bytes, bytes);
  EP_CHECK_EQ(std::string(found.source), std::string(source));
}

constexpr const char* of_group = "the cgroup's memory limit";

void reads_version_2() {
  made_up_machine machine;
  machine.file("proc/meminfo", "MemTotal:  4096000 kB\nMemAvailable:   2048000 kB").file("proc/self/cgroup", "0::/pod/box");
  limit_is(machine, 2048000 * 1024ull, "MemAvailable");
  machine.file("sys/fs/cgroup/pod/box/memory.max", "max").file("sys/fs/cgroup/pod/box/memory.current", "1000");
  limit_is(machine, 2048000 * 1024ull, "MemAvailable");
  machine.file("sys/fs/cgroup/pod/box/memory.max", "1000000").file("sys/fs/cgroup/pod/box/memory.current", "400000");
  limit_is(machine, 600000, of_group);
  // A parent with less room counts, whatever its limit is: others use it, too.
  machine.file("sys/fs/cgroup/pod/memory.max", "9000000").file("sys/fs/cgroup/pod/memory.current", "8500000");
  limit_is(machine, 500000, of_group);
  // Somebody was faster than the kernel's accounting.
  machine.file("sys/fs/cgroup/pod/memory.current", "9000001");
  limit_is(machine, 0, of_group);
  // No path that Linux gives, and no reason to look for ever.
  machine.file("proc/self/cgroup", "0::odd");
  limit_is(machine, 2048000 * 1024ull, "MemAvailable");
}

void reads_version_1() {
  made_up_machine machine;
  machine.file("proc/meminfo", "MemAvailable: 2048000 kB").file("proc/self/cgroup", "9:name=systemd:/\n4:memory:/box\n1:cpu:/box\n0::/");
  // "No limit" of version 1.
  machine.file("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712").file("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "5");
  limit_is(machine, 2048000 * 1024ull, "MemAvailable");
  machine.file("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "70000").file("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "5");
  limit_is(machine, 69995, of_group);
  // In a container the path is that of the host, and only the root can be seen.
  machine.file("proc/self/cgroup", "4:memory:/docker/0123456789").file("sys/fs/cgroup/memory/memory.limit_in_bytes", "50000").file("sys/fs/cgroup/memory/memory.usage_in_bytes", "1");
  limit_is(machine, 49999, of_group);
  // Files that are none.
  machine.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "-1");
  limit_is(machine, 2048000 * 1024ull, "MemAvailable");
  made_up_machine empty;
  limit_is(empty, none, "no limit found");
}

void reads_quotas_of_cores() {
  made_up_machine machine;
  machine.file("proc/self/cgroup", "0::/pod/box").file("sys/fs/cgroup/pod/box/cpu.max", "max 100000");
  EP_CHECK_EQ(ep::cpu_quota(machine.root()), 0.0);
  machine.file("sys/fs/cgroup/pod/box/cpu.max", "250000 100000");
  EP_CHECK_EQ(ep::cpu_quota(machine.root()), 2.5);
  machine.file("sys/fs/cgroup/pod/cpu.max", "150000 100000");
  EP_CHECK_EQ(ep::cpu_quota(machine.root()), 1.5);
  machine.file("proc/self/cgroup", "3:cpu,cpuacct:/box").file("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1").file("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000");
  EP_CHECK_EQ(ep::cpu_quota(machine.root()), 0.0);
  machine.file("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "50000");
  EP_CHECK_EQ(ep::cpu_quota(machine.root()), 0.5);
  // cpuset is another controller.
  machine.file("proc/self/cgroup", "2:cpuset:/box");
  EP_CHECK_EQ(ep::cpu_quota(machine.root()), 0.0);
}

// True if `body` was in a process of its own, in which checks do not count: it returns what went wrong, 0: nothing.
void in_child(const char* what, const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  const bool ok = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!ok) std::fprintf(stderr, "%s: %s %d\n", what, WIFSIGNALED(status) ? "signal" : "exit status", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  EP_CHECK(ok);
}

void reads_what_may_be_pinned() {
  in_child("pinned", [] {
    constexpr uint64_t kib = 1024;
    const rlimit pins{32 * kib, 32 * kib}; // may be lowered by anybody
    if (setrlimit(RLIMIT_MEMLOCK, &pins) != 0) return 1;
    made_up_machine machine;
    machine.file("proc/self/status", "Name:\tnode\nVmLck:\t      8 kB\nVmPin:\t       4 kB\nCapEff:\t0000000000000000");
    if (ep::pin_limit_now(machine.root()).bytes != 28 * kib) return 2;
    machine.file("proc/self/status", "VmPin:\t      64 kB\nCapEff:\t0000000000000000");
    if (ep::pin_limit_now(machine.root()).bytes != 0) return 3;
    machine.file("proc/self/status", "VmPin:\t    0 kB\nCapEff:\t0000000000004000"); // CAP_IPC_LOCK
    if (ep::pin_limit_now(machine.root()).bytes != none) return 4;
    machine.file("proc/self/status", "VmPin:\t    0 kB\nCapEff:\t000001ffffffbfff"); // all but that
    if (ep::pin_limit_now(machine.root()).bytes != 32 * kib) return 5;
    return 0;
  });
}

// Memory that was granted is there: whoever writes to all of it is not killed.
int fill_up_to(uint64_t spare) {
  const ep::memory_limit limit = ep::memory_limit_now();
  auto refused = ep::host_memory::create(limit.bytes + 1);
  if (refused.ok() || refused.why().status != EP_STATUS_MEMORY_LIMIT) return 11;
  if (limit.bytes < 2 * spare) return 12;
  auto made = ep::host_memory::create(limit.bytes - spare);
  if (!made.ok()) return made.why().status == EP_STATUS_MEMORY_LIMIT ? 13 : 14;
  std::memset(made.value()->data(), 0x5a, made.value()->byte_length());
  if (made.value()->data()[made.value()->byte_length() - 1] != 0x5a) return 15;
  return 0;
}

void grants_only_what_is_there() {
  in_child("address space", [] {
    std::ifstream statm("/proc/self/statm");
    uint64_t pages = 0;
    statm >> pages;
    const rlimit space{pages * 4096 + 256 * mib, pages * 4096 + 256 * mib};
    if (setrlimit(RLIMIT_AS, &space) != 0) return 1;
    if (std::strcmp(ep::memory_limit_now().source, "RLIMIT_AS") != 0) return 2;
    return fill_up_to(16 * mib); // alignment to huge pages takes addresses, too
  });
}

// A cgroup of our own below the one that we are in; empty where we may not make one.
std::string cgroup_make() {
  std::ifstream lines("/proc/self/cgroup");
  std::string line;
  while (std::getline(lines, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version_1 = controllers.find("memory") != std::string::npos;
    if (!version_1 && !controllers.empty()) continue;
    const std::string path = line.substr(second + 1);
    const std::string folder = std::string("/sys/fs/cgroup") + (version_1 ? "/memory" : "") + (path == "/" ? "" : path) + "/ep-limits-" + std::to_string(getpid());
    std::error_code error;
    if (!std::filesystem::create_directory(folder, error)) continue;
    const char* file = version_1 ? "/memory.limit_in_bytes" : "/memory.max";
    // Opened and not made: a folder that is no cgroup has no such file.
    std::fstream limit(folder + file, std::ios::in | std::ios::out);
    if (limit.is_open() && (limit << 256 * mib).flush().good()) return folder;
    std::filesystem::remove(folder, error);
  }
  return "";
}

// Page tables, what the process itself still touches, and AddressSanitizer's shadow, a byte for every 8, count against the limit, too.
#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t left_over = 64 * mib;
#else
constexpr uint64_t left_over = 16 * mib;
#endif

// A CTest of its own, limits_cgroup_test.
int grants_what_a_cgroup_leaves() {
#if defined(__SANITIZE_THREAD__)
  return ep::check::skip("the shadow that ThreadSanitizer keeps of every byte counts against a cgroup's limit");
#endif
  const std::string folder = cgroup_make();
  if (folder.empty()) return ep::check::skip("a cgroup with a memory limit cannot be made here (needs root and a writable memory controller)");
  in_child("cgroup", [&] {
    if (!(std::ofstream(folder + "/cgroup.procs") << getpid()).flush().good()) return 1;
    const ep::memory_limit limit = ep::memory_limit_now();
    if (std::strcmp(limit.source, of_group) != 0 || limit.bytes > 256 * mib) return 2;
    return fill_up_to(left_over);
  });
  std::error_code error;
  std::filesystem::remove(folder, error);
  EP_CHECK(!error);
  return ep::check::finish();
}

void this_machine_makes_sense() {
  const ep::host_facts facts = ep::host_facts_read();
  EP_CHECK(ep::usable_cores() >= 1 && ep::usable_cores() <= facts.affinity_cores);
  EP_CHECK(facts.memory_available <= facts.memory_total);
  EP_CHECK(ep::memory_limit_now().bytes <= facts.memory_total);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "cgroup") == 0) return grants_what_a_cgroup_leaves();
  reads_version_2();
  reads_version_1();
  reads_quotas_of_cores();
  reads_what_may_be_pinned();
  grants_only_what_is_there();
  this_machine_makes_sense();
  return ep::check::finish();
}
