#include "engine.hpp"

#include <algorithm>
#include <cstring>

#include "ep/device/copy.h"
#include "thread.hpp"

namespace ep::fabric {
namespace {

constexpr int64_t longest_away_ns = 20'000'000; // while others look
constexpr int64_t assistance_ns = 200'000; // no look for so long: whoever looked has what it waited for, or sleeps
// Before a peer has been heard at all: it may be busy opening.
constexpr int64_t patience_ns = 30'000'000'000;

// A number of the calling thread's.
size_t own_place() {
  static std::atomic<size_t> next{0};
  thread_local const size_t own = next.fetch_add(1, std::memory_order_relaxed);
  return own;
}

uint64_t load_word(const uint64_t& word) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire); }

} // namespace

engine::engine(std::shared_ptr<rank_context> context, std::unique_ptr<dl::fabric_port> port, const engine_options& options)
    : context_(std::move(context)), world_size_(context_->world_size()), options_(options), port_(std::move(port)), ring_(std::make_shared<ring_storage>()),
      accepted_(static_cast<size_t>(world_size_)), failures_(static_cast<size_t>(world_size_)) {
  ring_->entries.resize(options.ring_capacity);
  ring_->ring.entries = reinterpret_cast<uint64_t>(ring_->entries.data());
  ring_->ring.capacity = options.ring_capacity;
  ring_->ring.wake = reinterpret_cast<uint64_t>(&ring_->wake);
  context_->wait_for_networks();
}

engine::~engine() { stop(false); }

result<std::vector<uint8_t>> engine::address() {
  auto bytes = port_->address();
  if (!bytes.ok()) return bytes;
  if (mail_ == nullptr) {
    auto made = mailbox::create(*port_, world_size_);
    if (!made.ok()) return made.why();
    mail_ = std::move(made.value());
    count_.registered += mailbox::byte_length(world_size_);
  }
  const auto* mail = reinterpret_cast<const uint8_t*>(&mail_->place());
  bytes.value().insert(bytes.value().end(), mail, mail + sizeof(mailbox_place));
  return bytes;
}

result<nothing> engine::connect(std::span<const std::vector<uint8_t>> addresses, std::span<const link_keys> keys) {
  if (addresses.size() != static_cast<size_t>(world_size_) || keys.size() != addresses.size() || world_size_ > most_ranks) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(addresses.size()) + " addresses and " + std::to_string(keys.size()) + " pairs of keys for a world of " + std::to_string(world_size_) + " ranks, of which there may be " + std::to_string(most_ranks)};
  }
  if (mail_ == nullptr) return failure{EP_STATUS_INVALID, 0, "a rank that has told nobody its address cannot be connected"};
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    const std::vector<uint8_t>& address = addresses[rank];
    if (address.size() <= sizeof(mailbox_place)) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + ": its address has " + std::to_string(address.size()) + " bytes"};
    const auto port_bytes = address.size() - sizeof(mailbox_place);
    auto at = port_->insert({address.data(), port_bytes});
    if (!at.ok()) {
      failure why = at.why();
      why.message = "rank " + std::to_string(rank) + ": " + why.message;
      return why;
    }
    auto made = std::make_unique<link>();
    made->to = at.value();
    std::memcpy(&made->mail, address.data() + port_bytes, sizeof made->mail);
    made->tag_out = tagger(keys[rank].out);
    made->tag_in = tagger(keys[rank].in);
    made->heard_ns = made->spoke_ns = clock_now_ns();
    made->heard_ns += std::max<int64_t>(0, patience_ns - options_.silence_ns);
    links_.push_back(std::move(made));
  }
  witnesses_.resize(links_.size());
  auto sleeper = wake_descriptor::create(&ring_->wake);
  if (!sleeper.ok()) return sleeper.why();
  ring_->sleeper = std::move(sleeper.value());
  listens_ = port_->descriptor() >= 0;
  if (lines_ != nullptr && !far_.empty()) {
    if (auto begun = lines_->start(line_places_, keys, far_, &ring_->wake); !begun.ok()) return begun;
  }
  auto started = thread_start("ep-fabric", [this] { run(); }, "thread of a fabric engine; raise the limit on tasks");
  if (!started.ok()) return started.why();
  thread_ = std::move(started.value());
  context_->progress().add(this, [this] { return assist(); }, [this] { rest(); });
  return nothing{};
}

