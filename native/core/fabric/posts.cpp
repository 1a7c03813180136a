#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine.hpp"

// The part of the engine that hands the port what is to go out.
namespace ep::fabric {
namespace {

// HAZARD: what lies in a GPU no thread here reads or writes.
bool travels_inline(const outgoing& one) { return !one.wanted.answers() && !one.in_gpu && !one.wanted.of_gpu && one.wanted.bytes() <= inline_bytes; }

} // namespace

engine::operation* engine::take_operation(operation_kind kind, int32_t peer) {
  if (free_.empty()) {
    operations_.push_back(std::make_unique<operation>());
    free_.push_back(operations_.back().get());
  }
  operation* one = free_.back();
  free_.pop_back();
  one->kind = kind;
  one->peer = peer;
  return one;
}

void engine::give_operation(operation* one) {
  one->keep.reset();
  one->memory.reset();
  free_.push_back(one);
}

void engine::post_receive(operation* one) {
  if (port_->receive(&one->message, sizeof one->message, &one->context) != 0) receives_unposted_.push_back(one);
}

void engine::post_receives() {
  for (size_t waiting = receives_unposted_.size(); waiting > 0; --waiting) {
    operation* one = receives_unposted_.back();
    receives_unposted_.pop_back();
    post_receive(one);
  }
}

void engine::say(int32_t peer, message_kind kind, uint64_t value, uint64_t memory) {
  link& at = *links_[static_cast<size_t>(peer)];
  // HAZARD: who closes waits for what is still to be told, and whoever has left takes nothing any more: each rank's close would take as long as a farewell may.
  if (at.state == link_state::failed || (at.state == link_state::left && kind != message_kind::byed)) return;
  at.control.push_back({kind, 0, value, memory});
}

// What every message says of its source, and the tag of all of it.
void engine::seal(const link& at, wire_message& message) const {
  message.magic = wire_magic;
  message.source = context_->rank();
  message.acked = at.applied;
  message.tag = 0;
  message.tag = at.tag_out(&message, head_bytes + message.payload_bytes);
}

// A message has gone out.
void engine::told(link& at) {
  ++count_.messages;
  at.told = at.applied;
  at.asked = false;
}

// Seals it. 0, or an errno as the port gives it.
int engine::send(int32_t peer, wire_message& message) {
  link& at = *links_[static_cast<size_t>(peer)];
  seal(at, message);
  const std::optional<wire_brief> brief = brief_of(message);
  const size_t brief_bytes = brief_head_bytes + message.payload_bytes;
  int code = 0;
  bool fails_aloud = true; // what does not get there is told
  if (!brief.has_value()) {
    code = send_whole(peer, &message, head_bytes + message.payload_bytes);
  } else if (message.kind != message_kind::request) {
    code = send_whole(peer, &*brief, brief_bytes);
  } else if (message.sequence < at.acked + mailbox::slots) {
    code = mail(peer, *brief, brief_bytes, message.sequence);
  } else if (brief_bytes <= port_->offer().inject_bytes) {
    // HAZARD: nothing tells whether it gets there. A request's end is awaited, and signs of life, which follow however much is sent so, are not sent so.
    code = port_->inject(at.to, &*brief, brief_bytes);
    fails_aloud = false;
  } else {
    code = send_whole(peer, &*brief, brief_bytes);
  }
  if (code == 0 && fails_aloud) at.spoke_ns = now_ns_;
  if (code != 0) {
    if (code == EAGAIN) ++count_.full;
    return code;
  }
  told(at);
  return 0;
}

// HAZARD: with an event of its end, not injected. That would be cheaper by a little, but tcp;ofi_rxm of 1.17 does not know a failed one for what it is, and ends the process (SIGSEGV) where a peer has died.
int engine::mail(int32_t peer, const wire_brief& brief, size_t bytes, uint64_t sequence) {
  const link& at = *links_[static_cast<size_t>(peer)];
  operation* one = take_operation(operation_kind::message, peer);
  std::memcpy(&one->message, &brief, bytes);
  const int32_t self = context_->rank();
  return posted(one, port_->write(at.to, &one->message, bytes, nullptr, mail_data(self, sequence), mailbox::address(at.mail, self, sequence), at.mail.key, &one->context));
}

int engine::send_whole(int32_t peer, const void* bytes, size_t length) {
  operation* one = take_operation(operation_kind::message, peer);
  std::memcpy(&one->message, bytes, length);
  return posted(one, port_->send(links_[static_cast<size_t>(peer)]->to, &one->message, length, &one->context));
}

int engine::posted(operation* message, int code) {
  if (code == 0) {
    ++messages_under_way_;
  } else {
    give_operation(message);
  }
  return code;
}

engine::operation* engine::take_piece(int32_t peer, const outgoing& one) {
  const link& at = *links_[static_cast<size_t>(peer)];
  operation* piece = take_operation(operation_kind::piece, peer);
  piece->number = at.base + at.posted;
  piece->keep = one.wanted.keep;
  piece->memory = one.memory;
  return piece;
}

void engine::count_piece(outgoing& one, uint64_t length) {
  one.next += length;
  ++one.under_way;
  ++count_.writes;
}

int engine::post_pieces(int32_t peer, outgoing& one) {
  link& at = *links_[static_cast<size_t>(peer)];
  const request& wanted = one.wanted;
  const uint64_t bytes = wanted.bytes();
  const uint64_t longest = std::min<uint64_t>(largest_piece, port_->offer().max_message);
  const bool packed = wanted.stride == wanted.row_bytes || wanted.rows <= 1;
  while (one.next < bytes) {
    if (wanted.word_bytes != 0) {
      if (const int code = post_word(peer, one); code != 0) return code;
      continue;
    }
    const uint64_t column = packed ? one.next : one.next % wanted.row_bytes;
    const uint64_t row = packed ? 0 : one.next / wanted.row_bytes;
    const uint64_t length = std::min(longest, packed ? bytes - one.next : wanted.row_bytes - column);
    auto* local = reinterpret_cast<uint8_t*>(wanted.local + row * wanted.stride + column);
    const uint64_t remote = one.part.base + wanted.offset + one.next;
    if (one.next + length == bytes && !wanted.reads) {
      if (const int code = post_last_piece(peer, one, local, length, remote); code != ENOSYS) return code;
    }
    operation* piece = take_piece(peer, one);
    const int code = wanted.reads ? port_->read(at.to, local, length, wanted.descriptor, remote, one.part.key, &piece->context)
                                  : port_->write(at.to, local, length, wanted.descriptor, piece_data(context_->rank(), one.sequence), remote, one.part.key, &piece->context);
    if (code != 0) {
      if (code == EAGAIN) ++count_.full;
      give_operation(piece);
      return code;
    }
    count_piece(one, length);
    ++one.pieces;
  }
  return 0;
}

// With the brief of its request, for the mailbox: one message in place of two. ENOSYS where that cannot be: it is posted as any other, then.
int engine::post_last_piece(int32_t peer, outgoing& one, const uint8_t* local, uint64_t length, uint64_t remote) {
  link& at = *links_[static_cast<size_t>(peer)];
  const dl::fabric_offer& offer = port_->offer();
  if (!offer.pairs || length + brief_head_bytes > offer.max_message || one.in_gpu || one.wanted.of_gpu || one.sequence >= at.acked + mailbox::slots) return ENOSYS;
  wire_message message = announcement(one);
  seal(at, message);
  const std::optional<wire_brief> brief = brief_of(message);
  if (!brief.has_value()) return ENOSYS;
  operation* piece = take_piece(peer, one);
  std::memcpy(&piece->message, &*brief, brief_head_bytes);
  const int32_t self = context_->rank();
  const int code = port_->write_pair(at.to, {local, length, remote, one.part.key}, {&piece->message, brief_head_bytes, mailbox::address(at.mail, self, one.sequence), at.mail.key}, mail_data(self, one.sequence), &piece->context);
  if (code != 0) {
    if (code == EAGAIN) ++count_.full;
    give_operation(piece);
    return code;
  }
  count_piece(one, length);
  one.announced = true;
  at.spoke_ns = now_ns_;
  told(at);
  return 0;
}

// A word for memory of a GPU, from memory of the host.
int engine::post_word(int32_t peer, outgoing& one) {
  link& at = *links_[static_cast<size_t>(peer)];
  operation* piece = take_operation(operation_kind::piece, peer);
  piece->number = at.base + at.posted;
  piece->memory = one.memory;
  piece->word = one.wanted.word;
  const uint64_t remote = one.part.base + one.wanted.offset;
  const int code = port_->write(at.to, &piece->word, one.wanted.word_bytes, nullptr, piece_data(context_->rank(), one.sequence), remote, one.part.key, &piece->context);
  if (code != 0) {
    if (code == EAGAIN) ++count_.full;
    give_operation(piece);
    return code;
  }
  count_piece(one, one.wanted.word_bytes);
  ++one.pieces;
  return 0;
}

int engine::post_atomic(int32_t peer, outgoing& one) {
  link& at = *links_[static_cast<size_t>(peer)];
  const request& wanted = one.wanted;
  operation* piece = take_operation(operation_kind::piece, peer);
  piece->number = at.base + at.posted;
  piece->keep = wanted.keep;
  piece->memory = one.memory;
  // HAZARD: not in the request, which may be given up before the port has ended.
  piece->word = wanted.word;
  piece->compare = wanted.compare;
  auto* old = reinterpret_cast<uint64_t*>(wanted.local);
  const uint64_t remote = one.part.base + wanted.offset;
  const int code = wanted.atomic == remote_atomic::fetch_add ? port_->fetch_add(at.to, &piece->word, old, remote, one.part.key, &piece->context)
                                                         : port_->compare_swap(at.to, &piece->compare, &piece->word, old, remote, one.part.key, &piece->context);
  if (code != 0) {
    if (code == EAGAIN) ++count_.full;
    give_operation(piece);
    return code;
  }
  ++one.under_way;
  ++count_.atomics;
  return 0;
}

// What the request is, with its bytes where they are few.
wire_message engine::announcement(const outgoing& one) const {
  const request& wanted = one.wanted;
  wire_message message;
  begin_message(message, message_kind::request);
  message.op = static_cast<uint8_t>(static_cast<uint8_t>(wanted.op) | (one.asks() ? wire_asks : 0));
  message.pieces = one.pieces;
  message.sequence = one.sequence;
  message.memory = one.part.memory;
  message.offset = wanted.offset;
  message.slot = wanted.slot;
  message.value = wanted.value;
  if (!travels_inline(one)) return message;
  message.payload_bytes = static_cast<uint16_t>(wanted.bytes());
  if (wanted.word_bytes != 0) {
    std::memcpy(message.payload, &wanted.word, wanted.word_bytes);
  } else {
    for (uint64_t row = 0; row < wanted.rows; ++row) {
      std::memcpy(message.payload + row * wanted.row_bytes, reinterpret_cast<const void*>(wanted.local + row * wanted.stride), wanted.row_bytes);
    }
  }
  return message;
}

int engine::announce(int32_t peer, const outgoing& one) {
  wire_message message = announcement(one);
  return send(peer, message);
}

// Posts what there is room for. True: something was posted.
bool engine::pump(int32_t peer) {
  link& at = *links_[static_cast<size_t>(peer)];
  if (at.state == link_state::failed) return false;
  bool any = false;
  const auto refused = [&](int code) {
    if (code != EAGAIN) lose(peer, "a request could not be posted: " + failure_errno("post", code, "").message);
    return any;
  };
  const auto send_control = [&]() -> int {
    while (!at.control.empty()) {
      // A sign of life is no reason to look for more to do.
      const bool work = at.control.front().kind != message_kind::alive || at.applied != at.told;
      const control_message& one = at.control.front();
      wire_message message;
      begin_message(message, one.kind);
      message.op = one.op;
      message.memory = one.memory;
      message.value = one.value;
      if (const int code = send(peer, message); code != 0) return code;
      at.control.pop_front();
      any = any || work;
    }
    return 0;
  };
  if (const int code = send_control(); code != 0) return refused(code);
  for (; at.posted < at.out.size(); ++at.posted, any = true) {
    outgoing& one = at.out[at.posted];
    if (one.wanted.nowhere) continue;
    if (one.here) {
      if (at.posted != 0) break;
      if (!carry_out_here(one, largest_piece)) return true; // signs of life in between
      continue;
    }
    if (one.numbered() && one.sequence >= at.acked + request_window) break;
    if (one.wanted.atomic != remote_atomic::none) {
      if (const int code = post_atomic(peer, one); code != 0) return refused(code);
    } else if (!travels_inline(one)) {
      if (const int code = post_pieces(peer, one); code != 0) return refused(code);
    }
    if (one.wanted.answers()) continue;
    if (!one.announced) {
      if (const int code = announce(peer, one); code != 0) return refused(code);
    }
    at.unasked = !one.asks();
  }
  // Behind all that was accepted.
  if (at.state == link_state::up && at.posted == at.out.size() && at.wants_end.load(std::memory_order_relaxed) && at.wants_end.exchange(false, std::memory_order_acquire) && std::exchange(at.unasked, false)) {
    say(peer, message_kind::alive);
    at.control.back().op = wire_asks;
    if (const int code = send_control(); code != 0) return refused(code);
  }
  return any;
}

} // namespace ep::fabric
