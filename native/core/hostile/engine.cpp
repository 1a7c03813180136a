#include "engine.hpp"

#include <algorithm>
#include <cstring>

#include "../thread.hpp"

namespace ep {
namespace {

// Bytes begin..end of the packed rows.
void copy_packed(const hostile_request& request, uint64_t begin, uint64_t end) {
  const auto* src = reinterpret_cast<const uint8_t*>(request.src);
  uint8_t* dst = request.memory->data(request.peer) + request.dst_offset;
  while (begin < end) {
    const uint64_t row = begin / request.row_bytes;
    const uint64_t column = begin % request.row_bytes;
    const uint64_t bytes = std::min(end - begin, request.row_bytes - column);
    std::memcpy(dst + begin, src + row * request.src_stride + column, bytes);
    begin += bytes;
  }
}

template <class Word> void store_word(uint8_t* address, uint64_t value) {
  std::atomic_ref<Word>(*reinterpret_cast<Word*>(address)).store(static_cast<Word>(value), std::memory_order_release);
}

void store_word_of(const hostile_request& request) {
  uint8_t* address = request.memory->data(request.peer) + request.dst_offset;
  switch (request.word_bytes) {
    case 1: store_word<uint8_t>(address, request.word); break;
    case 2: store_word<uint16_t>(address, request.word); break;
    case 4: store_word<uint32_t>(address, request.word); break;
    default: store_word<uint64_t>(address, request.word); break;
  }
}

uint64_t load_word(const uint64_t& word) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire); }

} // namespace

hostile_engine::hostile_engine(std::shared_ptr<rank_context> context, completion_sink& sink, const hostile_options& options)
    : context_(std::move(context)), sink_(sink), options_(options), ring_(std::make_shared<ring_storage>()), random_(options.seed) {
  ring_->entries.resize(options.ring_capacity);
  ring_->ring.entries = reinterpret_cast<uint64_t>(ring_->entries.data());
  ring_->ring.capacity = options.ring_capacity;
  ring_->ring.wake = reinterpret_cast<uint64_t>(&ring_->wake);
}

result<std::unique_ptr<hostile_engine>> hostile_engine::create(std::shared_ptr<rank_context> context, completion_sink& sink, const hostile_options& options) {
  std::unique_ptr<hostile_engine> made(new hostile_engine(std::move(context), sink, options));
  auto started = thread_start("ep-hostile", [engine = made.get()] { engine->run(); }, "thread of a hostile engine; raise the limit on tasks");
  if (!started.ok()) return started.why();
  made->thread_ = std::move(started.value());
  return made;
}

hostile_engine::~hostile_engine() {
  // First: whoever posts from here on is told so.
  const uint64_t accepted = std::atomic_ref<uint64_t>(ring_->ring.tail).fetch_or(EP_PROXY_STOPPED, std::memory_order_seq_cst);
  stopping_.store(true, std::memory_order_seq_cst);
  wake_notify(&ring_->wake);
  if (thread_.joinable()) thread_.join(); // not of an engine whose thread could not be started
  outcome closed;
  closed.status = EP_STATUS_CLOSED;
  for (const flight& one : flights_) {
    if (one.request.operation_id != 0) sink_.complete(one.request.operation_id, closed);
  }
  for (const hostile_request& one : posted_) sink_.complete(one.operation_id, closed);
  for (const auto* flushes : {&flushes_, &flushes_posted_}) {
    for (const pending_flush& one : *flushes) sink_.complete(one.operation_id, closed);
  }
  // Nobody takes requests or reads sources any more: whoever waits for either need not wait longer, and learns whether all have landed.
  std::atomic_ref<uint64_t>(ring_->ring.head).store(UINT64_MAX, std::memory_order_seq_cst);
  if (load_word(ring_->ring.completed) < accepted) std::atomic_ref<uint64_t>(ring_->ring.completed).store(EP_PROXY_LOST, std::memory_order_seq_cst);
  wake_notify(context_->wake());
}

void hostile_engine::attach(symmetric_memory& memory) const { memory.use_proxy(std::shared_ptr<ep_proxy_ring>(ring_, &ring_->ring)); }

void hostile_engine::post(hostile_request request) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(request));
  }
  nudge();
}

void hostile_engine::flush(uint64_t operation_id, cancel_ref cancel, int32_t peer, int64_t deadline_ns) {
  {
    const std::lock_guard lock(mutex_);
    flushes_posted_.push_back({operation_id, std::move(cancel), peer, deadline_ns, 0, load_word(ring_->ring.tail)});
  }
  nudge();
}