void engine::stop(bool orderly) {
  if (stopped_) return;
  context_->progress().remove(this);
  for (const sharer& one : sharers_) one.context->progress().remove(this);
  // Whoever posts from here on is told so.
  const uint64_t taken = std::atomic_ref<uint64_t>(ring_->ring.tail).fetch_or(EP_PROXY_STOPPED, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stopping_.store(orderly ? EP_LIFE_CLOSED : EP_LIFE_DEAD, std::memory_order_seq_cst);
  nudge();
  if (thread_.joinable()) thread_.join(); // not of an engine that was never connected
  ring_->sleeper.reset();                  // memories keep the ring
  // HAZARD: after the farewell: who hears the end of a line alone must have been told nothing else.
  if (lines_ != nullptr) lines_->close();
  for (const auto& at : links_) {
    at->broken.store(true, std::memory_order_release);
    at->out.clear();
  }
  give_memories_up();
  witnesses_.clear();
  if (mail_ != nullptr) mail_->give_back(*port_);
  port_.reset();
  operations_.clear();
  std::atomic_ref<uint64_t>(ring_->ring.head).store(UINT64_MAX, std::memory_order_seq_cst);
  if (load_word(ring_->ring.completed) < taken) std::atomic_ref<uint64_t>(ring_->ring.completed).store(EP_PROXY_LOST, std::memory_order_seq_cst);
  wake_notify(context_->wake()); // whatever they wait for
  for (const sharer& one : sharers_) wake_notify(one.context->wake());
  sharers_.clear();
  context_.reset(); // whoever still looks at requests needs none of it
}

// ---- requests

std::string engine::prepare(outgoing& one, uint64_t memory_id, uint32_t& status) const {
  status = EP_STATUS_INVALID;
  request& wanted = one.wanted;
  if (wanted.peer < 0 || wanted.peer >= world_size_) return "names a peer outside of the world";
  const auto at = memories_.find(memory_id);
  if (at == memories_.end() || at->second.remotes.empty() || at->second.retired) return "names a memory that is not, or no longer, there";
  const routed_memory& known = at->second;
  const symmetric_memory& memory = *known.memory;
  const auto rank = static_cast<size_t>(wanted.peer);
  one.in_gpu = known.gpu != nullptr;
  const bool of_gpu = one.in_gpu || wanted.of_gpu;
  if (of_gpu && wanted.atomic != remote_atomic::none) return "is an atomic on memory of a GPU, where its kernels change words otherwise";
  // HAZARD: no processor reads or writes there.
  if (of_gpu && wanted.peer == context_->rank() && wanted.bytes() != 0) return "is of this rank for itself in memory of a GPU: copy it on a stream";
  if (wanted.atomic != remote_atomic::none && !offer().no_atomics.empty()) return "is an atomic, and there are none: " + offer().no_atomics;
  if (wanted.atomic != remote_atomic::none && wanted.offset % sizeof(uint64_t) != 0) return "is an atomic on a word that is not at a multiple of 8";
  if (wanted.op != signal_op::none && wanted.slot >= memory.signal_slots()) return "names a signal slot beyond the pad";
  if (wanted.row_bytes != 0 && wanted.rows > known.byte_length / wanted.row_bytes) return "is longer than the memory";
  const uint64_t bytes = wanted.word_bytes != 0 ? wanted.word_bytes : wanted.row_bytes * wanted.rows;
  if (wanted.offset > known.byte_length || bytes > known.byte_length - wanted.offset) return "ends beyond the memory";
  one.part = known.remotes[rank];
  one.memory = known.memory;
  if (known.closed[rank] == 0) return "";
  status = EP_STATUS_CLOSED;
  if (wanted.answers()) return (wanted.reads ? "reads a memory that rank " : "is an atomic on a memory that rank ") + std::to_string(wanted.peer) + " has closed";
  // Nobody will look there: it ends in its turn, and nothing is sent. A rank may still give credits to one that has finished.
  wanted.nowhere = true;
  return "";
}

result<uint64_t> engine::post(const symmetric_memory& memory, request wanted) {
  uint64_t number = 0;
  const bool light = !wanted.heavy();
  const bool eager = wanted.eager;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return failure{EP_STATUS_CLOSED, 0, "the fabric was closed"};
    outgoing one;
    one.wanted = std::move(wanted);
    uint32_t status = EP_STATUS_OK;
    if (const std::string why = prepare(one, memory.device_handle().memory_id, status); !why.empty()) return failure{status, 0, "the request " + why};
    const auto peer = static_cast<size_t>(one.wanted.peer);
    if (links_[peer]->broken.load(std::memory_order_acquire)) {
      return failure{failures_[peer].status == EP_STATUS_OK ? EP_STATUS_CLOSED : failures_[peer].status, 0, failures_[peer].text};
    }
    number = one.host = ++accepted_[peer];
    // HAZARD: before whoever posted looks for its end: what seemed light would be waited for, or carried, by a thread that has more to do.
    if (!light) heavy_.fetch_add(1, std::memory_order_relaxed);
    posted_.push_back(std::move(one));
    any_posted_.store(true, std::memory_order_seq_cst);
  }
  // A thread that sleeps as one does who awaits nothing is told that there is something.
  if (light && ((eager && send_if_free()) || step_if_free(clock_now_ns())) && !dormant_.load(std::memory_order_seq_cst)) return number;
  nudge();
  return number;
}

