#include "messages.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../hand_over.hpp"

namespace ep {
namespace {

uint64_t load(const uint64_t& word) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire); }
// Sequentially consistent: the eventcount of whoever waits for it needs it.
void store(uint64_t& word, uint64_t value) { std::atomic_ref<uint64_t>(word).store(value, std::memory_order_seq_cst); }

constexpr uint64_t chunks_of_lane = 2;
constexpr uint64_t past_cache_bytes = uint64_t{8} << 20;
// `filled` and `drained` count the chunks of one message.
constexpr uint64_t count_bits = 24;
constexpr uint64_t chunk_count(uint64_t number, uint64_t chunks) { return number << count_bits | chunks; }
constexpr uint64_t number_of(uint64_t count) { return count >> count_bits; }
constexpr uint64_t chunks_of(uint64_t count) { return count & ((uint64_t{1} << count_bits) - 1); }

} // namespace

message_board::message_board(group_board& board, end_send send_ended, end_receive receive_ended)
    : board_(board), send_ended_(std::move(send_ended)), receive_ended_(std::move(receive_ended)), lanes_(static_cast<size_t>(board.capacity())) {
  for (uint32_t i = 0; i < message_chunks; ++i) free_chunks_.push_back(i);
}

void message_board::send(std::unique_ptr<message_send> message) {
  ++pending_;
  ++sent.calls;
  lanes_[static_cast<size_t>(message->peer)].sends.push_back(std::move(message));
}

void message_board::receive(std::unique_ptr<message_receive> message) {
  ++pending_;
  ++received.calls;
  receives_.push_back(std::move(message));
}

void message_board::touch(int32_t peer) const {
  if (peer != board_.rank()) wake_notify(&board_.member(peer).wake);
}


void message_board::finish_send(message_send& message, uint32_t status, int32_t rank) {
  if (message.operation_id == 0) return; // was cut off before
  --pending_;
  outcome end;
  end.status = status;
  end.rank = rank;
  end.expected = message.bytes;
  send_ended_(std::exchange(message.operation_id, 0), end);
}

void message_board::finish_receive(std::unique_ptr<message_receive> message, uint32_t status, int32_t rank, uint64_t found) {
  --pending_;
  outcome end;
  end.status = status;
  end.rank = rank;
  end.expected = message->bytes;
  end.found = found;
  receive_ended_(std::move(message), end);
}

void message_board::withdraw(lane& to) {
  ++to.withdrawn;
  debts_.fetch_add(1, std::memory_order_release);
}

void message_board::owe(bool& owed) {
  if (!std::exchange(owed, true)) debts_.fetch_add(1, std::memory_order_release);
}

void message_board::settle(bool& owed) {
  if (std::exchange(owed, false)) debts_.fetch_sub(1, std::memory_order_release);
}

// The peer is gone, or another one: it asks for nothing.
void message_board::forgive(lane& with) {
  debts_.fetch_sub(std::exchange(with.withdrawn, 0), std::memory_order_release);
  settle(with.owes_active);
  settle(with.owes_taken);
}

bool message_board::pass(bool patient) {
  if (pending_ == 0 && !owes()) return false;
  bool made = false;
  // HAZARD: gone first, then the words. A peer takes a message, says so and closes: looked at the other way round, what it took counts as lost.
  if (patient) {
    for (int32_t peer = 0; peer < board_.size(); ++peer) lanes_[static_cast<size_t>(peer)].gone = peer != board_.rank() && board_.gone(peer);
  }
  for (int32_t peer = 0; peer < board_.size(); ++peer) {
    if (!board_.attached(peer) || !board_.current(peer)) continue;
    lane& with = lanes_[static_cast<size_t>(peer)];
    made = pass_sends(peer, with) || made;
    made = pass_receives(peer, with) || made;
  }
  if (patient) look_after(made);
  return made;
}

void message_board::begin_anew(int32_t peer) {
  lane& with = lanes_[static_cast<size_t>(peer)];
  for (auto& message : with.sends) finish_send(*message, EP_STATUS_PEER_LOST, peer);
  if (with.active != nullptr) finish_send(*with.active, EP_STATUS_PEER_LOST, peer);
  if (with.taking != nullptr) finish_receive(std::move(with.taking), EP_STATUS_PEER_LOST, peer, 0);
  free_chunks_.insert(free_chunks_.end(), with.chunks.begin(), with.chunks.end());
  forgive(with);
  with = {};
  std::memset(static_cast<void*>(&board_.lane(board_.rank(), peer)), 0, sizeof(message_lane));
}

