// One request, from its WQE to its completion.
#include <algorithm>
#include <cstring>

#include "engine.hpp"

namespace ep::nic::efa {
namespace {

// A peer that does not answer is asked again after this.
constexpr int64_t ask_again_ns = 1'000'000;
// Fragments of one request that are asked for over a network at a time.
constexpr uint32_t most_asked = 64;
// One that was asked over a network is looked after this often.
constexpr int64_t look_again_ns = 20'000'000;
// Fragments of one request that have been read and not landed: a long message must not be in memory twice.
constexpr size_t most_read = 256;
constexpr uint32_t bit(stage what) { return 1u << static_cast<uint32_t>(what); }
constexpr uint32_t inline_at = EP_EFA_META_BYTES + sizeof(ep_efa_remote_seg);
constexpr stage staged[] = {stage::payload, stage::land, stage::tick, stage::ack, stage::cqe, stage::count};

} // namespace

wire_target engine::target_of(const request& of) const { return {visitor_, visitor_.number, of.what.qpn, of.what.qkey}; }

wire_range engine::range_of(const request& of, const fragment& part) const { return {of.what.rkey, of.what.address, of.what.length, part.begin, part.bytes}; }

void engine::fetch(queue_pair& qp) {
  auto made = std::make_unique<request>();
  request& of = *made;
  of.qp = &qp;
  of.number = qp.fetched++;
  of.serial = ++serials_;
  of.begun_ns = now_ns_;
  qp.hold_decided = false;
  auto* words = reinterpret_cast<uint64_t*>(qp.entry(of.number));
  for (uint32_t word = 0; word < qp.limits.entry_bytes / 8; ++word) {
    const uint64_t found = std::atomic_ref<uint64_t>(words[word]).load(std::memory_order_relaxed);
    std::memcpy(of.wqe.data() + word * 8, &found, 8);
    // Device memory: the poster cannot read it, and whoever rings without having written all of the next WQE here is found out.
    std::atomic_ref<uint64_t>(words[word]).store(0x0101010101010101ull * wqe_scrub, std::memory_order_relaxed);
  }
  flights_.push_back(std::move(made));
  begin(of);
  if (of.over()) over(flights_.size() - 1);
}

void engine::begin(request& of) {
  queue_pair& qp = *of.qp;
  const wqe_outcome read = wqe_read(of.wqe.data(), of.number, qp.shift, qp.limits, of.what);
  if (qp.failed) return end(of, EP_EFA_STATUS_FLUSHED, "the queue pair is in error");
  if (read.noted) {
    violation wrong = read.wrong;
    wrong.qpn = qp.qpn;
    wrong.number = of.number;
    wrong.slot = static_cast<uint32_t>(of.number & (qp.depth - 1));
    wrong.writer = qp.writers.empty() ? 0 : qp.writers[wrong.slot * (qp.limits.entry_bytes / line_bytes)];
    report(wrong);
  }
  if (read.status == EP_EFA_STATUS_LOCAL_QP_INTERNAL) fail(qp);
  if (read.status != EP_EFA_STATUS_OK) return end(of, read.status, read.wrong.field);
  if (prepare(of)) plan(of);
}

// Checks what the requester itself can check. False: the request has failed.
bool engine::prepare(request& of) {
  const work_request& what = of.what;
  if (what.length > options_.max_message) {
    end(of, EP_EFA_STATUS_LOCAL_BAD_LENGTH, "the message is longer than the device takes (max_message)");
    return false;
  }
  const auto known = handles_.find(what.ah);
  if (known == handles_.end()) {
    end(of, EP_EFA_STATUS_LOCAL_INVALID_AH, "there is no such address handle");
    return false;
  }
  of.peer_port = known->second.port;
  const char* why = nullptr;
  if (what.opcode != EP_EFA_OPCODE_SEND && !what.inlined && memory.local(what.lkey, what.local, what.length, of.reads(), &why) == nullptr) {
    end(of, EP_EFA_STATUS_LOCAL_INVALID_LKEY, why);
    return false;
  }
  return true;
}

void engine::plan(request& of) {
  uint64_t piece = options_.fragment_bytes;
  if (!faults_.empty()) {
    for (const stage at : staged) {
      if (faults_.hit(fault_kind::hold, at, of.qp->qpn, of.what.opcode) != nullptr) of.held |= bit(at);
      if (const fault_rule* rule = faults_.hit(fault_kind::delay, at, of.qp->qpn, of.what.opcode)) {
        of.due_ns[static_cast<size_t>(at)] = now_ns_ + static_cast<int64_t>(rule->value);
      }
    }
    counts_.held += of.held != 0;
    if (const fault_rule* rule = faults_.hit(fault_kind::fail, of.qp->qpn, of.what.opcode)) return end(of, static_cast<uint8_t>(rule->value), "failed by a fault");
    if (const fault_rule* rule = faults_.hit(fault_kind::cut, of.qp->qpn, of.what.opcode)) piece = rule->value;
  }
  cut(of, piece);
}

void engine::cut(request& of, uint64_t piece) {
  // Ends of fragments are aligned where they land, so that no aligned word is torn.
  const uint64_t base = of.reads() ? of.what.local : of.what.address;
  const bool apart = options_.payload_apart && !of.what.inlined && of.what.opcode != EP_EFA_OPCODE_SEND;
  fragment_list& parts = apart ? of.unread : of.unlanded;
  uint64_t begin = 0;
  do {
    const uint64_t end = std::min(of.what.length, (base + begin + piece) / 8 * 8 - base);
    parts.add({begin, end - begin, nullptr, nullptr});
    begin = end;
  } while (begin < of.what.length);
}

void engine::next(const request& of, std::vector<step>& out, bool one) {
  const auto free = [&](stage what) { return (of.held & bit(what)) == 0 && of.due_ns[static_cast<size_t>(what)] <= now_ns_; };
  const auto parts = [&](stage what, const fragment_list& all) {
    const auto count = static_cast<uint32_t>(all.size());
    if (count == 0 || !free(what)) return;
    for (uint32_t i = 0; i < all.asked(); ++i) {
      if (waits(of, all[i].ticket)) continue;
      out.push_back({what, i});
      if (one) return;
    }
    const uint32_t rest = all.asked() < most_asked ? count - all.asked() : 0;
    if (rest != 0 && one) return out.push_back({what, all.asked() + static_cast<uint32_t>(random_.below(rest))});
    for (uint32_t i = 0; i < rest; ++i) out.push_back({what, all.asked() + i});
  };
  if (of.unlanded.size() < most_read) parts(stage::payload, of.unread);
  parts(stage::land, of.unlanded);
  if (of.tick_due && free(stage::tick) && !waits(of, of.tick_ticket)) out.push_back({stage::tick, 0});
  if (of.ack_due && free(stage::ack)) out.push_back({stage::ack, 0});
  if (of.cqe_due && free(stage::cqe)) out.push_back({stage::cqe, 0});
  if (of.count_due && free(stage::count)) out.push_back({stage::count, 0});
}

bool engine::advance(size_t flight, const step& what) {
  request& of = *flights_[flight];
  bool done = true;
  switch (what.what) {
    case stage::payload:
      if (what.fragment >= of.unread.size()) return false;
      done = payload(of, what.fragment);
      break;
    case stage::land:
      if (what.fragment >= of.unlanded.size()) return false;
      done = land(of, what.fragment);
      break;
    case stage::tick:
      if (!of.tick_due) return false;
      done = tick(of);
      break;
    case stage::ack:
      if (!of.ack_due) return false;
      of.ack_due = false;
      of.cqe_due = of.qp->cq != nullptr;
      of.count_due = (of.reads() ? of.qp->read : of.qp->written) != nullptr;
      if (!of.cqe_due && !of.count_due) known_over(of);
      note(of, what);
      break;
    case stage::cqe:
      if (!of.cqe_due) return false;
      done = complete(of);
      break;
    case stage::count:
      if (!of.count_due) return false;
      done = count(of);
      break;
    default: return false;
  }
  if (of.over()) over(flight);
  return done;
}

bool engine::payload(request& of, uint32_t at) {
  fragment& part = of.unread[at];
  const bool asked = part.ticket != nullptr;
  auto data = std::make_unique<uint8_t[]>(std::max<uint64_t>(part.bytes, 1));
  if (of.reads()) {
    if (!of.peer) of.peer = network_.connect(of.peer_port);
    const wire_reply reply = of.peer && link_up_ ? of.peer->read(target_of(of), range_of(of, part), data.get(), part.ticket) : wire_reply{EP_EFA_STATUS_UNRESPONSIVE, false, "nobody has the peer's address"};
    if (!answered(of, stage::payload, reply, !asked && part.ticket)) return later(of.unread, at, asked, reply);
  } else {
    const char* why = nullptr;
    const uint8_t* from = memory.local(of.what.lkey, of.what.local, of.what.length, false, &why);
    if (from == nullptr) {
      end(of, EP_EFA_STATUS_LOCAL_INVALID_LKEY, why);
      return true;
    }
    copy_words(data.get(), from + part.begin, part.bytes);
  }
  note(of, {stage::payload, at});
  part.data = std::move(data);
  of.unlanded.add(of.unread.take(at));
  return true;
}

bool engine::land(request& of, uint32_t at) {
  fragment& part = of.unlanded[at];
  const bool asked = part.ticket != nullptr;
  if (!of.peer) of.peer = network_.connect(of.peer_port);
  const char* why = nullptr;
  uint8_t* local = nullptr;
  if (of.what.opcode != EP_EFA_OPCODE_SEND && !of.what.inlined) {
    local = memory.local(of.what.lkey, of.what.local, of.what.length, of.reads(), &why);
    if (local == nullptr) {
      end(of, EP_EFA_STATUS_LOCAL_INVALID_LKEY, why);
      return true;
    }
  }
  wire_reply reply;
  if (of.reads() && part.data) {
    copy_words(local + part.begin, part.data.get(), part.bytes);
  } else if (!link_up_) {
    reply = {EP_EFA_STATUS_UNREACHABLE, false, "one's own link is down"};
  } else if (!of.peer) {
    reply = {EP_EFA_STATUS_UNRESPONSIVE, false, "nobody has the peer's address"};
  } else if (of.reads()) {
    reply = of.peer->read(target_of(of), range_of(of, part), local + part.begin, part.ticket);
  } else if (of.what.opcode == EP_EFA_OPCODE_SEND || of.what.has_immediate) {
    reply = of.peer->refuse_send(target_of(of), part.ticket);
  } else {
    const uint8_t* from = part.data ? part.data.get() : of.what.inlined ? of.wqe.data() + inline_at + part.begin : local + part.begin;
    reply = of.peer->write(target_of(of), range_of(of, part), from, part.ticket);
  }
  if (!answered(of, stage::land, reply, !asked && part.ticket)) return later(of.unlanded, at, asked, reply);
  counts_.bytes += part.bytes;
  note(of, {stage::land, at});
  (void)of.unlanded.take(at);
  if (of.unread.empty() && of.unlanded.empty()) {
    of.moving = false;
    of.ack_due = true;
    of.tick_due = !of.reads();
  }
  return true;
}

// False: it did not go well, and what follows from that has been done, or (busy) it has to be tried again.
bool engine::answered(request& of, stage during, const wire_reply& reply, bool fresh) {
  if (reply.busy) return false;
  if (fresh) of.asked_ns = now_ns_;
  if (reply.pending) {
    if (silent(of)) end(of, EP_EFA_STATUS_UNRESPONSIVE, "nothing came from the peer's host for too long");
    return false;
  }
  if (reply.status == EP_EFA_STATUS_OK) {
    of.give_up_ns = 0;
    return true;
  }
  if (reply.status != EP_EFA_STATUS_UNRESPONSIVE && reply.status != EP_EFA_STATUS_UNREACHABLE) {
    end(of, reply.status, reply.why);
    return false;
  }
  if (of.give_up_ns == 0) of.give_up_ns = now_ns_ + (of.peer_port > directory_ports ? options_.silent_ns : options_.unresponsive_ns);
  if (now_ns_ >= of.give_up_ns) {
    end(of, reply.status, reply.why);
    return false;
  }
  of.peer.reset(); // a number may be another device's by the next try
  of.due_ns[static_cast<size_t>(during)] = std::min(of.give_up_ns, now_ns_ + ask_again_ns);
  return false;
}

// An answer is awaited, and it is not yet time to look whether the peer is silent.
bool engine::waits(const request& of, const wire_ticket& ticket) const { return ticket && !ticket->answered.load(std::memory_order_acquire) && now_ns_ < of.look_ns; }

// What was asked over a network is still unanswered. As long as anything moves on the way there nobody is silent: the network's stream sends again by itself.
bool engine::silent(request& of) {
  of.look_ns = now_ns_ + look_again_ns;
  return now_ns_ - std::max(of.asked_ns, of.peer->moved_ns()) >= options_.silent_ns;
}

// A fragment that has not been answered well. Returns whether anything was done for it.
bool engine::later(fragment_list& parts, uint32_t at, bool asked, const wire_reply& reply) {
  if (parts.empty()) return true; // the request has ended
  const bool asks = parts[at].ticket != nullptr;
  (void)parts.sort(at);
  return !reply.busy && (!reply.pending || (asks && !asked));
}

// No tick of a lower serial is asked for any more.
uint64_t engine::oldest_serial() const {
  uint64_t oldest = serials_ + 1;
  for (const auto& flight : flights_) oldest = std::min(oldest, flight->serial);
  return oldest;
}

void engine::drop_tickets(request& of) {
  const auto is_open = [](const wire_ticket& ticket) { return ticket && !ticket->answered.load(std::memory_order_acquire); };
  bool open = is_open(of.tick_ticket);
  for (const fragment_list* parts : {&of.unread, &of.unlanded}) {
    for (uint32_t i = 0; i < parts->asked(); ++i) open = open || is_open((*parts)[i].ticket);
  }
  if (!open) return;
  if (!of.peer) of.peer = network_.connect(of.peer_port);
  of.peer->give_up();
}

bool engine::tick(request& of) {
  const bool far = of.peer_port > directory_ports;
  const bool asked = of.tick_ticket != nullptr;
  const wire_reply reply = of.peer->tick(target_of(of), of.serial, far ? oldest_serial() : 0, of.tick_ticket);
  if (reply.busy) return false;
  if (!asked && of.tick_ticket) of.asked_ns = now_ns_;
  if (reply.pending && !silent(of)) return !asked && of.tick_ticket;
  if (far && reply.status == EP_EFA_STATUS_UNRESPONSIVE) {
    // Lost on the way: nobody knows whether it was counted, so it is asked for again.
    if (of.give_up_ns == 0) of.give_up_ns = now_ns_ + options_.silent_ns;
    of.due_ns[static_cast<size_t>(stage::tick)] = now_ns_ + ask_again_ns;
    if (now_ns_ < of.give_up_ns) return true;
  }
  if (reply.pending) drop_tickets(of);
  // Where the peer has gone since, nobody is left to count.
  of.tick_due = false;
  note(of, {stage::tick, 0});
  return true;
}

bool engine::complete(request& of) {
  of.cqe_due = false;
  queue_pair& qp = *of.qp;
  ++counts_.completions;
  const bool before = qp.cq->overrun;
  note(of, {stage::cqe, 0});
  if (completion_write(*qp.cq, {of.what.id, of.status, of.what.opcode, qp.qpn})) {
    known_over(of);
    return true;
  }
  if (!before) {
    report({qp.qpn, static_cast<uint32_t>(qp.cq->produced % qp.cq->depth), of.number, 0, "completion queue", qp.cq->backlog() + 1, qp.cq->depth,
            "entries at most that their consumer has not taken"});
    events_.push_back({dl::efa_event_kind::cq_error, qp.cq->number, "a completion queue of " + std::to_string(qp.cq->depth) + " entries has overrun: nobody polls it"});
  }
  fail(qp);
  return true;
}

bool engine::count(request& of) {
  counter* into = of.reads() ? of.qp->read : of.qp->written;
  if (of.status == EP_EFA_STATUS_OK) {
    self_->count(into->index);
  } else {
    ++into->failures;
    if (into->failed != nullptr) store_ordered(*into->failed, into->failures & EP_EFA_COUNTER_MASK);
  }
  of.count_due = false;
  note(of, {stage::count, 0});
  known_over(of);
  return true;
}

// From here on its poster may know that there is room.
void engine::known_over(request& of) {
  if (of.told) return;
  of.told = true;
  ++of.qp->told;
}

void engine::end(request& of, uint8_t status, const char* why) {
  of.status = status;
  of.note = why;
  of.moving = false;
  drop_tickets(of);
  of.unread.clear();
  of.unlanded.clear();
  of.cqe_due = of.qp->cq != nullptr;
  of.count_due = (of.reads() ? of.qp->read : of.qp->written) != nullptr;
  if (!of.cqe_due && !of.count_due) known_over(of);
}

void engine::over(size_t flight) {
  request& of = *flights_[flight];
  ++counts_.requests;
  if (trace_.enabled()) {
    trace_event event;
    event.kind = trace_kind::request;
    event.opcode = of.what.opcode;
    event.status = of.status;
    event.qpn = of.qp->qpn;
    event.peer_port = of.peer_port;
    event.peer_qpn = of.what.qpn;
    event.rkey = of.what.rkey;
    event.number = of.number;
    event.begin_ns = of.begun_ns;
    event.end_ns = now_ns_;
    event.address = of.what.address;
    event.length = of.what.length;
    event.note = of.note;
    event.wqe_bytes = of.qp->limits.entry_bytes;
    event.wqe = of.wqe;
    trace_.add(event);
  }
  std::swap(flights_[flight], flights_.back());
  flights_.pop_back();
}

void engine::note(const request& of, const step& what) {
  if (!trace_.enabled() || !options_.trace_stages) return;
  trace_event event;
  event.what = what.what;
  event.opcode = of.what.opcode;
  event.status = of.status;
  event.qpn = of.qp->qpn;
  event.peer_port = of.peer_port;
  event.peer_qpn = of.what.qpn;
  event.rkey = of.what.rkey;
  event.number = of.number;
  event.begin_ns = event.end_ns = now_ns_;
  event.address = of.what.address;
  event.length = of.what.length;
  const fragment_list& parts = what.what == stage::payload ? of.unread : of.unlanded;
  if ((what.what == stage::payload || what.what == stage::land) && what.fragment < parts.size()) {
    event.begin = parts[what.fragment].begin;
    event.length = parts[what.fragment].bytes;
  }
  trace_.add(event);
}

} // namespace ep::nic::efa