request_state engine::look(int32_t peer, uint64_t number) const {
  const link& at = *links_[static_cast<size_t>(peer)];
  // HAZARD: in this order: what has ended well before the link broke has ended well.
  const bool broken = at.broken.load(std::memory_order_acquire);
  if (at.host_ended.load(std::memory_order_acquire) >= number) return request_state::done;
  return broken ? request_state::failed : request_state::pending;
}

void engine::want_end(int32_t peer) { links_[static_cast<size_t>(peer)]->wants_end.store(true, std::memory_order_release); }

uint64_t engine::accepted(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return accepted_[static_cast<size_t>(peer)];
}

link_failure engine::failure_of(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  const auto rank = static_cast<size_t>(peer);
  return rank < links_.size() && links_[rank]->broken.load(std::memory_order_acquire) ? failures_[rank] : link_failure{};
}

engine_counts engine::counts() const { return {count_.requests, count_.applied, count_.writes, count_.atomics, count_.messages, count_.full, count_.refused, count_.registered, lines_ == nullptr ? 0 : lines_->standing(), count_.carried}; }

std::string engine::violation() const {
  const std::lock_guard lock(mutex_);
  return violation_;
}

void engine::violate(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (violation_.empty()) violation_ = text;
}

void engine::nudge() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_notify(&ring_->wake);
  wake_notify(&away_);
}

bool engine::take_ring() {
  ep_proxy_ring& ring = ring_->ring;
  bool any = false;
  ring_held_ = false;
  for (uint64_t head = ring.head;; ++head) {
    const ep_proxy_request& entry = ring_->entries[head & (ring.capacity - 1)];
    if (load_word(entry.turn) != head + 1) break;
    // What a peer is too slow for stays in the ring, and holds its kernels up.
    ring_held_ = entry.peer >= 0 && entry.peer < world_size_ && links_[static_cast<size_t>(entry.peer)]->out.size() >= request_window;
    if (ring_held_) break;
    outgoing one;
    one.ring = head;
    one.wanted.peer = entry.peer;
    if (entry.slot != EP_NO_SLOT) {
      one.wanted.op = signal_op::add;
      one.wanted.slot = entry.slot;
      one.wanted.value = entry.add;
    }
    if (entry.op == EP_PROXY_PUT) {
      one.wanted.local = entry.src;
      one.wanted.stride = entry.src_stride;
      one.wanted.row_bytes = entry.row_bytes;
      one.wanted.rows = entry.rows;
      one.wanted.offset = entry.dst_offset;
    }
    std::string why = "is neither a put nor a signal";
    uint32_t status = EP_STATUS_OK;
    if (entry.op == EP_PROXY_PUT || entry.op == EP_PROXY_SIGNAL) {
      const std::lock_guard lock(mutex_);
      why = prepare(one, entry.memory_id, status);
    }
    if (why.empty()) {
      begin(std::move(one));
    } else {
      violate("request " + std::to_string(head) + " of a kernel of rank " + std::to_string(context_->rank()) + " " + why);
      ring_landed(head);
    }
    std::atomic_ref<uint64_t>(ring.head).store(head + 1, std::memory_order_release);
    any = true;
  }
  if (!any) return false;
  std::atomic_thread_fence(std::memory_order_seq_cst); // before the look who sleeps
  wake_waiters(); // producers wait for room on the rank's own word
  return true;
}

bool engine::take_posted() {
  if (!any_posted_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(mutex_);
    taken_.swap(posted_);
    any_posted_.store(false, std::memory_order_release);
  }
  const bool any = !taken_.empty();
  for (outgoing& one : taken_) begin(std::move(one));
  taken_.clear();
  return any;
}