bool message_board::pass_sends(int32_t peer, lane& to) {
  message_lane& mine = board_.lane(board_.rank(), peer);
  const message_lane& theirs = board_.lane(peer, board_.rank());
  bool made = false;
  // Announce whatever the receiver has room to read.
  const uint64_t seen = load(theirs.seen);
  for (const auto& message : to.sends) {
    if (message->number != 0) continue;
    if (to.announced - seen == message_notes) break;
    message->number = ++to.announced;
    mine.notes[message->number % message_notes] = {message->number, message->tag, message->bytes, message->offset, message->dtype, message->segment, {}};
    ++sent.signals;
    made = true;
  }
  if (made) store(mine.announced, to.announced);
  const uint64_t granted = load(theirs.granted);
  if (to.active != nullptr) {
    message_send& message = *to.active;
    // Chunks that the receiver has read go back to the pool.
    const uint64_t drained = load(theirs.drained);
    for (; number_of(drained) == message.number && to.drained < chunks_of(drained); ++to.drained, made = true) {
      free_chunks_.push_back(to.chunks.front());
      to.chunks.erase(to.chunks.begin());
    }
    // The receiver grants the next message only when it is done with this one.
    if (load(theirs.finished) == message.number || granted != message.number) {
      const bool rejected = load(theirs.rejected) == message.number;
      free_chunks_.insert(free_chunks_.end(), to.chunks.begin(), to.chunks.end());
      to.chunks.clear();
      finish_send(message, rejected ? EP_STATUS_MISMATCH : EP_STATUS_OK, peer);
      to.active.reset();
      settle(to.owes_active);
      made = true;
    }
  }
  if (to.active == nullptr && granted != to.handled) {
    to.handled = granted;
    const auto found = std::find_if(to.sends.begin(), to.sends.end(), [&](const auto& message) { return message->number == granted; });
    if (found == to.sends.end()) {
      store(mine.refused, granted); // withdrawn meanwhile
      if (to.withdrawn != 0) {
        --to.withdrawn;
        debts_.fetch_sub(1, std::memory_order_release);
      }
    } else {
      to.active = std::move(*found);
      if (to.active->deadline_ns == 0) to.active->deadline_ns = deadline_after(to.active->timeout_ms);
      to.sends.erase(found);
      to.filled = to.drained = 0;
      // Also what says that this message will not be withdrawn any more: the receiver ends nothing before it.
      store(mine.filled, chunk_count(granted, 0));
    }
    ++sent.signals;
    made = true;
  }
  if (to.active != nullptr && to.active->segment == group_no_segment) {
    message_send& message = *to.active;
    while (message.sent < message.bytes && to.chunks.size() < chunks_of_lane && !free_chunks_.empty()) {
      const uint32_t chunk = free_chunks_.back();
      free_chunks_.pop_back();
      to.chunks.push_back(chunk);
      const uint64_t bytes = std::min(message_chunk_bytes, message.bytes - message.sent);
      hand_over(board_.pool(board_.rank(), chunk), message.data + message.sent, bytes);
      message.sent += bytes;
      mine.chunk[++to.filled % chunks_of_lane] = chunk;
      store(mine.filled, chunk_count(message.number, to.filled));
      ++sent.writes;
      ++sent.signals;
      sent.bytes += bytes;
      made = true;
    }
  }
  if (made) touch(peer);
  return made;
}

bool message_board::match(int32_t peer, lane& from) {
  if (from.notes.empty() || receives_.empty()) return false;
  // The oldest receive that takes any of these, with the oldest message that it takes.
  for (auto wanted = receives_.begin(); wanted != receives_.end(); ++wanted) {
    if ((*wanted)->peer != any_rank && (*wanted)->peer != peer) continue;
    const auto found = std::find_if(from.notes.begin(), from.notes.end(), [&](const note& one) { return one.tag == (*wanted)->tag; });
    if (found == from.notes.end()) continue;
    from.taking = std::move(*wanted);
    receives_.erase(wanted);
    from.taken = *found;
    from.notes.erase(found);
    from.taking->source = peer;
    if (from.taking->deadline_ns == 0) from.taking->deadline_ns = deadline_after(from.taking->timeout_ms);
    return true;
  }
  return false;
}

