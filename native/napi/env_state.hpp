// What one environment (the main thread or a worker) owns: its completion queue and everything with a thread that must end before the environment does.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "setup.hpp"

namespace ep::binding {

class env_state final : public completion_sink {
 public:
  explicit env_state(Napi::Env env);
  ~env_state() override = default;

  // `complete(ids, words, messages)` in JS is called once per batch; `fail(status, errno, message)` makes an error.
  void configure(Napi::Function complete, Napi::Function fail);
  Napi::Value make_error(Napi::Env env, const failure& why);

  // An operation that will complete later. While any is pending the event loop stays alive, or a pending top-level await would end the process.
  // `nudge` makes whoever sleeps over it look at its cancel flag at once; it must be callable for as long as the operation is pending.
  uint64_t begin(Napi::Env env, cancel_ref cancel, std::function<void()> nudge = nullptr);
  void cancel(uint64_t operation_id);
  void complete(uint64_t operation_id, const outcome& end) override;

  // `stop` runs at the environment's end, newest first, before its wake-up function goes away; `warn` of all runs before the first `stop`, for what one of them may
  // wait for in another. Returns a key for forget().
  uint64_t at_end(std::function<void()> stop, std::function<void()> warn = nullptr);
  void forget(uint64_t key);
  uint64_t pending() const { return pending_; }

  std::map<std::string, Napi::FunctionReference> classes;

  // Arguments of the calls that are too short to pay for passing them one by one (15 ns each): JS writes them here, numbers as f64, a signal's value as u64.
  // One thread, and no call of these runs JS before it has read them.
  static constexpr size_t frame_words = 16;
  Napi::ArrayBuffer make_frame(Napi::Env env);
  double* frame() const { return frame_; }

 private:
  static void end(void* self);
  void drain(Napi::Env env);
  void deliver(Napi::Env env, const std::vector<std::pair<uint64_t, outcome>>& batch);

  Napi::ThreadSafeFunction wake_;
  Napi::Reference<Napi::ArrayBuffer> frame_buffer_;
  double* frame_ = nullptr;
  Napi::FunctionReference complete_;
  Napi::FunctionReference fail_;
  uint64_t next_operation_ = 1;
  uint64_t pending_ = 0;
  struct cancellation {
    cancel_ref flag;
    std::function<void()> nudge; // may be empty
  };
  std::map<uint64_t, cancellation> cancels_;
  struct ending {
    std::function<void()> stop;
    std::function<void()> warn; // may be empty
  };
  std::map<uint64_t, ending> ends_;
  uint64_t next_end_ = 1;

  std::mutex mutex_;
  std::vector<std::pair<uint64_t, outcome>> finished_;
  bool scheduled_ = false;
  bool ended_ = false;
};

} // namespace ep::binding
