#include <algorithm>
#include <cstring>
#include <utility>

#include "engine.hpp"

// The part of the engine that takes what the port says.
namespace ep::fabric {
namespace {

constexpr int64_t answer_ns = 3'000; // what a kernel answers within goes with the answer
constexpr int64_t longest_answer_ns = 30'000; // of what is waited for, though there is more to do
constexpr uint64_t tell_every = 64; // requests carried out before the source hears of it though there is more to do

} // namespace

// True: there was something to do, more than signs of life.
bool engine::poll() {
  post_receives();
  events_.clear();
  port_->poll(events_);
  bool work = false;
  for (const dl::fabric_event& event : events_) {
    if (event.what == dl::fabric_event::kind::arrived) {
      work = true;
      on_arrived(event.data);
      continue;
    }
    if (event.what == dl::fabric_event::kind::failed) {
      work = true;
      on_failed(event);
      continue;
    }
    auto* one = reinterpret_cast<operation*>(event.context);
    if (one == nullptr) continue;
    if (one->kind == operation_kind::receive) {
      work = on_bytes(*one, event.bytes) || work;
      receives_unposted_.push_back(one); // its answer goes first
      continue;
    }
    if (one->kind == operation_kind::message) --messages_under_way_;
    work = work || one->kind == operation_kind::piece;
    link& at = *links_[static_cast<size_t>(one->peer)];
    if (one->kind == operation_kind::piece && one->number - at.base < at.out.size()) --at.out[one->number - at.base].under_way;
    give_operation(one);
  }
  if (!work) post_receives();
  return work;
}

// The sources learn what has been carried out with what this rank sends them anyway; otherwise when there is a moment, and not seldom, and of what they do not wait for when nothing has come
// for a while. HAZARD: of long puts there may be one in each look for as long as any are under way: their source may post no more before it has heard of the first.
void engine::tell_applied() {
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    const link& at = *links_[static_cast<size_t>(peer)];
    if (at.state != link_state::up || at.applied == at.told || !at.control.empty()) continue;
    const bool has_moment = events_.empty() && now_ns_ - at.heard_ns > (at.asked ? answer_ns : options_.tell_after_ns);
    const bool is_late = at.asked && now_ns_ - at.owes_ns > longest_answer_ns;
    if (!has_moment && !is_late && at.applied - at.told < tell_every) continue;
    say(peer, message_kind::alive);
    pump(peer);
  }
}

void engine::on_failed(const dl::fabric_event& event) {
  auto* one = reinterpret_cast<operation*>(event.context);
  if (one == nullptr) return;
  if (one->kind == operation_kind::receive) {
    post_receive(one);
    return;
  }
  if (one->kind == operation_kind::message) --messages_under_way_;
  const int32_t peer = one->peer;
  give_operation(one);
  lose(peer, event.text);
}

void engine::on_arrived(uint32_t data) {
  const int32_t source = writer_of(data);
  if (source >= world_size_ || source == context_->rank()) return violate("a write came of rank " + std::to_string(source) + ", which is no other rank of this world");
  link& at = *links_[static_cast<size_t>(source)];
  if (at.state == link_state::failed) return;
  const uint64_t place = write_distance(data, at.applied);
  if (place >= request_window) return lose(source, "it sent a piece of a request that was over, or too far ahead");
  if (is_mail(data)) return on_mail(source, at.applied + place);
  at.heard_ns = std::max(at.heard_ns, now_ns_);
  if (at.in.size() <= place) at.in.resize(place + 1);
  ++at.in[place].pieces;
  apply(source);
}

// HAZARD: what is no brief of the source's, by its tag, must not pass in silence: where it lies, the source's own may have lain, whose request would never be whole.
void engine::on_mail(int32_t source, uint64_t sequence) {
  const link& at = *links_[static_cast<size_t>(source)];
  const std::optional<wire_brief> brief = mail_->take(source, sequence);
  if (!brief.has_value()) return lose(source, "what came into its mailbox is no request of the number that came with it");
  wire_message message; // what lies behind its bytes is not looked at
  expand(*brief, at.acked, at.applied, message);
  if (!authentic(message)) return lose(source, "somebody else wrote into its mailbox");
  on_authentic(message);
}

// HAZARD: nothing of a message may count before that, not even as a sign of life: anybody may have sent it.
bool engine::authentic(wire_message& message) {
  const uint64_t tag = std::exchange(message.tag, 0);
  const bool is = tag == links_[static_cast<size_t>(message.source)]->tag_in(&message, head_bytes + message.payload_bytes);
  if (!is) ++count_.refused;
  return is;
}

