// A reliable endpoint for messages and one-sided writes and reads between hosts, in our own types. `dl/fabric_libfabric.cpp` fills the table from libfabric; whoever drives a
// network (core/fabric) sees this file only.
//
// Promises, the least that libfabric's providers give: what is posted lands in any order; an arrival (`arrived`) says that the bytes of its own write have landed and carries 4
// bytes of the writer's; who wrote is not told. Anybody who finds the address can send messages; writes and reads take the key of the memory, which is of 64 bits that nobody guesses
// where the provider lets us choose (`offer.key_bytes`).
//
// Failures. `failure.sys_errno`: ELIBACC no libfabric; ELIBBAD too old a one, or a part of it is missing; ENODATA no provider offers what is asked for, the message says what does.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "status.hpp"

namespace ep::dl {

struct fabric_query {
  std::string library = "libfabric.so.1";
  std::string provider; // as libfabric calls it, "tcp;ofi_rxm"; "": the first of fabric_policy() that is there
  std::string address;  // of the interface to bind to; "": the provider's choice
  int gpu = -1;         // ordinal of the one whose memory is to be registered, too; -1: none
  bool sleeps = true;   // somebody may want to sleep on descriptor(); it makes events dearer
};

// What was chosen.
struct fabric_offer {
  std::string provider;
  std::string domain;  // the device or network interface
  std::string version; // of libfabric
  uint64_t max_message = 0;
  uint32_t data_bytes = 0; // that an arrival can carry
  uint32_t inject_bytes = 0; // that inject() takes
  bool pairs = false;        // there is write_pair()
  uint32_t key_bytes = 0;  // of a memory's key; 0: the provider makes them
  std::string no_gpu;      // why no memory of query.gpu is registered; empty: register_gpu() may be tried
  std::string no_atomics;  // why not; empty: fetch_add() and compare_swap() are there, and have been tried
};

// Best first.
std::span<const char* const> fabric_policy();

struct fabric_region {
  void* handle = nullptr;
  uint64_t key = 0;
  uint64_t base = 0; // peers name the first byte so: its address, or 0
  void* descriptor = nullptr; // with what requests name bytes of it, where they lie in a GPU
};

// Memory of query.gpu: `byte_length` bytes from `address` on, which lie at `offset` in a DMA-BUF of pages that begin at address - offset.
struct gpu_bytes {
  uint64_t address = 0;
  uint64_t byte_length = 0;
  int dmabuf_fd = -1; // -1: the GPU exports none
  uint64_t offset = 0;
};

// The context of an operation begins with these bytes, which are the provider's until its event.
struct fabric_context {
  void* internal[8];
};

struct fabric_event {
  enum class kind : uint8_t { done, arrived, failed };
  kind what = kind::done;
  fabric_context* context = nullptr; // of the operation; null for `arrived`, and for a failure that belongs to none
  uint32_t data = 0;                 // of `arrived`
  size_t bytes = 0;                  // of a message that was received
  int error = 0;                     // of `failed`: an errno
  std::string text;                  // of `failed`
};

// Bytes, and where they are to lie.
struct fabric_piece {
  const void* bytes = nullptr; // in memory of the host
  size_t length = 0;
  uint64_t at = 0;
  uint64_t key = 0;
};

class fabric_port {
 public:
  virtual ~fabric_port() = default;
  virtual const fabric_offer& offer() const = 0;
  // For insert() on the others.
  virtual result<std::vector<uint8_t>> address() = 0;
  virtual result<uint64_t> insert(std::span<const uint8_t> address) = 0;
  // Any thread. Peers may write and read the bytes until it is given back.
  virtual result<fabric_region> register_memory(void* bytes, uint64_t byte_length) = 0;
  // The same for memory of a GPU: as a DMA-BUF, or where that cannot be by its address, which takes help of the kernel (nvidia-peermem). EOPNOTSUPP says why neither goes.
  virtual result<fabric_region> register_gpu(const gpu_bytes& bytes) = 0;
  virtual void give_back(const fabric_region& region) = 0;

  // `descriptor`: of a region of a GPU, in which `buffer` lies; null: it lies in memory of the host. One thread at a time. 0: posted, an event follows. EAGAIN: no room now; poll(), then try again. Otherwise an errno: the way to that peer is gone.
  virtual int receive(void* buffer, size_t bytes, fabric_context* context) = 0;
  virtual int send(uint64_t to, const void* buffer, size_t bytes, fabric_context* context) = 0;
  // The same for up to offer().inject_bytes, which are the port's from the return on: 0 means that they are on their way, and no event follows. HAZARD: not even one of a failure; whoever has to
  // know of that sends something else behind it.
  virtual int inject(uint64_t to, const void* buffer, size_t bytes) = 0;
  virtual int write(uint64_t to, const void* buffer, size_t bytes, void* descriptor, uint32_t data, uint64_t at, uint64_t key, fabric_context* context) = 0;
  // To two places by one write, with one event and one arrival, which says that both have landed. ENOSYS where the offer says that there is none.
  virtual int write_pair(uint64_t to, const fabric_piece& first, const fabric_piece& second, uint32_t data, fabric_context* context) {
    (void)to, (void)first, (void)second, (void)data, (void)context;
    return ENOSYS;
  }
  virtual int read(uint64_t from, void* buffer, size_t bytes, void* descriptor, uint64_t at, uint64_t key, fabric_context* context) = 0;
  // On a word of 8 bytes at a multiple of 8; what it was lands in `old`. Atomic against those of all other ports whose offer has them too, and against nothing else: not against
  // writes, and not against this process's own stores. HAZARD: operands, too, must stay until the event. ENOSYS where offer().no_atomics says why.
  virtual int fetch_add(uint64_t to, const uint64_t* add, uint64_t* old, uint64_t at, uint64_t key, fabric_context* context) = 0;
  virtual int compare_swap(uint64_t to, const uint64_t* compare, const uint64_t* swap, uint64_t* old, uint64_t at, uint64_t key, fabric_context* context) = 0;
  // Makes progress, and appends what has happened.
  virtual void poll(std::vector<fabric_event>& events) = 0;

  // Becomes readable when there is something to poll for, provided that may_sleep() was true after the last poll; -1: the provider has none. HAZARD: it is a hint. Whoever sleeps on it
  // wakes up by himself now and then.
  virtual int descriptor() const { return -1; }
  virtual bool may_sleep() { return false; }
};

// Finds out what open_fabric would choose. The first time it is open for a moment: what a provider says of its atomics is known once they were tried, which is done once in a process.
result<fabric_offer> probe_fabric(const fabric_query& query);
result<std::unique_ptr<fabric_port>> open_fabric(const fabric_query& query);

} // namespace ep::dl
