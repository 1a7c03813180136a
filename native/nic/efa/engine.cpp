#include "engine.hpp"

#include <algorithm>
#include <cerrno>

#include <sched.h>

#include "waiting.hpp"

namespace ep::nic::efa {
namespace {

constexpr size_t kept_violations = 256;
// Requests under way at a time on a device with a thread, and events of it before its lock is free for others.
constexpr size_t most_flights = 256;
constexpr int turn_events = 256;
// And bytes: whoever moves gigabytes must not hold up the signals of others, nor calls of the table.
constexpr uint64_t turn_bytes = 1 << 20;
constexpr uint32_t doorbell_mask = EP_EFA_DOORBELL_COUNTER_MASK;

} // namespace

engine::engine(port_view port, net::hub* hub, const engine_options& options)
    : memory(port), port_(std::move(port)), network_(hub, port_.header().number), options_(options), random_(options.seed), trace_(options.trace_events) {
  self_ = std::make_shared<shm_peer>(port_);
  visitor_ = {port_.header().number, port_.mapping()->handle().nonce};
}

engine::~engine() = default;

uint32_t engine::take_qpn() {
  // Numbers go round, so that one which late requests may still name is not soon another's.
  for (uint32_t tries = 0; tries < port_max_qps; ++tries) {
    const uint32_t qpn = next_qpn_;
    next_qpn_ = next_qpn_ == 0xffff ? port_first_qpn : next_qpn_ + 1;
    const port_qp& place = port_.qp((qpn - port_first_qpn) % port_max_qps);
    const bool used = std::any_of(std::begin(place.active), std::end(place.active), [](const uint64_t& active) { return load_ordered(active) != 0; });
    if (load_ordered(place.qpn) == 0 && !used) return qpn;
  }
  return 0;
}

void engine::publish(queue_pair& qp, uint32_t qkey) {
  port_qp& place = port_.qp(qp.index);
  place.qkey = qkey;
  place.counter = qp.arrived == nullptr ? 0 : qp.arrived->index + 1;
  store_ordered(place.qpn, qp.qpn);
}

void engine::remove(queue_pair& qp) {
  store_ordered(port_.qp(qp.index).qpn, uint32_t{0});
  leave_ticks(qp);
  for (const auto& flight : flights_) {
    if (flight->qp == &qp) drop_tickets(*flight);
  }
  std::erase_if(flights_, [&](const auto& flight) { return flight->qp == &qp; });
  lines_.forget(reinterpret_cast<uint64_t>(qp.ring.get()), uint64_t{qp.depth} * qp.limits.entry_bytes);
  lines_.forget(reinterpret_cast<uint64_t>(qp.bell.get()), 4);
  if (qp.cq != nullptr) --qp.cq->users;
  for (counter* of : {qp.written, qp.read, qp.arrived}) {
    if (of != nullptr) --of->users;
  }
  qps.erase(qp.qpn);
}

// What has landed whole is its responder's to count, whoever sent it. HAZARD: its completion may be known, so it is not given up because others are in the way just now: they come
// out, but for those that were stopped there.
void engine::leave_ticks(const queue_pair& qp) {
  const int64_t deadline = clock_now_ns() + let_go_ns;
  for (const auto& flight : flights_) {
    if (flight->qp != &qp || !flight->tick_due) continue;
    for (;;) {
      const wire_reply reply = flight->peer->tick(target_of(*flight), flight->serial, oldest_serial(), flight->tick_ticket);
      const bool lost = reply.status == EP_EFA_STATUS_UNRESPONSIVE && flight->peer_port > directory_ports;
      if ((!reply.busy && !reply.pending && !lost) || clock_now_ns() >= deadline) break;
      sched_yield();
    }
  }
}

uint16_t engine::handle_add(uint32_t port) {
  for (auto& [ah, known] : handles_) {
    if (known.port != port) continue;
    ++known.users;
    return ah;
  }
  while (next_handle_ == 0 || next_handle_ == EP_EFA_UNKNOWN_AH || handles_.count(next_handle_) != 0) ++next_handle_;
  handles_[next_handle_] = {port, 1};
  std::atomic_ref<uint64_t>(port_.header().known[port / 64]).fetch_or(uint64_t{1} << port % 64, std::memory_order_seq_cst);
  return next_handle_++;
}

bool engine::handle_remove(uint16_t ah) {
  const auto found = handles_.find(ah);
  if (found == handles_.end()) return false;
  if (--found->second.users != 0) return true;
  const uint32_t port = found->second.port;
  std::atomic_ref<uint64_t>(port_.header().known[port / 64]).fetch_and(~(uint64_t{1} << port % 64), std::memory_order_seq_cst);
  handles_.erase(found);
  return true;
}

void engine::counter_publish(counter& made, uint64_t* completed) {
  port_counter& place = port_.counter(made.index);
  store_ordered(place.value, options_.first_count);
  place.place = place_of(completed, sizeof *completed, made.memory);
  place.has_wake = 0;
  place.generation = ++counter_generations_;
}

result<nothing> engine::counter_wake(counter& of, const ep_wake_word* wake) {
  std::shared_ptr<segment> held;
  const port_place place = place_of(wake, sizeof *wake, held);
  if (!held) return failure{EP_STATUS_SYSTEM, EINVAL, "counter_wake: the wake word lies in no shared segment, so peers could not notify it"};
  of.wake_memory = std::move(held);
  port_counter& counter = port_.counter(of.index);
  counter.wake = place;
  counter.has_wake = 1;
  counter.generation = ++counter_generations_;
  return nothing{};
}

void engine::counter_remove(counter& gone) { port_.counter(gone.index).generation = 0; }

void engine::counter_set(counter& of, uint64_t value) {
  port_counter& place = port_.counter(of.index);
  store_ordered(place.value, value);
  std::shared_ptr<segment> held;
  if (uint8_t* at = port_.map(place.place, held)) store_ordered(*reinterpret_cast<uint64_t*>(at), value & EP_EFA_COUNTER_MASK);
}

bool engine::in_use(uint32_t lkey, const queue_pair* only) const {
  for (uint32_t index = 0; index < port_max_qps; ++index) {
    if (only != nullptr && only->index != index) continue;
    for (uint64_t& place : port_.qp(index).active) {
      uint64_t active = load_ordered(place);
      if (active == 0 || (lkey != 0 && static_cast<uint32_t>(active) != lkey)) continue;
      if (!visitor_gone(active)) return true;
      std::atomic_ref<uint64_t>(place).compare_exchange_strong(active, 0, std::memory_order_seq_cst);
    }
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
  event.number = what.number;
  event.writer = what.writer;
  event.begin_ns = event.end_ns = now_ns_;
  event.address = what.found;
  event.length = what.expected;
  event.note = what.field;
  trace_.add(event);
}

bool engine::take_event(dl::efa_event& event) {
  if (events_.empty()) return false;
  event = std::move(events_.front());
  events_.pop_front();
  return true;
}

void engine::set_link(bool up) {
  link_up_ = up;
  store_ordered(port_.header().link_up, uint32_t{up ? 1u : 0u});
}

void engine::release_held() {
  for (auto& [qpn, qp] : qps) qp->hold_fetch = false;
  for (auto& flight : flights_) flight->held = 0;
}

// ---- stores that are watched

queue_pair* engine::ring_of(uint64_t address) {
  for (auto& [qpn, qp] : qps) {
    const auto begin = reinterpret_cast<uint64_t>(qp->ring.get());
    if (address >= begin && address - begin < uint64_t{qp->depth} * qp->limits.entry_bytes) return qp.get();
  }
  return nullptr;
}

queue_pair* engine::bell_of(uint64_t address) {
  for (auto& [qpn, qp] : qps) {
    if (address == reinterpret_cast<uint64_t>(qp->bell.get())) return qp.get();
  }
  return nullptr;
}

bool engine::store64(uint64_t writer, uint64_t address, uint64_t value) {
  if (!options_.watch_stores || ring_of(address) == nullptr) return false;
  ++counts_.stores;
  lines_.store64(writer, address, value);
  return true;
}

bool engine::store32(uint64_t writer, uint64_t address, uint32_t value) {
  queue_pair* qp = options_.watch_stores ? bell_of(address) : nullptr;
  if (qp == nullptr) return false;
  lines_.doorbell(writer, address, value);
  return true;
}

void engine::fence(uint64_t writer) {
  if (!options_.watch_stores) return;
  ++counts_.fences;
  if (!faults_.empty() && faults_.hit(fault_kind::drop_fence, 0, 0, writer) != nullptr) return;
  for (size_t next = lines_.oldest(writer); next < lines_.size(); next = lines_.oldest(writer)) leave(next);
}

void engine::leave(size_t index) { arrive(lines_.take(index)); }

void engine::arrive(const combined_line& line) {
  if (line.doorbell) {
    if (queue_pair* qp = bell_of(line.address)) doorbell(*qp, line.value, line.writer, true);
    return;
  }
  queue_pair* qp = ring_of(line.address);
  if (qp == nullptr) return;
  const uint64_t at = line.address - reinterpret_cast<uint64_t>(qp->ring.get());
  const uint64_t slot = at / qp->limits.entry_bytes;
  // A WQE that a doorbell told of and the device has not read.
  const uint64_t ahead = (slot - qp->fetched) & (qp->depth - 1);
  if (ahead < qp->rung - qp->fetched) {
    report({qp->qpn, static_cast<uint32_t>(slot), qp->fetched + ahead, line.writer, "entry", slot, (qp->fetched + qp->depth) & (qp->depth - 1),
            "a slot of a WQE that was rung and not fetched yet is written to"});
  }
  auto* words = reinterpret_cast<uint64_t*>(line.address);
  for (uint32_t word = 0; word < 8; ++word) {
    if ((line.words >> word & 1) != 0) std::atomic_ref<uint64_t>(words[word]).store(line.data[word], std::memory_order_relaxed);
  }
  qp->writers[at / line_bytes] = line.writer;
}

// ---- doorbells

bool engine::look(queue_pair& qp) {
  if (qp.repeats > 0) {
    --qp.repeats; // of what has been taken already: says nothing new
    ++counts_.doorbells;
    return true;
  }
  const uint32_t value = load_acquire(*reinterpret_cast<const uint32_t*>(qp.bell.get()));
  if (value == qp.seen) return false;
  qp.seen = value;
  doorbell(qp, value, 0, false);
  return true;
}

void engine::doorbell(queue_pair& qp, uint32_t value, uint64_t writer, bool watched) {
  if (!faults_.empty()) {
    if (faults_.hit(fault_kind::lose_doorbell, qp.qpn, 0) != nullptr) return;
    if (faults_.hit(fault_kind::repeat_doorbell, qp.qpn, 0) != nullptr) ++qp.repeats;
  }
  ++counts_.doorbells;
  const uint32_t forward = (value - static_cast<uint32_t>(qp.rung)) & doorbell_mask;
  const auto slot = static_cast<uint32_t>(qp.rung & (qp.depth - 1));
  const auto wrong = [&](uint64_t found, uint64_t expected, const char* rule) { report({qp.qpn, slot, qp.rung, writer, "doorbell", found, expected, rule}); };
  if (forward == 0) {
    if (watched) wrong(value, qp.rung + 1, "more than the last one: it tells of nothing");
    return;
  }
  if (forward > doorbell_mask / 2) return wrong(value, qp.rung, "more than the last one: a doorbell never goes back");
  if ((value & ~doorbell_mask) != 0 && value != static_cast<uint32_t>(qp.rung + forward)) {
    wrong(value, static_cast<uint32_t>(qp.rung + forward), "16 bits of the count of WQEs, or 32");
  }
  const uint64_t room = qp.depth - (qp.rung - qp.told);
  if (forward > room && !qp.failed) {
    wrong(forward, room, "new WQEs at most: that many are known to be over");
    qp.rung += std::min<uint64_t>(forward, room);
    return fail(qp);
  }
  if (watched && forward > qp.max_batch && !qp.failed) {
    wrong(forward, qp.max_batch, "WQEs between two doorbells at most (max_batch)");
    if (options_.reserved == lint::error) {
      qp.rung += forward;
      return fail(qp);
    }
  }
  qp.rung += forward;
  if (trace_.enabled() && options_.trace_stages) {
    trace_event event;
    event.what = stage::doorbell;
    event.qpn = qp.qpn;
    event.number = value;
    event.writer = writer;
    event.begin_ns = event.end_ns = now_ns_;
    trace_.add(event);
  }
}

void engine::fail(queue_pair& qp) {
  if (qp.failed) return;
  qp.failed = true;
  events_.push_back({dl::efa_event_kind::endpoint_error, qp.qpn, "queue pair " + std::to_string(qp.qpn) + " broke a rule of the device"});
}

// ---- the schedule

bool engine::may_fetch(queue_pair& qp) {
  if (qp.fetched == qp.rung) return false;
  if (!qp.hold_decided && !qp.failed) {
    qp.hold_decided = true;
    if (!faults_.empty() && faults_.hit(fault_kind::hold, stage::fetch, qp.qpn, 0) != nullptr) qp.hold_fetch = true;
  }
  return !qp.hold_fetch;
}

void engine::pending(std::vector<event>& out, int64_t now_ns) {
  now_ns_ = now_ns;
  for (size_t i = 0; i < lines_.size(); ++i) {
    if (!lines_.may_leave(i)) continue;
    const combined_line& line = lines_.at(i);
    event one;
    one.what = line.doorbell ? stage::doorbell : stage::line;
    one.writer = line.writer;
    one.key = line.order;
    if (queue_pair* qp = line.doorbell ? bell_of(line.address) : ring_of(line.address)) {
      const uint64_t at = line.address - reinterpret_cast<uint64_t>(qp->ring.get());
      one.qpn = qp->qpn;
      one.number = line.doorbell ? line.value : at / qp->limits.entry_bytes;
      one.fragment = line.doorbell ? 0 : static_cast<uint32_t>(at % qp->limits.entry_bytes / line_bytes);
    }
    out.push_back(one);
  }
  for (auto& [qpn, qp] : qps) {
    const bool rings = !options_.watch_stores && load_acquire(*reinterpret_cast<const uint32_t*>(qp->bell.get())) != qp->seen;
    if (rings || qp->repeats > 0) out.push_back({stage::doorbell, qpn, 0, 0, 0, 0});
    if (may_fetch(*qp)) out.push_back({stage::fetch, qpn, qp->fetched, 0, 0, 0});
  }
  for (const auto& flight : flights_) {
    steps_.clear();
    next(*flight, steps_, false);
    for (const step& one : steps_) out.push_back({one.what, flight->qp->qpn, flight->number, one.fragment, 0, flight->serial});
  }
}

bool engine::run(const event& what, int64_t now_ns) {
  now_ns_ = now_ns;
  if (what.what == stage::line || (what.what == stage::doorbell && what.key != 0)) {
    for (size_t i = 0; i < lines_.size(); ++i) {
      if (lines_.at(i).order != what.key) continue;
      leave(i);
      return true;
    }
    return false;
  }
  if (what.what == stage::doorbell || what.what == stage::fetch) {
    const auto found = qps.find(what.qpn);
    if (found == qps.end()) return false;
    if (what.what == stage::doorbell) return look(*found->second);
    if (!may_fetch(*found->second)) return false;
    fetch(*found->second);
    return true;
  }
  for (size_t i = 0; i < flights_.size(); ++i) {
    if (flights_[i]->serial == what.key) return advance(i, {what.what, what.fragment});
  }
  return false;
}

bool engine::work(int64_t now_ns) {
  now_ns_ = now_ns;
  bool any = false;
  for (auto& [qpn, qp] : qps) {
    if (!options_.watch_stores) any = look(*qp) || any;
    while (flights_.size() < most_flights && may_fetch(*qp)) {
      fetch(*qp);
      any = true;
    }
  }
  while (lines_.size() > 0) {
    size_t at = random_.below(lines_.size());
    while (!lines_.may_leave(at)) at = (at + 1) % lines_.size();
    leave(at);
    any = true;
  }
  const uint64_t bytes = counts_.bytes;
  size_t at = 0;
  int idle = 0;
  for (int i = 0; i < turn_events && !flights_.empty() && counts_.bytes - bytes < turn_bytes; ++i) {
    // Mostly one request goes on for some events, as one packet of a real device takes them all; whose turn is next is anybody's.
    if (at >= flights_.size() || random_.below(4) == 0) at = random_.below(flights_.size());
    steps_.clear();
    next(*flights_[at], steps_, true);
    const bool done = !steps_.empty() && advance(at, step(steps_[random_.below(steps_.size())]));
    any = any || done;
    if (done) {
      idle = 0;
    } else {
      at = flights_.size();
      if (++idle > 16) break;
    }
  }
  return any;
}

int64_t engine::next_due_ns() const {
  int64_t due = INT64_MAX;
  for (const auto& flight : flights_) {
    for (const int64_t at : flight->due_ns) {
      if (at > now_ns_) due = std::min(due, at);
    }
  }
  return due;
}

} // namespace ep::nic::efa
