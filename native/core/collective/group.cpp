#include "group.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "../thread.hpp"
#include "ep/device/copy.h"

namespace ep {
namespace {

// Larger calls on group memory go to the group's thread at once: the caller's would be held up longer than a hand-over takes.
constexpr uint64_t inline_bytes = uint64_t{4} << 20;

// Before the clock is read for the first time: a peer that is there answers within them.
constexpr int first_looks = 64;
// Small calls are timed this many at a time: to read the clock takes a quarter of one.
constexpr uint64_t measured_rounds = 16;
// How long the group's thread leaves a caller alone that carries out calls itself.
constexpr int64_t helped_us = 100;
// As long as a switch between two processes takes on a slow machine (5 us in a virtual one, 1 to 2 elsewhere). Measured there, 4 ranks on 2 cores, 8 B, us of a call: 14.5 without, 12.1 with 2 us, 10.7 with 5, 10.7 with 10.
constexpr int64_t elsewhere_ns = 5'000;
// What a thread copies into fresh memory in a nanosecond.
constexpr uint64_t copied_per_ns = 4;

uint64_t block_bytes(const collective_call& call) {
  if (call.kind != op_kind::all_to_all) return call.bytes * (call.inputs.size() + call.outputs.size());
  uint64_t bytes = 0;
  for (const call_block& block : call.inputs) bytes += block.bytes;
  for (const call_block& block : call.outputs) bytes += block.bytes;
  return bytes;
}

bool large(const collective_call& call) { return block_bytes(call) > 2 * inline_bytes; }

// Lines by turns, as steps have them: nobody writes one that may still be read. Numbers of one measurement go on where those before it ended.
bool exchange(const std::vector<uint8_t*>& memories, size_t own, uint64_t number) {
  constexpr uint64_t apart = 128;
  const auto line = [&](uint8_t* memory) { return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory + number % 2 * apart)); };
  line(memories[own]).store(number, std::memory_order_release);
  for (uint8_t* const memory : memories) {
    for (uint64_t looks = 0; line(memory).load(std::memory_order_acquire) < number; cpu_relax()) {
      if (++looks % 1024 == 0) std::this_thread::yield();
      if (looks == uint64_t{1} << 32) return false;
    }
  }
  return true;
}

} // namespace

result<std::shared_ptr<collective_group>> collective_group::create(completion_sink& sink, const group_options& options, bool evicts) {
  auto made = group_board::create(options);
  if (!made.ok()) return made.why();
  std::shared_ptr<collective_group> group(new collective_group(sink));
  group->board_ = std::move(made.value());
  group->evicts_ = evicts;
  group->note_view();
  group->messages_ = std::make_unique<message_board>(
      *group->board_,
      [self = group.get()](uint64_t id, const outcome& end) {
        self->in_flight_.fetch_sub(1, std::memory_order_acq_rel);
        self->sink_.complete(id, end);
      },
      [self = group.get()](std::unique_ptr<message_receive> message, const outcome& end) {
        const uint64_t id = message->operation_id;
        if (end.status == EP_STATUS_OK && message->data == nullptr && message->got != 0) {
          const std::lock_guard lock(self->inbox_mutex_);
          self->received_[id] = std::move(message->copy);
        }
        self->in_flight_.fetch_sub(1, std::memory_order_acq_rel);
        self->sink_.complete(id, end);
      });
  group->board_->on_joined = [self = group.get()](int32_t peer) { self->messages_->begin_anew(peer); };
  return group;
}

void collective_group::note_view() {
  size_.store(board_->size(), std::memory_order_release);
  epoch_.store(board_->epoch(), std::memory_order_release);
  fencing_.store(board_->fencing(), std::memory_order_release);
}

result<nothing> collective_group::attach(int32_t rank, const ep_segment_handle& handle, uint32_t incarnation) {
  const std::lock_guard lock(run_mutex_);
  auto done = board_->attach(rank, handle, incarnation);
  nudge();
  return done;
}

void collective_group::lose(int32_t rank, uint32_t incarnation) {
  const std::lock_guard lock(run_mutex_);
  board_->lose(rank, incarnation);
  nudge();
}