void engine::begin(outgoing one) {
  link& at = *links_[static_cast<size_t>(one.wanted.peer)];
  ++count_.requests;
  if (one.host == no_number && one.wanted.heavy()) heavy_.fetch_add(1, std::memory_order_relaxed); // one of the host counts since it was posted
  if (one.wanted.peer == context_->rank() && one.wanted.atomic == remote_atomic::none) {
    // HAZARD: an atomic of this rank on its own word goes through the provider, as those of others do; what comes after it must not end before.
    // What takes long goes piece by piece, by the thread that carries what does.
    one.here = !at.out.empty() || one.wanted.heavy();
    if (!one.here) {
      carry_out_here(one, UINT64_MAX);
      // HAZARD: where an earlier one, an atomic, has failed: requests end in their order, and this number would say that it ended well.
      if (!at.broken.load(std::memory_order_relaxed)) {
        finish(at, one);
      } else if (one.ring != no_number) {
        ring_landed(one.ring);
      }
      lighten(one);
      return;
    }
  }
  if (at.state != link_state::up) {
    // Whoever waits for the peer learns of its end from its life.
    if (one.wanted.answers()) at.broken.store(true, std::memory_order_seq_cst);
    if (!at.broken.load(std::memory_order_relaxed)) {
      finish(at, one);
    } else if (one.ring != no_number) {
      ring_landed(one.ring);
    }
    lighten(one);
    ended_any_ = true;
    return;
  }
  if (one.numbered()) one.sequence = at.next_sequence++;
  at.out.push_back(std::move(one));
}

// At most so many bytes of it. True: all of it is done, and signalled.
bool engine::carry_out_here(outgoing& one, uint64_t most) {
  const request& wanted = one.wanted;
  const int32_t self = context_->rank();
  const symmetric_memory& memory = *one.memory;
  if (wanted.word_bytes != 0) {
    memory.write(self, wanted.offset, &wanted.word, wanted.word_bytes);
  } else {
    const uint64_t bytes = wanted.row_bytes * wanted.rows;
    const uint64_t end = bytes - one.next > most ? one.next + most : bytes;
    while (one.next < end) {
      const uint64_t column = wanted.reads ? one.next : one.next % wanted.row_bytes;
      const uint64_t row = wanted.reads ? 0 : one.next / wanted.row_bytes;
      const uint64_t length = wanted.reads ? end - one.next : std::min(end - one.next, wanted.row_bytes - column);
      auto* local = reinterpret_cast<uint8_t*>(wanted.local + row * wanted.stride + column);
      if (wanted.reads) ep_copy(local, memory.data(self) + wanted.offset + one.next, length, 0);
      else memory.write(self, wanted.offset + one.next, local, length);
      one.next += length;
    }
    if (end != bytes) return false;
  }
  memory.signal_update(self, wanted.slot, wanted.op, wanted.value);
  return true;
}

// It is over, or will never be carried.
void engine::lighten(const outgoing& one) {
  if (one.wanted.heavy()) heavy_.fetch_sub(1, std::memory_order_relaxed);
}

// It has landed, or never will. HAZARD: step() has a fence between this and the look who sleeps.
void engine::finish(link& at, const outgoing& one) {
  if (one.ring != no_number) ring_landed(one.ring);
  if (one.host != no_number) at.host_ended.store(one.host, std::memory_order_release);
  if (!one.wanted.eager) ended_any_ = true;
}

void engine::ring_landed(uint64_t number) {
  ring_ahead_.push_back(number);
  uint64_t& word = ring_->ring.completed;
  uint64_t completed = word; // whoever has the turn writes it
  // `completed` n means that requests 0..n-1 have landed: a bare count would let a producer reuse the source of one that has not.
  for (auto next = ring_ahead_.begin(); (next = std::find(ring_ahead_.begin(), ring_ahead_.end(), completed)) != ring_ahead_.end();) {
    ring_ahead_.erase(next);
    ++completed;
  }
  std::atomic_ref<uint64_t>(word).store(completed, std::memory_order_release);
  ended_any_ = true;
}

// ---- the thread

// All that there is to do, once. True: there was something. With the turn. The clock is read once for all of it.
bool engine::step(int64_t now) {
  now_ns_ = now;
  // What is to go out goes before the look at what has come in: that takes system calls, and whoever answers posts right behind one that found something.
  bool any = take_ring();
  any = take_posted() || any;
  for (int32_t peer = 0; any && peer < world_size_; ++peer) pump(peer);
  any = poll() || any;
  any = retire_memories() || any;
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    any = pump(peer) || any;
    end_requests(peer);
  }
  tell_applied();
  if (ended_any_) {
    ended_any_ = false;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    wake_waiters();
  }
  return any;
}

