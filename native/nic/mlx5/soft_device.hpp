// The software NIC behind the table of dl/mlx5.hpp, with a thread of its own or stepped by a test.
#pragma once

#include <atomic>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "commands.hpp"
#include "dl/mlx5.hpp"
#include "engine.hpp"
#include "life.hpp"

namespace ep::nic {

struct soft_options {
  engine_options engine;
  // False: nothing happens but by step(), and time is what its caller says.
  bool threaded = true;
  // Peers are reached over this network, all but oneself. Unless given: through the memory of this machine.
  std::optional<net::hub_options> network;
};

// How long a peer may stay inside of an access to something that is taken away. It takes longer than a copy only where its process was stopped.
inline constexpr int64_t let_go_ns = 2'000'000'000;

class soft_device final : public dl::mlx5_device {
 public:
  static result<std::unique_ptr<soft_device>> open(const std::string& name, const soft_options& options);
  ~soft_device() override;

  // ---- beyond the table: what only an emulator has. All may be called from any thread.

  // Its address goes into ep_ibgda_device.nic_wake: whoever rings may notify it (wake_notify), and the NIC does not sleep on. Without, doorbells.hpp
  // says how late a doorbell is seen.
  ep_wake_word* doorbell_wake() const { return &port_.header().doorbell; }
  // Writes and atomics that peers land in this region notify `wake`, which lies in a segment. To be called before peers learn of the key.
  result<nothing> region_wake(const dl::mlx5_mr& mr, const ep_wake_word* wake);
  uint32_t port_number() const { return port_.header().number; }
  // Null: this NIC is on no network. HAZARD: a peer has to be told of, hub()->know(), before a queue pair is connected to it.
  net::hub* hub() const { return hub_.get(); }

  // Replaces the script; see faults.hpp. EP_STATUS_INVALID names line and word.
  result<nothing> set_faults(std::string_view script);
  void release_held(); // requests under `hold`
  void set_link(bool up);

  // The first 256; counts().violations has all.
  std::vector<violation> violations() const;
  engine_counts counts() const;
  std::vector<trace_event> trace() const;
  void write_trace_jsonl(std::ostream& out) const;
  void write_trace_chrome(std::ostream& out) const;

  // Without a thread: one piece of work, chosen by `random`, at this time. False: nothing can be done now.
  bool step(random_source& random, int64_t now_ns);
  // Without a thread: whatever is due at this time, as the thread would do it. False: nothing was.
  bool poll(int64_t now_ns);
  // When delayed work is due; INT64_MAX: none waits for the clock.
  int64_t next_due_ns() const;

  // ---- the table
  const std::string& name() const override { return name_; }
  result<nothing> close() override;
  result<dl::mlx5_port> query_port(uint8_t port) override;
  result<dl::mlx5_gid> query_gid(uint8_t port, uint32_t index) override;
  result<dl::mlx5_pd> alloc_pd() override;
  result<nothing> dealloc_pd(const dl::mlx5_pd& pd) override;
  result<dl::mlx5_mr> reg_mr(const dl::mlx5_pd& pd, const dl::mlx5_memory& memory, uint32_t access) override;
  result<nothing> dereg_mr(const dl::mlx5_mr& mr) override;
  result<dl::mlx5_uar> alloc_uar(dl::mlx5_uar_kind kind) override;
  result<nothing> free_uar(const dl::mlx5_uar& uar) override;
  result<dl::mlx5_umem> umem_reg(const dl::mlx5_memory& memory, uint32_t access) override;
  result<nothing> umem_dereg(const dl::mlx5_umem& umem) override;
  result<uint32_t> query_eqn(uint32_t vector) override;
  result<nothing> general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) override;
  result<dl::mlx5_object> obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) override;
  result<nothing> obj_modify(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override;
  result<nothing> obj_query(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override;
  result<nothing> obj_destroy(const dl::mlx5_object& object) override;
  result<dl::mlx5_path> resolve_ah(const dl::mlx5_pd& pd, const dl::mlx5_route& route) override;
  result<bool> poll_async(dl::mlx5_event& event) override;

 private:
  // The engine, while no one else has it. The NIC's thread lets go of it between rounds when somebody wants it.
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
  void run();
  void stop();
  void doorbell_wake_now();
  failure refuse(const char* call, int error, const std::string& why) const;
  // Runs a command, again and again while a peer is inside of an access that it wants to end.
  result<nothing> command(const char* call, std::span<const uint8_t> in, std::span<uint8_t> out);
  size_t objects() const;

  std::string name_;
  port_view port_;
  directory_entry entry_;
  const soft_options options_;
  mutable std::mutex mutex_;
  mutable std::atomic<int> wanting_{0};
  std::unique_ptr<net::hub> hub_;
  std::unique_ptr<engine> engine_;
  uint32_t next_page_ = 1;
  life_holder life_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  bool stopped_ = false;
};

std::string hex_text(uint64_t value);
// One sentence: queue pair, slot, field, what was found and what was expected.
std::string violation_text(const violation& what);

// Devices of the software: each open() gives a NIC of its own, whatever the name.
class soft_driver final : public dl::mlx5_driver {
 public:
  explicit soft_driver(const soft_options& options) : options_(options) {}
  const char* backing() const override { return "soft"; }
  result<std::vector<dl::mlx5_device_info>> list_devices() override;
  result<std::unique_ptr<dl::mlx5_device>> open(const std::string& name) override;

 private:
  const soft_options options_;
};

inline constexpr const char* soft_device_name = "mlx5_soft0";

} // namespace ep::nic
