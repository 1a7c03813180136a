// A small NIC for tests of the post path: executes the WQEs of its queue pairs within this process, and takes nothing on trust. Not the software NIC
// (native/nic): it has no PRM, no states and no wire, but it runs on a context, so that the simt executor interleaves it with the posters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ep/abi/ibgda.h"
#include "ep/abi/mlx5_cqe.h"
#include "ep/abi/mlx5_wqe.h"
#include "ep/device/order.h"

namespace ep::test {

inline uint32_t load_be32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, 4);
  return __builtin_bswap32(value);
}
inline uint64_t load_be64(const uint8_t* at) { return static_cast<uint64_t>(load_be32(at)) << 32 | load_be32(at + 4); }

struct queue_options {
  uint32_t depth = 16;
  bool collapsed = true;
  uint32_t qpn = 0x1234;
  int32_t peer = 0;
};

// One queue pair: its rings and registers, and what the NIC knows of it.
struct test_queue {
  explicit test_queue(const queue_options& wanted) : sq(wanted.depth), cq(wanted.collapsed ? 1 : wanted.depth) {
    for (line& entry : cq) std::memset(entry.bytes, 0xff, sizeof entry.bytes);
    qp.header = {EP_MAGIC_IBGDA_QP, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof qp};
    qp.sq = reinterpret_cast<uint64_t>(sq.data());
    qp.dbr = reinterpret_cast<uint64_t>(&dbr);
    qp.bf = reinterpret_cast<uint64_t>(bf);
    qp.cq = reinterpret_cast<uint64_t>(cq.data());
    qp.cq_dbr = wanted.collapsed ? 0 : reinterpret_cast<uint64_t>(&cq_dbr);
    qp.qpn = wanted.qpn;
    qp.depth = wanted.depth;
    marks.resize((wanted.depth + 63) / 64);
    qp.marks = reinterpret_cast<uint64_t>(marks.data());
    qp.cq_depth = static_cast<uint32_t>(cq.size());
    qp.flags = wanted.collapsed ? EP_IBGDA_CQ_COLLAPSED : 0;
    qp.peer = wanted.peer;
    qp.response = reinterpret_cast<uint64_t>(&response);
    qp.response_lkey = response_lkey;
  }
  test_queue(const test_queue&) = delete;

  static constexpr uint32_t response_lkey = 0x77;
  struct alignas(64) line {
    uint8_t bytes[64] = {};
  };
  std::vector<line> sq;
  std::vector<line> cq;
  std::vector<uint64_t> marks;
  alignas(64) uint64_t bf[64] = {};
  alignas(8) ep_mlx5_dbr dbr{};
  alignas(8) ep_mlx5_cq_dbr cq_dbr{};
  uint64_t response = 0;
  alignas(64) ep_ibgda_qp qp{}; // posters may use a copy of it: the NIC reads only what never changes

  // The NIC's own.
  uint64_t consumer = 0;
  uint64_t cqes = 0;
  uint64_t seen[2] = {}; // in either half of the register
  bool failed = false;
  uint64_t wqes = 0;
  uint64_t doorbells = 0;
  uint32_t silent_from = UINT32_MAX; // this WQE and later ones find no peer
  uint32_t refused_from = UINT32_MAX; // this NIC lets nobody read the sources of this WQE and later ones
  uint32_t post_size = 1;            // WQEs of each post, 2^16 at most of all: a doorbell tells of whole ones
  uint32_t slow = 0;                 // points of the scheduler that it lets pass before it takes what has been posted
  ep_wake_word* wake = nullptr;      // of the peer: notified after each message
};

class test_nic {
 public:
  struct region {
    uint64_t begin;
    uint64_t bytes;
  };

  test_queue& add(const queue_options& wanted) {
    test_queue& made = queues.emplace_back(wanted);
    made.qp.index = static_cast<uint32_t>(queues.size() - 1);
    return made;
  }
  void allow(uint32_t key, const void* begin, uint64_t bytes) { keys[key] = {reinterpret_cast<uint64_t>(begin), bytes}; }
  test_queue& queue(size_t index) { return queues[index]; }
  size_t size() const { return queues.size(); }

