// Two or more software EFAs with endpoints between them, driven by raw WQEs: what stands between a test and the bytes is here.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "nic/efa/soft_device.hpp"
#include "nic/efa/stepper.hpp"
#include "waiting.hpp"

namespace ep::test {

namespace efa = nic::efa;

template <class Value> Value must(result<Value> got) {
  EP_CHECK(got.ok());
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

inline efa::soft_options stepped(uint64_t seed = 1) {
  efa::soft_options options;
  options.threaded = false;
  options.engine.seed = seed;
  options.engine.fragment_bytes = 16;
  options.engine.trace_events = 100'000;
  options.engine.trace_stages = true;
  return options;
}

// A device with one registered segment. Its first page is for counts, which the node hands out.
class efa_node {
 public:
  static constexpr uint64_t count_bytes = 4096;
  static constexpr uint32_t all_rights = dl::EFA_ACCESS_LOCAL_WRITE | dl::EFA_ACCESS_REMOTE_WRITE | dl::EFA_ACCESS_REMOTE_READ;
  explicit efa_node(const efa::soft_options& options, uint64_t bytes = 1 << 16)
      : device(must(efa::soft_device::open("efa", options))), memory(must(segment::create(count_bytes + bytes))),
        mr(must(device->reg_mr({address(), bytes}, all_rights))), bytes(bytes) {}
  ~efa_node() {
    if (mr.handle != nullptr) must(device->dereg_mr(mr));
  }

  uint8_t* data(uint64_t offset = 0) const { return memory->data() + count_bytes + offset; }
  uint64_t address(uint64_t offset = 0) const { return reinterpret_cast<uint64_t>(data(offset)); }
  uint64_t word(uint64_t offset) const { return efa::load_acquire(*reinterpret_cast<const uint64_t*>(data(offset))); }
  uint64_t* take_count() { return reinterpret_cast<uint64_t*>(memory->data()) + counts_++; }

  std::unique_ptr<efa::soft_device> device;
  std::shared_ptr<segment> memory;
  dl::efa_mr mr;
  uint64_t bytes;

 private:
  uint32_t counts_ = 0;
};

struct efa_queue_options {
  uint32_t depth = 16;
  uint32_t cq_depth = 64;
  uint32_t entry_bytes = 16;
  bool inline_write = false;
};

struct efa_request {
  uint32_t opcode = EP_EFA_OPCODE_RDMA_WRITE;
  dl::efa_peer to;
  uint64_t remote = 0;
  uint32_t rkey = 0;
  uint64_t local = 0;
  uint32_t lkey = 0;
  uint32_t bytes = 0;
};

struct efa_completion {
  uint64_t id;
  uint8_t status;
  uint8_t opcode;
  uint32_t qpn;
};

// One endpoint with its completions and three counts, as a poster sees it.
class efa_queue {
 public:
  efa_queue(efa_node& of, const efa_queue_options& options = {}) : of(of), options(options) {
    const auto count = [&](uint64_t*& word) {
      word = of.take_count();
      uint64_t* failures = of.take_count();
      failed.push_back(failures);
      counters.push_back(must(of.device->open_counter({{reinterpret_cast<uint64_t>(word), 8}, {reinterpret_cast<uint64_t>(failures), 8}})));
    };
    count(written);
    count(arrived);
    count(read);
    dl::efa_cq_spec cq_spec;
    cq_spec.depth = options.cq_depth;
    cq_spec.entry_bytes = options.entry_bytes;
    cq = must(of.device->create_cq(cq_spec));
    must(of.device->cq_polled(cq, &polled));
    endpoint = must(of.device->create_endpoint({options.depth, options.inline_write, cq, counters[0], counters[1], counters[2]}));
    mask = options.depth - 1;
    ring = reinterpret_cast<uint8_t*>(endpoint.sq.buffer);
  }
  ~efa_queue() { destroy(); }
  efa_queue(const efa_queue&) = delete;

  void destroy() {
    if (endpoint.handle == nullptr) return;
    for (const dl::efa_peer& peer : peers) must(of.device->remove_address(peer));
    must(of.device->destroy_endpoint(endpoint));
    must(of.device->destroy_cq(cq));
    for (const dl::efa_counter& counter : counters) must(of.device->close_counter(counter));
    endpoint.handle = nullptr;
  }

  dl::efa_peer knows(const dl::efa_address& address) {
    peers.push_back(must(of.device->insert_address(endpoint, address)));
    return peers.back();
  }

  uint32_t phase(uint64_t number) const { return number / options.depth & 1; }
  uint8_t* slot(uint64_t number) const { return ring + (number & mask) * endpoint.sq.wqe_bytes; }

  // A well-formed entry; tests change bytes of it.
  std::vector<uint8_t> wqe(const efa_request& what) const {
    std::vector<uint8_t> bytes(endpoint.sq.wqe_bytes);
    ep_efa_rdma_wqe entry{};
    entry.meta.req_id = static_cast<uint16_t>(tail);
    entry.meta.ctrl1 = static_cast<uint8_t>(0x80 | what.opcode);
    entry.meta.ctrl2 = static_cast<uint8_t>(EP_EFA_CTRL2 | phase(tail));
    entry.meta.dest_qpn = what.to.qpn;
    entry.meta.ah = what.to.ah;
    entry.meta.qkey = what.to.qkey;
    entry.meta.length = 1;
    entry.remote = {what.bytes, what.rkey, what.remote};
    entry.local = {what.bytes, what.lkey, what.local};
    std::memcpy(bytes.data(), &entry, sizeof entry);
    return bytes;
  }
  std::vector<uint8_t> inline_wqe(const efa_request& what, const void* value) const {
    std::vector<uint8_t> bytes = wqe(what);
    bytes[2] |= EP_EFA_CTRL1_INLINE;
    const auto length = static_cast<uint16_t>(what.bytes);
    std::memcpy(bytes.data() + 6, &length, 2);
    std::memset(bytes.data() + 48, 0, bytes.size() - 48);
    std::memcpy(bytes.data() + 48, value, what.bytes);
    return bytes;
  }
  // The entry at `tail`; returns its number.
  uint64_t put(const std::vector<uint8_t>& bytes) {
    for (size_t at = 0; at < bytes.size(); at += 8) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + at, 8);
      std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(slot(tail) + at)).store(word, std::memory_order_relaxed);
    }
    return tail++;
  }
  void ring_to(uint32_t value) { efa::store_release(*reinterpret_cast<uint32_t*>(endpoint.sq.doorbell), value); }
  void bell() { ring_to(static_cast<uint32_t>(tail)); }
  uint64_t post(const efa_request& what) {
    const uint64_t number = put(wqe(what));
    bell();
    return number;
  }

  // The next completion, if it has come.
  bool poll(efa_completion& out) {
    const uint8_t* at = reinterpret_cast<const uint8_t*>(endpoint_cq()) + (polled % options.cq_depth) * options.entry_bytes;
    const uint64_t word = efa::load_acquire(*reinterpret_cast<const uint64_t*>(at));
    if ((word >> 24 & 1) != (polled / options.cq_depth % 2 == 0 ? 1u : 0u)) return false;
    out = {word & 0xffff, static_cast<uint8_t>(word >> 16), static_cast<uint8_t>(word >> 28 & 7), static_cast<uint32_t>(word >> 32 & 0xffff)};
    if (options.entry_bytes >= 16) {
      uint64_t second;
      std::memcpy(&second, at + 8, 8);
      out.id |= (word >> 48) << 16 | (second & 0xffffffff) << 32;
    }
    efa::store_release(polled, polled + 1);
    return true;
  }
  std::vector<efa_completion> poll_all() {
    std::vector<efa_completion> all;
    for (efa_completion one; poll(one);) all.push_back(one);
    return all;
  }
  static uint64_t count_of(const uint64_t* word) { return efa::load_acquire(*word); }

  efa_node& of;
  efa_queue_options options;
  std::vector<dl::efa_counter> counters;
  std::vector<uint64_t*> failed;
  uint64_t* written = nullptr;
  uint64_t* arrived = nullptr;
  uint64_t* read = nullptr;
  uint64_t polled = 0;
  dl::efa_cq cq;
  dl::efa_endpoint endpoint;
  std::vector<dl::efa_peer> peers;
  uint64_t mask = 0;
  uint8_t* ring = nullptr;
  uint64_t tail = 0;

 private:
  uint64_t endpoint_cq() const { return cq.buffer; }
};

