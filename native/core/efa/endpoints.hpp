// The endpoints of one rank: made through the table of dl/efa.hpp, then handed to kernels and to the host's requests as the structs of abi/efa_gda.h.
//
//   create()       everything of this rank exists; address() is what the others must know
//   connect()      the others are known to this NIC, as they must be for it to take their requests
//   (a barrier)    HAZARD: a request to a rank that does not know its sender yet ends with "unknown peer"
//   device()       for kernels
//   renew()        instead of all that: other endpoints, which no request of before knows; then connect() again
//
// SRD has no connections: an endpoint reaches everybody. `queue_pairs` of them are posted to by kernels, by key; one for each peer is the host's, so that what one peer breaks is
// not broken for the others.
//
// One thread at a time, kernels excepted.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "queue_block.hpp"

namespace ep::efa {

struct endpoint_options {
  int32_t rank = 0;
  int32_t world_size = 1;
  uint32_t queue_pairs = 4; // of kernels
  uint32_t depth = 256;     // of each send queue, in WQEs, at least; a power of two
  bool inline_values = true; // WQEs of 128 bytes where the device can: values travel within them. Otherwise they wait in a slot of registered memory
  uint32_t sharing = EP_EFA_SHARE_DEVICE;
};

// What others must know of a rank, as bytes.
struct rank_address {
  int32_t rank; // -1: nobody is in that place, and nothing is posted there
  int32_t world_size;
  dl::efa_address data;      // of its first endpoint: whom bytes without a signal are sent to
  uint64_t scratch;          // 8 bytes that requests without bytes name
  uint32_t scratch_rkey;
  uint32_t reserved;
};

struct registered_memory {
  dl::efa_mr mr;
  dl::efa_memory memory;
};

class rank_endpoints {
 public:
  // EP_STATUS_INVALID: options that the device cannot fulfil; the message says what it can. EP_STATUS_SYSTEM: as of the table.
  static result<std::unique_ptr<rank_endpoints>> create(std::unique_ptr<dl::efa_device> device, const endpoint_options& options, emulator_hooks hooks,
                                                        ep_wake_word* completion_wake);
  ~rank_endpoints();
  rank_endpoints(const rank_endpoints&) = delete;
  rank_endpoints& operator=(const rank_endpoints&) = delete;

  // No kernel may post any more. Later calls do nothing.
  result<nothing> close();

  // Others in the place of all endpoints, with another scratch word: nothing that peers knew reaches any of them, and whatever was under way by them has ended. No kernel may post
  // any more until connect(). Where it fails, the old ones are broken for good, and another try may go well.
  result<nothing> renew();

  rank_address address() const;
  // By rank, one's own included; once, and once after each renew(). EP_STATUS_MISMATCH names the odd rank.
  result<nothing> connect(std::span<const rank_address> of_ranks);
  // HAZARD: before it no rank has a target, and nothing may be posted.
  bool connected() const { return !peers_.empty(); }

  dl::efa_device& nic() const { return *device_; }
  const emulator_hooks& hooks() const { return hooks_; }
  const endpoint_options& options() const { return options_; }
  ep_efa_device& device() const { return block_->device(); }
  ep_efa_qp& kernel_qp(uint32_t index) const { return block_->qp(index); }
  ep_efa_qp& host_qp(int32_t peer) const { return block_->qp(options_.queue_pairs + static_cast<uint32_t>(peer)); }
  const dl::efa_endpoint& first() const { return block_->endpoint(0); }
  // The NIC does nothing more for the host's requests to this peer, and reads no source of theirs. The struct stays: nothing may be posted to it.
  void cut_host(int32_t peer) { block_->end_endpoint(options_.queue_pairs + static_cast<uint32_t>(peer)); }

  // What is left of the device. Each signal slot of a memory takes a counter and an endpoint.
  uint32_t counters_left() const { return counters_left_; }
  uint32_t endpoints_left() const { return endpoints_left_; }
  uint32_t signal_slots_left() const { return std::min(counters_left_, endpoints_left_); }
  void counters_taken(int64_t change) { counters_left_ = static_cast<uint32_t>(static_cast<int64_t>(counters_left_) + change); }
  void endpoints_taken(int64_t change) { endpoints_left_ = static_cast<uint32_t>(static_cast<int64_t>(endpoints_left_) + change); }
  const ep_efa_target& data_target(int32_t rank) const { return data_targets_[static_cast<size_t>(rank)]; }

  // `access`: EFA_ACCESS_*. Local ranges are looked up in a table, so they must not overlap (EP_STATUS_INVALID).
  result<registered_memory> register_memory(const dl::efa_memory& memory, uint32_t access);
  result<nothing> release_memory(const registered_memory& memory);

 private:
  rank_endpoints(std::unique_ptr<dl::efa_device> device, const endpoint_options& options, emulator_hooks hooks)
      : device_(std::move(device)), options_(options), hooks_(std::move(hooks)) {}
  uint32_t pair_count() const { return options_.queue_pairs + static_cast<uint32_t>(options_.world_size); }
  result<nothing> check() const;
  result<std::unique_ptr<queue_block>> build() const;
  void publish_ranges();
  result<nothing> forget_peers();
  result<nothing> tear_down();

  std::unique_ptr<dl::efa_device> device_;
  endpoint_options options_;
  emulator_hooks hooks_;
  std::unique_ptr<queue_block> block_;
  ep_wake_word* completion_wake_ = nullptr;
  std::vector<dl::efa_peer> peers_; // no handle: nobody is there
  std::vector<ep_efa_target> data_targets_;
  std::vector<ep_efa_remote> scratch_remotes_;
  std::vector<registered_memory> memories_;
  std::vector<std::vector<uint64_t>> range_tables_; // all of them: kernels may still read an older one
  uint32_t counters_left_ = 0;
  uint32_t endpoints_left_ = 0;
  bool closed_ = false;
};

} // namespace ep::efa