void message_board::finish_taking(int32_t peer, lane& from, uint32_t status) {
  message_lane& mine = board_.lane(board_.rank(), peer);
  if (status == EP_STATUS_MISMATCH) store(mine.rejected, from.taken.number);
  store(mine.finished, from.taken.number);
  ++received.signals;
  const uint64_t found = from.taken.bytes;
  from.taken = {};
  settle(from.owes_taken);
  if (from.taking != nullptr) finish_receive(std::move(from.taking), status, peer, found);
}

// What has come of the granted message; true if it moved on.
bool message_board::take(int32_t peer, lane& from, uint64_t filled) {
  message_receive* into = from.taking.get();
  if (into != nullptr && (from.taken.bytes > into->bytes || from.taken.dtype != into->dtype)) {
    finish_taking(peer, from, EP_STATUS_MISMATCH);
    return true;
  }
  if (into != nullptr && into->data == nullptr && into->copy.size() < from.taken.bytes) into->copy.resize(from.taken.bytes);
  uint8_t* to = into == nullptr ? nullptr : into->data != nullptr ? into->data : into->copy.data();
  uint64_t got = from.taken_chunks * message_chunk_bytes;
  bool made = false;
  if (from.taken.segment != group_no_segment) {
    if (to != nullptr && from.taken.bytes != 0) {
      const uint8_t* data = board_.memory_of(peer, from.taken.segment, from.taken.offset, from.taken.bytes);
      if (data == nullptr) {
        finish_taking(peer, from, EP_STATUS_SYSTEM);
        return true;
      }
      ep_copy(to, data, from.taken.bytes, from.taken.bytes > past_cache_bytes ? 1 : 0);
      ep_copy_fence();
    }
    got = from.taken.bytes;
  } else {
    message_lane& mine = board_.lane(board_.rank(), peer);
    const message_lane& theirs = board_.lane(peer, board_.rank());
    for (; from.taken_chunks < filled; made = true) {
      const uint64_t bytes = std::min(message_chunk_bytes, from.taken.bytes - got);
      const uint32_t chunk = theirs.chunk[(from.taken_chunks + 1) % chunks_of_lane];
      if (to != nullptr) ep_copy(to + got, board_.pool(peer, chunk), bytes, 0);
      got += bytes;
      store(mine.drained, chunk_count(from.taken.number, ++from.taken_chunks));
      ++received.signals;
    }
  }
  if (got < from.taken.bytes) return made;
  if (into != nullptr) into->got = from.taken.bytes;
  finish_taking(peer, from, EP_STATUS_OK);
  return true;
}

bool message_board::pass_receives(int32_t peer, lane& from) {
  message_lane& mine = board_.lane(board_.rank(), peer);
  const message_lane& theirs = board_.lane(peer, board_.rank());
  bool made = false;
  const uint64_t announced = load(theirs.announced);
  if (from.seen < announced) {
    for (; from.seen < announced; ++from.seen) {
      const message_note& one = theirs.notes[(from.seen + 1) % message_notes];
      from.notes.push_back({one.number, one.tag, one.dtype, one.segment, one.bytes, one.offset});
    }
    store(mine.seen, from.seen);
    made = true;
  }
  if (from.taken.number == 0 && match(peer, from)) {
    message_receive& into = *from.taking;
    from.taken_chunks = 0;
    into.got = 0;
    store(mine.granted, from.taken.number);
    ++received.signals;
    made = true;
  }
  const uint64_t filled = load(theirs.filled);
  if (from.taken.number != 0 && load(theirs.refused) == from.taken.number) {
    // Its sender gave up before it was granted: the receive goes back to where it was.
    from.taken = {};
    settle(from.owes_taken);
    if (from.taking != nullptr) receives_.push_front(std::move(from.taking));
    made = true;
  } else if (from.taken.number != 0 && number_of(filled) == from.taken.number) {
    made = take(peer, from, chunks_of(filled)) || made;
  }
  if (made) touch(peer);
  return made;
}

