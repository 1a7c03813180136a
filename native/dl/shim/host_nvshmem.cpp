// Stands in for libnvshmem_host.so.3 over the stand-in for a GPU (host_device.cpp): PEs are processes of this machine, heaps are files that all of them map. For tests; no part of what is
// installed. As in NVSHMEM, a process is one PE of one world for as long as it lives, beginning and barriers wait for all PEs for ever, nobody is told of one that died, and the same bytes lie at other
// addresses on each PE.
//
// EP_NVSHMEM_HOST_VERSION: what it says of itself, 30405. EP_NVSHMEM_HOST_APART: PEs reach each other, but map nothing, as over a network. EP_NVSHMEM_HOST_TURNS: it says that PEs share a GPU by turns.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dl/nvshmem_symbols.hpp"

extern "C" void ep_cuda_host_put(void* stream, void (*run)(void*), void* argument);

namespace {

using ep::dl::nvshmem_init_attr;
using ep::dl::nvshmem_unique_id;

constexpr int failed = 7;
constexpr int most_pes = 64;

struct place {
  int32_t pid;
  int32_t file;
};

// Of a world: a file that its first PE makes.
struct meeting {
  std::atomic<uint32_t> arrived[most_pes];
  std::atomic<uint32_t> allocated[most_pes];
  std::atomic<uint32_t> barriers[most_pes];
  place heaps[most_pes];
  uint64_t bytes[most_pes];
};

struct of_process {
  int made_file = -1; // of get_uniqueid
  meeting* shared = nullptr;
  int pe = -1;
  int pes = 0;
  uint8_t* heaps[most_pes] = {};
  uint64_t heap_bytes = 0;
  bool heap_taken = false;
  uint32_t barriers = 0;
};
of_process& here() {
  static auto* made = new of_process;
  return *made;
}

void* map_place(const place& at, uint64_t bytes) {
  const std::string path = "/proc/" + std::to_string(at.pid) + "/fd/" + std::to_string(at.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return made == MAP_FAILED ? nullptr : made;
}

int make_file(uint64_t bytes) {
  const int file = memfd_create("ep-host-nvshmem", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
  return -1;
}

void all(const std::atomic<uint32_t> (&words)[most_pes], uint32_t value) {
  for (int pe = 0; pe < here().pes; ++pe) {
    while (words[pe].load(std::memory_order_acquire) < value) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

uint8_t* at_peer(const void* own, int pe) { return here().heaps[pe] + (static_cast<const uint8_t*>(own) - here().heaps[here().pe]); }

struct work {
  enum class kind { put, get, value, signal, barrier } what;
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  uint64_t bytes = 0; // of a value: its width
  std::atomic<uint64_t>* signal = nullptr;
  uint64_t word = 0;
  bool adds = false;
};

void run(void* argument) {
  auto* job = static_cast<work*>(argument);
  switch (job->what) {
    case work::kind::put:
    case work::kind::get: std::memmove(job->to, job->from, job->bytes); break;
    case work::kind::value: std::memcpy(job->to, &job->word, job->bytes); break;
    case work::kind::signal: break;
    case work::kind::barrier: {
      meeting& shared = *here().shared;
      const uint32_t round = ++here().barriers;
      shared.barriers[here().pe].store(round, std::memory_order_release);
      all(shared.barriers, round);
      break;
    }
  }
  if (job->signal != nullptr) {
    if (job->adds) job->signal->fetch_add(job->word, std::memory_order_acq_rel);
    else job->signal->store(job->word, std::memory_order_release);
  }
  delete job;
}

void put_on(void* stream, const work& job) { ep_cuda_host_put(stream, run, new work(job)); }

void put_word(void* to, uint64_t value, uint64_t width, int pe, void* stream) {
  work job{work::kind::value};
  job.to = at_peer(to, pe);
  job.word = value;
  job.bytes = width;
  put_on(stream, job);
}

} // namespace

#define EP_VISIBLE extern "C" __attribute__((visibility("default")))

EP_VISIBLE void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  const char* told = std::getenv("EP_NVSHMEM_HOST_VERSION");
  const int version = told == nullptr ? 30405 : std::atoi(told);
  *major = version / 10000;
  *minor = version % 10000 / 100;
  *patch = version % 100;
}

EP_VISIBLE int nvshmemx_get_uniqueid(nvshmem_unique_id* id) {
  if (here().made_file < 0) here().made_file = make_file(sizeof(meeting));
  if (here().made_file < 0) return failed;
  const place made{static_cast<int32_t>(getpid()), here().made_file};
  std::memcpy(id->bytes, &made, sizeof made);
  return 0;
}

EP_VISIBLE int nvshmemx_set_attr_uniqueid_args(const int pe, const int pes, const nvshmem_unique_id* id, nvshmem_init_attr* attr) {
  if (attr->version != ep::dl::nvshmem_first_version<nvshmem_init_attr>() || id->version != ep::dl::nvshmem_first_version<nvshmem_unique_id>()) return failed;
  attr->args.unique_id.id = const_cast<nvshmem_unique_id*>(id);
  attr->args.unique_id.pe = pe;
  attr->args.unique_id.pes = pes;
  return 0;
}

EP_VISIBLE int nvshmemx_hostlib_init_attr(unsigned flags, nvshmem_init_attr* attr) {
  of_process& own = here();
  if (flags != ep::dl::nvshmem_with_unique_id || own.shared != nullptr) return failed;
  const auto& given = attr->args.unique_id;
  if (given.pe < 0 || given.pe >= given.pes || given.pes > most_pes) return failed;
  place first{};
  std::memcpy(&first, given.id->bytes, sizeof first);
  auto* shared = static_cast<meeting*>(map_place(first, sizeof(meeting)));
  if (shared == nullptr) return failed;
  own.pe = given.pe;
  own.pes = given.pes;
  own.shared = shared;
  shared->arrived[own.pe].store(1, std::memory_order_release);
  all(shared->arrived, 1);
  return 0;
}

EP_VISIBLE int nvshmemx_init_status() {
  if (here().shared == nullptr) return 0;
  return std::getenv("EP_NVSHMEM_HOST_TURNS") != nullptr ? ep::dl::nvshmem_limited_mpg : ep::dl::nvshmem_initialized;
}
EP_VISIBLE int nvshmem_my_pe() { return here().pe; }
EP_VISIBLE int nvshmem_n_pes() { return here().pes; }

// Once: whoever stands above cuts it up.
EP_VISIBLE void* nvshmem_malloc(size_t bytes) {
  of_process& own = here();
  if (own.heap_taken || own.shared == nullptr) return nullptr;
  own.heap_taken = true;
  own.heap_bytes = bytes;
  const int file = make_file(bytes);
  if (file < 0) return nullptr;
  own.shared->heaps[own.pe] = {static_cast<int32_t>(getpid()), file};
  own.shared->bytes[own.pe] = bytes;
  own.shared->allocated[own.pe].store(1, std::memory_order_release);
  all(own.shared->allocated, 1);
  for (int pe = 0; pe < own.pes; ++pe) {
    own.heaps[pe] = static_cast<uint8_t*>(map_place(own.shared->heaps[pe], bytes));
    if (own.heaps[pe] == nullptr || own.shared->bytes[pe] != bytes) return nullptr;
  }
  own.shared->allocated[own.pe].store(2, std::memory_order_release);
  all(own.shared->allocated, 2); // files may go with their processes from here on
  std::memset(own.heaps[own.pe], 0xa5, std::min<size_t>(bytes, 1 << 20)); // it is not zeroed
  return own.heaps[own.pe];
}

EP_VISIBLE void* nvshmem_ptr(const void* at, int pe) {
  if (pe != here().pe && std::getenv("EP_NVSHMEM_HOST_APART") != nullptr) return nullptr;
  return at_peer(at, pe);
}

EP_VISIBLE void nvshmemx_putmem_on_stream(void* to, const void* from, size_t bytes, int pe, void* stream) {
  work job{work::kind::put};
  job.to = at_peer(to, pe);
  job.from = static_cast<const uint8_t*>(from);
  job.bytes = bytes;
  put_on(stream, job);
}

EP_VISIBLE void nvshmemx_putmem_signal_on_stream(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int op, int pe, void* stream) {
  work job{work::kind::put};
  job.to = at_peer(to, pe);
  job.from = static_cast<const uint8_t*>(from);
  job.bytes = bytes;
  job.signal = reinterpret_cast<std::atomic<uint64_t>*>(at_peer(signal, pe));
  job.word = value;
  job.adds = op == ep::dl::nvshmem_signal_add;
  put_on(stream, job);
}

EP_VISIBLE void nvshmemx_getmem_on_stream(void* to, const void* from, size_t bytes, int pe, void* stream) {
  work job{work::kind::get};
  job.to = static_cast<uint8_t*>(to);
  job.from = at_peer(from, pe);
  job.bytes = bytes;
  put_on(stream, job);
}

EP_VISIBLE void nvshmemx_uint8_p_on_stream(uint8_t* to, uint8_t value, int pe, void* stream) { put_word(to, value, 1, pe, stream); }
EP_VISIBLE void nvshmemx_uint16_p_on_stream(uint16_t* to, uint16_t value, int pe, void* stream) { put_word(to, value, 2, pe, stream); }
EP_VISIBLE void nvshmemx_uint32_p_on_stream(uint32_t* to, uint32_t value, int pe, void* stream) { put_word(to, value, 4, pe, stream); }
EP_VISIBLE void nvshmemx_uint64_p_on_stream(uint64_t* to, uint64_t value, int pe, void* stream) { put_word(to, value, 8, pe, stream); }

EP_VISIBLE void nvshmemx_signal_op_on_stream(uint64_t* signal, uint64_t value, int op, int pe, void* stream) {
  work job{work::kind::signal};
  job.signal = reinterpret_cast<std::atomic<uint64_t>*>(at_peer(signal, pe));
  job.word = value;
  job.adds = op == ep::dl::nvshmem_signal_add;
  put_on(stream, job);
}

// A stream's pieces have landed when they have run.
EP_VISIBLE void nvshmemx_quiet_on_stream(void*) {}
EP_VISIBLE void nvshmemx_barrier_all_on_stream(void* stream) { put_on(stream, work{work::kind::barrier}); }