// In either form. False: it was a sign of life and no more, or nothing.
bool engine::on_bytes(operation& one, size_t bytes) {
  const auto of_others = [&](int32_t source) { return source >= 0 && source < world_size_ && source != context_->rank(); };
  wire_message& message = one.message;
  uint16_t begin = 0;
  std::memcpy(&begin, &message, sizeof begin);
  if (bytes >= brief_head_bytes && begin == brief_magic) {
    wire_brief brief;
    static_assert(sizeof brief <= sizeof message);
    std::memcpy(&brief, &message, sizeof brief); // what lies behind its bytes is not looked at
    if (brief.payload_bytes <= brief_payload_bytes && bytes == brief_head_bytes + brief.payload_bytes && of_others(brief.source)) {
      const link& at = *links_[brief.source];
      expand(brief, at.acked, at.applied, message);
      return authentic(message) && on_authentic(message);
    }
  } else if (bytes >= head_bytes && message.magic == wire_magic && of_others(message.source) && message.payload_bytes <= inline_bytes && bytes == head_bytes + message.payload_bytes) {
    return authentic(message) && on_authentic(message);
  }
  ++count_.refused;
  return false;
}

// False: it was a sign of life and no more.
bool engine::on_authentic(const wire_message& message) {
  const int32_t source = message.source;
  link& at = *links_[static_cast<size_t>(source)];
  if (at.state == link_state::failed) return false;
  at.heard_ns = now_ns_;
  if (message.acked > at.next_sequence) {
    lose(source, "it says that it carried out more than it was sent");
    return true;
  }
  const bool news = message.acked > at.acked;
  at.acked = std::max(at.acked, message.acked);
  switch (message.kind) {
    case message_kind::request: on_request(source, message); return true;
    case message_kind::alive:
      // It may have overtaken what it asks for.
      at.asked = at.asked || (message.op & wire_asks) != 0;
      return news || at.asked;
    case message_kind::byed: at.byed = true; return true;
    case message_kind::bye: {
      at.control.clear(); // nothing else matters to who leaves: see say()
      say(source, message_kind::byed);
      if (at.state != link_state::up) return true;
      at.state = link_state::left;
      {
        const std::lock_guard lock(mutex_);
        failures_[static_cast<size_t>(source)] = {EP_STATUS_PEER_LOST, "rank " + std::to_string(source) + (message.value == EP_LIFE_CLOSED ? " closed" : " died")};
      }
      drop_requests(at, message.value == EP_LIFE_CLOSED);
      context_->set_life(source, message.value == EP_LIFE_CLOSED ? EP_LIFE_CLOSED : EP_LIFE_DEAD);
      return true;
    }
    case message_kind::retire: {
      {
        const std::lock_guard lock(mutex_);
        for (auto& [id, known] : memories_) {
          const auto rank = static_cast<size_t>(source);
          if (!known.remotes.empty() && known.remotes[rank].memory == message.memory) known.closed[rank] = 1;
        }
      }
      take_posted(); // what was accepted before the mark goes before the answer
      at.retiring.push_back({message.memory, at.base + at.out.size()});
      return true;
    }
    case message_kind::retired: {
      const std::lock_guard lock(mutex_);
      const auto known = memories_.find(message.memory);
      if (known != memories_.end() && !known->second.awaited.empty()) known->second.awaited[static_cast<size_t>(source)] = 0;
      return true;
    }
  }
  lose(source, "it sent a message of an unknown kind");
  return true;
}

void engine::on_request(int32_t source, const wire_message& message) {
  link& at = *links_[static_cast<size_t>(source)];
  const uint64_t place = message.sequence - at.applied;
  if (place == 0 && at.in.empty() && message.pieces == 0) {
    carry_out_next(source, message);
    return;
  }
  if (place >= request_window || (place < at.in.size() && at.in[place].announced)) return lose(source, "it sent a request twice, or too far ahead");
  if (at.in.size() <= place) at.in.resize(place + 1);
  at.in[place].announced = true;
  std::memcpy(&at.in[place].message, &message, head_bytes + message.payload_bytes);
  apply(source);
}

// False: the source was given up for it.
bool engine::carry_out_next(int32_t source, const wire_message& message) {
  link& at = *links_[static_cast<size_t>(source)];
  if (!carry_out(message)) {
    lose(source, "it sent a request that does not fit the memory that it is for");
    return false;
  }
  at.asked = at.asked || (message.op & wire_asks) != 0;
  if (at.applied == at.told) at.owes_ns = at.heard_ns;
  ++at.applied;
  ++count_.applied;
  return true;
}

