// One rank's queue pairs as a transport uses them: memories that kernels and peers reach, sources that kernels send from, and requests of the host itself.
//
// Each peer has one queue pair more than kernels use: the host's, with rings of its own. Its requests never wait on the caller's thread: what finds no room is kept, and
// posted when somebody looks.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "apart_words.hpp"
#include "control_places.hpp"
#include "memory.hpp"
#include "queues.hpp"
#include "rank.hpp"

namespace ep::ibgda {

// What only an emulated NIC has.
struct emulator_hooks {
  bool adds_as_processors = false; // its atomics are atomic against those of processors, too
  uint64_t doorbell_wake = 0; // address of an ep_wake_word to notify after a doorbell; 0: none
  // Writes and atomics that peers land in this region notify the word.
  std::function<result<nothing>(const dl::mlx5_mr&, const ep_wake_word*)> region_wake;
};

// A run of bytes in a peer's part, or one of its signal words.
struct remote_place {
  uint64_t address = 0;
  uint32_t rkey = 0;
};

// One operation: bytes or a word, then a signal.
struct host_request {
  enum class kind : uint8_t { none, write, read, word, fetch_add, compare_swap, masked_swap };
  kind what = kind::none;
  int32_t peer = 0;
  remote_place remote;
  uint64_t local = 0; // address of the source of a write, the target of a read or of an atomic's old value: in registered memory
  uint64_t bytes = 0; // of a word: 1, 2, 4 or 8; of atomics 8
  uint64_t word = 0;  // what is written, added, or swapped in
  uint64_t compare = 0;
  uint64_t compare_mask = 0; // of masked_swap: which bits are compared
  uint64_t swap_mask = 0;    // and which are swapped
  signal_op signal = signal_op::none;
  remote_place slot;
  uint64_t value = 0;
  std::shared_ptr<const void> keep; // held until the request has ended
};

// How the queue pair to a peer broke.
struct pair_failure {
  uint32_t status = EP_STATUS_OK; // EP_STATUS_OK: it did not
  uint32_t syndrome = 0;
  uint32_t vendor_syndrome = 0;
  uint32_t qpn = 0;
  uint32_t opcode = 0;
  uint32_t index = 0;
  uint32_t rkey = 0;
  uint64_t remote_address = 0;
  // Where the completion is of a request that was flushed: what the NIC told of the failure before it, if it did. 0: nothing.
  uint32_t first_syndrome = 0;
};

// replaced: it had not ended when another process came in the peer's place.
enum class request_state : uint32_t { pending, done, failed, replaced };

// Used by the rank's own thread, but for look(), end_way() and own_fault(), which any may call.
class rank_nic final : public memory_route, public std::enable_shared_from_this<rank_nic> {
 public:
  // `driver` outlives what it opened. `options.qps_per_peer` and `active_qps` are what kernels use; the host's are added.
  static result<std::shared_ptr<rank_nic>> create(std::shared_ptr<rank_context> context, std::unique_ptr<dl::mlx5_driver> driver, open_port port,
                                                  queue_options options, emulator_hooks hooks, control_places places = host_places());
  ~rank_nic() override;

  // No request of the host any more: what has not ended is given up, and what it held is free. HAZARD: it may hold a memory, which holds this object.
  void stop();

  rank_queues& queues() { return *queues_; }
  // Better places for the kernels' queues, and why they were passed over.
  std::vector<fallback> fallbacks() const { return all_fallbacks(places_, queues_->fallbacks()); }
  // Kernels run on a GPU: those of the host cannot use the memories of this NIC.
  bool for_gpu() const { return places_.gpu; }
  uint64_t max_message() const { return device().max_message; }
  // Fetch-add and compare-and-swap of 8 bytes: addends and old values in the host's byte order.
  bool has_atomics() const { return queues_->has_atomics(); }
  // Besides: of some bits of the word. The ring has to hold its two WQEBBs and what ends their post.
  bool has_masked_swap() const;

  // Registers this rank's part; peers need what is returned.
  result<ep_ibgda_remote> add_memory(const symmetric_memory& memory);
  // Given every rank's: kernels and peers reach the memory from here on.
  result<nothing> route(symmetric_memory& memory, std::span<const ep_ibgda_remote> remotes);
  // Its keys are dead when it returns: whoever still writes there breaks its queue pair.
  void remove_memory(const symmetric_memory& memory) { remove_part(memory.device_handle().memory_id); }

  // The same of a part for kernels on a GPU, which lies where their queues do (`queues().beside_queues`): signal words, then bytes.
  result<ep_ibgda_remote> add_part(uint64_t memory_id, const control_block& block, uint64_t signal_bytes, uint64_t byte_length);
  // What kernels are given as ep_memory_handle.proxy, and what keeps it.
  struct kernel_route {
    std::shared_ptr<memory_route> route;
    uint64_t address = 0;
  };
  result<kernel_route> route_part(uint64_t memory_id, std::span<const ep_ibgda_remote> remotes);
  void remove_part(uint64_t memory_id);