// With the turn, or where nobody has it any more.
void engine::wake_waiters() const {
  context_->wake_own();
  for (const sharer& one : sharers_) one.context->wake_own();
}

void engine::run() {
  constexpr int receives = 256;
  std::unique_lock turn(turn_);
  over_ = false;
  for (int i = 0; i < receives; ++i) post_receive(take_operation(operation_kind::receive, -1));
  int64_t busy_ns = clock_now_ns();
  watched_ns_ = doubted_ns_ = found_ns_ = busy_ns;
  for (;;) {
    const bool any = step(clock_now_ns());
    const int64_t now = clock_now_ns();
    if (any) keep_pace(now);
    doubt_descriptor(any || assisted(now), now);
    watch_life(now);
    if (stopping_.load(std::memory_order_acquire) != 0 && farewell_over(now)) break;
    if (any || assisted(now)) busy_ns = now;
    const bool leaves = stopping_.load(std::memory_order_acquire) != 0;
    if (stays(now) && !leaves) {
      if (!any) pause(turn, false);
    } else if (assisted(now) && !heavy() && !leaves) {
      step_back(turn);
    } else if (!any) {
      nap(turn, now, now - busy_ns);
    }
  }
  over_ = true;
}

// ---- in its stead

// Passes by where another thread is at it: what that finds, it tells to all who wait. True: done, and nothing waits for room.
bool engine::step_if_free(int64_t now) {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn.owns_lock() || over_) return false;
  const uint64_t before = count_.applied;
  step(now);
  count_.carried += count_.applied - before;
  return all_out();
}

// Nothing waits for room. With the turn.
bool engine::all_out() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& at) { return at->state == link_state::failed || (at->control.empty() && at->posted == at->out.size()); });
}

// What was posted and no more: whoever posts waits next, and looks at what has come then. True: it is out.
bool engine::send_if_free() {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn.owns_lock() || over_) return false;
  now_ns_ = clock_now_ns();
  take_posted();
  for (int32_t peer = 0; peer < world_size_; ++peer) pump(peer);
  return all_out();
}

bool engine::assist() {
  if (heavy()) {
    rest();
    return true;
  }
  const int64_t now = clock_now_ns();
  assisted_until_ns_[own_place() % assistants].store(now + std::max(assistance_ns, rare_looks::apart_ns()), std::memory_order_relaxed);
  step_if_free(now);
  return heavy();
}

// HAZARD: only where nobody else looks: one that sleeps in between (the watcher of JS's waits) would wake the thread beside a kernel that spins.
void engine::rest() {
  assisted_until_ns_[own_place() % assistants].store(0, std::memory_order_seq_cst);
  if (!stepped_back_.load(std::memory_order_seq_cst) || (assisted(clock_now_ns()) && !heavy())) return;
  wake_notify(&away_);
}

bool engine::assisted(int64_t now) const {
  return std::any_of(std::begin(assisted_until_ns_), std::end(assisted_until_ns_), [now](const auto& one) { return now < one.load(std::memory_order_relaxed); });
}

// Leaves the turn to whoever looks, and sleeps; not for so long that peers would miss signs of life. On a word of its own: a kernel that posts wakes whoever sleeps on the ring's, and carries
// what it posted itself as soon as it waits. If it does not wait, the thread looks soon.
void engine::step_back(std::unique_lock<std::mutex>& turn) {
  turn.unlock();
  stepped_back_.store(true, std::memory_order_seq_cst);
  const int64_t begin_ns = clock_now_ns();
  const int64_t end_ns = begin_ns + std::min(longest_away_ns, options_.heartbeat_ns / 8);
  for (int64_t now = begin_ns; now < end_ns && assisted(now) && !heavy(); now = clock_now_ns()) {
    const uint32_t epoch = wake_prepare(&away_);
    if (!assisted(now) || any_posted_.load(std::memory_order_seq_cst) || stopping_.load(std::memory_order_seq_cst) != 0) {
      wake_cancel(&away_);
      break;
    }
    wake_commit(&away_, epoch, away_ns_);
    // Whoever has looked for so long does for longer.
    away_ns_ = std::min(2 * away_ns_, longest_nap_ns);
    // Nobody else looks at lives.
    if (turn.try_lock()) {
      watch_life(clock_now_ns());
      turn.unlock();
    }
  }
  if (!assisted(clock_now_ns())) away_ns_ = shortest_nap_ns;
  stepped_back_.store(false, std::memory_order_seq_cst);
  turn.lock();
}

} // namespace ep::fabric
