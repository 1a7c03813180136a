// A context of the GIN facade (device/efa_gin.h) on a rank's NIC: queue pairs of its own, whose completion counters are its signals and counters. The facade puts between parts of any
// memory that the NIC knows.
//
//   create()       everything of this rank exists; address() is what the others must know
//   connect()      the others are known. HAZARD: a signal that comes before this rank has looked for it is not lost, but a kernel must not post before connect()
//   device()       for kernels, with memory_of(memory)
//
// One thread at a time, kernels excepted.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "rank_nic.hpp"

namespace ep::efa {

struct gin_spec {
  uint32_t signals = 0;
  uint32_t counters = 0;
  uint32_t sharing = EP_EFA_SHARE_DEVICE;
};

constexpr uint32_t gin_max_ids = 1024; // of signals, of counters

class gin_context {
 public:
  // EP_STATUS_CAPACITY: the device has not that many counters or endpoints left. EP_STATUS_INVALID: the NIC is not connected, or the numbers are out of range.
  static result<std::shared_ptr<gin_context>> create(std::shared_ptr<rank_nic> nic, const gin_spec& spec);
  ~gin_context();
  gin_context(const gin_context&) = delete;
  gin_context& operator=(const gin_context&) = delete;

  // Bytes that address() has, on every rank.
  static uint64_t address_bytes(const gin_spec& spec);
  std::vector<uint8_t> address() const;
  // By rank, one's own included; once. EP_STATUS_MISMATCH names a rank that made another context.
  result<nothing> connect(std::span<const std::vector<uint8_t>> of_ranks);
  // Its queue pairs are dead when it returns: whoever still signals there breaks its own queue pair. No kernel may use the context any more.
  void close();

  const gin_spec& spec() const { return spec_; }
  rank_nic& nic() const { return *nic_; }
  ep_efa_device& device() const { return block_->device(); }
  // What the facade's calls take. EP_STATUS_INVALID: the memory belongs to another transport. It is valid as long as the memory is.
  result<ep_efa_memory> memory_of(const symmetric_memory& memory) const;

 private:
  gin_context(std::shared_ptr<rank_nic> nic, const gin_spec& spec) : nic_(std::move(nic)), spec_(spec) {}
  uint32_t pair_count() const { return 1 + std::max(spec_.signals, spec_.counters); }
  result<nothing> check() const;
  result<nothing> build();
  result<dl::efa_counter> count(uint64_t index);

  std::shared_ptr<rank_nic> nic_;
  gin_spec spec_;
  std::shared_ptr<segment> counts_; // counter_words of signals, then of counters: the NICs of software of other processes change them
  std::vector<dl::efa_counter> counters_;
  std::unique_ptr<queue_block> block_;
  uint32_t endpoints_taken_ = 0;
  std::vector<ep_efa_count> signal_counts_;
  std::vector<ep_efa_count> counter_counts_;
  std::vector<dl::efa_peer> peers_;
  std::vector<ep_efa_target> targets_;
  std::vector<ep_efa_remote> scratch_remotes_;
};

} // namespace ep::efa