std::vector<group_peer> collective_group::survey() {
  const std::lock_guard lock(run_mutex_);
  std::vector<group_peer> peers(static_cast<size_t>(board_->capacity()));
  board_->survey(peers.data());
  return peers;
}

std::vector<std::shared_ptr<segment>> collective_group::peers() {
  const std::lock_guard lock(run_mutex_);
  return board_->peers();
}

std::vector<ep_core_set> collective_group::cores_on_host() {
  const std::lock_guard lock(run_mutex_);
  return board_->cores_on_host();
}

result<nothing> collective_group::fence() {
  if (!fencing_.load(std::memory_order_acquire)) return nothing{};
  const std::lock_guard lock(run_mutex_);
  if (!board_->fencing()) return nothing{};
  auto done = board_->fence();
  nudge();
  return done;
}

void collective_group::join(uint64_t operation_id, cancel_ref cancel, double timeout_ms) {
  const std::lock_guard run(run_mutex_);
  const std::lock_guard lock(inbox_mutex_);
  outcome end;
  end.status = EP_STATUS_BUSY;
  if (joining_ != nullptr || !start_thread()) return sink_.complete(operation_id, end);
  joining_ = std::make_unique<joining>(joining{operation_id, std::move(cancel), deadline_after(timeout_ms)});
  in_flight_.fetch_add(1, std::memory_order_acq_rel);
  board_->ask_to_join(true);
  wake_thread();
}

// True when the rank has been taken in, or has stopped waiting for that.
bool collective_group::pass_join() {
  outcome end;
  if (!board_->try_join()) {
    if (board_->evicted()) end.status = EP_STATUS_EVICTED; // taken in and out again, before it came
    else if (joining_->cancel && joining_->cancel->value.load(std::memory_order_acquire) != 0) end.status = EP_STATUS_ABORTED;
    else if (joining_->deadline_ns <= clock_now_ns()) end.status = EP_STATUS_TIMEOUT;
    else return false;
    board_->ask_to_join(false);
  }
  poisoned_ = false;
  note_view();
  end.expected = board_->joined_sequence();
  end.stage = static_cast<uint32_t>(board_->epoch());
  const auto ended = std::move(joining_);
  in_flight_.fetch_sub(1, std::memory_order_acq_rel);
  sink_.complete(ended->operation_id, end);
  return true;
}

result<uint32_t> collective_group::allocate(uint64_t byte_length) {
  const std::lock_guard lock(run_mutex_);
  return board_->allocate(byte_length);
}

std::vector<int32_t> collective_group::active_in(uint64_t epoch) {
  const std::lock_guard lock(run_mutex_);
  return board_->active_in(epoch);
}

// HAZARD: under `run_mutex_`, in which calls are carried out: taken before, they could be overtaken by the caller's next one.
void collective_group::take_inbox() {
  const std::lock_guard lock(inbox_mutex_);
  for (auto& call : inbox_) calls_.push_back(std::move(call));
  for (auto& message : sends_in_) messages_->send(std::move(message));
  for (auto& message : receives_in_) messages_->receive(std::move(message));
  inbox_.clear();
  sends_in_.clear();
  receives_in_.clear();
}

// Of the caller's thread: waits for whoever the call waits for, and lets messages go on meanwhile. False: the time for that is up.
bool collective_group::wait_now(queued_call& queued) {
  if (board_->policy().spin_ns > 0) {
    for (int i = 0; i < first_looks; ++i) {
      if (queued.run.can_advance()) return true;
      cpu_relax();
    }
  }
  return wait_inline(board_->policy(), board_->wake(), [&] { return (!messages_->idle() && messages_->pass(false)) || can_advance_soon(queued.run); });
}

