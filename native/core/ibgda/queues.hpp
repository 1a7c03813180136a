// The queue pairs of one rank: made and connected by commands through the table, then handed to kernels as the structs of abi/ibgda.h.
//
//   create()        every queue pair exists, in state RST; connection() is what the others must know
//   connect()       RST -> INIT -> RTR -> RTS, given what all ranks said
//   (a barrier)     HAZARD: a packet to a queue pair that is not yet in RTR is dropped, and its sender waits for a whole ack timeout
//   device_address()  for kernels
//
//   reset(peer)       another process comes in the place of a rank that died; connection() is what it must know
//   connect(peer)     given what that one said, and a barrier as above
//
// Queue pairs that this process posts to itself (host_qps) share nothing with those of kernels but the protection domain: their rings lie in host memory wherever the
// kernels' lie.
//
// One thread at a time, kernels excepted.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "commands.hpp"
#include "control_memory.hpp"
#include "device_choice.hpp"
#include "ep/abi/ibgda.h"
#include "ep/abi/ibgda_peer.h"

namespace ep::ibgda {

struct queue_options {
  int32_t rank = 0;
  int32_t world_size = 1;
  uint32_t qps_per_peer = 1;
  uint32_t host_qps = 0;   // of them, the last ones: posted by this process
  uint32_t active_qps = 0; // of the others, used by keys; 0: all
  uint32_t depth = 1024;   // of each send queue, in WQEs; a power of two, 2 to EP_IBGDA_MAX_DEPTH
  bool collapsed = true;   // EP_IBGDA_CQ_COLLAPSED
  uint32_t sharing = EP_IBGDA_SHARE_DEVICE;
  uint8_t mtu = 0;          // 1 to 5; 0: what the port has. Both ends use the smaller one
  uint8_t service_level = 0; // InfiniBand: SL; Ethernet: priority
  uint8_t traffic_class = 0;
  uint8_t ack_timeout = 18; // a try waits 4.096 us << it, and there are retry_count more: a dead peer is noticed after about 8 s
  uint8_t retry_count = 7;
  uint64_t nic_wake = 0;    // ep_ibgda_qp.nic_wake
  // 24 bits: the number of the first packet that a queue pair awaits. `before`: what it would have awaited next, had it not been reset; nothing where it is new.
  // HAZARD: late packets of the process at the other end have numbers from `before` on: the new ones must not come to them. Unless given: at random; 2^22 to 2^23 further on.
  std::function<uint32_t(std::optional<uint32_t> before)> starting_psn;
};

struct registered_memory {
  dl::mlx5_mr mr;
  dl::mlx5_memory memory;
};

struct queue_event {
  dl::mlx5_event event;
  std::string text;  // "queue pair 0x12 to rank 3 failed, ..."
  int32_t peer = -1; // whose queue pair; -1: not about one
};

class rank_queues {
 public:
  // `sources`: where control memory of the kernels' queue pairs may lie, in the order of preference; each must outlive this object. What fails with one of them, at
  // whichever step up to the creation of all queue pairs, is tried with the next, and told by fallbacks().
  // EP_STATUS_INVALID: options. EP_STATUS_SYSTEM: as of the table; EPROTO: the device speaks another CQE version, or lacks 8-byte masked fetch-add.
  static result<std::unique_ptr<rank_queues>> create(open_port port, const queue_options& options, std::span<control_memory* const> sources);
  // Destroys what is left; close() tells what went wrong.
  ~rank_queues();
  rank_queues(const rank_queues&) = delete;
  rank_queues& operator=(const rank_queues&) = delete;

  // No kernel may post any more, and no peer be meant to reach this rank's memory. Later calls do nothing.
  result<nothing> close();

  // ep_ibgda_peer and its numbers.
  std::vector<uint8_t> connection() const;
  // `of_ranks[r]`: connection() of rank r, one's own included. EP_STATUS_MISMATCH: not of this world, not of this ABI, another number of queue pairs, or another
  // link layer; the message names the rank. No bytes: the rank is not here, and posters find its queue pairs broken (EP_STATUS_PEER_LOST).
  result<nothing> connect(std::span<const std::vector<uint8_t>> of_ranks);
  // For another process in the place of a rank: queue pairs and completion queues to it, rings, records and structs are again as create() left them, but that the queue pairs
  // await other packets, and that posters find them broken until connect(). What the NIC had not yet carried out it carries out no more. Nobody may be posting to them.
  result<nothing> reset(int32_t peer);
  // After reset(), or where connect() was given no bytes of the rank: the same of this rank alone.
  result<nothing> connect(int32_t peer, const std::vector<uint8_t>& of_rank);
  // Queue pairs to a rank that was lost go to the error state: what waits there is flushed at once, not when retries are used up.
  result<nothing> cut(int32_t peer);

  // Rights: MLX5_ACCESS_*. Local ranges that kernels send from or receive responses in are looked up in the range table: those must not overlap
  // (EP_STATUS_INVALID).
  result<registered_memory> register_memory(const dl::mlx5_memory& memory, uint32_t access);
  result<nothing> release_memory(const registered_memory& memory);

  // For kernels: address of ep_ibgda_device.
  uint64_t device_address() const { return kernels_.device_address(); }
  // For this process: likewise of its own queue pairs. 0: it has none.
  uint64_t host_device_address() const { return host_.count == 0 ? 0 : host_.device_address(); }
  // What kernels have made of their structs by now; `index` as in ep_ibgda_device.qps.
  result<ep_ibgda_device> device_now() const;
  result<ep_ibgda_qp> pair_now(uint32_t index) const;
  // The routes of one symmetric memory: where each rank's part lies. Address of ep_ibgda_memory; it lives as long as `keep`.
  struct memory_route {
    uint64_t address = 0;
    std::shared_ptr<void> keep;
    control_block block;
  };
  result<memory_route> route_memory(std::span<const ep_ibgda_remote> remotes);
  // From now on that rank's part lies elsewhere. No kernel may be using the route.
  result<nothing> reroute_memory(const memory_route& route, int32_t rank, const ep_ibgda_remote& remote);

