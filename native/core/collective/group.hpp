// A rank's side of a process group: its calls in order, tried on the calling thread first, then carried on by the group's own thread.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "messages.hpp"
#include "run.hpp"

namespace ep {

// A call and what it needs beyond the moment at which it was made.
struct queued_call {
  uint64_t operation_id = 0;
  cancel_ref cancel;
  double timeout_ms = -1;
  int64_t deadline_ns = 0; // set when the call is the oldest one
  bool begun = false;
  bool borrowed = false; // blocks point into memory that is the caller's again when its thread returns
  collective_call call;
  collective_run run;
  std::vector<std::vector<uint8_t>> copies; // of borrowed memory, once the call was handed over
  std::vector<const uint8_t*> copied_from;
};

// What is known of a call that failed.
struct call_failure {
  std::vector<int32_t> active;
  std::vector<int32_t> missing;
  std::vector<int32_t> lost;
  std::vector<group_call> calls; // of `active`, where they differ
};

struct membership_end {
  std::vector<group_peer> peers;
  bool admitted = false;
};

// All-reduces of two f32; barriers; or, to compare them with, an exchange that does nothing else: every rank stores a number and waits for the others'.
enum class measured : uint32_t { all_reduce = 0, barrier, exchange };

class collective_group {
 public:
  // `evicts`: a call whose deadline passes goes on without those that have not come to it.
  static result<std::shared_ptr<collective_group>> create(completion_sink& sink, const group_options& options, bool evicts = false);
  ~collective_group() { close(false); }

  const ep_segment_handle& handle() const { return board_->handle(); }
  int32_t rank() const { return board_->rank(); }
  int32_t size() const { return size_.load(std::memory_order_acquire); }
  int32_t capacity() const { return board_->capacity(); }
  result<nothing> attach(int32_t rank, const ep_segment_handle& handle, uint32_t incarnation = 1);
  void lose(int32_t rank, uint32_t incarnation = 1);
  result<uint32_t> allocate(uint64_t byte_length);
  const std::shared_ptr<segment>& allocation(uint32_t index) const { return board_->allocation(index); }
  uint64_t allocations() const { return board_->allocations(); }

  // The calling thread's attempt, behind all calls before it: true when the call has ended, and well. Otherwise it is under way or has not begun: submit it.
  bool try_now(queued_call& call);
  // Copies borrowed memory and hands the call over; `operation_id` and `cancel` are set. The sink hears of its end.
  void submit(std::unique_ptr<queued_call> call);
  // Copies borrowed outputs of a call that has ended: `targets` as `call.outputs` were. Forgets the call.
  bool collect(uint64_t operation_id, const std::vector<call_block>& targets);
  // Of a call that has failed; forgets it.
  call_failure failure_of(uint64_t operation_id);
  // After a cancel flag was raised.
  void nudge();

  // What a membership call that has ended well has found; forgets it.
  membership_end membership_of(uint64_t operation_id);
  // Of a rank that takes no part: asks to be taken in. The outcome's `expected` is the number of the call that did so. No calls meanwhile.
  void join(uint64_t operation_id, cancel_ref cancel, double timeout_ms);
  // What this rank itself knows.
  std::vector<group_peer> survey();
  // While calls are under way, and after one that failed: see group_board::fence. Costs a load where there is nothing to do.
  result<nothing> fence();
  const std::vector<std::shared_ptr<segment>>& own_memory() const { return board_->own_memory(); }
  std::vector<std::shared_ptr<segment>> peers();
  std::vector<ep_core_set> cores_on_host();

  // Messages: each ends through the sink.
  void send(std::unique_ptr<message_send> message);
  void receive(std::unique_ptr<message_receive> message);

  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }
  std::vector<int32_t> active_in(uint64_t epoch);
  std::vector<int32_t> active() { return active_in(epoch()); }
  // By op_kind, then sends, then receives.
  op_trace trace(uint32_t kind);
  // Of a receive that has ended, into no group memory; forgets it.
  std::vector<uint8_t> take_received(uint64_t operation_id);

  // Ends everything under way as closed, joins the thread, and gives memory back. On the rank's own thread.
  void close(bool orderly);

  // `rounds` of them back to back on the calling thread; a duration in ns each, of 16 at a time. How many were done: fewer if a peer did not come or a sum was wrong.
  // An exchange needs 4096 bytes as the first group memory of every rank.
  uint64_t measure(measured what, uint64_t first_sequence, uint64_t rounds, double* samples);

 private:
  collective_group(completion_sink& sink) : sink_(sink) {}
  void work();
  bool start_thread();
  template <class Queue, class Item> bool hand_over(Queue& queue, std::unique_ptr<Item> item);
  void wake_thread();
  void take_inbox();
  bool pass(bool patient);
  bool pass_join();
  void note_view();
  void finish(std::unique_ptr<queued_call> call, const outcome& end);
  bool run_now(queued_call& call);
  bool wait_now(queued_call& call);
  bool can_advance_soon(collective_run& run);
  bool help();
  bool resume(queued_call& call, int64_t until_ns);

  completion_sink& sink_;
  std::unique_ptr<group_board> board_;
  std::unique_ptr<message_board> messages_;
  std::atomic<uint64_t> epoch_{group_first_epoch};
  std::atomic<int32_t> size_{0};
  std::atomic<bool> fencing_{false};
  bool evicts_ = false;
  std::array<op_trace, op_kinds> traces_{};
  uint64_t exchanges_ = 0;

  // Held by whoever advances calls: the caller's thread for an attempt, else the group's.
  std::mutex run_mutex_;
  std::deque<std::unique_ptr<queued_call>> calls_; // oldest first
  bool poisoned_ = false;

  struct joining {
    uint64_t operation_id;
    cancel_ref cancel;
    int64_t deadline_ns;
  };
  std::unique_ptr<joining> joining_;

  std::mutex inbox_mutex_;
  std::condition_variable inbox_changed_;
  std::deque<std::unique_ptr<queued_call>> inbox_;
  std::vector<std::unique_ptr<message_send>> sends_in_;
  std::vector<std::unique_ptr<message_receive>> receives_in_;
  std::atomic<uint64_t> in_flight_{0};       // calls and messages handed over and not ended
  std::atomic<uint64_t> calls_in_flight_{0}; // of them
  std::atomic<bool> helping_{false};         // a caller's thread carries calls out
  bool nudged_ = false;
  bool stopping_ = false;
  bool closed_ = false;
  bool released_ = false; // the wake word is gone
  std::map<uint64_t, std::unique_ptr<queued_call>> ended_; // whose outputs JS has not taken
  std::map<uint64_t, std::vector<uint8_t>> received_;
  std::map<uint64_t, call_failure> failures_;
  std::map<uint64_t, membership_end> memberships_;
  std::thread thread_;
};

} // namespace ep