  // Executes what is posted to one queue, or to all of them, until the context ends its waits.
  template <class Ctx> void serve(Ctx& ctx, test_queue& queue) {
    while (ctx.wait_for(news{queue}, 0, -1, 0, nullptr)) {
      for (uint32_t i = 0; i < queue.slow; ++i) ctx.point();
      drain(ctx, queue);
    }
  }
  template <class Ctx> void serve_all(Ctx& ctx) {
    std::vector<test_queue*> all;
    for (test_queue& queue : queues) all.push_back(&queue);
    const auto any = [&](uint64_t* found) {
      return std::any_of(all.begin(), all.end(), [&](test_queue* queue) { return news{*queue}(found); });
    };
    while (ctx.wait_for(any, 0, -1, 0, nullptr)) {
      for (test_queue* queue : all) {
        uint64_t found = 0;
        if (news{*queue}(&found)) drain(ctx, *queue);
      }
    }
  }

  uint64_t executed() const {
    uint64_t sum = 0;
    for (const test_queue& queue : queues) sum += queue.wqes;
    return sum;
  }

  std::vector<std::string> violations;
  bool copies = true; // false: messages move no bytes, for lengths that no test can afford
  uint64_t max_message = EP_MLX5_MAX_MESSAGE_BYTES;
  std::function<void(const uint8_t* wqe)> watch; // sees every WQE before it is executed

 private:
  struct news {
    test_queue& queue;
    bool operator()(uint64_t* found) const {
      no_point here;
      *found = 0;
      for (size_t half = 0; half < 2; ++half) {
        if (load_acquire(here, &queue.bf[half * 32]) != queue.seen[half]) return true;
      }
      return false;
    }
  };

  void violation(const test_queue& queue, const std::string& what) {
    violations.push_back("qp " + std::to_string(queue.qp.qpn) + " wqe " + std::to_string(queue.consumer) + ": " + what);
  }

  template <class Ctx> void drain(Ctx& ctx, test_queue& queue) {
    for (size_t half = 0; half < 2; ++half) {
      const uint64_t value = load_acquire(ctx, &queue.bf[half * 32]);
      if (value == queue.seen[half]) continue;
      queue.seen[half] = value;
      ++queue.doorbells;
      const uint32_t qpn = __builtin_bswap32(static_cast<uint32_t>(value >> 32)) >> 8;
      if (qpn != queue.qp.qpn) violation(queue, "doorbell names qp " + std::to_string(qpn));
    }
    ctx.point();
    const uint32_t record = __builtin_bswap32(std::atomic_ref<uint32_t>(queue.dbr.send).load(std::memory_order_acquire));
    if (record > EP_MLX5_DBR_COUNTER_MASK) violation(queue, "doorbell record has bits above 15");
    if (record % queue.post_size != 0) violation(queue, "a doorbell tells of a part of a post");
    const auto posted = static_cast<uint16_t>(record - static_cast<uint16_t>(queue.consumer));
    if (posted > queue.qp.depth) {
      violation(queue, std::to_string(posted) + " posted WQEs overrun the ring of " + std::to_string(queue.qp.depth));
      return;
    }
    for (const uint64_t end = queue.consumer + posted; queue.consumer != end; ++queue.consumer) {
      execute(ctx, queue);
      if (watch_limit != 0 && violations.size() > watch_limit) return;
    }
  }

  bool allowed(uint32_t key, uint64_t address, uint64_t bytes) const {
    const auto found = keys.find(key);
    return found != keys.end() && address >= found->second.begin && bytes <= found->second.bytes && address - found->second.begin <= found->second.bytes - bytes;
  }
  bool local_allowed(const test_queue& queue, uint32_t key, uint64_t address, uint64_t bytes) const {
    return (key == test_queue::response_lkey && address == reinterpret_cast<uint64_t>(&queue.response) && bytes <= 8) || allowed(key, address, bytes);
  }

