// Some queue pairs of one device, with all that those who post to them need: rings, completions, the structs of abi/efa_gda.h, a scratch word and places for values. Whom they reach
// is for their owner to fill in.
//
// One thread at a time, kernels excepted.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "dl/efa.hpp"
#include "ep/abi/efa_gda.h"
#include "ep/abi/rank.h"
#include "ibgda/control_memory.hpp"
#include "segment.hpp"

namespace ep::efa {

// What only an emulated NIC has.
struct emulator_hooks {
  uint64_t doorbell_wake = 0; // address of an ep_wake_word to notify after a doorbell; 0: none
  // After bytes of peers landed in the region, or the counter changed, the NIC notifies the word.
  std::function<result<nothing>(const dl::efa_mr&, const ep_wake_word*)> region_wake;
  std::function<result<nothing>(const dl::efa_counter&, const ep_wake_word*)> counter_wake;
  // The same for a completion that was written.
  std::function<result<nothing>(const dl::efa_cq&, ep_wake_word*)> cq_wake;
  // Where the consumer of a completion queue keeps count, for the NIC to see an overrun.
  std::function<result<nothing>(const dl::efa_cq&, const uint64_t* polled)> cq_consumer;
};

struct queue_block_options {
  int32_t rank = 0;
  int32_t world_size = 1;
  uint32_t of_kernels = 0;   // the first so many are in ep_efa_device.qps
  uint32_t depth = 256;      // of each send queue, in WQEs, at least; a power of two
  bool inline_values = true; // WQEs of 128 bytes where the device can
  uint32_t sharing = EP_EFA_SHARE_DEVICE;
};

struct queue_pair_spec {
  dl::efa_counter written;                 // none: not counted
  dl::efa_counter arrived;
  ep_wake_word* completion_wake = nullptr; // null: nobody is told of completions
};

class queue_block {
 public:
  // EP_STATUS_SYSTEM: as of the table, or a device that gives rings which cannot be used. Counters outlive the block.
  static result<std::unique_ptr<queue_block>> create(dl::efa_device& device, const queue_block_options& options, const emulator_hooks& hooks,
                                                     std::span<const queue_pair_spec> specs);
  ~queue_block();
  queue_block(const queue_block&) = delete;
  queue_block& operator=(const queue_block&) = delete;

  // Whether values travel within requests as far as the options and the device go; a ring may still be of 64 bytes.
  static bool asks_inline(const dl::efa_device& device, bool wanted) { return wanted && device.capabilities().max_inline_write >= 8; }

  // No kernel may post any more. Endpoints first: what their requests name goes after them. Both may be called again.
  result<nothing> end_endpoints();
  result<nothing> close();
  void end_endpoint(uint32_t index);
  // Whoever posts to any of them, or awaits what was posted, finds it broken, with this status.
  void break_all(uint32_t status);

  const dl::efa_endpoint& endpoint(uint32_t index) const { return pairs_[index].endpoint; }
  ep_efa_qp& qp(uint32_t index) const { return qps_[index]; }
  uint32_t count() const { return static_cast<uint32_t>(pairs_.size()); }
  // Filled in but for `scratch_remotes`, `signals`, `counters` and `ranges`.
  ep_efa_device& device() const { return *device_struct_; }
  // 8 bytes that requests without bytes name, and their key for peers.
  uint64_t scratch() const { return small_address_; }
  uint32_t scratch_rkey() const { return small_mr_.rkey; }
  // For every queue pair: `targets` as ep_efa_qp has them, which outlive the block.
  void aim(const ep_efa_target* targets, uint32_t slots);

 private:
  struct pair {
    dl::efa_cq cq;
    dl::efa_endpoint endpoint;
  };

  queue_block(dl::efa_device& device, const queue_block_options& options, const emulator_hooks& hooks) : device_(device), options_(options), hooks_(hooks) {}
  result<nothing> build(std::span<const queue_pair_spec> specs);
  result<nothing> build_pair(pair& made, const queue_pair_spec& spec);
  result<nothing> build_memory();
  bool staged(const pair& made) const; // values of this queue pair wait in slots of memory

  dl::efa_device& device_;
  queue_block_options options_;
  emulator_hooks hooks_;
  std::unique_ptr<ibgda::control_memory> control_;
  ibgda::control_block structs_;
  std::shared_ptr<segment> small_; // scratch, then values: registered. Peers name the scratch, and those of other processes must be able to map it
  ep_efa_qp* qps_ = nullptr;
  ep_efa_device* device_struct_ = nullptr;
  std::vector<pair> pairs_;
  uint64_t small_address_ = 0;
  dl::efa_mr small_mr_;
};

} // namespace ep::efa
