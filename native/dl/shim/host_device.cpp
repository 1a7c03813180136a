// Stands in for libep_cuda.so where there is no GPU: the same table, kernels of the host build, "device memory" that is the host's. For tests of everything above the
// table; no part of what is installed. Its device says what it is ("runs_on": "host threads").
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <cstdio>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/device/compat.hpp"
#include "core/launch.hpp"
#include "cuda/moe_ranks.h"
#include "cuda/table.h"
#include "ep/device/compat_dispatch.h"
#include "ep/device/core_attention.h"
#include "ep/device/device_call.h"
#include "ep/device/expert_layer.h"
#include "ep/device/group_call.h"
#include "ep/device/ibgda_endpoint.h"
#include "ep/device/moe_launch.h"
#include "host_device_context.hpp"
#include "host_device_stream.hpp"

namespace {

using namespace ep::shim;

// CUDA's numbers.
constexpr int ok = 0;
constexpr int invalid_value = 1;
constexpr int no_memory = 2;
constexpr int invalid_configuration = 9;
constexpr int invalid_device_pointer = 17;
constexpr int invalid_device = 101;
constexpr int of_this_process = 201;
constexpr int already_mapped = 208;
constexpr int no_peer_access = 217;
constexpr int cooperative_launch_too_large = 720;
constexpr int not_supported = 801;
constexpr int capture_unsupported = 900;

constexpr uint32_t most_blocks = 32;
constexpr int most_devices = 8;

struct place {
  int device;
  uint64_t bytes;
  uint64_t mapped; // of device memory: a file that other processes map, and a page behind it that nobody may touch
  int file;
  bool pinned;
  bool imported;
};
struct all_memory {
  std::mutex mutex;
  std::map<uint64_t, place> blocks;
};
all_memory& memory() {
  static auto* made = new all_memory;
  return *made;
}

const char* error_text(int error) {
  switch (error) {
    case ok: return "no error";
    case no_memory: return "out of memory";
    case invalid_configuration: return "invalid configuration argument";
    case invalid_device_pointer: return "invalid device pointer";
    case invalid_device: return "invalid device ordinal";
    case of_this_process: return "invalid device context";
    case already_mapped: return "resource already mapped";
    case no_peer_access: return "peer access is not supported between these two devices";
    case cooperative_launch_too_large: return "too many blocks in cooperative launch";
    case not_supported: return "operation not supported";
    case capture_unsupported: return "operation not permitted when stream is capturing";
    default: return "invalid argument";
  }
}

// EP_CUDA_HOST_DEVICES: how many there are, 1 unless it says more. With EP_CUDA_HOST_BROKEN_DEVICE one more that fails.
int working_devices() {
  const char* wanted = std::getenv("EP_CUDA_HOST_DEVICES");
  return wanted == nullptr ? 1 : std::clamp(std::atoi(wanted), 1, most_devices);
}
bool works(int device) { return device >= 0 && device < working_devices(); }
int device_count(int* count) {
  *count = working_devices() + (std::getenv("EP_CUDA_HOST_BROKEN_DEVICE") == nullptr ? 0 : 1);
  return ok;
}
// EP_CUDA_HOST_NO_PEERS: none reaches memory of another.
int peer_access(int device, int peer, int* reaches) {
  if (!works(device) || !works(peer)) return invalid_device;
  *reaches = device != peer && std::getenv("EP_CUDA_HOST_NO_PEERS") == nullptr ? 1 : 0;
  return ok;
}

int device_facts(int device, ep_cuda_facts* facts) {
  if (!works(device)) return invalid_device;
  *facts = {};
  std::snprintf(facts->name, sizeof facts->name, "kernels on host threads (for tests)");
  std::snprintf(facts->pci, sizeof facts->pci, "0000:%02x:00.0", static_cast<unsigned>(device));
  std::snprintf(facts->runs_on, sizeof facts->runs_on, "host threads");
  facts->memory_bytes = uint64_t{1} << 30;
  facts->multiprocessors = static_cast<int32_t>(most_blocks);
  facts->clock_khz = 1'000'000;
  facts->cooperative = 1;
  facts->host_atomics = 1;
  facts->ipc = 1;
  return ok;
}

uint64_t pages(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// Null where there is none. Nobody may touch the page behind it.
void* map_file(int file, uint64_t bytes) {
  const uint64_t whole = pages(bytes);
  void* reserved = mmap(nullptr, whole + pages(1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  if (mmap(reserved, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED) return reserved;
  munmap(reserved, whole + pages(1));
  return nullptr;
}

int memory_allocate(int device, uint64_t bytes, uint64_t* address) {
  if (!works(device)) return invalid_device;
  if (bytes > (uint64_t{1} << 30)) return no_memory;
  const int file = memfd_create("ep-host-device", MFD_CLOEXEC);
  if (file < 0) return no_memory;
  void* made = ftruncate(file, static_cast<off_t>(pages(bytes))) == 0 ? map_file(file, bytes) : nullptr;
  if (made == nullptr) {
    close(file);
    return no_memory;
  }
  *address = reinterpret_cast<uint64_t>(made);
  const std::lock_guard lock(memory().mutex);
  memory().blocks[*address] = {device, bytes, pages(bytes) + pages(1), file, false, false};
  return ok;
}
int pinned_allocate(int device, uint64_t bytes, uint64_t* address) {
  if (!works(device)) return invalid_device;
  if (bytes > (uint64_t{1} << 30)) return no_memory;
  const uint64_t whole = (bytes + 511) / 256 * 256;
  void* made = std::aligned_alloc(256, whole);
  if (made == nullptr) return no_memory;
  std::memset(made, 0, whole);
  *address = reinterpret_cast<uint64_t>(made);
  const std::lock_guard lock(memory().mutex);
  memory().blocks[*address] = {device, bytes, 0, -1, true, false};
  return ok;
}

int block_drop(uint64_t address, bool imported) {
  finish_all();
  place dropped{};
  {
    const std::lock_guard lock(memory().mutex);
    const auto found = memory().blocks.find(address);
    if (found == memory().blocks.end() || found->second.imported != imported) return invalid_value;
    dropped = found->second;
    memory().blocks.erase(found);
  }
  if (dropped.pinned) {
    std::free(reinterpret_cast<void*>(address));
    return ok;
  }
  munmap(reinterpret_cast<void*>(address), dropped.mapped);
  if (dropped.file < 0) return ok;
  // What other processes still map is gone with it: their next access ends them (SIGBUS). A GPU would let it hit whatever comes next.
  const int gone = ftruncate(dropped.file, 0);
  close(dropped.file);
  return gone == 0 ? ok : invalid_value;
}
int block_free(int, uint64_t address) { return block_drop(address, false); }

// What is in a handle for other processes.
struct exported {
  int32_t pid;
  int32_t file;
  int32_t device;
  uint64_t bytes;
};
static_assert(sizeof(exported) <= EP_CUDA_IPC_BYTES);

// One that maps a handle just now, for long enough that another thread may come.
class importing {
 public:
  explicit importing(const exported& from) : which_(from.pid, from.file) {
    {
      const std::lock_guard lock(mutex());
      alone = under_way().insert(which_).second;
    }
    if (alone) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~importing() {
    const std::lock_guard lock(mutex());
    if (alone) under_way().erase(which_);
  }
  bool alone = false;

 private:
  using handle = std::pair<int32_t, int32_t>;
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::set<handle>& under_way() {
    static auto* made = new std::set<handle>;
    return *made;
  }
  handle which_;
};

int memory_export(int device, uint64_t address, uint8_t handle[EP_CUDA_IPC_BYTES]) {
  if (!works(device)) return invalid_device;
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(address);
  if (found == memory().blocks.end() || found->second.file < 0) return invalid_value;
  const exported made{static_cast<int32_t>(getpid()), found->second.file, found->second.device, found->second.bytes};
  std::memset(handle, 0, EP_CUDA_IPC_BYTES);
  std::memcpy(handle, &made, sizeof made);
  return ok;
}
int memory_import(int device, const uint8_t handle[EP_CUDA_IPC_BYTES], uint64_t* address) {
  if (!works(device)) return invalid_device;
  exported from{};
  std::memcpy(&from, handle, sizeof from);
  if (from.pid == getpid()) return of_this_process;
  int reaches = 1;
  if (from.device != device) peer_access(device, from.device, &reaches);
  if (reaches == 0) return no_peer_access;
  // As the driver (580.159.04): a handle that another thread of the process is about to map cannot be mapped.
  const importing mine(from);
  if (!mine.alone) return already_mapped;
  const std::string path = "/proc/" + std::to_string(from.pid) + "/fd/" + std::to_string(from.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return invalid_value;
  void* made = map_file(file, from.bytes);
  close(file);
  if (made == nullptr) return no_memory;
  *address = reinterpret_cast<uint64_t>(made);
  const std::lock_guard lock(memory().mutex);
  memory().blocks[*address] = {device, from.bytes, pages(from.bytes) + pages(1), -1, false, true};
  return ok;
}
int memory_unmap(int, uint64_t address) { return block_drop(address, true); }
int memory_find(int device, uint64_t address, uint64_t* end) {
  if (!works(device)) return invalid_device;
  const std::lock_guard lock(memory().mutex);
  auto after = memory().blocks.upper_bound(address);
  if (after == memory().blocks.begin()) return invalid_device_pointer;
  --after;
  if (after->second.pinned || after->second.device != device || address >= after->first + after->second.bytes) return invalid_device_pointer;
  *end = after->first + after->second.bytes;
  return ok;
}

int stream_create(int device, int, void** stream) {
  if (!works(device)) return invalid_device;
  auto* made = new queue;
  const std::lock_guard lock(queues().mutex);
  queues().queues.push_back(made);
  *stream = made;
  return ok;
}
int stream_finish(void* stream) {
  queue_at(stream).finish();
  return ok;
}
int stream_destroy(void* stream) {
  queue_at(stream).finish();
  {
    const std::lock_guard lock(queues().mutex);
    std::erase(queues().queues, static_cast<queue*>(stream));
  }
  delete static_cast<queue*>(stream);
  return ok;
}

// EP_CUDA_HOST_REFUSED_EVENTS: while it is set no event can be made, for tests.
int event_create(int device, int, void** event) {
  if (!works(device)) return invalid_device;
  if (std::getenv("EP_CUDA_HOST_REFUSED_EVENTS") != nullptr) return no_memory;
  *event = new std::shared_ptr<recorded>(std::make_shared<recorded>());
  return ok;
}
std::shared_ptr<recorded>& event_at(void* event) { return *static_cast<std::shared_ptr<recorded>*>(event); }
int event_destroy(void* event) {
  delete &event_at(event);
  return ok;
}
int event_record(void* event, void* stream) {
  // Ranks' graphs are captured each on its own stream here.
  if (queue_at(stream).captured) return not_supported;
  const auto of = event_at(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(of->mutex);
    number = ++of->records;
  }
  return put_on(stream, [of, number] {
    {
      const std::lock_guard lock(of->mutex);
      of->reached = std::max(of->reached, number);
      of->when = std::chrono::steady_clock::now();
    }
    of->changed.notify_all();
  });
}
int event_query(void* event, int* reached) {
  const std::lock_guard lock(event_at(event)->mutex);
  *reached = event_at(event)->reached == event_at(event)->records ? 1 : 0;
  return ok;
}
int event_elapsed(void* from, void* to, float* milliseconds) {
  *milliseconds = std::chrono::duration<float, std::milli>(event_at(to)->when - event_at(from)->when).count();
  return ok;
}
int stream_wait(void* stream, void* event) {
  const auto of = event_at(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(of->mutex);
    number = of->records;
  }
  return put_on(stream, [of, number] {
    std::unique_lock lock(of->mutex);
    of->changed.wait(lock, [&] { return of->reached >= number; });
  });
}

int copy(void* stream, uint64_t to, uint64_t from, uint64_t bytes) {
  return put_on(stream, [=] { std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
}
int fill(void* stream, uint64_t at, uint8_t value, uint64_t bytes) {
  return put_on(stream, [=] { std::memset(reinterpret_cast<void*>(at), value, bytes); });
}

int capture_begin(void* stream) {
  if (queue_at(stream).captured) return capture_unsupported;
  queue_at(stream).captured = std::make_unique<std::vector<task>>();
  return ok;
}
int capture_end(void* stream, void** graph) {
  if (!queue_at(stream).captured) return invalid_value;
  *graph = new std::shared_ptr<const std::vector<task>>(queue_at(stream).captured.release());
  return ok;
}
int graph_launch(void* graph, void* stream) {
  const auto of = *static_cast<std::shared_ptr<const std::vector<task>>*>(graph);
  return put_on(stream, [of] {
    for (const task& each : *of) each();
  });
}
int graph_destroy(void* graph) {
  delete static_cast<std::shared_ptr<const std::vector<task>>*>(graph);
  return ok;
}

int resident(int device, uint32_t, uint32_t lanes, uint32_t* blocks) {
  if (!works(device)) return invalid_device;
  if (lanes == 0 || lanes > 1024) return invalid_configuration;
  *blocks = most_blocks;
  return ok;
}

// The kernel's waits end as on a GPU: by their budget, counted from the kernel's begin, by the flag, or those for a rank by its word.
template <class Kernel> void run_grid(const ep_cuda_launch& how, const Kernel& kernel) {
  ep::kernel_environment environment;
  environment.waits.cancel = reinterpret_cast<const std::atomic<uint32_t>*>(how.cancel);
  if (how.wait_cycles != 0) environment.waits.deadline_ns = ep::clock_now_ns() + static_cast<int64_t>(how.wait_cycles);
  environment.waits.policy = {0, 20'000, 100'000};
  const auto ran = ep::fast_run(how.blocks, environment, [&](ep::fast_context& context) {
    device_context ctx{context, reinterpret_cast<const uint32_t*>(how.lost)};
    kernel(ctx);
  });
  if (!ran.ok()) std::abort(); /* no thread to be had: a test cannot go on */
}
template <class Kernel> int launched(const ep_cuda_launch& how, const Kernel& kernel) {
  if (how.blocks == 0 || how.lanes == 0 || how.lanes % 32 != 0 || how.lanes > 1024) return invalid_configuration;
  if (how.blocks > most_blocks) return invalid_configuration;
  return put_on(how.stream, [how, kernel] { run_grid(how, kernel); });
}

template <class Memory> bool load_store(const Memory& memory) { return memory.header.kind == EP_MEMORY_LOAD_STORE; }
template <class Memory> bool by_nic(const Memory& memory) { return memory.header.kind == EP_MEMORY_IBGDA; }

int begin_call(const ep_cuda_launch* how, const ep_call_counts* counts) {
  return launched(*how, [counts = *counts](device_context& ctx) { ep::begin_call(ctx, counts); });
}
// EP_CUDA_HOST_REFUSED_DISPATCH=N: the process's N-th launch of a dispatch fails, for tests.
bool refused_now() {
  static std::atomic<int> launches{0};
  const char* refused = std::getenv("EP_CUDA_HOST_REFUSED_DISPATCH");
  return refused != nullptr && ++launches == std::atoi(refused);
}
int dispatch(const ep_cuda_launch* how, const ep_device_call* call) {
  if (refused_now()) return invalid_configuration;
  if (call->args.part_count > EP_CALL_PARTS) return invalid_value;
  if (by_nic(call->args.memory)) {
    return launched(*how, [call = *call](device_context& ctx) {
      const ep::ibgda_endpoint endpoint{call.args.memory};
      ep::device_dispatch(ctx, endpoint, call);
      endpoint.quiet_key(ctx, ep::block_coop<device_context>{ctx}, reinterpret_cast<ep_kernel_status*>(call.args.status));
    });
  }
  if (!load_store(call->args.memory)) return invalid_value;
  return launched(*how, [call = *call](device_context& ctx) { ep::device_dispatch(ctx, ep::load_store_endpoint{call.args.memory}, call); });
}
int grant(const ep_cuda_launch* how, const ep_device_grant* grant) {
  if (by_nic(grant->memory)) {
    return launched(*how, [grant = *grant](device_context& ctx) {
      const ep::ibgda_endpoint endpoint{grant.memory};
      ep::grant_lease(ctx, endpoint, grant);
      endpoint.quiet_key(ctx, ep::block_coop<device_context>{ctx}, nullptr);
    });
  }
  if (!load_store(grant->memory)) return invalid_value;
  return launched(*how, [grant = *grant](device_context& ctx) { ep::grant_lease(ctx, ep::load_store_endpoint{grant.memory}, grant); });
}
int compat(const ep_cuda_launch* how, const ep_compat_args* args) {
  if (!load_store(args->memory) || ep::compat_refusal(*args) != nullptr) return invalid_value;
  return launched(*how, [args = *args](device_context& ctx) { ep::compat_dispatch(ctx, ep::load_store_endpoint{args.memory}, args); });
}

// The scratch of a block is its own.
template <class Kernel> int with_scratch(const ep_cuda_launch& how, uint32_t floats, const Kernel& kernel) {
  ep_cuda_launch few = how;
  few.blocks = 2;
  few.lanes = 32;
  return launched(few, [floats, kernel](device_context& ctx) {
    std::vector<float> scratch(floats);
    kernel(ctx, scratch.data());
  });
}
int attention_forward(const ep_cuda_launch* how, const ep_attention_args* args) {
  return with_scratch(*how, EP_ATTENTION_FORWARD_FLOATS(args->head_dim), [args = *args](device_context& ctx, float* scratch) { ep::core_attention_forward(ctx, args, scratch); });
}
int attention_backward(const ep_cuda_launch* how, const ep_attention_args* args) {
  return with_scratch(*how, EP_ATTENTION_BACKWARD_FLOATS(args->head_dim), [args = *args](device_context& ctx, float* scratch) { ep::core_attention_backward(ctx, args, scratch); });
}

int experts_forward(const ep_cuda_launch* how, const ep_expert_args* args) {
  if (args->experts > EP_EXPERT_MOST) return invalid_value;
  return with_scratch(*how, EP_EXPERT_FLOATS(args->hidden, args->intermediate), [args = *args](device_context& ctx, float* scratch) { ep::expert_layer(ctx, args, scratch); });
}

// Times of a call count from the kernel's begin.
ep_moe_call begun(const ep_moe_buffer& buffer, const ep_moe_call& given, bool begins) {
  ep_moe_call call = given;
  call.epoch = ep::moe_epoch_of(buffer, given, begins);
  const auto now = static_cast<uint64_t>(ep::clock_now_ns());
  for (uint64_t* time : {&call.credits_by_ns, &call.counts_by_ns, &call.answers_by_ns}) {
    if (*time != 0) *time += now;
  }
  return call;
}
auto dispatch_kernel(const ep_moe_buffer& buffer, const ep_moe_dispatch_args& given, uint32_t halves) {
  return [buffer, given, halves](device_context& ctx) {
    ep_moe_dispatch_args args = given;
    args.call = begun(buffer, given.call, (halves & ep::moe_send_half) != 0);
    ep::moe_run_dispatch(ctx, ep::load_store_endpoint{buffer.memory}, buffer, args, halves);
  };
}
auto combine_kernel(const ep_moe_buffer& buffer, const ep_moe_combine_args& given, uint32_t halves) {
  return [buffer, given, halves](device_context& ctx) {
    ep_moe_combine_args args = given;
    args.call = begun(buffer, given.call, false);
    ep::moe_run_combine(ctx, ep::load_store_endpoint{buffer.memory}, buffer, args, halves);
  };
}
int moe_dispatch(const ep_cuda_launch* how, const ep_moe_buffer* buffer, const ep_moe_dispatch_args* args, uint32_t halves) {
  return load_store(buffer->memory) ? launched(*how, dispatch_kernel(*buffer, *args, halves)) : invalid_value;
}
int moe_combine(const ep_cuda_launch* how, const ep_moe_buffer* buffer, const ep_moe_combine_args* args, uint32_t halves) {
  return load_store(buffer->memory) ? launched(*how, combine_kernel(*buffer, *args, halves)) : invalid_value;
}
// Ranks of one launch begin together, and the stream goes on when all of them have ended.
int moe_together(const ep_cuda_launch* how, const ep_cuda_moe_rank* ranks, uint32_t count, uint32_t halves) {
  if (!ep::moe_ranks_agree(ranks, count)) return invalid_value;
  if (how->blocks == 0 || how->lanes == 0 || how->lanes % 32 != 0 || how->lanes > 512) return invalid_configuration;
  if (uint64_t{how->blocks} * count > most_blocks) return cooperative_launch_too_large;
  std::vector<task> grids;
  for (uint32_t i = 0; i < count; ++i) {
    const ep_cuda_launch of{how->stream, how->blocks, how->lanes, ranks[i].wait_cycles, ranks[i].cancel, ranks[i].lost};
    if (ranks[i].dispatch != nullptr) grids.push_back([of, kernel = dispatch_kernel(*ranks[i].buffer, *ranks[i].dispatch, halves)] { run_grid(of, kernel); });
    else grids.push_back([of, kernel = combine_kernel(*ranks[i].buffer, *ranks[i].combine, halves)] { run_grid(of, kernel); });
  }
  return put_on(how->stream, [grids] {
    std::vector<std::thread> others;
    for (size_t i = 1; i < grids.size(); ++i) others.emplace_back(grids[i]);
    grids[0]();
    for (std::thread& each : others) each.join();
  });
}
int copy_pieces(void* stream, const ep_cuda_piece* pieces, uint32_t count) {
  if (count == 0 || count > EP_CUDA_MOST_PIECES) return invalid_value;
  for (uint32_t i = 0; i < count; ++i) {
    if (((pieces[i].to | pieces[i].from | pieces[i].bytes) & 3) != 0) return invalid_value;
  }
  return put_on(stream, [all = std::vector<ep_cuda_piece>(pieces, pieces + count)] {
    for (const ep_cuda_piece& one : all) {
      std::memcpy(reinterpret_cast<void*>(one.to), reinterpret_cast<const void*>(one.from), one.bytes);
    }
  });
}
int moe_release(const ep_cuda_launch* how, const ep_moe_buffer* buffer, const ep_moe_call* call) {
  if (!load_store(buffer->memory)) return invalid_value;
  return launched(*how, [buffer = *buffer, given = *call](device_context& ctx) {
    ep::moe_release(ctx, ep::load_store_endpoint{buffer.memory}, buffer, begun(buffer, given, false));
  });
}
int group_call(const ep_cuda_launch* how, const ep_group_args* args) {
  if (!load_store(args->memory) || how->blocks > args->blocks || args->memory.world_size > EP_GROUP_MOST_RANKS) return invalid_value;
  return launched(*how, [args = *args](device_context& ctx) { ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args); });
}

int device_use(int device) { return works(device) ? ok : invalid_device; }
void* stream_handle(void* stream) { return stream; }

constexpr ep_cuda_table table = {EP_CUDA_TABLE_VERSION,
                                 sizeof(ep_cuda_table),
                                 EP_ABI_MAJOR,
                                 EP_ABI_MINOR,
                                 0,
                                 error_text,
                                 device_count,
                                 device_facts,
                                 memory_allocate,
                                 block_free,
                                 memory_export,
                                 memory_import,
                                 memory_unmap,
                                 memory_find,
                                 pinned_allocate,
                                 block_free,
                                 stream_create,
                                 stream_destroy,
                                 stream_finish,
                                 event_create,
                                 event_destroy,
                                 event_record,
                                 event_query,
                                 event_elapsed,
                                 stream_wait,
                                 copy,
                                 fill,
                                 capture_begin,
                                 capture_end,
                                 graph_launch,
                                 graph_destroy,
                                 resident,
                                 begin_call,
                                 dispatch,
                                 grant,
                                 compat,
                                 attention_forward,
                                 attention_backward,
                                 experts_forward,
                                 moe_dispatch,
                                 moe_combine,
                                 moe_release,
                                 group_call,
                                 device_use,
                                 stream_handle,
                                 peer_access,
                                 moe_together,
                                 copy_pieces};

} // namespace

extern "C" __attribute__((visibility("default"))) const ep_cuda_table* ep_cuda_table_of(uint32_t version) {
  return version == EP_CUDA_TABLE_VERSION ? &table : nullptr;
}

// For other libraries that stand in for CUDA's: `run` is a piece of the stream's work.
extern "C" __attribute__((visibility("default"))) void ep_cuda_host_put(void* stream, void (*run)(void*), void* argument) {
  put_on(stream, [run, argument] { run(argument); });
}
