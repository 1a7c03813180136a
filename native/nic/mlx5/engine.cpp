#include "engine.hpp"

#include <algorithm>
#include <cstdlib>

#include "bits.hpp"

namespace ep::nic {
namespace {

constexpr size_t kept_violations = 256;
// Requests of one queue pair before others have their turn.
constexpr int turn_requests = 64;
// And bytes: a queue pair that moves gigabytes must not hold up the signals of others, nor calls of the table.
constexpr uint64_t turn_bytes = 1 << 20;

} // namespace

engine::engine(port_view port, std::unique_ptr<fabric> network, const engine_options& options)
    : memory(port), qps(port_max_qps), port_(std::move(port)), network_(std::move(network)), options_(options), random_(options.seed),
      trace_(options.trace_events) {}

engine::~engine() {
  for (auto& entry : pages) std::free(entry.second->page);
}

queue_pair* engine::find_qp(uint32_t qpn) const {
  const uint32_t index = qpn - port_first_qpn;
  return index < port_max_qps ? qps[index].get() : nullptr;
}

queue_pair* engine::add_qp() {
  for (uint32_t index = 0; index < port_max_qps; ++index) {
    // A number that a peer is using just now (it was destroyed, or the peer died inside) is no free number.
    if (qps[index] || load_ordered(port_.qp(index).active) != 0) continue;
    qps[index] = std::make_unique<queue_pair>();
    qps[index]->index = index;
    qps[index]->qpn = port_first_qpn + index;
    return qps[index].get();
  }
  return nullptr;
}

void engine::stop_qp(queue_pair& qp, uint8_t state) {
  qp.state = state;
  const qp_state shared = state == EP_MLX5_QP_STATE_ERR ? qp_state::error : qp_state::reset;
  store_ordered(port_.qp(qp.index).state, static_cast<uint32_t>(shared));
  drop_ticket(qp);
  drop_behind(qp, true);
  qp.current->active = false;
  qp.current->held = false;
  qp.resume_ns = 0;
  if (state != EP_MLX5_QP_STATE_ERR) {
    qp.consumer = 0;
    qp.producer = 0;
    qp.receive_consumer = 0;
    qp.peer.reset();
  } else {
    make_ready(qp); // what is posted is flushed
  }
}

void engine::remove_qp(queue_pair& qp) {
  stop_qp(qp, EP_MLX5_QP_STATE_RST);
  std::erase(ready_, &qp);
  std::erase(receivers_, &qp);
  if (qp.uar != nullptr) std::erase(qp.uar->qps, &qp);
  qps[qp.index].reset();
}

// A register write comes before a command that follows it.
void engine::drop_doorbells(const queue_pair& qp) {
  const auto is_its = [&](uint64_t value) { return be32(static_cast<uint32_t>(value >> 32)) >> 8 == qp.qpn; };
  for (uint32_t half = 0; half < EP_MLX5_BF_BYTES; half += EP_MLX5_BF_HALF_BYTES) {
    std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(qp.uar->page + EP_MLX5_BF_OFFSET + half));
    uint64_t value = word.load(std::memory_order_relaxed);
    if (value != 0 && is_its(value)) word.compare_exchange_strong(value, 0, std::memory_order_relaxed);
  }
  std::erase_if(qp.uar->repeats, is_its);
}

void engine::connect(queue_pair& qp) {
  if (qp.peer && !qp.peer->gone()) return;
  auto found = network_->connect(qp.remote_port);
  // Nobody there, or not any more: requests go unanswered, as on a real network. A restarted peer is found at the next try.
  qp.peer = found.ok() ? std::move(found.value()) : nullptr;
}

bool engine::in_use(uint32_t key, const queue_pair* only) const {
  for (uint32_t index = 0; index < port_max_qps; ++index) {
    if (only != nullptr && only->index != index) continue;
    const uint64_t active = load_ordered(port_.qp(index).active);
    if (active == 0 || (key != 0 && static_cast<uint32_t>(active) != key)) continue;
    // Whoever died inside of an access does nothing any more.
    auto peer = network_->connect(static_cast<uint32_t>(active >> 32) & 0x7fffffff);
    if (peer.ok() && !peer.value()->gone()) return true;
    store_ordered(port_.qp(index).active, uint64_t{0});
  }
  return false;
}