// Where ranks outnumber cores. All ranks of this core have entered the step, and whoever is awaited has a core of its own: a yield would only go round among those who wait, and when the
// awaited comes in the meantime, this rank hears of it two switches later.
bool collective_group::can_advance_soon(collective_run& run) {
  if (run.can_advance()) return true;
  if (board_->policy().spin_ns > 0 || !board_->awaits_elsewhere()) return false;
  const int64_t end_ns = clock_now_ns() + elsewhere_ns;
  do {
    for (int i = 0; i < 16; ++i) {
      if (run.can_advance()) return true;
      cpu_relax();
    }
  } while (clock_now_ns() < end_ns);
  return false;
}

// Carries out what was handed over before. HAZARD: without it, one call that went to the thread would send every later one there for as long as the caller
// does not pause: none could overtake it.
bool collective_group::help() {
  take_inbox();
  while (!calls_.empty()) {
    if (pass(false)) continue;
    if (calls_.empty()) break;
    if (!calls_.front()->begun || !wait_now(*calls_.front())) return false;
  }
  return true;
}

bool collective_group::try_now(queued_call& queued) {
  if (!queued.borrowed && large(queued.call)) return false;
  helping_.store(true, std::memory_order_release);
  const std::unique_lock lock(run_mutex_);
  const bool done = board_->connected() && !poisoned_ && (calls_in_flight_.load(std::memory_order_acquire) == 0 || help()) && !poisoned_ && run_now(queued);
  helping_.store(false, std::memory_order_release);
  return done;
}

bool collective_group::run_now(queued_call& queued) {
  queued.begun = true;
  queued.deadline_ns = 0; // reading the clock costs as much as a small call: whoever has to wait sets it
  queued.run.begin(*board_, queued.call, traces_[static_cast<size_t>(queued.call.kind)]);
  int64_t waited_since = 0;
  for (;;) {
    switch (queued.run.advance()) {
      case progress::done: note_view(); return true;
      case progress::made: waited_since = 0; break;
      case progress::failed: return false; // told by the group's thread, like every failure
      case progress::waiting:
        if (wait_now(queued)) break;
        // To hand a call over is to copy what it borrows, on this thread: up to that time it is as well spent waiting.
        const int64_t copying_ns = queued.borrowed ? static_cast<int64_t>(block_bytes(queued.call) / copied_per_ns) : 0;
        if (copying_ns == 0) return false;
        const int64_t now = clock_now_ns();
        if (waited_since == 0) waited_since = now;
        if (now - waited_since > copying_ns) return false;
    }
  }
}

void collective_group::submit(std::unique_ptr<queued_call> queued) {
  if (queued->borrowed) {
    // The caller's memory is the caller's again. Outputs may hold results of the part that is done, and may be inputs, too.
    const auto copy = [&](call_block& block) {
      for (size_t i = 0; i < queued->copied_from.size(); ++i) {
        if (queued->copied_from[i] == block.data) {
          block.data = queued->copies[i].data();
          return;
        }
      }
      queued->copied_from.push_back(block.data);
      queued->copies.emplace_back(block.data, block.data + block.bytes);
      block.data = queued->copies.back().data();
    };
    queued->copies.reserve(queued->call.inputs.size() + queued->call.outputs.size());
    for (call_block& block : queued->call.inputs) {
      if (block.segment == group_no_segment && block.bytes != 0) copy(block);
    }
    for (call_block& block : queued->call.outputs) {
      if (block.segment == group_no_segment && block.bytes != 0) copy(block);
    }
  }
  calls_in_flight_.fetch_add(1, std::memory_order_acq_rel);
  if (!hand_over(inbox_, std::move(queued))) calls_in_flight_.fetch_sub(1, std::memory_order_acq_rel);
}

void collective_group::send(std::unique_ptr<message_send> message) { hand_over(sends_in_, std::move(message)); }
void collective_group::receive(std::unique_ptr<message_receive> message) { hand_over(receives_in_, std::move(message)); }

// To the group's thread. False: there is none and none can be started, and the item has ended.
template <class Queue, class Item> bool collective_group::hand_over(Queue& queue, std::unique_ptr<Item> item) {
  const std::lock_guard lock(inbox_mutex_);
  if (!start_thread()) {
    outcome end;
    end.status = EP_STATUS_SYSTEM;
    end.message = "the group's thread could not be started; close groups or raise the limit on tasks";
    sink_.complete(item->operation_id, end);
    return false;
  }
  in_flight_.fetch_add(1, std::memory_order_acq_rel);
  queue.push_back(std::move(item));
  wake_thread();
  return true;
}

