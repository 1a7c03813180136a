#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "atomics.hpp"
#include "bits.hpp"
#include "dl/mlx5.hpp"
#include "ep/device/copy.h"
#include "port.hpp"
#include "waiting.hpp"
#include "wire.hpp"

namespace ep::nic {
namespace {

// A piece of at least this goes past the caches, as a NIC's writes mostly do; below, the caches are faster than memory.
constexpr uint64_t stream_bytes = 64 * 1024;

} // namespace

void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  const uintptr_t target = reinterpret_cast<uintptr_t>(to);
  // Whole aligned words are what kernels poll: they arrive at once.
  if (bytes == 8 && (target & 7) == 0) {
    store_release(*reinterpret_cast<uint64_t*>(to), load_raw<uint64_t>(from));
  } else if (bytes == 4 && (target & 3) == 0) {
    store_release(*reinterpret_cast<uint32_t*>(to), load_raw<uint32_t>(from));
  } else if (bytes < stream_bytes) {
    std::memcpy(to, from, bytes);
  } else {
    ep_copy(to, from, bytes, 1);
    ep_copy_fence();
  }
}

namespace {

// Calls body(piece part, offset in the message, bytes) for what of the message's bytes lies in begin..end.
template <class Body> void for_pieces(std::span<const wire_piece> pieces, uint64_t begin, uint64_t end, Body&& body) {
  uint64_t at = 0;
  for (const wire_piece& piece : pieces) {
    const uint64_t from = std::max(begin, at);
    const uint64_t to = std::min(end, at + piece.bytes);
    if (from < to) body(piece.base + (from - at), from, to - from);
    at += piece.bytes;
  }
}

// Its value before.
template <class Word> Word update_word(uint8_t* address, const wire_message& message, bool last) {
  std::atomic_ref<Word> word(*reinterpret_cast<Word*>(address));
  const auto swapped = [&](Word value) {
    if (!message.big_endian) return value;
    return sizeof(Word) == 8 ? static_cast<Word>(be64(value)) : static_cast<Word>(be32(static_cast<uint32_t>(value)));
  };
  const auto operand = [&](size_t at) { return static_cast<Word>(message.operand[at]); };
  const auto made = [&](Word old) {
    return message.operation == wire_operation::add ? masked_add<Word>(old, operand(0), operand(1))
                                                    : masked_swap<Word>(old, operand(0), operand(1), operand(2), operand(3));
  };
  Word stored = word.load(std::memory_order_relaxed);
  if (!last) return swapped(stored);
  if (message.torn) {
    const auto old = static_cast<Word>(*message.torn);
    word.store(swapped(made(old)), std::memory_order_seq_cst);
    return old;
  }
  while (!word.compare_exchange_weak(stored, swapped(made(swapped(stored))), std::memory_order_seq_cst)) {
  }
  return swapped(stored);
}

class shm_peer final : public wire_peer {
 public:
  explicit shm_peer(port_view view, uint32_t visitor = 0) : view_(std::move(view)), visitor_(visitor), mapped_(port_max_keys) {}

  bool gone() const override {
    const uint32_t life = life_state(&view_.header().life);
    return life == EP_LIFE_DEAD || life == EP_LIFE_CLOSED;
  }

  wire_reply deliver(const wire_message& message, uint64_t begin, uint64_t end, bool last, wire_ticket&) override {
    if (load_acquire(view_.header().link_up) == 0) return {wire_answer::lost, 0, "the peer's link is down"};
    if (life_state(&view_.header().life) != EP_LIFE_ALIVE) return {wire_answer::lost, 0, "the peer's NIC is gone"};
    const uint32_t index = message.target_qpn - port_first_qpn;
    if (index >= port_max_qps) return {wire_answer::lost, 0, "the peer has no such queue pair"};
    port_qp& qp = view_.qp(index);
    std::atomic_ref<uint64_t> active(qp.active);
    // Announce first, then read the tables: whoever takes something away clears it, then looks here. Both in one order of all such operations.
    uint64_t nobody = 0;
    const uint64_t mine = active_mark | uint64_t{visitor_ == 0 ? message.source_port : visitor_} << 32 | message.rkey;
    if (!active.compare_exchange_strong(nobody, mine, std::memory_order_seq_cst)) return {wire_answer::lost, 0, "another NIC is writing through this queue pair"};
    const wire_reply reply = execute(qp, message, begin, end, last);
    active.store(0, std::memory_order_release);
    return reply;
  }

 private:
  struct mapping {
    uint64_t generation = 0;
    uint8_t* base = nullptr;
    ep_wake_word* wake = nullptr;
    std::shared_ptr<segment> memory;
    std::shared_ptr<segment> wake_memory;
  };