  placement where() const { return kernels_.source->where(); }
  // Memory beside the kernels' rings.
  result<control_block> beside_queues(uint64_t bytes) { return kernels_.source->allocate((bytes + 4095) / 4096 * 4096); }
  const std::vector<fallback>& fallbacks() const { return fallbacks_; }
  const open_port& port() const { return port_; }
  const queue_options& options() const { return options_; }
  // 8-byte fetch-add and compare-and-swap, both in the host's byte order.
  bool has_masked_swap() const { return has_masked_swap_; }
  bool has_atomics() const { return has_atomics_; }
  // Of queue pair `index` (peer * qps_per_peer + k).
  uint32_t qpn(uint32_t index) const { return pairs_[index].qpn; }
  // EP_MLX5_QP_STATE_*, as the NIC has it.
  result<uint32_t> state(uint32_t index);
  // The next thing that the NIC has to tell, if there is one.
  result<std::optional<queue_event>> next_event();

 private:
  struct pair {
    dl::mlx5_object cq;
    dl::mlx5_object qp;
    dl::mlx5_uar uar;
    uint64_t doorbell = 0; // of the posters
    uint32_t cqn = 0;
    uint32_t qpn = 0;
    uint32_t starting_psn = 0;
  };
  // Queue pairs of the same posters, and the memory that these share with the NIC.
  struct bank {
    control_memory* source = nullptr;
    uint32_t first = 0; // of each peer's queue pairs
    uint32_t count = 0;
    control_block queues;
    control_block structs;
    uint64_t device_offset = 0;
    uint64_t marks_offset = 0; // in `structs`: marks_bytes() of each pair
    dl::mlx5_umem umem;
    dl::mlx5_mr responses;
    std::vector<control_block> range_tables; // all of them: kernels may still read an older one
    uint64_t device_address() const { return structs.address + device_offset; }
  };
  // Byte offsets in the block of queues.
  struct layout {
    uint64_t cq_bytes = 0;
    uint64_t sq_bytes = 0;
    uint64_t records = 0; // doorbell records: 64 bytes for the CQ, 64 for the QP, of each pair
    uint64_t responses = 0; // 8 bytes of each pair, a line each
    uint64_t response_bytes = 0;
    uint64_t cqs = 0;
    uint64_t sqs = 0;
    uint64_t total = 0;
  };

  rank_queues(open_port port, const queue_options& options) : port_(std::move(port)), options_(options) {}
  uint32_t pair_count() const { return static_cast<uint32_t>(options_.world_size) * options_.qps_per_peer; }
  dl::mlx5_device& device() const { return *port_.device; }

  result<nothing> read_capabilities();
  result<nothing> build_kernels(std::span<control_memory* const> sources);
  uint32_t size_of(const bank& of) const { return static_cast<uint32_t>(options_.world_size) * of.count; }
  // Of the bank's pair `i`, in pairs_.
  uint32_t index_of(const bank& of, uint32_t i) const { return i / of.count * options_.qps_per_peer + of.first + i % of.count; }
  layout lay_out(const bank& of) const;
  uint64_t marks_bytes() const { return std::max(options_.depth / 8, 64u); }
  result<nothing> build(bank& of, control_memory& source);
  result<nothing> build_pair(const bank& of, uint32_t i, uint32_t eqn, const layout& at);
  result<nothing> fill_structs(bank& of, const layout& at);
  ep_ibgda_qp struct_of(const bank& of, uint32_t i, const layout& at) const;
  result<uint32_t> draw_psn(std::optional<uint32_t> before) const;
  result<nothing> reset_pair(bank& of, uint32_t i, const layout& at);
  result<nothing> empty_ring(bank& of, uint32_t i, const layout& at, ep_ibgda_qp& fresh);
  // Whether posters may use the queue pairs of all posters to the rank.
  result<nothing> mark(int32_t peer, bool usable);
  result<nothing> tell_broken(int32_t peer);
  // Of one rank's bytes; the numbers are those of its queue pairs to this rank.
  struct remote_end {
    ep_ibgda_peer peer;
    std::vector<uint32_t> qpn;
    std::vector<uint32_t> starting_psn;
  };
  result<remote_end> read_peer(int32_t rank, const std::vector<uint8_t>& bytes) const;
  result<nothing> connect_peer(int32_t rank, const remote_end& remote);
  result<nothing> modify(uint32_t index, std::span<const uint8_t> command, const char* step);
  static result<control_block> placed(control_memory& source, std::initializer_list<std::span<const uint8_t>> parts);
  result<nothing> publish_ranges();
  result<nothing> publish_ranges(bank& of);
  result<nothing> tear_down(bank& of);

  open_port port_;
  queue_options options_;
  std::vector<fallback> fallbacks_;
  uint8_t log_max_message_ = 30;
  bool has_atomics_ = false;
  bool has_masked_swap_ = false;

  dl::mlx5_pd pd_;
  std::unique_ptr<control_memory> host_source_ = host_control_memory();
  bank kernels_;
  bank host_;
  std::vector<pair> pairs_;
  std::vector<registered_memory> memories_;
  bool closed_ = false;
};

} // namespace ep::ibgda
