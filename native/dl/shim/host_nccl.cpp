// Stands in for libnccl.so.2 over the stand-in for a GPU (host_device.cpp): ranks are threads or processes of this machine, data goes through a file in shared memory. For tests; no part
// of what is installed. As in NCCL, communicators do not block, the first call of a kind ends only when its peers have made theirs, calls that do not fit together hang, and nobody is
// told of a rank that died.
//
// EP_NCCL_HOST_VERSION: what it says of itself. EP_NCCL_HOST_BROKEN=N: the process's N-th call reports a remote error some time later. EP_NCCL_HOST_LAUNCH_US: a call is on its
// stream so much later, and in progress until then, as NCCL launches from a thread of its own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "collective/reduce.hpp"
#include "dl/nccl_symbols.hpp"

extern "C" void ep_cuda_host_put(void* stream, void (*run)(void*), void* argument);

namespace {

using ep::dl::nccl_comm;
using ep::dl::nccl_result;

constexpr nccl_result success = ep::dl::nccl_success;
constexpr nccl_result in_progress = ep::dl::nccl_in_progress;
constexpr nccl_result system_error = 2;
constexpr nccl_result invalid_argument = 4;
constexpr nccl_result invalid_usage = 5;
constexpr nccl_result remote_error = 6;
constexpr int most_ranks = 16;
constexpr size_t box_bytes = 16 * 1024;

// From one rank to another, a piece at a time.
struct box {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> read;
  uint64_t tag;
  uint64_t bytes;
  uint8_t data[box_bytes];
};
struct meeting {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> called[most_ranks];                // collective calls that connected: the first
  std::atomic<uint32_t> paired[most_ranks][most_ranks];    // the same of messages, by who and with whom
  box boxes[most_ranks][most_ranks];                       // by sender and receiver
};

// A box waits for one with the same tag, for ever.
struct transfer {
  bool sends;
  int peer;
  uint64_t tag;
  uint8_t* at;
  uint64_t bytes;
  uint64_t done = 0;
  bool begun = false; // of no bytes: one empty piece
  bool over = false;
};

struct step {
  int verb; // as ep::gpu::nccl_verb
  const uint8_t* from;
  uint8_t* to;
  uint64_t count;
  int type;
  int fold;
  double factor;
  int peer; // or root
};

struct communicator {
  int rank;
  int size;
  std::string name;
  meeting* shared;
  bool met = false;
  bool connected = false;
  std::vector<bool> pairs;
  nccl_result state = in_progress;
  std::vector<step> pending; // waits until peers have made the same
  void* stream = nullptr;
  std::chrono::steady_clock::time_point launches{}; // those that are pending; the epoch: nobody asked yet
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};
  std::map<int, double> folds;
  int next_fold = 1000;
};

ep::element_type element_of(int type) {
  using ep::element_type;
  constexpr element_type types[] = {element_type::i8, element_type::u8, element_type::i32, element_type::u32, element_type::i64, element_type::u64, element_type::f16, element_type::f32, element_type::f64, element_type::bf16};
  return types[type];
}
ep::reduce_op fold_of(int fold) {
  constexpr ep::reduce_op folds[] = {ep::reduce_op::sum, ep::reduce_op::product, ep::reduce_op::max, ep::reduce_op::min, ep::reduce_op::avg};
  return fold > 4 ? ep::reduce_op::premul_sum : folds[fold];
}

struct work {
  communicator* of;
  std::vector<step> steps;
};

// One look at the box: whether something moved.
bool move(communicator& of, transfer& one) {
  box& through = one.sends ? of.shared->boxes[of.rank][one.peer] : of.shared->boxes[one.peer][of.rank];
  const uint64_t written = through.written.load(std::memory_order_acquire);
  const uint64_t read = through.read.load(std::memory_order_acquire);
  if (one.sends) {
    if (written != read) return false;
    through.tag = one.tag;
    through.bytes = std::min<uint64_t>(one.bytes - one.done, box_bytes);
    std::memcpy(through.data, one.at + one.done, through.bytes);
    one.done += through.bytes;
    through.written.store(written + 1, std::memory_order_release);
  } else {
    if (written == read || through.tag != one.tag || through.bytes > one.bytes - one.done) return false;
    std::memcpy(one.at + one.done, through.data, through.bytes);
    one.done += through.bytes;
    through.read.store(read + 1, std::memory_order_release);
  }
  one.over = one.done == one.bytes;
  return true;
}