bool collective_group::start_thread() {
  if (thread_.joinable()) return true;
  if (stopping_) return false;
  auto started = thread_start("ep-group", [this] { work(); }, "thread of a process group");
  if (!started.ok()) return false;
  thread_ = std::move(started.value());
  return true;
}

void collective_group::wake_thread() {
  if (released_) return;
  inbox_changed_.notify_one();
  wake_notify(board_->wake()); // it may be asleep over a call that waits for peers
}

void collective_group::nudge() {
  const std::lock_guard lock(inbox_mutex_);
  nudged_ = true;
  wake_thread();
}

void collective_group::finish(std::unique_ptr<queued_call> queued, const outcome& end) {
  const uint64_t id = queued->operation_id;
  if (end.status != EP_STATUS_OK) {
    call_failure failed;
    failed.active = board_->active();
    if (end.status == EP_STATUS_PEER_LOST) {
      failed.lost = board_->lost();
      // A root that was lost with an earlier call.
      if (end.rank >= 0 && std::find(failed.lost.begin(), failed.lost.end(), end.rank) == failed.lost.end()) failed.lost = {end.rank};
    } else if (queued->begun) {
      failed.missing = board_->missing();
    }
    if (end.status == EP_STATUS_MISMATCH) {
      const uint64_t step = queued->run.differs_at();
      std::erase_if(failed.active, [&](int32_t r) { return !board_->has_entered(r, step); });
      for (const int32_t r : failed.active) failed.calls.push_back(board_->call_of(r, step));
    }
    if (end.status != EP_STATUS_PEER_LOST) {
      if (queued->begun && end.status != EP_STATUS_CLOSED && end.status != EP_STATUS_EVICTED) queued->run.give_up(end.status);
      poisoned_ = true;
    }
    const std::lock_guard lock(inbox_mutex_);
    failures_[id] = std::move(failed);
  } else if (queued->call.change != nullptr) {
    const std::lock_guard lock(inbox_mutex_);
    memberships_[id] = {queued->run.peers(), queued->run.admitted()};
  } else if (!queued->copies.empty()) {
    const std::lock_guard lock(inbox_mutex_);
    ended_[id] = std::move(queued);
  }
  note_view();
  calls_in_flight_.fetch_sub(1, std::memory_order_acq_rel);
  in_flight_.fetch_sub(1, std::memory_order_acq_rel);
  outcome told = end;
  if (queued != nullptr && queued->call.change != nullptr && end.status == EP_STATUS_OK) told.expected = queued->run.sequence();
  told.stage = static_cast<uint32_t>(board_->epoch());
  sink_.complete(id, told);
}

// Carries the oldest call on; true if anything was done.
bool collective_group::pass(bool patient) {
  bool made = messages_->pass(patient);
  if (joining_ != nullptr) made = pass_join() || made;
  while (!calls_.empty()) {
    queued_call& head = *calls_.front();
    outcome end;
    progress now = progress::waiting;
    if (!head.begun && head.call.change != nullptr && head.call.change->repairs) poisoned_ = false;
    if (poisoned_) {
      end.status = EP_STATUS_BUSY;
      now = progress::failed;
    } else {
      if (!head.begun) {
        head.begun = true;
        head.deadline_ns = deadline_after(head.timeout_ms);
        head.run.begin(*board_, head.call, traces_[static_cast<size_t>(head.call.kind)]);
      }
      now = head.run.advance();
      if (head.deadline_ns == 0) head.deadline_ns = deadline_after(head.timeout_ms);
      if (now == progress::waiting && patient) now = head.run.look();
      if (now == progress::failed) end = head.run.end();
      if (now == progress::waiting && patient) {
        end.rank = -1;
        if (head.cancel && head.cancel->value.load(std::memory_order_acquire) != 0) end.status = EP_STATUS_ABORTED;
        else if (head.deadline_ns <= clock_now_ns()) end.status = EP_STATUS_TIMEOUT;
        if (end.status == EP_STATUS_TIMEOUT && evicts_) {
          head.run.evict_missing();
          head.deadline_ns = deadline_after(head.timeout_ms);
          return true;
        }
        if (end.status != EP_STATUS_OK) now = progress::failed;
      }
    }
    fencing_.store(board_->fencing(), std::memory_order_release); // a call that lost members may go on
    if (now == progress::waiting) return made;
    made = true;
    if (now == progress::made) return true; // messages have their turn
    auto ended = std::move(calls_.front());
    calls_.pop_front();
    finish(std::move(ended), end);
  }
  return made;
}