void hostile_engine::nudge() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_notify(&ring_->wake);
}

hostile_counts hostile_engine::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::string hostile_engine::violation() const {
  const std::lock_guard lock(mutex_);
  return violation_;
}

const char* hostile_engine::refusal(const hostile_request& request) const {
  if (!request.memory) return "names a memory that is not, or no longer, there";
  const symmetric_memory& memory = *request.memory;
  if (request.peer < 0 || request.peer >= context_->world_size()) return "names a peer outside of the world";
  if (request.slot != EP_NO_SLOT && request.slot >= memory.signal_slots()) return "names a signal slot beyond the pad";
  if (request.row_bytes != 0 && request.rows > memory.byte_length() / request.row_bytes) return "is longer than the memory";
  const uint64_t bytes = request.row_bytes * request.rows;
  if (request.dst_offset > memory.byte_length() || bytes > memory.byte_length() - request.dst_offset) return "ends beyond the memory";
  return nullptr;
}

void hostile_engine::begin(hostile_request request, uint64_t ring_sequence) {
  flight one{std::move(request), next_number_++, ring_sequence, 0, {}};
  one.due_ns = clock_now_ns() + static_cast<int64_t>(random_.below(static_cast<uint64_t>(options_.max_delay_ns) + 1));
  const uint64_t bytes = one.request.row_bytes * one.request.rows;
  if (one.request.word_bytes != 0) {
    one.pieces.push_back({0, 0});
  } else if (bytes != 0) {
    uint64_t begin = 0;
    for (uint64_t cuts = random_.below(options_.max_pieces); cuts > 0 && begin < bytes; --cuts) {
      const uint64_t end = begin + random_.below(bytes - begin + 1);
      if (end == begin) continue;
      one.pieces.push_back({begin, end});
      begin = end;
    }
    if (begin < bytes) one.pieces.push_back({begin, bytes});
  }
  flights_.push_back(std::move(one));
}

bool hostile_engine::take_ring() {
  ep_proxy_ring& ring = ring_->ring;
  bool any = false;
  for (uint64_t head = ring.head;; ++head) {
    const ep_proxy_request& entry = ring_->entries[head & (ring.capacity - 1)];
    if (load_word(entry.turn) != head + 1) break;
    hostile_request request;
    request.memory = symmetric_memory::find(entry.memory_id);
    request.peer = entry.peer;
    request.slot = entry.slot;
    request.add = entry.add;
    if (entry.op == EP_PROXY_PUT) {
      request.src = entry.src;
      request.src_stride = entry.src_stride;
      request.row_bytes = entry.row_bytes;
      request.rows = entry.rows;
      request.dst_offset = entry.dst_offset;
    }
    const char* why = entry.op == EP_PROXY_PUT || entry.op == EP_PROXY_SIGNAL ? refusal(request) : "is neither a put nor a signal";
    if (why == nullptr) {
      begin(std::move(request), head);
    } else {
      {
        const std::lock_guard lock(mutex_);
        if (violation_.empty()) violation_ = "request " + std::to_string(head) + " of a kernel of rank " + std::to_string(context_->rank()) + " " + why;
      }
      ring_landed(head);
    }
    std::atomic_ref<uint64_t>(ring.head).store(head + 1, std::memory_order_seq_cst);
    any = true;
  }
  if (any) wake_notify(context_->wake()); // producers wait for room on the rank's own word
  return any;
}

bool hostile_engine::take() {
  bool any = false;
  // The ring first: a flush that JS posted after a kernel's requests must find them taken.
  any = take_ring() || any;
  std::deque<hostile_request> posted;
  std::vector<pending_flush> flushes;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(posted_);
    flushes.swap(flushes_posted_);
  }
  for (hostile_request& request : posted) begin(std::move(request), UINT64_MAX);
  for (pending_flush& flush : flushes) {
    flush.number = next_number_;
    flushes_.push_back(std::move(flush));
  }
  return any || !posted.empty() || !flushes.empty();
}

bool hostile_engine::covered(const pending_flush& flush, const flight& one) const {
  if (one.request.peer != flush.peer) return false;
  return one.ring_sequence == UINT64_MAX ? one.number < flush.number : one.ring_sequence < flush.ring_tail;
}