  template <class Ctx> void execute(Ctx& ctx, test_queue& queue) {
    ctx.point();
    uint8_t* slot = queue.sq[queue.consumer & (queue.qp.depth - 1)].bytes;
    uint8_t wqe[64];
    std::memcpy(wqe, slot, sizeof wqe);
    if (queue.failed) return complete(ctx, queue, wqe, EP_MLX5_SYNDROME_FLUSHED);
    if (watch) watch(wqe);
    ++queue.wqes;
    const uint32_t head = load_be32(wqe);
    const uint32_t opmod = head >> 24;
    const uint32_t opcode = head & 0xff;
    const uint32_t segments = load_be32(wqe + 4) & 0xff;
    if ((head >> 8 & 0xffff) != (queue.consumer & 0xffff)) {
      violation(queue, "index " + std::to_string(head >> 8 & 0xffff) + " is not that of the slot");
      return complete(ctx, queue, wqe, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
    }
    if (load_be32(wqe + 4) >> 8 != queue.qp.qpn) violation(queue, "wrong qpn");
    if (load_be32(wqe + 8) > 0xff || (wqe[11] != 0 && wqe[11] != EP_MLX5_CQ_UPDATE)) violation(queue, "reserved bits in the control segment");
    if (load_be32(wqe + 12) != 0 && opcode != EP_MLX5_OPCODE_RDMA_WRITE_IMM) violation(queue, "immediate data of a request without");
    if (load_be32(wqe + 28) != 0) violation(queue, "reserved bits in the remote segment");
    const uint64_t remote = load_be64(wqe + 16);
    const uint32_t rkey = load_be32(wqe + 24);
    if (queue.consumer >= queue.refused_from) return complete(ctx, queue, wqe, EP_MLX5_SYNDROME_LOCAL_PROTECTION);
    if (queue.consumer >= queue.silent_from) return complete(ctx, queue, wqe, EP_MLX5_SYNDROME_RETRY_EXCEEDED);
    switch (opcode) {
      case EP_MLX5_OPCODE_RDMA_WRITE:
      case EP_MLX5_OPCODE_RDMA_WRITE_IMM:
      case EP_MLX5_OPCODE_RDMA_READ: return complete(ctx, queue, wqe, transfer(ctx, queue, wqe, opcode, segments, remote, rkey));
      case EP_MLX5_OPCODE_ATOMIC_MASKED_FA:
      case EP_MLX5_OPCODE_ATOMIC_CS: return complete(ctx, queue, wqe, atomic(ctx, queue, wqe, opcode, opmod, segments, remote, rkey));
      default: violation(queue, "opcode " + std::to_string(opcode)); return complete(ctx, queue, wqe, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
    }
  }

  template <class Ctx>
  uint32_t transfer(Ctx& ctx, test_queue& queue, const uint8_t* wqe, uint32_t opcode, uint32_t segments, uint64_t remote, uint32_t rkey) {
    uint8_t held[64];
    const uint8_t* from = nullptr;
    uint64_t bytes = 0;
    if (segments != 2) {
      const uint32_t count = load_be32(wqe + 32);
      bytes = count & ~EP_MLX5_INLINE;
      if (bytes == 0 || bytes > max_message) {
        violation(queue, "a message of " + std::to_string(bytes) + " bytes has a data segment");
        return EP_MLX5_SYNDROME_LOCAL_LENGTH;
      }
      const bool in_wqe = (count & EP_MLX5_INLINE) != 0;
      if (segments != (in_wqe ? 2 + (4 + bytes + 15) / 16 : 3) || (in_wqe && opcode != EP_MLX5_OPCODE_RDMA_WRITE)) {
        violation(queue, "ds " + std::to_string(segments) + " does not fit its data");
        return EP_MLX5_SYNDROME_LOCAL_QP_OPERATION;
      }
      if (in_wqe) {
        std::memcpy(held, wqe + 36, bytes);
        from = held;
      } else {
        const uint64_t local = load_be64(wqe + 40);
        if (!local_allowed(queue, load_be32(wqe + 36), local, bytes)) return EP_MLX5_SYNDROME_LOCAL_PROTECTION;
        from = reinterpret_cast<const uint8_t*>(local);
      }
    }
    if (!allowed(rkey, remote, bytes)) return EP_MLX5_SYNDROME_REMOTE_ACCESS;
    auto* to = reinterpret_cast<uint8_t*>(remote);
    if (opcode == EP_MLX5_OPCODE_RDMA_READ) {
      const uint8_t* there = to;
      to = const_cast<uint8_t*>(from);
      from = there;
    }
    constexpr uint64_t step = 16;
    for (uint64_t at = 0; copies && at < bytes; at += step) {
      std::memcpy(to + at, from + at, bytes - at < step ? bytes - at : step);
      ctx.point();
    }
    return 0;
  }

  template <class Ctx>
  uint32_t atomic(Ctx& ctx, test_queue& queue, const uint8_t* wqe, uint32_t opcode, uint32_t opmod, uint32_t segments, uint64_t remote, uint32_t rkey) {
    const bool narrow = opmod == EP_MLX5_OPMOD_ATOMIC_4;
    const uint64_t bytes = narrow ? 4 : 8;
    const uint32_t wanted = opcode == EP_MLX5_OPCODE_ATOMIC_CS ? 0 : narrow ? EP_MLX5_OPMOD_ATOMIC_4 : EP_MLX5_OPMOD_ATOMIC_8;
    const uint64_t local = load_be64(wqe + 56);
    if (opmod != wanted || segments != 4 || load_be32(wqe + 48) != bytes) {
      violation(queue, "opmod, ds or byte count of an atomic");
      return EP_MLX5_SYNDROME_LOCAL_QP_OPERATION;
    }
    if (!local_allowed(queue, load_be32(wqe + 52), local, bytes)) return EP_MLX5_SYNDROME_LOCAL_PROTECTION;
    if (remote % bytes != 0) return EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST;
    if (!allowed(rkey, remote, bytes)) return EP_MLX5_SYNDROME_REMOTE_ACCESS;
    ctx.point();
    if (narrow) {
      const uint32_t old = std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(remote)).fetch_add(load_be32(wqe + 32));
      const uint32_t swapped = __builtin_bswap32(old);
      std::memcpy(reinterpret_cast<void*>(local), &swapped, 4);
      return 0;
    }
    const std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(remote));
    uint64_t old = load_be64(wqe + 40);
    if (opcode == EP_MLX5_OPCODE_ATOMIC_CS) {
      word.compare_exchange_strong(old, load_be64(wqe + 32));
    } else {
      if (old != 0) violation(queue, "a field boundary in a plain addition");
      old = word.fetch_add(load_be64(wqe + 32));
    }
    std::memcpy(reinterpret_cast<void*>(local), &old, 8);
    return 0;
  }