  wire_reply execute(port_qp& qp, const wire_message& message, uint64_t begin, uint64_t end, bool last) {
    const auto state = static_cast<qp_state>(load_ordered(qp.state));
    if (state != qp_state::rtr && state != qp_state::rts) return {wire_answer::lost, 0, "the peer's queue pair is not ready to receive"};
    // HAZARD: a packet does not say by which queue pair it was sent: one of an earlier life of the connection passes, unless its number tells.
    if (qp.remote_port != message.source_port) return {wire_answer::lost, 0, "the peer's queue pair is connected to another port"};
    const uint32_t expected = load_acquire(qp.expected_psn);
    const uint32_t ahead = (message.psn - expected) & 0xffffff;
    if (ahead != 0 && ahead < 0x800000) return {wire_answer::lost, 0, "packets are missing: the peer expects an earlier sequence number"};
    if (ahead != 0) {
      // HAZARD: hardware takes any number in the half behind for a repetition and acknowledges it, also one of an earlier life of this queue pair, whose
      // sender then believes that it has landed. Here only what really came in this life is repeated.
      if (0x1000000 - ahead > qp.received_packets) return {wire_answer::lost, 0, "the sequence number is of an earlier connection"};
      return again(qp, message, begin, end);
    }
    if (const char* why = refusal(qp, message)) return {wire_answer::invalid_request, 0, why};
    if (message.has_immediate) {
      const uint32_t taken = load_acquire(qp.receive_taken);
      if (load_acquire(qp.receive_posted) == taken) return {wire_answer::not_ready, 0, "the peer has posted no receive request", qp.rnr_timer};
      if (taken - load_acquire(qp.receive_done) >= port_inbox_slots) return {wire_answer::not_ready, 0, "the peer's NIC is behind with its completions", qp.rnr_timer};
    }
    wire_reply reply{wire_answer::ack, 0, nullptr};
    ep_wake_word* wake = nullptr;
    if (message.length != 0) { // a request of no bytes names no memory, and its key is not looked at
      reply = access(qp, message, begin, end, last, &wake);
      if (reply.answer != wire_answer::ack) return reply;
    }
    if (!last) return reply;
    if (message.atomic_bytes != 0) {
      qp.atomics[qp.atomics_kept++ % port_kept_atomics] = {reply.old, message.psn, 0};
    }
    qp.received_packets += message.packets;
    store_release(qp.expected_psn, (expected + message.packets) & 0xffffff);
    if (message.has_immediate) {
      const uint32_t taken = qp.receive_taken;
      qp.inbox[taken % port_inbox_slots] = {message.immediate, static_cast<uint32_t>(message.length)};
      store_ordered(qp.receive_taken, taken + 1);
      wake_notify(&view_.header().doorbell);
    }
    if (wake != nullptr) {
      std::atomic_thread_fence(std::memory_order_seq_cst);
      wake_notify(wake);
    }
    return reply;
  }

  // The answer to it was lost: reads are repeated, all else is only acknowledged.
  wire_reply again(port_qp& qp, const wire_message& message, uint64_t begin, uint64_t end) {
    if (message.atomic_bytes != 0) {
      for (uint32_t back = 1; back <= port_kept_atomics; ++back) { // the newest first: numbers come again
        const port_atomic& kept = qp.atomics[(qp.atomics_kept - back) % port_kept_atomics];
        if (kept.psn == message.psn) return {wire_answer::ack, kept.old, nullptr};
      }
      return {wire_answer::lost, 0, "the peer has forgotten the result of this atomic"};
    }
    ep_wake_word* wake = nullptr;
    if (message.operation == wire_operation::read && message.length != 0) return access(qp, message, begin, end, false, &wake);
    return {wire_answer::ack, 0, nullptr};
  }

  static const char* refusal(const port_qp& qp, const wire_message& message) {
    if (message.operation == wire_operation::write && (qp.rights & qp_right_write) == 0) return "the peer's queue pair allows no writes (rwe)";
    if (message.operation == wire_operation::read && (qp.rights & qp_right_read) == 0) return "the peer's queue pair allows no reads (rre)";
    if (message.atomic_bytes != 0) {
      if ((qp.rights & qp_right_atomic) == 0) return "the peer's queue pair allows no atomics (rae)";
      if (message.address % message.atomic_bytes != 0) return "the atomic's word is not aligned";
    }
    if (message.has_immediate && qp.has_receive_queue == 0) return "the peer's queue pair has no receive queue for an immediate";
    return nullptr;
  }