void hostile_engine::look_at_flushes() {
  for (size_t i = 0; i < flushes_.size();) {
    const pending_flush& flush = flushes_[i];
    bool waiting = load_word(ring_->ring.head) < flush.ring_tail;
    for (flight& one : flights_) {
      if (!covered(flush, one)) continue;
      one.due_ns = 0;
      waiting = true;
    }
    outcome end;
    end.rank = flush.peer;
    bool over = true;
    if (!waiting) {
      end.status = EP_STATUS_OK;
    } else if (flush.cancel->value.load(std::memory_order_acquire) != 0) {
      end.status = EP_STATUS_ABORTED;
    } else if (context_->life(flush.peer) == EP_LIFE_DEAD) {
      end.status = EP_STATUS_PEER_LOST;
    } else if (flush.deadline_ns != no_deadline && clock_now_ns() >= flush.deadline_ns) {
      end.status = EP_STATUS_TIMEOUT;
    } else {
      over = false;
    }
    if (!over) {
      ++i;
      continue;
    }
    sink_.complete(flush.operation_id, end);
    flushes_.erase(flushes_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void hostile_engine::ring_landed(uint64_t sequence) {
  ring_ahead_.push_back(sequence);
  uint64_t& word = ring_->ring.completed;
  uint64_t completed = word; // this thread alone writes it
  // `completed` n means that requests 0..n-1 have landed: a bare count would let a producer reuse the source of one that has not.
  for (auto next = ring_ahead_.begin(); (next = std::find(ring_ahead_.begin(), ring_ahead_.end(), completed)) != ring_ahead_.end();) {
    ring_ahead_.erase(next);
    ++completed;
  }
  std::atomic_ref<uint64_t>(word).store(completed, std::memory_order_seq_cst);
  wake_notify(context_->wake());
}

void hostile_engine::land(size_t index) {
  flight one = std::move(flights_[index]);
  if (index + 1 != flights_.size()) flights_[index] = std::move(flights_.back());
  flights_.pop_back();
  const hostile_request& request = one.request;
  // Sequentially consistent: the bytes of this put are visible before it, and it is the signaller's half of the eventcount.
  if (request.slot != EP_NO_SLOT) request.memory->signal_update(request.peer, request.slot, signal_op::add, request.add);
  bool early = false;
  for (const flight& other : flights_) early = early || (other.request.peer == request.peer && other.number < one.number);
  {
    const std::lock_guard lock(mutex_);
    ++counts_.landed;
    if (early) ++counts_.overtakes;
  }
  if (one.ring_sequence != UINT64_MAX) ring_landed(one.ring_sequence);
  if (request.operation_id != 0) {
    outcome end;
    end.rank = request.peer;
    sink_.complete(request.operation_id, end);
  }
}

void hostile_engine::step(size_t index) {
  flight& one = flights_[index];
  if (one.pieces.empty()) {
    land(index);
    return;
  }
  const size_t chosen = random_.below(one.pieces.size());
  const piece part = one.pieces[chosen];
  one.pieces[chosen] = one.pieces.back();
  one.pieces.pop_back();
  if (one.request.word_bytes != 0) {
    store_word_of(one.request);
  } else {
    copy_packed(one.request, part.begin, part.end);
  }
  const std::lock_guard lock(mutex_);
  ++counts_.pieces;
}

void hostile_engine::run() {
  while (!stopping_.load(std::memory_order_acquire)) {
    take();
    look_at_flushes();
    const int64_t now = clock_now_ns();
    int64_t next = INT64_MAX;
    size_t due = 0;
    for (const flight& one : flights_) {
      due += one.due_ns <= now ? 1 : 0;
      next = std::min(next, one.due_ns);
    }
    if (due != 0) {
      size_t chosen = random_.below(due);
      size_t index = 0;
      while (flights_[index].due_ns > now || chosen-- != 0) ++index;
      step(index);
      continue;
    }
    for (const pending_flush& flush : flushes_) next = std::min(next, flush.deadline_ns);
    const uint32_t epoch = wake_prepare(&ring_->wake);
    if (stopping_.load(std::memory_order_seq_cst) || take()) {
      wake_cancel(&ring_->wake);
      continue;
    }
    // A flush also looks for the death of its peer, which wakes nobody here.
    const int64_t at_most = flushes_.empty() ? 1'000'000'000 : 2'000'000;
    wake_commit(&ring_->wake, epoch, next == INT64_MAX ? at_most : std::clamp<int64_t>(next - now, 1, at_most));
  }
}

} // namespace ep