void engine::report(violation what) {
  ++counts_.violations;
  if (violations_.size() < kept_violations) violations_.push_back(what);
  if (!trace_.enabled()) return;
  trace_event event;
  event.kind = trace_kind::violation;
  event.qpn = what.qpn;
  event.index = what.index;
  event.begin_ns = event.end_ns = now_ns_;
  event.address = what.found;
  event.length = what.expected;
  event.note = what.field;
  trace_.add(event);
}

bool engine::take_event(dl::mlx5_event& event) {
  if (events_.empty()) return false;
  event = events_.front();
  events_.pop_front();
  return true;
}

void engine::set_link(bool up) {
  link_back_ns_ = INT64_MAX;
  if (up == link_up_) return;
  link_up_ = up;
  store_ordered(port_.header().link_up, uint32_t{up ? 1u : 0u});
  raise({up ? dl::mlx5_event_kind::port_up : dl::mlx5_event_kind::port_down, 1, 0, 0});
}

void engine::release_held() {
  for (auto& qp : qps) {
    if (qp) qp->current->held = false;
  }
}

bool engine::poll_doorbells(int64_t now_ns) {
  now_ns_ = now_ns;
  if (now_ns >= link_back_ns_) set_link(true);
  bool any = false;
  for (auto& [id, page] : pages) {
    for (uint32_t half = 0; half < EP_MLX5_BF_BYTES; half += EP_MLX5_BF_HALF_BYTES) {
      std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(page->page + EP_MLX5_BF_OFFSET + half));
      if (word.load(std::memory_order_relaxed) == 0) continue;
      any = true;
      doorbell(*page, word.exchange(0, std::memory_order_acquire));
    }
    if (page->repeats.empty()) continue;
    std::vector<uint64_t> repeats;
    repeats.swap(page->repeats);
    for (const uint64_t value : repeats) repeat(*page, value);
    any = true;
  }
  return any;
}

void engine::doorbell(doorbell_page& page, uint64_t value) {
  ++counts_.doorbells;
  const uint32_t qpn = be32(static_cast<uint32_t>(value >> 32)) >> 8;
  queue_pair* qp = find_qp(qpn);
  if (qp == nullptr || qp->uar != &page) {
    report({qpn, 0, 0, "doorbell.qpn", qpn, page.qps.empty() ? 0 : page.qps.front()->qpn, "a queue pair of this page"});
  } else if (!faults_.empty() && faults_.hit(fault_kind::lose_doorbell, qpn, 0) != nullptr) {
    return;
  } else {
    if (!faults_.empty() && faults_.hit(fault_kind::repeat_doorbell, qpn, 0) != nullptr) page.repeats.push_back(value);
    ring(*qp);
  }
  // HAZARD: hardware takes each store to the register; here a store may have replaced one of another queue pair before it was seen. So a page that
  // several share is a doorbell for all of them, and a poster that forgets to ring is found out on a page of its own only.
  if (page.qps.size() < 2) return;
  for (queue_pair* other : page.qps) {
    if (other != qp && other->state == EP_MLX5_QP_STATE_RTS) ring(*other);
  }
}

// A doorbell that a fault makes come a second time; its queue pair may be gone by now.
void engine::repeat(doorbell_page& page, uint64_t value) {
  queue_pair* qp = find_qp(be32(static_cast<uint32_t>(value >> 32)) >> 8);
  if (qp != nullptr && qp->uar == &page) ring(*qp);
}