bool message_board::look_after(bool& made) {
  const int64_t now = clock_now_ns();
  const auto cut = [&](const auto& message, int32_t peer, int32_t* rank) -> uint32_t {
    *rank = peer;
    if (message.cancel && message.cancel->value.load(std::memory_order_acquire) != 0) return EP_STATUS_ABORTED;
    if (peer != board_.rank() && board_.evicted()) return EP_STATUS_EVICTED; // nobody looks at its words any more
    if (peer != any_rank && lanes_[static_cast<size_t>(peer)].gone) return EP_STATUS_PEER_LOST;
    if (message.deadline_ns != 0 && message.deadline_ns <= now) return EP_STATUS_TIMEOUT;
    return EP_STATUS_OK;
  };
  for (int32_t peer = 0; peer < board_.size(); ++peer) {
    lane& with = lanes_[static_cast<size_t>(peer)];
    int32_t rank = peer;
    if (!with.sends.empty() && with.active == nullptr && with.sends.front()->deadline_ns == 0) {
      with.sends.front()->deadline_ns = deadline_after(with.sends.front()->timeout_ms);
    }
    for (size_t i = 0; i < with.sends.size();) {
      const uint32_t status = cut(*with.sends[i], peer, &rank);
      if (status == EP_STATUS_OK) {
        ++i;
        continue;
      }
      finish_send(*with.sends[i], status, rank);
      if (with.sends[i]->number != 0) withdraw(with);
      with.sends.erase(with.sends.begin() + static_cast<std::ptrdiff_t>(i));
      made = true;
    }
    if (with.active != nullptr && with.active->operation_id != 0) {
      // A granted message cannot be withdrawn: its work ends, and whenever the receiver goes on, it still finds the data.
      const uint32_t status = cut(*with.active, peer, &rank);
      if (status != EP_STATUS_OK) {
        finish_send(*with.active, status, rank);
        owe(with.owes_active);
        made = true;
      }
    }
    if (with.active != nullptr && with.gone) {
      free_chunks_.insert(free_chunks_.end(), with.chunks.begin(), with.chunks.end());
      with.chunks.clear();
      with.active.reset();
    }
    if (with.taking != nullptr) {
      uint32_t status = cut(*with.taking, peer, &rank);
      // What a dead sender had written whole has been taken above.
      if (status != EP_STATUS_OK) {
        finish_receive(std::move(with.taking), status, rank, 0);
        owe(with.owes_taken);
        made = true;
      }
    }
    if (with.gone || (peer != board_.rank() && board_.evicted())) forgive(with);
  }
  for (size_t i = 0; i < receives_.size();) {
    message_receive& message = *receives_[i];
    const bool first = std::none_of(receives_.begin(), receives_.begin() + static_cast<std::ptrdiff_t>(i), [&](const auto& earlier) {
      return earlier->tag == message.tag && (earlier->peer == message.peer || earlier->peer == any_rank || message.peer == any_rank);
    });
    if (first && message.deadline_ns == 0) message.deadline_ns = deadline_after(message.timeout_ms);
    int32_t rank = message.peer;
    uint32_t status = cut(message, message.peer, &rank);
    if (message.peer == any_rank && status == EP_STATUS_OK) {
      bool all_gone = board_.size() > 1;
      for (int32_t peer = 0; peer < board_.size(); ++peer) {
        if (peer != board_.rank() && !lanes_[static_cast<size_t>(peer)].gone) all_gone = false;
      }
      const lane& self = lanes_[static_cast<size_t>(board_.rank())];
      if (all_gone && self.sends.empty() && self.notes.empty()) {
        status = EP_STATUS_PEER_LOST;
        rank = board_.rank() == 0 ? board_.size() - 1 : 0;
      }
    }
    if (status == EP_STATUS_OK) {
      ++i;
      continue;
    }
    auto ended = std::move(receives_[i]);
    receives_.erase(receives_.begin() + static_cast<std::ptrdiff_t>(i));
    finish_receive(std::move(ended), status, rank, 0);
    made = true;
  }
  return made;
}

void message_board::close() {
  for (int32_t peer = 0; peer < board_.size(); ++peer) {
    lane& with = lanes_[static_cast<size_t>(peer)];
    for (auto& message : with.sends) finish_send(*message, EP_STATUS_CLOSED, peer);
    with.sends.clear();
    if (with.active != nullptr) finish_send(*with.active, EP_STATUS_CLOSED, peer);
    if (with.taking != nullptr) finish_receive(std::move(with.taking), EP_STATUS_CLOSED, peer, 0);
  }
  for (auto& message : receives_) finish_receive(std::move(message), EP_STATUS_CLOSED, message->peer, 0);
  receives_.clear();
}

} // namespace ep
