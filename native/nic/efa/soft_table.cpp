// The calls of dl/efa.hpp, by the tables of the engine.
#include <bit>
#include <cerrno>
#include <cstring>

#include <sched.h>

#include "nic/mlx5/registrations.hpp"
#include "soft_device.hpp"
#include "waiting.hpp"

namespace ep::nic::efa {
namespace {

// Handles are numbers of tables: a forged or stale one is looked up in vain.
void* handle_of(uint64_t number) { return reinterpret_cast<void*>(static_cast<uintptr_t>(number)); }
uint64_t number_of(void* handle) { return reinterpret_cast<uintptr_t>(handle); }
constexpr uint64_t counter_kind = uint64_t{1} << 32;
constexpr uint64_t cq_kind = uint64_t{2} << 32;

// An address, as libfabric's provider lays one out: GID, number, connection key.
struct raw_address {
  gid_bytes gid;
  uint16_t qpn;
  uint16_t reserved;
  uint32_t qkey;
};
static_assert(sizeof(raw_address) == 24);

} // namespace

counter* soft_device::find_counter(const dl::efa_counter& of) const {
  const uint64_t number = number_of(of.handle);
  if ((number & counter_kind) == 0) return nullptr;
  const auto found = engine_->counters.find(static_cast<uint32_t>(number));
  return found == engine_->counters.end() ? nullptr : found->second.get();
}

completion_queue* soft_device::find_cq(const dl::efa_cq& of) const {
  const uint64_t number = number_of(of.handle);
  if ((number & cq_kind) == 0) return nullptr;
  const auto found = engine_->cqs.find(static_cast<uint32_t>(number));
  return found == engine_->cqs.end() ? nullptr : found->second.get();
}

result<nothing> soft_device::region_wake(const dl::efa_mr& mr, const ep_wake_word* wake) {
  const turn mine(*this);
  return engine_->memory.set_wake(mr.lkey, wake);
}

result<nothing> soft_device::counter_wake(const dl::efa_counter& of, const ep_wake_word* wake) {
  const turn mine(*this);
  counter* known = find_counter(of);
  if (known == nullptr) return refuse("counter_wake", EINVAL, "there is no such counter");
  return engine_->counter_wake(*known, wake);
}

result<nothing> soft_device::counter_set(const dl::efa_counter& of, uint64_t value) {
  const turn mine(*this);
  counter* known = find_counter(of);
  if (known == nullptr) return refuse("counter_set", EINVAL, "there is no such counter");
  engine_->counter_set(*known, value);
  return nothing{};
}

result<nothing> soft_device::cq_polled(const dl::efa_cq& of, const uint64_t* polled) {
  const turn mine(*this);
  completion_queue* known = find_cq(of);
  if (known == nullptr) return refuse("cq_polled", EINVAL, "there is no such completion queue");
  known->polled = polled;
  known->nobody_polls = polled == nullptr;
  return nothing{};
}

result<nothing> soft_device::cq_wake(const dl::efa_cq& of, ep_wake_word* wake) {
  const turn mine(*this);
  completion_queue* known = find_cq(of);
  if (known == nullptr) return refuse("cq_wake", EINVAL, "there is no such completion queue");
  known->wake = wake;
  return nothing{};
}

result<dl::efa_mr> soft_device::reg_mr(const dl::efa_memory& memory, uint32_t access) {
  const turn mine(*this);
  auto key = engine_->memory.add(memory, access);
  if (!key.ok()) return key.why();
  return dl::efa_mr{handle_of(key.value()), key.value(), port_rkey_bits | key.value()};
}

result<nothing> soft_device::dereg_mr(const dl::efa_mr& mr) {
  const auto key = static_cast<uint32_t>(number_of(mr.handle));
  {
    const turn mine(*this);
    auto cleared = engine_->memory.clear(key);
    if (!cleared.ok()) return cleared.why();
  }
  const int64_t deadline = clock_now_ns() + let_go_ns;
  for (;;) {
    {
      const turn mine(*this);
      if (!engine_->in_use(key, nullptr)) {
        engine_->memory.forget(key);
        return nothing{};
      }
    }
    if (clock_now_ns() >= deadline) return refuse("dereg_mr", EBUSY, "a peer's device is inside of an access to this memory and does not come out (is its process stopped?)");
    sched_yield();
  }
}

result<dl::efa_cq> soft_device::create_cq(const dl::efa_cq_spec& spec) {
  const turn mine(*this);
  if (spec.ring.byte_length != 0) return refuse("create_cq", EOPNOTSUPP, "the ring cannot lie in memory of the caller");
  if (!std::has_single_bit(spec.depth) || spec.depth > capabilities_.max_cq_depth) {
    return refuse("create_cq", EINVAL, "a depth of " + std::to_string(spec.depth) + ", expected a power of two, at most " + std::to_string(capabilities_.max_cq_depth));
  }
  if (spec.entry_bytes != EP_EFA_CQE_BYTES && spec.entry_bytes != sizeof(ep_efa_tx_cqe) && spec.entry_bytes != sizeof(ep_efa_wide_rx_cqe)) {
    return refuse("create_cq", EINVAL, "entries of " + std::to_string(spec.entry_bytes) + " bytes, expected 8, 16 or 32");
  }
  if (options_.engine.wide_ids && spec.entry_bytes == EP_EFA_CQE_BYTES) return refuse("create_cq", EINVAL, "entries of 8 bytes have no room for ids of 64 bits");
  auto cq = std::make_unique<completion_queue>();
  cq->number = next_cq_++;
  cq->depth = spec.depth;
  cq->entry_bytes = spec.entry_bytes;
  cq->memory = page_memory(uint64_t{spec.depth} * spec.entry_bytes);
  if (!cq->memory) return refuse("create_cq", ENOMEM, "memory for " + std::to_string(spec.depth) + " entries is not to be had");
  const dl::efa_cq made{handle_of(cq_kind | cq->number), reinterpret_cast<uint64_t>(cq->memory.get()), cq->depth, cq->entry_bytes};
  engine_->cqs[cq->number] = std::move(cq);
  return made;
}

result<nothing> soft_device::destroy_cq(const dl::efa_cq& cq) {
  const turn mine(*this);
  completion_queue* known = find_cq(cq);
  if (known == nullptr) return refuse("destroy_cq", EINVAL, "there is no such completion queue");
  if (known->users != 0) return refuse("destroy_cq", EBUSY, std::to_string(known->users) + " endpoints still use it");
  engine_->cqs.erase(known->number);
  return nothing{};
}

result<dl::efa_counter> soft_device::open_counter(const dl::efa_counter_spec& spec) {
  const turn mine(*this);
  if (!options_.engine.counters) return refuse("open_counter", EOPNOTSUPP, "this device counts no completions");
  for (const dl::efa_memory* word : {&spec.completed, &spec.failed}) {
    auto checked = memory_check("open_counter", {word->address, word->byte_length, word->dmabuf_fd, word->dmabuf_offset});
    if (!checked.ok()) return checked.why();
    if (word->byte_length != sizeof(uint64_t) || word->address % sizeof(uint64_t) != 0) return refuse("open_counter", EINVAL, "a count is 8 bytes, aligned");
  }
  if (engine_->counters.size() >= options_.engine.max_counters) {
    return refuse("open_counter", ENOMEM, "all " + std::to_string(options_.engine.max_counters) + " counters of the device are taken");
  }
  while (engine_->counters.count(next_counter_) != 0) next_counter_ = (next_counter_ + 1) % port_max_counters;
  auto made = std::make_unique<counter>();
  made->index = next_counter_;
  made->failed = reinterpret_cast<uint64_t*>(spec.failed.address);
  made->failed_memory = segment::containing(made->failed, sizeof *made->failed);
  engine_->counter_publish(*made, reinterpret_cast<uint64_t*>(spec.completed.address));
  const uint32_t index = made->index;
  engine_->counters[index] = std::move(made);
  next_counter_ = (next_counter_ + 1) % port_max_counters;
  return dl::efa_counter{handle_of(counter_kind | index)};
}

result<nothing> soft_device::close_counter(const dl::efa_counter& of) {
  const turn mine(*this);
  counter* known = find_counter(of);
  if (known == nullptr) return refuse("close_counter", EINVAL, "there is no such counter");
  if (known->users != 0) return refuse("close_counter", EBUSY, std::to_string(known->users) + " endpoints still count with it");
  engine_->counter_remove(*known);
  engine_->counters.erase(known->index);
  return nothing{};
}

result<dl::efa_endpoint> soft_device::create_endpoint(const dl::efa_endpoint_spec& spec) {
  const turn mine(*this);
  const uint32_t wide = spec.inline_write ? 2 : 1;
  const uint32_t most = options_.engine.max_depth / wide;
  if (spec.inline_write && !options_.engine.inline_write) return refuse("create_endpoint", EOPNOTSUPP, "this device has no inline writes");
  if (!std::has_single_bit(spec.depth) || spec.depth > most) {
    return refuse("create_endpoint", EINVAL, "a send queue of " + std::to_string(spec.depth) + ", expected a power of two, at most " + std::to_string(most));
  }
  if (engine_->qps.size() >= options_.engine.max_endpoints) {
    return refuse("create_endpoint", ENOMEM, "all " + std::to_string(options_.engine.max_endpoints) + " endpoints of the device are taken");
  }
  auto qp = std::make_unique<queue_pair>();
  qp->cq = spec.cq.handle == nullptr ? nullptr : find_cq(spec.cq);
  if (spec.cq.handle != nullptr && qp->cq == nullptr) return refuse("create_endpoint", EINVAL, "there is no such completion queue");
  const auto count_with = [&](const dl::efa_counter& of, counter*& into) {
    if (of.handle != nullptr) into = find_counter(of);
    return of.handle == nullptr || into != nullptr;
  };
  if (!count_with(spec.written, qp->written) || !count_with(spec.arrived, qp->arrived) || !count_with(spec.read, qp->read)) {
    return refuse("create_endpoint", EINVAL, "there is no such counter");
  }
  qp->qpn = engine_->take_qpn();
  if (qp->qpn == 0) return refuse("create_endpoint", ENOMEM, "all " + std::to_string(port_max_qps) + " numbers of queue pairs are taken");
  qp->index = (qp->qpn - port_first_qpn) % port_max_qps;
  qp->depth = spec.depth;
  qp->shift = static_cast<uint32_t>(std::countr_zero(spec.depth));
  qp->limits = {EP_EFA_WQE_BYTES * wide, options_.engine.wide_ids, options_.engine.reserved};
  qp->max_batch = options_.engine.max_batch == 0 ? spec.depth : std::max(1u, std::min(spec.depth, options_.engine.max_batch / wide));
  qp->ring = page_memory(uint64_t{qp->depth} * qp->limits.entry_bytes);
  qp->bell = page_memory(4);
  if (!qp->ring || !qp->bell) return refuse("create_endpoint", ENOMEM, "memory for " + std::to_string(spec.depth) + " WQEs is not to be had");
  std::memset(qp->ring.get(), wqe_scrub, uint64_t{qp->depth} * qp->limits.entry_bytes);
  if (options_.engine.watch_stores) qp->writers.resize(uint64_t{qp->depth} * qp->limits.entry_bytes / line_bytes);
  if (qp->cq != nullptr) ++qp->cq->users;
  for (counter* of : {qp->written, qp->read, qp->arrived}) {
    if (of != nullptr) ++of->users;
  }
  const auto qkey = static_cast<uint32_t>(qkeys_.next()) | 1;
  dl::efa_endpoint made;
  made.handle = handle_of(qp->qpn);
  made.qpn = qp->qpn;
  made.sq = {reinterpret_cast<uint64_t>(qp->ring.get()), reinterpret_cast<uint64_t>(qp->bell.get()), qp->depth, qp->limits.entry_bytes, qp->max_batch, options_.engine.wide_ids};
  const raw_address address{hub_ ? hub_->gid() : gid_link_local(port_number()), static_cast<uint16_t>(qp->qpn), 0, qkey};
  std::memcpy(made.address.bytes.data(), &address, sizeof address);
  made.address.length = sizeof address;
  engine_->publish(*qp, qkey);
  engine_->qps[qp->qpn] = std::move(qp);
  return made;
}

result<nothing> soft_device::destroy_endpoint(const dl::efa_endpoint& endpoint) {
  const auto qpn = static_cast<uint32_t>(number_of(endpoint.handle));
  queue_pair gone;
  {
    const turn mine(*this);
    const auto found = engine_->qps.find(qpn);
    if (found == engine_->qps.end()) return refuse("destroy_endpoint", EINVAL, "there is no such endpoint");
    gone.index = found->second->index;
    engine_->remove(*found->second);
  }
  const int64_t deadline = clock_now_ns() + let_go_ns;
  for (;;) {
    {
      const turn mine(*this);
      if (!engine_->in_use(0, &gone)) return nothing{};
    }
    if (clock_now_ns() >= deadline) return refuse("destroy_endpoint", EBUSY, "a peer's device writes through it just now and does not come out (is its process stopped?)");
    sched_yield();
  }
}

result<dl::efa_peer> soft_device::insert_address(const dl::efa_endpoint& of, const dl::efa_address& address) {
  const turn mine(*this);
  if (engine_->qps.count(static_cast<uint32_t>(number_of(of.handle))) == 0) return refuse("insert_address", EINVAL, "there is no such endpoint");
  raw_address raw;
  if (address.length != sizeof raw) {
    return refuse("insert_address", EINVAL, "an address of " + std::to_string(address.length) + " bytes, expected " + std::to_string(sizeof raw) + ": is the peer's of hardware?");
  }
  std::memcpy(&raw, address.bytes.data(), sizeof raw);
  const uint32_t number = engine_->number_of(raw.gid);
  if (number == 0) return refuse("insert_address", EHOSTUNREACH, "the GID is not one of a software NIC, or of one on a network that this device was not told of");
  if (number <= directory_ports) {
    auto found = directory_find(number);
    if (!found.ok()) return refuse("insert_address", EHOSTUNREACH, found.why().message);
  }
  const uint16_t ah = engine_->handle_add(number);
  return dl::efa_peer{handle_of(uint64_t{1} << 32 | ah), ah, raw.qpn, raw.qkey};
}

result<nothing> soft_device::remove_address(const dl::efa_peer& peer) {
  const turn mine(*this);
  if (!engine_->handle_remove(static_cast<uint16_t>(number_of(peer.handle)))) return refuse("remove_address", EINVAL, "there is no such address handle");
  return nothing{};
}

result<bool> soft_device::poll_async(dl::efa_event& event) {
  const turn mine(*this);
  return engine_->take_event(event);
}

} // namespace ep::nic::efa