  // Another process comes in the place of a rank that died: rank_queues::reset(), after which no request of the host to the rank is under way: those that had not ended have failed.
  // Kernels, and peers that this rank does not know to be dead, use none of its queue pairs.
  result<nothing> reset_peer(int32_t rank);
  // Given what the newcomer said. Nobody posts before all have done it.
  result<nothing> connect_peer(int32_t rank, const std::vector<uint8_t>& connection);
  // The rank's part of a memory that was routed is another one now: of all that kernels and the host post from here on.
  result<nothing> replace_remote(const symmetric_memory& memory, int32_t rank, const ep_ibgda_remote& remote);
  const ep_ibgda_remote* remote(const symmetric_memory& memory, int32_t rank) const;
  // Where a signal goes; remote() is not null. HAZARD: an addition may go to another word than a `set`, and lands in the peer's word later: the two have no order.
  static remote_place signal_place(const symmetric_memory& memory, const ep_ibgda_remote& part, uint64_t slot, signal_op op);

  result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) override;

  // Moves the queue pairs to the rank into the error state, in which they take nothing from it. The rank is dead: the host's requests to it fail, too.
  bool end_way(int32_t rank) override;
  bool own_fault(uint64_t found) override;

  // Takes it over. The number is for look(): requests to one peer end in their order. One to a part that was routed with key 0, of a rank that has yet to tell it, comes to nothing.
  result<uint64_t> post(const host_request& request);
  request_state look(int32_t peer, uint64_t number);
  // Number of the last request to this peer, 0: none.
  uint64_t accepted(int32_t peer);
  pair_failure failure_of(int32_t peer);
  // A queue pair of kernels that broke first; its peer, or -1.
  pair_failure kernel_failure(int32_t* peer);

 private:
  struct work_item {
    host_request::kind what;
    bool add; // a fetch-add of `word`
    remote_place remote;
    uint64_t local;
    uint32_t lkey;
    uint32_t bytes;
    uint64_t word;
    bool last; // of its request
    uint64_t compare = 0;
    uint64_t compare_mask = 0;
    uint64_t swap_mask = 0;
    uint32_t blocks() const; // WQEBBs, with the NOP behind several
  };
  struct ended_by {
    uint64_t wqe; // its request has ended once so many have completed
    std::shared_ptr<const void> keep;
  };
  struct host_pair {
    std::mutex mutex;
    std::deque<work_item> waiting;
    std::deque<std::shared_ptr<const void>> waiting_keep; // of requests whose last item waits
    std::deque<ended_by> posted;
    uint64_t accepted = 0;
    uint64_t ended = 0;
    std::vector<std::pair<uint64_t, uint64_t>> lost; // numbers behind the first, up to the second: ended when the peer was replaced
    bool stopped = false;
    request_state end_of(uint64_t number) const;
  };
  struct registered_source {
    uint64_t begin;
    uint64_t end;
    std::weak_ptr<const void> keep;
    registered_memory memory;
  };
  struct routed_memory {
    uint64_t memory_id = 0;
    std::optional<registered_memory> memory;  // none: it has no bytes
    std::optional<registered_memory> signals; // of the words that are apart
    std::unique_ptr<apart_words> apart; // none: signals go to the memory's own words
    std::vector<ep_ibgda_remote> remotes;
    rank_queues::memory_route route;
  };

  rank_nic() = default;
  // Of the host's queue pairs.
  const ep_ibgda_device& device() const { return *reinterpret_cast<const ep_ibgda_device*>(queues_->host_device_address()); }
  ep_ibgda_qp& pair_of(int32_t peer) const;
  void advance(host_pair& pair, ep_ibgda_qp& qp);
  void sweep_sources();
  pair_failure explained(pair_failure found);
  void take_events();
  routed_memory* find(uint64_t memory_id);
  routed_memory* find(const symmetric_memory& memory) { return find(memory.device_handle().memory_id); }
  result<nothing> set_apart(routed_memory& made, const symmetric_memory& memory);
  void release(routed_memory& memory);

  std::shared_ptr<rank_context> context_;
  std::unique_ptr<dl::mlx5_driver> driver_;
  control_places places_;
  std::unique_ptr<rank_queues> queues_;
  emulator_hooks hooks_;
  ep_ibgda_memory own_route_{};
  ep_memory_handle own_handle_{};
  std::vector<std::unique_ptr<host_pair>> pairs_; // by rank
  std::vector<registered_source> sources_;
  std::vector<routed_memory> memories_;
  std::mutex aside_; // of what any thread may ask: commands, and events
  std::map<uint32_t, uint32_t> told_; // by queue pair number: the syndrome of the event that said that it has failed
};

} // namespace ep::ibgda