void collective_group::work() {
  wait_policy policy; // as long as peers come, it may change
  int64_t waiting_since = 0; // 0: something was done just now
  for (;;) {
    bool look = false;
    {
      std::unique_lock lock(inbox_mutex_);
      // Idle, it does not sleep where peers would have to wake it: each of their steps would cost them a system call.
      inbox_changed_.wait(lock, [&] {
        return stopping_ || in_flight_.load(std::memory_order_acquire) != 0 || messages_->owes();
      });
      if (stopping_) return;
      look = std::exchange(nudged_, false);
    }
    if (helping_.load(std::memory_order_acquire)) {
      // The caller's thread does this one's work, and may need its core.
      std::this_thread::sleep_for(std::chrono::microseconds(helped_us));
    }
    const int64_t now = clock_now_ns();
    const int64_t waited = waiting_since == 0 ? 0 : now - waiting_since;
    bool made = false;
    {
      const std::lock_guard run(run_mutex_);
      policy = board_->policy();
      const bool patient = look || waited > policy.spin_ns + policy.yield_ns;
      take_inbox();
      made = pass(patient);
    }
    if (made) {
      waiting_since = 0;
      continue;
    }
    if (waiting_since == 0) waiting_since = now;
    if (waited < policy.spin_ns) {
      for (int i = 0; i < 16; ++i) cpu_relax();
      continue;
    }
    if (waited < policy.spin_ns + policy.yield_ns) {
      std::this_thread::yield();
      continue;
    }
    const uint32_t epoch = wake_prepare(board_->wake());
    bool ready = false;
    {
      const std::lock_guard run(run_mutex_);
      ready = pass(true);
    }
    bool handed = false;
    {
      const std::lock_guard lock(inbox_mutex_);
      handed = stopping_ || nudged_ || !inbox_.empty() || !sends_in_.empty() || !receives_in_.empty();
    }
    if (ready || handed || (in_flight_.load(std::memory_order_acquire) == 0 && !messages_->owes())) {
      wake_cancel(board_->wake());
    } else {
      wake_commit(board_->wake(), epoch, policy.slice_ns);
    }
    if (ready) waiting_since = 0;
  }
}

void collective_group::close(bool orderly) {
  {
    const std::lock_guard lock(inbox_mutex_);
    if (closed_) return;
    closed_ = true;
    stopping_ = true;
    wake_thread();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard run(run_mutex_);
  outcome end;
  end.status = EP_STATUS_CLOSED;
  for (auto& message : sends_in_) sink_.complete(message->operation_id, end);
  for (auto& message : receives_in_) sink_.complete(message->operation_id, end);
  messages_->close();
  for (auto& call : inbox_) calls_.push_back(std::move(call));
  inbox_.clear();
  for (auto& call : calls_) sink_.complete(call->operation_id, end);
  calls_.clear();
  if (joining_ != nullptr) sink_.complete(joining_->operation_id, end);
  joining_.reset();
  board_->leave(orderly);
  const std::lock_guard lock(inbox_mutex_);
  released_ = board_->release();
}

bool collective_group::collect(uint64_t operation_id, const std::vector<call_block>& targets) {
  std::unique_ptr<queued_call> ended;
  {
    const std::lock_guard lock(inbox_mutex_);
    const auto found = ended_.find(operation_id);
    if (found == ended_.end()) return true;
    ended = std::move(found->second);
    ended_.erase(found);
  }
  const auto& outputs = ended->call.outputs;
  if (targets.size() != outputs.size()) return false;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].segment != group_no_segment || outputs[i].bytes == 0) continue;
    if (targets[i].bytes != outputs[i].bytes) return false;
    ep_copy(targets[i].data, outputs[i].data, outputs[i].bytes, 0);
  }
  return true;
}