void engine::ring(queue_pair& qp) {
  const uint32_t record = be32(load_acquire(*reinterpret_cast<const uint32_t*>(qp.dbr + offsetof(ep_mlx5_dbr, send))));
  const auto producer = static_cast<uint16_t>(record);
  if (trace_.enabled()) {
    trace_event event;
    event.kind = trace_kind::doorbell;
    event.qpn = qp.qpn;
    event.index = producer;
    event.begin_ns = event.end_ns = now_ns_;
    trace_.add(event);
  }
  const uint32_t slot = qp.consumer & ((1u << qp.log_sq) - 1);
  if (qp.state != EP_MLX5_QP_STATE_RTS && qp.state != EP_MLX5_QP_STATE_ERR) {
    report({qp.qpn, slot, qp.consumer, "doorbell", qp.state, EP_MLX5_QP_STATE_RTS, "a queue pair that is ready to send"});
    return;
  }
  if (record > EP_MLX5_DBR_COUNTER_MASK) report({qp.qpn, slot, qp.consumer, "dbr.send upper half", record >> 16, 0, nullptr});
  const auto posted = static_cast<uint16_t>(producer - qp.consumer);
  if (posted > 1u << qp.log_sq) {
    // Hardware goes on with whatever lies in the ring. Overwritten requests are lost for good, so this ends the queue pair.
    report({qp.qpn, slot, qp.consumer, "dbr.send", posted, 1u << qp.log_sq, "at most the ring's size ahead of what was executed"});
    if (qp.state == EP_MLX5_QP_STATE_RTS) {
      qp.current->request.index = qp.consumer;
      qp.current->request.opcode = 0;
      qp.current->request.wqebbs = 0;
      finish(qp, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION, "the send queue overran");
    }
    qp.producer = qp.consumer = producer;
    return;
  }
  qp.producer = producer;
  make_ready(qp);
}

void engine::make_ready(queue_pair& qp) {
  if (qp.ready || qp.consumer == qp.producer) return;
  qp.ready = true;
  ready_.push_back(&qp);
}

bool engine::work(int64_t now_ns) {
  now_ns_ = now_ns;
  if (ready_.empty()) return false;
  if (faults_.has(fault_kind::reorder)) {
    for (size_t i = ready_.size(); i > 1; --i) std::swap(ready_[i - 1], ready_[random_.below(i)]);
  }
  bool any = false;
  const size_t turns = ready_.size();
  for (size_t i = 0; i < turns; ++i) {
    queue_pair& qp = *ready_[i];
    if (faults_.has(fault_kind::reorder) && random_.below(2) == 0) {
      any = true;
      continue;
    }
    turn_bytes_ = 0;
    for (int left = turn_requests; left > 0 && turn_bytes_ < turn_bytes && advance(qp); --left) any = true;
  }
  std::erase_if(ready_, [](queue_pair* qp) { return !(qp->ready = qp->consumer != qp->producer); });
  return any;
}

bool engine::step(random_source& random, int64_t now_ns) {
  now_ns_ = now_ns;
  if (now_ns >= link_back_ns_) set_link(true);
  std::vector<std::function<bool()>> choices;
  for (auto& entry : pages) {
    doorbell_page* page = entry.second.get();
    for (uint32_t half = 0; half < EP_MLX5_BF_BYTES; half += EP_MLX5_BF_HALF_BYTES) {
      auto* word = reinterpret_cast<uint64_t*>(page->page + EP_MLX5_BF_OFFSET + half);
      if (load_acquire(*word) == 0) continue;
      choices.emplace_back([this, page, word] {
        doorbell(*page, std::atomic_ref<uint64_t>(*word).exchange(0, std::memory_order_acquire));
        return true;
      });
    }
    if (!page->repeats.empty()) {
      choices.emplace_back([this, page] {
        const uint64_t value = page->repeats.back();
        page->repeats.pop_back();
        repeat(*page, value);
        return true;
      });
    }
  }
  for (queue_pair* qp : ready_) {
    if (qp->current->held || qp->resume_ns > now_ns) continue;
    choices.emplace_back([this, qp] { return advance(*qp); });
  }
  bool did = poll_receives(now_ns);
  if (!choices.empty()) did = choices[random.below(choices.size())]() || did;
  std::erase_if(ready_, [](queue_pair* qp) { return !(qp->ready = qp->consumer != qp->producer); });
  return did;
}

int64_t engine::next_due_ns() const {
  int64_t due = link_back_ns_;
  for (const queue_pair* qp : ready_) {
    if (!qp->current->held) due = std::min(due, qp->resume_ns);
  }
  return due;
}

} // namespace ep::nic