  template <class Ctx> void complete(Ctx& ctx, test_queue& queue, const uint8_t* wqe, uint32_t syndrome) {
    ctx.wake(reinterpret_cast<uint64_t>(queue.wake));
    // Nobody may write here before the completion is seen, and whoever rings too early finds this. A failed WQE is left for its poster to read.
    if (syndrome == 0) std::memset(queue.sq[queue.consumer & (queue.qp.depth - 1)].bytes, 0xdd, 64);
    if (syndrome == 0 && wqe[11] == 0) return;
    queue.failed = queue.failed || syndrome != 0;
    const uint64_t size = queue.cq.size();
    if (queue.qp.cq_dbr != 0) {
      const uint32_t taken = __builtin_bswap32(std::atomic_ref<uint32_t>(queue.cq_dbr.consumer).load(std::memory_order_acquire));
      if (((queue.cqes - taken) & EP_MLX5_CQ_DBR_COUNTER_MASK) >= size) violation(queue, "the completion queue is full");
    }
    uint8_t* entry = queue.cq[queue.cqes % size].bytes;
    const uint64_t before = static_cast<uint64_t>(syndrome) << 56 | static_cast<uint64_t>(syndrome != 0 ? 0x88 : 0) << 48;
    ctx.point();
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(entry + 48)).store(before, std::memory_order_release);
    const uint64_t owner = queue.qp.cq_dbr != 0 ? queue.cqes / size & 1 : 0;
    const uint64_t opcode = syndrome != 0 ? EP_MLX5_CQE_REQ_ERR : EP_MLX5_CQE_REQ;
    const uint64_t counter = __builtin_bswap16(static_cast<uint16_t>(queue.consumer));
    const uint64_t tail = opcode << 60 | owner << 56 | counter << 32 | static_cast<uint64_t>(__builtin_bswap32(queue.qp.qpn | static_cast<uint32_t>(wqe[3]) << 24));
    ++queue.cqes;
    ctx.point();
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(entry + 56)).store(tail, std::memory_order_release);
  }

  static constexpr size_t watch_limit = 100; // violations after which a queue is given up
  std::deque<test_queue> queues;
  std::map<uint32_t, region> keys;
};

} // namespace ep::test