std::vector<uint8_t> collective_group::take_received(uint64_t operation_id) {
  const std::lock_guard lock(inbox_mutex_);
  auto node = received_.extract(operation_id);
  return node.empty() ? std::vector<uint8_t>{} : std::move(node.mapped());
}

call_failure collective_group::failure_of(uint64_t operation_id) {
  const std::lock_guard lock(inbox_mutex_);
  auto node = failures_.extract(operation_id);
  return node.empty() ? call_failure{} : std::move(node.mapped());
}

op_trace collective_group::trace(uint32_t kind) {
  const std::lock_guard lock(run_mutex_);
  if (kind < op_kinds) return traces_[kind];
  const message_trace& side = kind == op_kinds ? messages_->sent : messages_->received;
  return {side.calls, side.bytes, side.writes, side.signals};
}

membership_end collective_group::membership_of(uint64_t operation_id) {
  const std::lock_guard lock(inbox_mutex_);
  auto node = memberships_.extract(operation_id);
  return node.empty() ? membership_end{} : std::move(node.mapped());
}

uint64_t collective_group::measure(measured what, uint64_t first_sequence, uint64_t rounds, double* samples) {
  const bool barrier = what == measured::barrier;
  std::vector<uint8_t*> memories;
  for (const int32_t r : board_->active()) memories.push_back(what == measured::exchange ? board_->memory_of(r, 0, 0, 4096) : nullptr);
  if (what == measured::exchange && std::find(memories.begin(), memories.end(), nullptr) != memories.end()) return 0;
  queued_call queued;
  queued.timeout_ms = 10'000;
  float values[2];
  queued.call.kind = barrier ? op_kind::barrier : op_kind::all_reduce;
  queued.call.dtype = barrier ? element_type::u8 : element_type::f32;
  if (!barrier) {
    queued.call.bytes = sizeof values;
    queued.call.inputs = queued.call.outputs = {{reinterpret_cast<uint8_t*>(values), sizeof values, group_no_segment, 0}};
  }
  const auto ranks = static_cast<float>(board_->active().size());
  int64_t before = clock_now_ns();
  for (uint64_t round = 0; round < rounds; ++round) {
    queued.call.sequence = first_sequence + round;
    values[0] = values[1] = static_cast<float>(round % 1024);
    // Not done: carry on with what has begun.
    if (what == measured::exchange) {
      if (!exchange(memories, static_cast<size_t>(board_->place()), ++exchanges_)) return round;
    } else if (!try_now(queued) && !resume(queued, clock_now_ns() + 5'000'000'000)) return round;
    const float want = ranks * static_cast<float>(round % 1024);
    if (what == measured::all_reduce && (values[0] != want || values[1] != want)) return round;
    if ((round + 1) % measured_rounds != 0 && round + 1 != rounds) continue;
    const uint64_t first = round / measured_rounds * measured_rounds;
    const int64_t after = clock_now_ns();
    std::fill(samples + first, samples + round + 1, static_cast<double>(after - before) / static_cast<double>(round + 1 - first));
    before = after;
  }
  return rounds;
}

bool collective_group::resume(queued_call& queued, int64_t until_ns) {
  const std::lock_guard lock(run_mutex_);
  if (!queued.begun) return false;
  while (clock_now_ns() < until_ns) {
    const progress now = queued.run.advance();
    if (now == progress::done) return true;
    if (now == progress::failed) return false;
    if (now == progress::waiting) wait_inline(board_->policy(), board_->wake(), [&] { return can_advance_soon(queued.run); });
  }
  return false;
}

} // namespace ep