void engine::apply(int32_t source) {
  link& at = *links_[static_cast<size_t>(source)];
  while (!at.in.empty() && at.in.front().announced && at.in.front().pieces >= at.in.front().message.pieces) {
    if (at.in.front().pieces != at.in.front().message.pieces) return lose(source, "it sent more pieces of a request than it said");
    if (!carry_out_next(source, at.in.front().message)) return;
    at.in.pop_front();
  }
}

// Null: there is none of this number that could be written.
const engine::routed_memory* engine::reach(uint64_t memory) {
  if (reached_ != nullptr && reached_id_ == memory) return reached_;
  const std::lock_guard lock(mutex_);
  const auto known = memories_.find(memory);
  // HAZARD: between retire and retired there may still be requests for it; after that, none. Before route() it has no place yet that could be written: peers are told of it earlier, and are to wait.
  if (known == memories_.end() || known->second.remotes.empty()) return nullptr;
  reached_id_ = memory;
  reached_ = &known->second;
  return reached_;
}

bool engine::carry_out(const wire_message& message) {
  const routed_memory* known = reach(message.memory);
  if (known == nullptr || (known->gpu != nullptr && message.payload_bytes != 0)) return false;
  symmetric_memory& memory = *known->memory;
  const int32_t self = context_->rank();
  // Somebody may be waiting for plain bytes.
  if (memory.wakes_rank()) ended_any_ = true;
  if (message.offset > known->byte_length || message.payload_bytes > known->byte_length - message.offset) return false;
  if (message.payload_bytes != 0) memory.write(self, message.offset, message.payload, message.payload_bytes);
  const auto op = static_cast<signal_op>(message.op & ~wire_asks);
  if (op == signal_op::none) return true;
  if ((op != signal_op::add && op != signal_op::set) || message.slot >= memory.signal_slots()) return false;
  memory.signal_update(self, message.slot, op, message.value);
  return true;
}

// The first request is over.
void engine::take_off(link& at) {
  lighten(at.out.front());
  at.out.pop_front();
  ++at.base;
}

void engine::end_requests(int32_t peer) {
  link& at = *links_[static_cast<size_t>(peer)];
  while (at.posted != 0) {
    const outgoing& one = at.out.front();
    if (one.under_way != 0 || (one.numbered() && one.sequence >= at.acked)) break;
    finish(at, one);
    take_off(at);
    --at.posted;
  }
  while (!at.retiring.empty() && at.retiring.front().number <= at.base) {
    say(peer, message_kind::retired, 0, at.retiring.front().memory);
    at.retiring.erase(at.retiring.begin());
  }
}

// What the peer has said it carried out has ended well, though events of its pieces may be missing still. Of the rest, puts to a rank that left in order end well, too: nobody will look
// at its memory. Everything else will not land any more, or nobody will know. What is under way keeps its bytes until its event.
void engine::drop_requests(link& at, bool left_in_order) {
  while (!at.out.empty() && !at.out.front().wanted.answers() && (left_in_order || at.out.front().wanted.nowhere || (at.posted != 0 && at.out.front().sequence < at.acked))) {
    finish(at, at.out.front());
    take_off(at);
    if (at.posted != 0) --at.posted;
  }
  if (!left_in_order || !at.out.empty()) at.broken.store(true, std::memory_order_seq_cst);
  while (!at.out.empty()) {
    if (at.out.front().here) carry_out_here(at.out.front(), UINT64_MAX); // needs no provider
    if (at.out.front().ring != no_number) ring_landed(at.out.front().ring);
    take_off(at);
  }
  at.posted = 0;
  at.in.clear();
  at.retiring.clear();
  ended_any_ = true;
}

void engine::lose(int32_t peer, const std::string& why) {
  link& at = *links_[static_cast<size_t>(peer)];
  at.control.clear(); // nobody hears it any more, and it would pass for work that is to be done
  if (at.state != link_state::up) {
    at.state = link_state::failed;
    return;
  }
  at.state = link_state::failed;
  {
    const std::lock_guard lock(mutex_);
    failures_[static_cast<size_t>(peer)] = {EP_STATUS_PEER_LOST, "rank " + std::to_string(peer) + ": " + why};
  }
  drop_requests(at, false);
  // What does not reach this rank itself says nothing of its life.
  if (peer != context_->rank()) context_->set_life(peer, EP_LIFE_DEAD);
}

} // namespace ep::fabric