// Two nodes that know each other. `a` posts, `b` is written to; both may.
struct efa_pair {
  explicit efa_pair(uint64_t seed = 1, const efa_queue_options& queues = {}, const efa::soft_options& options = stepped())
      : a_node(seeded(options, seed)), b_node(seeded(options, seed + 1)), a(a_node, queues), b(b_node, queues), steps(seed) {
    to_b = a.knows(b.endpoint.address);
    to_a = b.knows(a.endpoint.address);
    if (!options.threaded) {
      steps.add(*a_node.device);
      steps.add(*b_node.device);
    }
  }
  static efa::soft_options seeded(efa::soft_options options, uint64_t seed) {
    options.engine.seed = seed;
    return options;
  }
  // From `from` of a's memory to `to` of b's.
  efa_request write(uint64_t from, uint64_t to, uint32_t bytes) const {
    return {EP_EFA_OPCODE_RDMA_WRITE, to_b, b_node.address(to), b_node.mr.rkey, a_node.address(from), a_node.mr.lkey, bytes};
  }
  efa_request read(uint64_t into, uint64_t from, uint32_t bytes) const {
    efa_request what = write(into, from, bytes);
    what.opcode = EP_EFA_OPCODE_RDMA_READ;
    return what;
  }

  efa_node a_node, b_node;
  efa_queue a, b;
  dl::efa_peer to_a, to_b;
  efa::stepper steps;
};

} // namespace ep::test