// Of each peer and direction one after the other, all of them side by side.
void carry_out(communicator& of, std::vector<transfer>& all) {
  std::map<std::pair<bool, int>, std::vector<transfer*>> lines;
  for (transfer& each : all) lines[{each.sends, each.peer}].push_back(&each);
  size_t left = all.size();
  std::map<std::pair<bool, int>, size_t> next;
  while (left > 0 && !of.aborted.load(std::memory_order_acquire)) {
    bool moved = false;
    for (auto& [where, line] : lines) {
      size_t& at = next[where];
      if (at == line.size()) continue;
      moved = move(of, *line[at]) || moved;
      if (line[at]->over) {
        ++at;
        --left;
      }
    }
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void run(void* argument) {
  const std::unique_ptr<work> what(static_cast<work*>(argument));
  communicator& of = *what->of;
  std::vector<transfer> all;
  struct folding {
    const step* of;
    std::vector<std::vector<uint8_t>> parts; // by rank
    const uint8_t* own;
    uint64_t count;
  };
  std::vector<folding> foldings;
  // Messages to itself: the n-th sent is the n-th received.
  std::vector<const step*> to_self;
  std::vector<const step*> from_self;
  for (const step& one : what->steps) {
    const uint64_t each = ep::element_bytes(element_of(one.type));
    const uint64_t bytes = one.count * each;
    const uint64_t tag = one.verb >= 5 ? 1 : (bytes << 16) ^ static_cast<uint64_t>(one.verb << 12 | one.type << 8 | (one.fold > 4 ? 5 : one.fold) << 4 | (one.peer + 1));
    const auto give = [&](int peer, const uint8_t* at) { all.push_back({true, peer, tag, const_cast<uint8_t*>(at), bytes}); };
    const auto take = [&](int peer, uint8_t* at) { all.push_back({false, peer, tag, at, bytes}); };
    const auto fold = [&](const uint8_t* own) {
      foldings.push_back({&one, std::vector<std::vector<uint8_t>>(static_cast<size_t>(of.size)), own, one.count});
      for (int rank = 0; rank < of.size; ++rank) {
        if (rank == of.rank) continue;
        auto& part = foldings.back().parts[static_cast<size_t>(rank)];
        part.resize(bytes);
        take(rank, part.data());
      }
    };
    for (int rank = 0; rank < of.size; ++rank) {
      if (rank == of.rank) continue;
      if (one.verb == 0 || one.verb == 3) give(rank, one.from);
      if (one.verb == 1 && one.peer == of.rank) give(rank, one.from);
      if (one.verb == 3) take(rank, one.to + static_cast<uint64_t>(rank) * bytes);
      if (one.verb == 4) give(rank, one.from + static_cast<uint64_t>(rank) * bytes);
    }
    switch (one.verb) {
      case 0: fold(one.from); break;
      case 1:
        if (one.peer != of.rank) take(one.peer, one.to);
        else std::memmove(one.to, one.from, bytes);
        break;
      case 2:
        if (one.peer == of.rank) fold(one.from);
        else give(one.peer, one.from);
        break;
      case 3: std::memmove(one.to + static_cast<uint64_t>(of.rank) * bytes, one.from, bytes); break;
      case 4: fold(one.from + static_cast<uint64_t>(of.rank) * bytes); break;
      case 5:
        if (one.peer == of.rank) to_self.push_back(&one);
        else give(one.peer, one.from);
        break;
      default:
        if (one.peer == of.rank) from_self.push_back(&one);
        else take(one.peer, one.to);
    }
  }
  for (size_t i = 0; i < to_self.size() && i < from_self.size(); ++i) std::memmove(from_self[i]->to, to_self[i]->from, to_self[i]->count * ep::element_bytes(element_of(to_self[i]->type)));
  carry_out(of, all);
  if (!of.aborted.load(std::memory_order_acquire)) {
    for (const folding& each : foldings) {
      std::vector<const void*> sources;
      for (int rank = 0; rank < of.size; ++rank) sources.push_back(rank == of.rank ? each.own : each.parts[static_cast<size_t>(rank)].data());
      std::vector<uint8_t> made(each.count * ep::element_bytes(element_of(each.of->type)));
      if (each.count > 0) ep::reduce_elements(made.data(), sources.data(), of.size, each.count, element_of(each.of->type), fold_of(each.of->fold), each.of->factor, false);
      std::memcpy(each.of->to, made.data(), made.size());
    }
  }
  of.running.fetch_sub(1, std::memory_order_acq_rel);
}

// Whether all whom the pending calls need have made theirs, once.
bool connected(communicator& of) {
  bool all = true;
  for (const step& one : of.pending) {
    if (one.verb < 5) {
      if (of.connected) continue;
      of.shared->called[of.rank].store(1);
      for (int rank = 0; rank < of.size; ++rank) all = all && of.shared->called[rank].load() != 0;
    } else if (!of.pairs[static_cast<size_t>(one.peer)] && one.peer != of.rank) {
      of.shared->paired[of.rank][one.peer].store(1);
      all = all && of.shared->paired[one.peer][of.rank].load() != 0;
    }
  }
  if (!all) return false;
  for (const step& one : of.pending) {
    if (one.verb < 5) of.connected = true;
    else of.pairs[static_cast<size_t>(one.peer)] = true;
  }
  return true;
}

nccl_result put(communicator& of) {
  if (!connected(of)) return in_progress;
  if (const char* late = std::getenv("EP_NCCL_HOST_LAUNCH_US"); late != nullptr) {
    const auto now = std::chrono::steady_clock::now();
    if (of.launches == std::chrono::steady_clock::time_point{}) of.launches = now + std::chrono::microseconds(std::atoi(late));
    if (now < of.launches) return in_progress;
    of.launches = {};
  }
  of.running.fetch_add(1, std::memory_order_acq_rel);
  ep_cuda_host_put(of.stream, run, new work{&of, std::move(of.pending)});
  of.pending.clear();
  return success;
}

// The first look at pending calls; others follow as the communicator is asked for its state.
nccl_result begin(communicator& of) {
  static std::atomic<int> calls{0};
  const char* broken = std::getenv("EP_NCCL_HOST_BROKEN");
  if (broken != nullptr && ++calls == std::atoi(broken)) {
    of.state = remote_error;
    return in_progress;
  }
  const nccl_result made = put(of);
  if (made == in_progress) of.state = in_progress;
  return made;
}

// Of this thread: the calls between a group's begin and end.
struct grouping {
  int depth = 0;
  communicator* of = nullptr;
};
thread_local grouping group;

communicator& at(nccl_comm comm) { return *static_cast<communicator*>(comm); }

nccl_result add(nccl_comm comm, void* stream, step one) {
  communicator& of = at(comm);
  if (one.type < 0 || one.type > 9 || one.peer >= of.size) return invalid_argument;
  if (of.state != success) return invalid_usage;
  one.factor = of.folds.count(one.fold) != 0 ? of.folds[one.fold] : 0;
  of.pending.push_back(one);
  of.stream = stream;
  if (group.depth == 0) return begin(of);
  group.of = &of;
  return success;
}

std::string name_of(const ep::dl::nccl_unique_id& id) { return std::string(id.bytes, strnlen(id.bytes, sizeof id.bytes)); }

void forget(communicator* of) {
  while (of->running.load(std::memory_order_acquire) != 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  munmap(of->shared, sizeof(meeting));
  delete of;
}

const uint8_t* bytes(const void* at) { return static_cast<const uint8_t*>(at); }
uint8_t* bytes(void* at) { return static_cast<uint8_t*>(at); }

} // namespace

#define EP_SHOWN __attribute__((visibility("default")))
extern "C" {

EP_SHOWN nccl_result ncclGetVersion(int* version) {
  const char* said = std::getenv("EP_NCCL_HOST_VERSION");
  *version = said == nullptr ? 22809 : std::atoi(said);
  return success;
}

EP_SHOWN const char* ncclGetErrorString(nccl_result error) {
  switch (error) {
    case success: return "no error";
    case system_error: return "unhandled system error";
    case invalid_argument: return "invalid argument";
    case invalid_usage: return "invalid usage";
    case remote_error: return "remote process exited or there was a network error";
    case in_progress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
EP_SHOWN const char* ncclGetLastError(nccl_comm) { return ""; }

EP_SHOWN nccl_result ncclGetUniqueId(ep::dl::nccl_unique_id* id) {
  static std::atomic<int> made{0};
  *id = {};
  std::snprintf(id->bytes, sizeof id->bytes, "/ep-host-nccl-%d-%d", static_cast<int>(getpid()), ++made);
  return success;
}

EP_SHOWN nccl_result ncclCommInitRankConfig(nccl_comm* comm, int ranks, ep::dl::nccl_unique_id id, int rank, ep::dl::nccl_config* config) {
  if (config->magic != 0xcafebeef || config->byte_length < 20 || config->blocking != 0) return invalid_argument;
  if (ranks < 1 || ranks > most_ranks || rank < 0 || rank >= ranks) return invalid_argument;
  const std::string name = name_of(id);
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return system_error;
  void* shared = ftruncate(file, sizeof(meeting)) == 0 ? mmap(nullptr, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (shared == MAP_FAILED) return system_error;
  auto* made = new communicator{};
  made->rank = rank;
  made->size = ranks;
  made->name = name;
  made->shared = static_cast<meeting*>(shared);
  made->pairs.resize(static_cast<size_t>(ranks));
  if (made->shared->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) shm_unlink(name.c_str());
  *comm = made;
  return in_progress;
}

EP_SHOWN nccl_result ncclCommGetAsyncError(nccl_comm comm, nccl_result* state) {
  communicator& of = at(comm);
  if (!of.met && of.shared->arrived.load() >= static_cast<uint32_t>(of.size)) {
    of.met = true;
    of.state = success;
  }
  if (of.met && of.state == in_progress && put(of) == success) of.state = success;
  *state = of.state;
  return success;
}

EP_SHOWN nccl_result ncclCommFinalize(nccl_comm comm) { return at(comm).running.load() == 0 ? success : in_progress; }
EP_SHOWN nccl_result ncclCommDestroy(nccl_comm comm) {
  forget(&at(comm));
  return success;
}
EP_SHOWN nccl_result ncclCommAbort(nccl_comm comm) {
  at(comm).aborted.store(true, std::memory_order_release);
  if (!at(comm).met) shm_unlink(at(comm).name.c_str());
  forget(&at(comm));
  return success;
}

EP_SHOWN nccl_result ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int, nccl_comm comm) {
  // What it is as an f64: of one element, folded alone, 1 · factor.
  double factor = 0;
  const ep::element_type element = element_of(type);
  if (element == ep::element_type::f64) std::memcpy(&factor, scalar, sizeof factor);
  else if (element == ep::element_type::f32) {
    float single = 0;
    std::memcpy(&single, scalar, sizeof single);
    factor = single;
  } else {
    uint16_t half = 0;
    std::memcpy(&half, scalar, sizeof half);
    const uint32_t sign = half >> 15;
    const uint32_t exponent = element == ep::element_type::f16 ? half >> 10 & 31 : half >> 7 & 255;
    const double fraction = element == ep::element_type::f16 ? (half & 1023) / 1024.0 : (half & 127) / 128.0;
    const int bias = element == ep::element_type::f16 ? 15 : 127;
    factor = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
    if (sign != 0) factor = -factor;
  }
  *op = at(comm).next_fold++;
  at(comm).folds[*op] = factor;
  return success;
}
EP_SHOWN nccl_result ncclRedOpDestroy(int op, nccl_comm comm) { return at(comm).folds.erase(op) == 1 ? success : invalid_argument; }

EP_SHOWN nccl_result ncclGroupStart() {
  ++group.depth;
  return success;
}
EP_SHOWN nccl_result ncclGroupEnd() {
  if (--group.depth > 0 || group.of == nullptr) return success;
  communicator& of = *group.of;
  group.of = nullptr;
  return begin(of);
}

EP_SHOWN nccl_result ncclAllReduce(const void* from, void* to, size_t count, int type, int op, nccl_comm comm, void* stream) { return add(comm, stream, {0, bytes(from), bytes(to), count, type, op, 0, -1}); }
EP_SHOWN nccl_result ncclBroadcast(const void* from, void* to, size_t count, int type, int root, nccl_comm comm, void* stream) { return add(comm, stream, {1, bytes(from), bytes(to), count, type, 0, 0, root}); }
EP_SHOWN nccl_result ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, nccl_comm comm, void* stream) { return add(comm, stream, {2, bytes(from), bytes(to), count, type, op, 0, root}); }
EP_SHOWN nccl_result ncclAllGather(const void* from, void* to, size_t count, int type, nccl_comm comm, void* stream) { return add(comm, stream, {3, bytes(from), bytes(to), count, type, 0, 0, -1}); }
EP_SHOWN nccl_result ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, nccl_comm comm, void* stream) { return add(comm, stream, {4, bytes(from), bytes(to), count, type, op, 0, -1}); }
EP_SHOWN nccl_result ncclSend(const void* from, size_t count, int type, int peer, nccl_comm comm, void* stream) { return add(comm, stream, {5, bytes(from), nullptr, count, type, 0, 0, peer}); }
EP_SHOWN nccl_result ncclRecv(void* to, size_t count, int type, int peer, nccl_comm comm, void* stream) { return add(comm, stream, {6, nullptr, bytes(to), count, type, 0, 0, peer}); }
}
