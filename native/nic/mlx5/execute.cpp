// The requester's half: one send queue, one request after the other. Over a network those behind the head are asked before it is answered; answers are taken in order.
#include <algorithm>
#include <cstring>
#include <utility>

#include "bits.hpp"
#include "engine.hpp"

namespace ep::nic {
namespace {

// How long a requester waits after "receiver not ready", by the responder's min_rnr_nak (InfiniBand specification, table of RNR NAK timers).
constexpr std::array<int64_t, 32> rnr_wait_us{655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,    480,    640,    960,    1280,   1920,
                                              2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920,  122880, 163840, 245760, 327680, 491520};
constexpr uint8_t rnr_retry_for_ever = 7;
// A longer message is delivered in several turns, in the order of its addresses, as packets come.
constexpr uint64_t slice_bytes = net::part_bytes;
// After a way that broke, the first wait; each further one is twice as long.
constexpr int64_t broken_wait_ns = 20'000'000;
constexpr int64_t crowded_wait_ns = 1'000'000;
// Of one queue pair, asked behind the head.
constexpr size_t most_behind = 31;
constexpr uint64_t most_behind_bytes = 1 << 20;

} // namespace

bool engine::advance(queue_pair& qp) {
  const bool come = qp.current->ticket && qp.current->ticket->answered.load(std::memory_order_acquire);
  if (qp.current->held || (qp.resume_ns > now_ns_ && !come)) return look_ahead(qp);
  if (qp.consumer == qp.producer) return false;
  if (qp.state == EP_MLX5_QP_STATE_ERR) {
    flush(qp);
    return true;
  }
  if (qp.state != EP_MLX5_QP_STATE_RTS) return false;
  if (!qp.current->active && !fetch(qp)) return true;
  flight& now = *qp.current;
  if (!now.planned && !faults_.empty()) {
    now.planned = true;
    if (faults_.hit(fault_kind::hold, qp.qpn, now.request.opcode) != nullptr) now.held = true;
    if (const fault_rule* rule = faults_.hit(fault_kind::delay, qp.qpn, now.request.opcode)) qp.resume_ns = now_ns_ + static_cast<int64_t>(rule->value);
    const fault_rule* torn = now.request.atomic_bytes != 0 ? faults_.hit(fault_kind::torn, qp.qpn, now.request.opcode) : nullptr;
    if (torn != nullptr) {
      now.torn = true;
      now.torn_ns = static_cast<int64_t>(torn->value);
    }
    const fault_rule* rule = now.request.atomic_bytes == 0 && now.request.length > 1 ? faults_.hit(fault_kind::partial, qp.qpn, now.request.opcode) : nullptr;
    if (rule != nullptr) {
      // All but the last piece, in any order; the last one comes with the rest of the request.
      uint64_t begin = 0;
      for (uint64_t piece = rule->value; piece > 1 && begin + 1 < now.request.length; --piece) {
        const uint64_t end = begin + 1 + random_.below(now.request.length - begin - 1);
        now.parts.emplace_back(begin, end);
        begin = end;
      }
      now.parts.emplace_back(begin, now.request.length);
      for (size_t i = now.parts.size(); i > 1; --i) std::swap(now.parts[i - 1], now.parts[random_.below(i)]);
    }
    if (now.held || qp.resume_ns > now_ns_) return true;
  }
  attempt(qp);
  return true;
}

// Reads a WQE out of the ring.
void engine::load(const queue_pair& qp, uint16_t index, flight& into) {
  const uint32_t mask = (1u << qp.log_sq) - 1;
  const uint32_t posted = static_cast<uint16_t>(qp.producer - index);
  uint8_t* wqe = into.wqe.data();
  std::memcpy(wqe, qp.sq + uint64_t{index & mask} * EP_MLX5_WQEBB_BYTES, EP_MLX5_WQEBB_BYTES);
  // What lies beyond the producer may still be written to, and is not read.
  into.request.wqebbs = std::min(wqe_wqebbs(wqe), posted);
  for (uint32_t i = 1; i < into.request.wqebbs; ++i) {
    std::memcpy(wqe + i * EP_MLX5_WQEBB_BYTES, qp.sq + uint64_t{(index + i) & mask} * EP_MLX5_WQEBB_BYTES, EP_MLX5_WQEBB_BYTES);
  }
  into.active = true;
  into.held = false;
  into.planned = false;
  into.torn = false;
  into.tries = 0;
  into.rnr_tries = 0;
  into.begun_ns = now_ns_;
  into.landed = 0;
  into.ticket.reset();
  into.whole = false;
  into.pieces.clear();
  into.parts.clear();
}

// The next request becomes the head. False: it is over already.
bool engine::fetch(queue_pair& qp) {
  flight& now = *qp.current;
  load(qp, qp.consumer, now);
  const uint32_t wqebbs = now.request.wqebbs;
  violation wrong;
  if (!wqe_read(now.wqe.data(), qp.consumer, qp.qpn, static_cast<uint16_t>(qp.producer - qp.consumer), now.request, wrong)) {
    wrong.qpn = qp.qpn;
    wrong.slot = qp.consumer & ((1u << qp.log_sq) - 1);
    wrong.index = qp.consumer;
    report(wrong);
    now.request.index = qp.consumer;
    now.request.wqebbs = wqebbs;
    finish(qp, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION, wrong.field);
    return false;
  }
  if (now.request.opcode == EP_MLX5_OPCODE_NOP) {
    finish(qp, 0, nullptr);
    return false;
  }
  const char* why = nullptr;
  const uint8_t syndrome = prepare(qp, qp.send_psn, now, why);
  if (syndrome == 0) return true;
  finish(qp, syndrome, why);
  return false;
}

// Checks what the requester itself can check. Not 0: the syndrome with which the request ends.
uint8_t engine::prepare(const queue_pair& qp, uint32_t psn, flight& now, const char*& why) {
  const work_request& request = now.request;
  if (request.length > uint64_t{1} << qp.log_msg_max) {
    why = "the message is longer than the queue pair allows (log_msg_max)";
    return EP_MLX5_SYNDROME_LOCAL_LENGTH;
  }
  const bool into_local = request.operation != wire_operation::write;
  if (request.inlined) {
    now.pieces.push_back({now.wqe.data() + request.inline_at, request.length});
  }
  for (uint32_t i = 0; i < request.data_count; ++i) {
    const wqe_data& data = request.data[i];
    uint8_t* local = memory.local(data.lkey, qp.pdn, data.address, data.bytes, into_local, &why);
    if (local == nullptr) return EP_MLX5_SYNDROME_LOCAL_PROTECTION;
    now.pieces.push_back({local, data.bytes});
  }
  wire_message& message = now.message;
  message.source_port = port_.header().number;
  message.source_qpn = qp.qpn;
  message.target_qpn = qp.remote_qpn;
  message.psn = psn;
  message.packets = request.length <= qp.mtu_bytes ? 1 : static_cast<uint32_t>((request.length + qp.mtu_bytes - 1) / qp.mtu_bytes);
  message.operation = request.operation;
  message.has_immediate = request.opcode == EP_MLX5_OPCODE_RDMA_WRITE_IMM;
  message.immediate = request.immediate;
  const bool ordinary = request.opcode == EP_MLX5_OPCODE_ATOMIC_FA || request.opcode == EP_MLX5_OPCODE_ATOMIC_CS;
  message.big_endian = ordinary && !options_.host_order_atomics;
  message.atomic_bytes = request.atomic_bytes;
  message.rkey = request.rkey;
  message.address = request.address;
  message.length = request.length;
  message.torn.reset();
  message.operand = request.operand;
  message.pieces = now.pieces;
  return 0;
}

// Asks for requests behind a head that waits for its answer: the peer carries out what a stream brings in its order, and refuses by its sequence number whatever lies behind one that it did not
// carry out. Where there are faults none goes ahead, since they are drawn for one request after the other.
bool engine::look_ahead(queue_pair& qp) {
  if (!qp.current->active || !qp.current->ticket || !qp.current->whole || !faults_.empty() || !link_up_ || qp.state != EP_MLX5_QP_STATE_RTS) return false;
  bool any = false;
  while (qp.behind.size() < most_behind) {
    if (!qp.spare) qp.spare = std::make_unique<flight>();
    if (!ask_behind(qp, *qp.spare)) break;
    qp.behind.push_back(std::move(qp.spare));
    any = true;
  }
  return any;
}

// False: the next request waits until it is the head, which also says what is wrong with it, if anything is.
bool engine::ask_behind(queue_pair& qp, flight& next) {
  const flight& last = qp.behind.empty() ? *qp.current : *qp.behind.back();
  const auto index = static_cast<uint16_t>(last.request.index + last.request.wqebbs);
  if (index == qp.producer) return false;
  load(qp, index, next);
  violation wrong;
  if (!wqe_read(next.wqe.data(), index, qp.qpn, static_cast<uint16_t>(qp.producer - index), next.request, wrong)) return false;
  // A fence waits for those before it.
  if (next.request.opcode == EP_MLX5_OPCODE_NOP || next.request.fence != 0) return false;
  uint64_t bytes = next.request.length;
  uint32_t fetches = next.request.operation == wire_operation::write ? 0 : 1;
  const auto add = [&](const flight& one) {
    bytes += one.request.length;
    fetches += one.request.operation == wire_operation::write ? 0 : 1;
  };
  add(*qp.current);
  for (const auto& one : qp.behind) add(*one);
  // HAZARD: the peer keeps the results of as many atomics as may be under way, for those whose answers are lost: of one more it would have forgotten the first.
  if (bytes > most_behind_bytes || fetches > qp.most_fetches) return false;
  const char* why = nullptr;
  if (prepare(qp, (last.message.psn + last.message.packets) & 0xffffff, next, why) != 0) return false;
  (void)qp.peer->deliver(next.message, 0, next.request.length, true, next.ticket);
  if (!next.ticket) return false;
  turn_bytes_ += next.request.length;
  next.whole = true;
  next.planned = true;
  next.asked_ns = now_ns_;
  return true;
}

// What a fault does to the link when a request is tried.
void engine::move_link(const queue_pair& qp) {
  if (faults_.empty() || !link_up_) return;
  const fault_rule* rule = faults_.hit(fault_kind::link_down, qp.qpn, qp.current->request.opcode);
  if (rule == nullptr) return;
  set_link(false);
  if (rule->value != 0) link_back_ns_ = now_ns_ + static_cast<int64_t>(rule->value);
}

void engine::attempt(queue_pair& qp) {
  flight& now = *qp.current;
  move_link(qp);
  if (!link_up_) {
    drop_ticket(qp);
    drop_behind(qp, true);
    return unanswered(qp, "one's own link is down");
  }
  // HAZARD: an answer may have been long on its way, or a try long ago, and the memory may be another's by now.
  if ((now.ticket || now.tries != 0 || now.rnr_tries != 0 || now.landed != 0 || now.message.torn) && !local_still(qp)) {
    return finish(qp, EP_MLX5_SYNDROME_LOCAL_PROTECTION, "the local memory went away while the request was under way");
  }
  if (!now.ticket) {
    connect(qp);
    if (!qp.peer) return unanswered(qp, "no port has the peer's address");
    if (!faults_.empty() && faults_.hit(fault_kind::drop, qp.qpn, now.request.opcode) != nullptr) return unanswered(qp, "dropped by a fault");
    now.asked_ns = now_ns_;
  }
  if (now.torn) {
    const wire_reply reply = qp.peer->deliver(now.message, 0, now.request.length, false, now.ticket);
    if (reply.answer != wire_answer::ack) return answered(qp, reply);
    now.message.torn = reply.old;
    now.torn = false;
    qp.resume_ns = now_ns_ + now.torn_ns;
    return;
  }
  if (now.parts.size() > 1) {
    // Whatever `partial` says, no part is longer than a turn's.
    const auto [begin, whole_end] = now.parts.back();
    const uint64_t end = std::min(whole_end, begin + slice_bytes);
    const wire_reply reply = qp.peer->deliver(now.message, begin, end, false, now.ticket);
    if (reply.answer != wire_answer::ack) return answered(qp, reply);
    now.parts.back().first = end;
    if (end == whole_end) now.parts.pop_back();
    return;
  }
  const uint64_t begin = now.parts.empty() ? now.landed : std::max(now.landed, now.parts.back().first);
  const uint64_t end = now.parts.empty() ? now.request.length : now.parts.back().second;
  turn_bytes_ += std::min(end - begin, slice_bytes);
  if (end - begin > slice_bytes) {
    const wire_reply reply = qp.peer->deliver(now.message, begin, begin + slice_bytes, false, now.ticket);
    if (reply.answer != wire_answer::ack) return answered(qp, reply);
    now.landed = begin + slice_bytes;
    return;
  }
  now.whole = true;
  const wire_reply reply = qp.peer->deliver(now.message, begin, end, true, now.ticket);
  if (reply.answer == wire_answer::ack && !faults_.empty() && faults_.hit(fault_kind::drop_ack, qp.qpn, now.request.opcode) != nullptr) {
    return unanswered(qp, "its answer was dropped by a fault");
  }
  answered(qp, reply);
}

void engine::answered(queue_pair& qp, const wire_reply& reply) {
  flight& now = *qp.current;
  switch (reply.answer) {
    case wire_answer::ack:
      if (now.request.atomic_bytes != 0) store_old(qp, reply.old);
      qp.send_psn = (qp.send_psn + now.message.packets) & 0xffffff;
      counts_.bytes += now.request.length;
      return finish(qp, 0, nullptr);
    case wire_answer::pending: return pending(qp);
    case wire_answer::lost: return unanswered(qp, reply.why, reply.broken);
    case wire_answer::not_ready:
      if (qp.rnr_retry != rnr_retry_for_ever && now.rnr_tries++ >= qp.rnr_retry) return finish(qp, EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED, reply.why);
      ++counts_.retries;
      drop_behind(qp, false);
      qp.resume_ns = now_ns_ + std::min(rnr_wait_us[reply.rnr_timer & 31] * 1000, options_.max_ack_timeout_ns);
      return;
    case wire_answer::invalid_request: return finish(qp, EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST, reply.why);
    case wire_answer::access_error: return finish(qp, EP_MLX5_SYNDROME_REMOTE_ACCESS, reply.why);
  }
}

// Silence for as long as the queue pair waits is a try. It is the network's stream that sends again meanwhile, so as long as anything moves on it, nobody is silent.
void engine::pending(queue_pair& qp) {
  flight& now = *qp.current;
  if (!now.ticket) { // so much is under way that it was not even asked
    qp.resume_ns = now_ns_ + crowded_wait_ns;
    return;
  }
  const int64_t wait_ns = qp.ack_timeout == 0 ? INT64_MAX / 2 : int64_t{4096} << qp.ack_timeout;
  const int64_t since_ns = std::max(now.asked_ns, qp.peer->moved_ns());
  if (now_ns_ - since_ns < wait_ns) {
    qp.resume_ns = since_ns + wait_ns;
    return;
  }
  if (now.tries >= qp.retry_count) return finish(qp, EP_MLX5_SYNDROME_RETRY_EXCEEDED, "nothing came from the peer's host for as long as the queue pair waits");
  ++now.tries;
  ++counts_.retries;
  now.asked_ns = now_ns_;
  qp.resume_ns = now_ns_ + wait_ns;
}

// Whether the memory that the request is about to use here is still what it was when it was checked.
bool engine::local_still(const queue_pair& qp) const {
  const flight& now = *qp.current;
  const work_request& request = now.request;
  const bool writes = request.operation == wire_operation::write;
  if (writes && now.ticket) return true; // it was read when it was asked
  const char* why = nullptr;
  for (uint32_t i = 0; i < request.data_count; ++i) {
    const wqe_data& data = request.data[i];
    if (memory.local(data.lkey, qp.pdn, data.address, data.bytes, !writes, &why) != now.pieces[i + (request.inlined ? 1 : 0)].base) return false;
  }
  return true;
}

void engine::drop_ticket(queue_pair& qp) {
  wire_ticket& ticket = qp.current->ticket;
  if (ticket && qp.peer && !ticket->answered.load(std::memory_order_acquire)) qp.peer->give_up();
  ticket.reset();
}

// `cut`: what of it is still on its way must not arrive. Otherwise the head's answer has said that nothing behind it was carried out, or they are asked again with the same numbers, and count once.
void engine::drop_behind(queue_pair& qp, bool cut) {
  const auto is_open = [](const auto& one) { return !one->ticket->answered.load(std::memory_order_acquire); };
  if (cut && qp.peer && std::any_of(qp.behind.begin(), qp.behind.end(), is_open)) qp.peer->give_up();
  qp.behind.clear();
}

void engine::unanswered(queue_pair& qp, const char* why, bool broken) {
  flight& now = *qp.current;
  drop_behind(qp, false);
  // An ack timeout of 0 waits for ever, by the specification: the queue pair then stands until it is destroyed. Here it is asked again now and then.
  if (qp.ack_timeout != 0 && now.tries >= qp.retry_count) return finish(qp, EP_MLX5_SYNDROME_RETRY_EXCEEDED, why);
  const int64_t longest_ns = broken ? broken_wait_ns << std::min(now.tries, 6u) : options_.max_ack_timeout_ns;
  ++now.tries;
  ++counts_.retries;
  const int64_t wait_ns = qp.ack_timeout == 0 ? longest_ns : int64_t{4096} << qp.ack_timeout;
  qp.resume_ns = now_ns_ + std::min(wait_ns, longest_ns);
}

// The old value of an atomic: big-endian from the 4-byte form, in host order from the 8-byte form (reference/mooncake.md 3.3).
void engine::store_old(queue_pair& qp, uint64_t old) {
  const wire_piece& place = qp.current->pieces.front();
  const bool aligned = reinterpret_cast<uintptr_t>(place.base) % place.bytes == 0;
  if (place.bytes == 4) {
    const uint32_t word = be32(static_cast<uint32_t>(old));
    if (aligned) {
      store_release(*reinterpret_cast<uint32_t*>(place.base), word);
    } else {
      std::memcpy(place.base, &word, 4);
    }
    return;
  }
  const uint64_t word = qp.current->message.big_endian ? be64(old) : old;
  if (aligned) {
    store_release(*reinterpret_cast<uint64_t*>(place.base), word);
  } else {
    std::memcpy(place.base, &word, 8);
  }
}

void engine::finish(queue_pair& qp, uint8_t syndrome, const char* note) {
  flight& now = *qp.current;
  drop_ticket(qp);
  now.active = false;
  now.held = false;
  ++counts_.requests;
  if (trace_.enabled()) trace_request(qp, syndrome, note);
  qp.consumer = static_cast<uint16_t>(qp.consumer + now.request.wqebbs);
  qp.resume_ns = 0;
  completion what;
  what.wqe_opcode = now.request.opcode;
  what.wqe_counter = now.request.index;
  what.qpn = qp.qpn;
  what.user_index = qp.user_index;
  what.timestamp = static_cast<uint64_t>(now_ns_);
  if (syndrome == 0) {
    what.byte_count = static_cast<uint32_t>(now.request.length);
    const bool tells = now.request.ce == EP_MLX5_CE_ALWAYS;
    if (!qp.behind.empty()) {
      qp.spare = std::exchange(qp.current, std::move(qp.behind.front()));
      qp.behind.pop_front();
    }
    if (tells) complete(qp, *qp.send_cq, what);
    return;
  }
  drop_behind(qp, false);
  what.opcode = EP_MLX5_CQE_REQ_ERR;
  what.syndrome = syndrome;
  complete(qp, *qp.send_cq, what);
  if (qp.state != EP_MLX5_QP_STATE_ERR) {
    stop_qp(qp, EP_MLX5_QP_STATE_ERR);
    raise({dl::mlx5_event_kind::qp_error, 0, qp.qpn, syndrome});
  }
}

// A queue pair in error completes whatever is posted, without looking at it.
void engine::flush(queue_pair& qp) {
  const uint32_t mask = (1u << qp.log_sq) - 1;
  const uint8_t* wqe = qp.sq + uint64_t{qp.consumer & mask} * EP_MLX5_WQEBB_BYTES;
  alignas(8) uint8_t head[8];
  std::memcpy(head, wqe, sizeof head);
  const uint32_t posted = static_cast<uint16_t>(qp.producer - qp.consumer);
  // Where the ring does not hold what it should, single WQEBBs are as good a guess as any.
  const bool sound = static_cast<uint16_t>(load_be32(head) >> 8) == qp.consumer && load_be32(head + 4) >> 8 == qp.qpn;
  completion what;
  what.opcode = EP_MLX5_CQE_REQ_ERR;
  what.syndrome = EP_MLX5_SYNDROME_FLUSHED;
  what.wqe_opcode = head[3];
  what.wqe_counter = qp.consumer;
  what.qpn = qp.qpn;
  what.user_index = qp.user_index;
  qp.consumer = static_cast<uint16_t>(qp.consumer + (sound ? std::min(wqe_wqebbs(head), posted) : 1));
  ++counts_.requests;
  complete(qp, *qp.send_cq, what);
}

bool engine::complete(queue_pair& qp, completion_queue& cq, const completion& what) {
  ++counts_.completions;
  const bool before = cq.overrun;
  if (completion_write(cq, what)) return true;
  if (!before) {
    report({qp.qpn, static_cast<uint32_t>(cq.produced & ((1u << cq.log_size) - 1)), what.wqe_counter, "cq room", completion_backlog(cq), (1u << cq.log_size) - 1,
            "at most: the consumer is too far behind"});
    raise({dl::mlx5_event_kind::cq_error, 0, cq.cqn, 0});
  }
  if (qp.state != EP_MLX5_QP_STATE_ERR) {
    stop_qp(qp, EP_MLX5_QP_STATE_ERR);
    raise({dl::mlx5_event_kind::qp_error, 0, qp.qpn, 0});
  }
  return false;
}

void engine::trace_request(const queue_pair& qp, uint8_t syndrome, const char* note) {
  const flight& now = *qp.current;
  trace_event event;
  event.opcode = now.request.opcode;
  event.syndrome = syndrome;
  event.tries = static_cast<uint8_t>(std::min(now.tries + 1, 255u));
  event.index = now.request.index;
  event.qpn = qp.qpn;
  event.peer_port = qp.remote_port;
  event.rkey = now.request.has_remote ? now.request.rkey : 0;
  event.psn = now.request.has_remote ? now.message.psn : 0;
  event.begin_ns = now.begun_ns;
  event.end_ns = now_ns_;
  event.address = now.request.has_remote ? now.request.address : 0;
  event.length = now.request.length;
  event.note = note;
  event.wqe_bytes = std::min(now.request.wqebbs * EP_MLX5_WQEBB_BYTES, static_cast<uint32_t>(event.wqe.size()));
  std::copy_n(now.wqe.begin(), event.wqe_bytes, event.wqe.begin());
  trace_.add(event);
}

bool engine::poll_receives(int64_t now_ns) {
  now_ns_ = now_ns;
  bool any = false;
  if (receivers_.empty()) return false;
  for (queue_pair* qp : receivers_) any = receive(*qp) || any;
  return any;
}

// Tells peers how many receive requests there are, and makes completions of the immediates that arrived.
bool engine::receive(queue_pair& qp) {
  if (qp.state != EP_MLX5_QP_STATE_RTR && qp.state != EP_MLX5_QP_STATE_RTS) return false;
  port_qp& shared = port_.qp(qp.index);
  const auto posted = static_cast<uint16_t>(be32(load_acquire(*reinterpret_cast<const uint32_t*>(qp.dbr))));
  // The record has 16 bits, the count that peers compare has 32.
  const auto more = static_cast<uint16_t>(posted - static_cast<uint16_t>(shared.receive_posted));
  if (more != 0) store_ordered(shared.receive_posted, shared.receive_posted + more);
  bool any = more != 0;
  while (load_ordered(shared.receive_taken) != shared.receive_done) {
    const port_inbox& one = shared.inbox[shared.receive_done % port_inbox_slots];
    completion what;
    what.opcode = EP_MLX5_CQE_RESP_WR_IMM;
    what.wqe_counter = static_cast<uint16_t>(shared.receive_done);
    what.qpn = qp.qpn;
    what.user_index = qp.user_index;
    what.byte_count = one.byte_count;
    what.immediate = one.immediate;
    what.timestamp = static_cast<uint64_t>(now_ns_);
    complete(qp, *qp.receive_cq, what);
    store_ordered(shared.receive_done, shared.receive_done + 1);
    any = true;
  }
  return any;
}

} // namespace ep::nic
