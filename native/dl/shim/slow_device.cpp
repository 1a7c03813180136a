// libep_cuda_slow.so: the table of another library, EP_CUDA_SLOW_OF, that says on stderr which of its calls stand still, and for how long: EP_CUDA_PATH=libep_cuda_slow.so EP_CUDA_SLOW_OF=libep_cuda.so. The driver may
// hold a call until kernels have ended that wait for what this very thread is about to launch, and then no rank says more than that somebody did not come. EP_CUDA_SLOW_MS (1 000): from when on. EP_CUDA_SLOW_COUNT, not
// empty: how often each call was made, when the process ends; a GPU has few queues, so that streams count. For finding out, and for tests; no part of what is installed.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/table.h"

namespace {

using clock = std::chrono::steady_clock;

struct call_under_way {
  const char* name;
  long thread;
  clock::time_point since;
  bool told = false;
};

double seconds_since(clock::time_point begin) { return std::chrono::duration<double>(clock::now() - begin).count(); }

// Leaked on purpose: threads may call while static destructors run.
class watcher {
 public:
  static watcher& here() {
    static auto* made = new watcher;
    return *made;
  }
  void begins(call_under_way* call) {
    const std::lock_guard lock(mutex_);
    calls_.push_back(call);
  }
  void ends(call_under_way* call) {
    const std::lock_guard lock(mutex_);
    std::erase(calls_, call);
    if (call->told) std::fprintf(stderr, "slow call: thread %ld was in %s for %.1f s\n", call->thread, call->name, seconds_since(call->since));
  }

 private:
  watcher() {
    const char* given = std::getenv("EP_CUDA_SLOW_MS");
    limit_ = given == nullptr ? 1.0 : std::strtod(given, nullptr) / 1000;
    std::thread([this] { look(); }).detach();
  }
  [[noreturn]] void look() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const std::lock_guard lock(mutex_);
      for (call_under_way* call : calls_) {
        if (call->told || seconds_since(call->since) < limit_) continue;
        call->told = true;
        std::fprintf(stderr, "slow call: thread %ld stands in %s, as do %zu others in calls of theirs\n", call->thread, call->name, calls_.size() - 1);
      }
    }
  }
  std::mutex mutex_;
  std::vector<call_under_way*> calls_;
  double limit_ = 1.0;
};

struct watched {
  call_under_way call;
  explicit watched(const char* name) : call{name, syscall(SYS_gettid), clock::now()} { watcher::here().begins(&call); }
  ~watched() { watcher::here().ends(&call); }
  watched(const watched&) = delete;
};

struct counted_call {
  const char* name;
  std::atomic<uint64_t>* made;
};

// Leaked on purpose: told when static destructors run.
std::vector<counted_call>& counted() {
  static auto* all = new std::vector<counted_call>;
  return *all;
}

void tell_counts() {
  std::fputs("calls:", stderr);
  for (const counted_call& one : counted()) std::fprintf(stderr, " %s %llu", one.name, static_cast<unsigned long long>(one.made->load()));
  std::fputc('\n', stderr);
}

const ep_cuda_table* original = nullptr;

template <auto Entry> struct timed;
template <class Result, class... Given, Result (*ep_cuda_table::*Entry)(Given...)> struct timed<Entry> {
  static inline const char* name = nullptr;
  static inline std::atomic<uint64_t> made{0};
  static Result call(Given... given) {
    const watched here(name);
    made.fetch_add(1, std::memory_order_relaxed);
    return (original->*Entry)(given...);
  }
};

template <auto Entry> void watch(ep_cuda_table& table, const char* name) {
  timed<Entry>::name = name;
  counted().push_back({name, &timed<Entry>::made});
  table.*Entry = timed<Entry>::call;
}

const ep_cuda_table* open_original(uint32_t version) {
  const char* path = std::getenv("EP_CUDA_SLOW_OF");
  void* file = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    std::fprintf(stderr, "libep_cuda_slow.so: EP_CUDA_SLOW_OF names no library that can be opened: %s\n", path == nullptr ? "it is not set" : dlerror());
    return nullptr;
  }
  const auto of = reinterpret_cast<ep_cuda_table_function>(dlsym(file, EP_CUDA_TABLE_SYMBOL));
  return of == nullptr ? nullptr : of(version);
}

} // namespace

extern "C" __attribute__((visibility("default"))) const ep_cuda_table* ep_cuda_table_of(uint32_t version) {
  static const ep_cuda_table* const made = [version]() -> const ep_cuda_table* {
    original = open_original(version);
    if (original == nullptr) return nullptr;
    static ep_cuda_table table = *original;
    // All but what cannot wait: error_text, device_count, stream_handle.
#define EP_WATCH(entry) watch<&ep_cuda_table::entry>(table, #entry)
    EP_WATCH(device_facts), EP_WATCH(memory_allocate), EP_WATCH(memory_free), EP_WATCH(memory_export), EP_WATCH(memory_import), EP_WATCH(memory_unmap), EP_WATCH(memory_find), EP_WATCH(pinned_allocate),
        EP_WATCH(pinned_free), EP_WATCH(stream_create), EP_WATCH(stream_destroy), EP_WATCH(stream_finish), EP_WATCH(event_create), EP_WATCH(event_destroy), EP_WATCH(event_record), EP_WATCH(event_query),
        EP_WATCH(event_elapsed), EP_WATCH(stream_wait), EP_WATCH(copy), EP_WATCH(fill), EP_WATCH(capture_begin), EP_WATCH(capture_end), EP_WATCH(graph_launch), EP_WATCH(graph_destroy), EP_WATCH(resident),
        EP_WATCH(begin_call), EP_WATCH(dispatch), EP_WATCH(grant), EP_WATCH(compat), EP_WATCH(attention_forward), EP_WATCH(attention_backward), EP_WATCH(experts_forward), EP_WATCH(moe_dispatch),
        EP_WATCH(moe_combine), EP_WATCH(moe_release), EP_WATCH(group_call), EP_WATCH(device_use), EP_WATCH(peer_access), EP_WATCH(moe_together), EP_WATCH(copy_pieces);
#undef EP_WATCH
    const char* count = std::getenv("EP_CUDA_SLOW_COUNT");
    if (count != nullptr && *count != '\0') std::atexit(tell_counts);
    return &table;
  }();
  return made;
}
