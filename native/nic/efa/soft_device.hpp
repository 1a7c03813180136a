// The software EFA behind the table of dl/efa.hpp, with a thread of its own or stepped by a test.
#pragma once

#include <atomic>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dl/efa.hpp"
#include "engine.hpp"
#include "life.hpp"

namespace ep::nic::efa {

struct soft_options {
  engine_options engine;
  // False: nothing happens but by run() and step(), and time is what its caller says.
  bool threaded = true;
  // Peers are reached over this network, all but oneself. Unless given: through the memory of this machine.
  std::optional<net::hub_options> network;
};

class soft_device final : public dl::efa_device {
 public:
  static result<std::unique_ptr<soft_device>> open(const std::string& name, const soft_options& options);
  ~soft_device() override;

  // ---- beyond the table: what only an emulator has. All may be called from any thread.

  // Its address goes into ep_efa_qp.nic_wake: whoever rings may notify it (wake_notify), and the device does not sleep on. Without, doorbells.hpp says
  // how late a doorbell is seen.
  ep_wake_word* doorbell_wake() const { return &port_.header().doorbell; }
  // `wake`, which lies in a segment, is notified whenever a peer's bytes have landed in this region, or the counter's memory has changed. To be called before peers learn of
  // the key or the endpoint.
  result<nothing> region_wake(const dl::efa_mr& mr, const ep_wake_word* wake);
  result<nothing> counter_wake(const dl::efa_counter& counter, const ep_wake_word* wake);
  // The same for a completion that was written.
  result<nothing> cq_wake(const dl::efa_cq& cq, ep_wake_word* wake);
  // How many completions the queue's consumer has taken: with it an overrun is seen. Null: nobody polls, so it comes with the first completion too many. Without this
  // call overruns are not looked for.
  result<nothing> cq_polled(const dl::efa_cq& cq, const uint64_t* polled);
  // The verb that sets a counter.
  result<nothing> counter_set(const dl::efa_counter& counter, uint64_t value);
  uint32_t port_number() const { return port_.header().number; }
  // Null: this device is on no network. HAZARD: a peer has to be told of, hub()->know(), before its address is inserted.
  net::hub* hub() const { return hub_.get(); }

  // Replaces the script; see faults.hpp. EP_STATUS_INVALID names line and word.
  result<nothing> set_faults(std::string_view script);
  void release_held(); // what a `hold` holds
  void set_link(bool up);

  // The first 256; counts().violations has all.
  std::vector<violation> violations() const;
  engine_counts counts() const;
  std::vector<trace_event> trace() const;
  void write_trace_jsonl(std::ostream& out) const;
  void write_trace_chrome(std::ostream& out) const;

  // Of a device that watches stores (engine_options::watch_stores): a poster's store, and its fence. False: the address belongs to no queue of this device.
  bool store64(uint64_t writer, uint64_t address, uint64_t value);
  bool store32(uint64_t writer, uint64_t address, uint32_t value);
  void fence(uint64_t writer);

  // Without a thread: all that may happen next; one of it (false: not just now, a device of another thread is in the way); whatever is due, as the thread would do it.
  void pending(std::vector<event>& out, int64_t now_ns);
  bool run(const event& what, int64_t now_ns);
  bool poll(int64_t now_ns);
  // When delayed work is due; INT64_MAX: none waits for the clock.
  int64_t next_due_ns() const;

  // ---- the table
  const std::string& name() const override { return name_; }
  result<nothing> close() override;
  const dl::efa_capabilities& capabilities() const override { return capabilities_; }
  result<dl::efa_mr> reg_mr(const dl::efa_memory& memory, uint32_t access) override;
  result<nothing> dereg_mr(const dl::efa_mr& mr) override;
  result<dl::efa_cq> create_cq(const dl::efa_cq_spec& spec) override;
  result<nothing> destroy_cq(const dl::efa_cq& cq) override;
  result<dl::efa_counter> open_counter(const dl::efa_counter_spec& spec) override;
  result<nothing> close_counter(const dl::efa_counter& counter) override;
  result<dl::efa_endpoint> create_endpoint(const dl::efa_endpoint_spec& spec) override;
  result<nothing> destroy_endpoint(const dl::efa_endpoint& endpoint) override;
  result<dl::efa_peer> insert_address(const dl::efa_endpoint& of, const dl::efa_address& address) override;
  result<nothing> remove_address(const dl::efa_peer& peer) override;
  result<bool> poll_async(dl::efa_event& event) override;

 private:
  // The engine, while no one else has it. The device's thread lets go of it between rounds when somebody wants it.
  class turn {
   public:
    explicit turn(const soft_device& device) : device_(device) {
      device_.wanting_.fetch_add(1, std::memory_order_relaxed);
      device_.mutex_.lock();
      device_.wanting_.fetch_sub(1, std::memory_order_relaxed);
    }
    ~turn() { device_.mutex_.unlock(); }
    turn(const turn&) = delete;
    turn& operator=(const turn&) = delete;

   private:
    const soft_device& device_;
  };

  soft_device(std::string name, port_view port, directory_entry entry, std::unique_ptr<net::hub> hub, const soft_options& options);
  result<nothing> start();
  void run_thread();
  void stop();
  void notify();
  failure refuse(const char* call, int error, const std::string& why) const;
  size_t objects() const;
  counter* find_counter(const dl::efa_counter& of) const;
  completion_queue* find_cq(const dl::efa_cq& of) const;

  std::string name_;
  port_view port_;
  directory_entry entry_;
  const soft_options options_;
  dl::efa_capabilities capabilities_;
  mutable std::mutex mutex_;
  mutable std::atomic<int> wanting_{0};
  std::unique_ptr<net::hub> hub_;
  std::unique_ptr<engine> engine_;
  uint32_t next_cq_ = 1;
  uint32_t next_counter_ = 0;
  random_source qkeys_;
  life_holder life_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  bool stopped_ = false;
};

// One sentence: queue pair, slot, field, what was found and what was expected.
std::string violation_text(const violation& what);

// Devices of the software: each open() gives a device of its own, whatever the name.
class soft_driver final : public dl::efa_driver {
 public:
  explicit soft_driver(const soft_options& options) : options_(options) {}
  const char* backing() const override { return "soft"; }
  result<std::vector<dl::efa_device_info>> list_devices() override;
  result<std::unique_ptr<dl::efa_device>> open(const std::string& name) override;

 private:
  const soft_options options_;
};

inline constexpr const char* soft_device_name = "efa_soft0";

} // namespace ep::nic::efa