  wire_reply access(port_qp& qp, const wire_message& message, uint64_t begin, uint64_t end, bool last, ep_wake_word** wake) {
    const uint32_t index = message.rkey >> 8;
    if (index >= port_max_keys) return {wire_answer::access_error, 0, "the peer has no such key"};
    const port_key& key = view_.key(index);
    if (message.rkey == 0 || load_ordered(key.key) != message.rkey) return {wire_answer::access_error, 0, "the peer has no such key"};
    if (key.pdn != qp.pdn) return {wire_answer::access_error, 0, "the key belongs to another protection domain than the peer's queue pair"};
    const uint32_t right = message.operation == wire_operation::write  ? dl::MLX5_ACCESS_REMOTE_WRITE
                           : message.operation == wire_operation::read ? dl::MLX5_ACCESS_REMOTE_READ
                                                                       : dl::MLX5_ACCESS_REMOTE_ATOMIC;
    if ((key.access & right) == 0) return {wire_answer::access_error, 0, "the key does not give this right"};
    const uint64_t from = message.address - key.iova;
    if (message.address < key.iova || from > key.bytes || message.length > key.bytes - from) {
      return {wire_answer::access_error, 0, "the range ends outside of what the key covers"};
    }
    const mapping* mapped = map(key, index);
    if (mapped == nullptr) {
      return {wire_answer::access_error, 0, "the peer registered memory that lies in no segment: only NICs of its own process reach it"};
    }
    if (mapped->base == nullptr) return {wire_answer::lost, 0, "the peer's memory cannot be mapped any more"};
    uint8_t* remote = mapped->base + from;
    *wake = mapped->wake;
    wire_reply reply{wire_answer::ack, 0, nullptr};
    if (message.operation == wire_operation::write) {
      for_pieces(message.pieces, begin, end, [&](const uint8_t* local, uint64_t at, uint64_t bytes) { copy_bytes(remote + at, local, bytes); });
    } else if (message.operation == wire_operation::read) {
      for_pieces(message.pieces, begin, end, [&](uint8_t* local, uint64_t at, uint64_t bytes) { copy_bytes(local, remote + at, bytes); });
    } else {
      reply.old = message.atomic_bytes == 8 ? update_word<uint64_t>(remote, message, last) : update_word<uint32_t>(remote, message, last);
    }
    return reply;
  }

  // Null: in no segment and of another process. A base of null: gone.
  const mapping* map(const port_key& key, uint32_t index) {
    mapping& known = mapped_[index];
    if (known.generation == key.generation) return &known;
    if (key.memory.pid == 0 && !view_.same_process()) return nullptr;
    known = mapping{};
    if (key.memory.pid == 0) {
      known.base = reinterpret_cast<uint8_t*>(key.offset);
    } else {
      auto opened = segment::open(key.memory);
      if (!opened.ok()) return &known; // generation 0: the next request tries again
      known.memory = std::move(opened.value());
      known.base = known.memory->data() + key.offset;
    }
    if (key.wake_offset != UINT64_MAX) {
      auto opened = segment::open(key.wake);
      if (opened.ok()) {
        known.wake_memory = std::move(opened.value());
        known.wake = reinterpret_cast<ep_wake_word*>(known.wake_memory->data() + key.wake_offset);
      }
    }
    known.generation = key.generation;
    return &known;
  }

  port_view view_;
  const uint32_t visitor_;
  std::vector<mapping> mapped_;
};

class shm_fabric final : public fabric {
 public:
  result<std::shared_ptr<wire_peer>> connect(uint32_t number) override {
    // A number may be another port's by now, so what the directory says counts, not what was found before.
    auto handle = directory_find(number);
    if (!handle.ok()) return handle.why();
    std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
    if (auto known = peers_[handle.value().nonce].lock()) return std::shared_ptr<wire_peer>(known);
    auto view = port_view::open(handle.value());
    if (!view.ok()) return view.why();
    if (view.value().header().number != number) {
      return failure{EP_STATUS_STALE_HANDLE, EHOSTUNREACH, "port number " + std::to_string(number) + " changed hands while it was looked up"};
    }
    auto made = std::make_shared<shm_peer>(std::move(view.value()));
    peers_[handle.value().nonce] = made;
    return std::shared_ptr<wire_peer>(made);
  }
  uint32_t number_of(const gid_bytes& gid) const override { return number_of_gid(gid); }

 private:
  std::map<uint64_t, std::weak_ptr<wire_peer>> peers_;
};

} // namespace

std::unique_ptr<wire_peer> peer_of_port(port_view view, uint32_t visitor) { return std::make_unique<shm_peer>(std::move(view), visitor); }

std::unique_ptr<fabric> fabric_of_memory() { return std::make_unique<shm_fabric>(); }

} // namespace ep::nic
