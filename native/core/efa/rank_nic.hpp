// One rank's endpoints as a transport uses them: memories that kernels and peers reach, sources that kernels send from, and requests of the host itself.
//
// How a signal travels (signal_board.hpp). A request that adds 1 and fits one WRITE is that WRITE, sent to the queue pair of the slot: its arrival is the signal. Any other value
// travels by the cell of (this rank, slot) at the peer, in a WRITE of its own that is posted once all that the signal speaks of has completed, which on EFA means that it has landed
// and that what is sent after it is seen after it; several that wait go together.
//
// Requests of the host never wait on the caller's thread: what finds no room is kept, and posted when somebody looks.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "endpoints.hpp"
#include "memory.hpp"
#include "rank.hpp"
#include "segment.hpp"
#include "signal_board.hpp"

namespace ep::efa {

// One operation: bytes or a word, then a signal.
struct host_request {
  enum class kind : uint8_t { none, write, read, word };
  kind what = kind::none;
  int32_t peer = 0;
  uint64_t offset = 0; // in the peer's part
  uint64_t local = 0;  // address of the source of a write, the target of a read: in registered memory
  uint64_t bytes = 0;  // of a word: 1, 2, 4 or 8
  uint64_t word = 0;
  bool signals = false;
  uint64_t slot = 0;
  uint64_t add = 0;
  std::shared_ptr<const void> keep; // held until the request has ended
};

// How a queue pair broke.
struct pair_failure {
  uint32_t status = EP_STATUS_OK; // EP_STATUS_OK: it did not
  uint32_t efa_status = 0;        // of the completion; 0: none, whoever posted gave up
  uint32_t qpn = 0;
  uint64_t wqe = 0;
  uint64_t remote_address = 0;
  int32_t peer = -1;
};

// renewed: it had not ended when all endpoints were made anew.
enum class request_state : uint32_t { pending, done, failed, renewed };

// Used by the rank's own thread, but for look(), which any may call.
class rank_nic final : public memory_route, public std::enable_shared_from_this<rank_nic> {
 public:
  // `driver` outlives what it opened.
  static result<std::shared_ptr<rank_nic>> create(std::shared_ptr<rank_context> context, std::unique_ptr<dl::efa_driver> driver,
                                                  std::unique_ptr<dl::efa_device> device, endpoint_options options, emulator_hooks hooks);
  ~rank_nic() override;

  // No request of the host any more: what has not ended is given up, and what it held is free. HAZARD: it may hold a memory, which holds this object.
  void stop();

  rank_endpoints& endpoints() { return *endpoints_; }
  uint64_t max_message() const { return endpoints_->device().max_message; }
  ep_wake_word* wake() const { return context_->wake(); }

  // Bytes that describe this rank's part of a memory with so many slots.
  static uint64_t part_bytes(uint64_t signal_slots);
  // Registers this rank's part, and makes a queue pair and a counter for each slot; peers need what is returned. EP_STATUS_BUSY: the device has not that many counters left.
  result<std::vector<uint8_t>> add_memory(const symmetric_memory& memory);
  // Given every rank's: kernels and peers reach the memory from here on. Empty for a rank that is not here.
  result<nothing> route(symmetric_memory& memory, std::span<const std::vector<uint8_t>> parts);
  // One rank's part alone, of a memory that was routed, also if renew() came since: that rank is reached from here on, in this part. Nothing may be under way to it in this memory.
  // After renew() nobody is before that. Where it fails, that rank is not reached.
  result<nothing> replace_part(symmetric_memory& memory, int32_t rank, const std::vector<uint8_t>& part);
  // Its keys and queue pairs are dead when it returns: whoever still writes there breaks its own queue pair.
  void remove_memory(const symmetric_memory& memory);
  bool knows(const symmetric_memory& memory) const;

  // When ranks come in the place of others: nothing that any rank has under way, or that a dead one's NIC still sends, lands here any more, and no count that it would raise is
  // anybody's; what has landed before is in the words. Makes all endpoints anew, and of each memory the keys, queue pairs and counters; bytes and words stay, and so does what kernels
  // were given. Then endpoints().connect() with everybody's address, and for each memory route() with everybody's part(), or replace_part() with one after the other; what nobody
  // routes is posted to in vain. No kernel may run here, and none
  // post, until then. Requests of the host that had not ended are over. Where it fails, nothing can be posted until another try goes well.
  //
  // Why all: on SRD a queue pair is for all peers, and a counter says how many have arrived, never from whom: among new ones alone a straggler is found by its number and keys.
  result<nothing> renew();
  // What add_memory() returned, or what became of it by renew().
  result<std::vector<uint8_t>> part(const symmetric_memory& memory) const;

  result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) override;

  // Takes it over. The number is for look(): requests to one peer end in their order.
  result<uint64_t> post(const symmetric_memory& memory, const host_request& request);
  request_state look(int32_t peer, uint64_t number);
  // Number of the last request to this peer, 0: none.
  uint64_t accepted(int32_t peer);
  pair_failure failure_of(int32_t peer);
  // A queue pair of kernels that broke first.
  pair_failure kernel_failure();

 private:
  // What is posted for a request, and for a cell.
  struct work_item {
    host_request::kind what = host_request::kind::none;
    ep_efa_target target{};
    uint64_t remote = 0;
    uint32_t rkey = 0;
    uint64_t local = 0;
    uint32_t lkey = 0;
    uint32_t bytes = 0;
    uint64_t word = 0;
    uint32_t slot = 0; // of the targets, for errors
  };
  using cell_name = std::pair<uint64_t, uint64_t>; // memory, slot
  struct cell {
    work_item write;      // its word is the total
    uint64_t end = 0;     // behind the last WQE that wrote it
    bool changed = false; // since then
  };
  static constexpr uint64_t not_posted = UINT64_MAX;
  struct entry {
    std::vector<work_item> items;
    uint64_t end = not_posted; // behind its last WQE; 0: it has none
    bool by_cell = false;
    cell_name cell{};
    work_item cell_write{};
    uint64_t add = 0;
    uint64_t cell_end = not_posted; // behind the WQE that told its cell
    std::shared_ptr<const void> keep;
  };
  struct host_pair {
    std::mutex mutex;
    // Accepted and not ended, in their order: the first `landed` have completed but for their cells, the first `posted` are in the ring, of the next one so many items.
    std::deque<entry> entries;
    size_t landed = 0;
    size_t posted = 0;
    size_t items_posted = 0;
    std::map<cell_name, cell> cells;
    std::vector<uint64_t> gone; // memories whose cells nobody names once all entries have ended
    uint64_t accepted = 0;
    uint64_t ended = 0;
    std::vector<std::pair<uint64_t, uint64_t>> lost; // numbers behind the first, up to the second: ended by renew()
    bool stopped = false;
    request_state end_of(uint64_t number) const;
  };
  struct registered_source {
    uint64_t begin;
    uint64_t end;
    std::weak_ptr<const void> keep;
    registered_memory memory;
  };
  struct remote_part {
    uint64_t data = 0;
    uint32_t data_rkey = 0;
    uint32_t cells_rkey = 0;
    uint64_t cells = 0; // address of this rank's row at the peer
    bool here = false;
    std::vector<dl::efa_peer> signals;
  };
  struct kernel_route;
  struct routed_memory {
    uint64_t memory_id = 0;
    std::optional<registered_memory> data; // none: it has no bytes
    std::shared_ptr<segment> control;      // counters, then cells
    dl::efa_mr cells;
    dl::efa_cq cq;
    std::vector<dl::efa_counter> counters;
    std::vector<dl::efa_endpoint> signals;
    std::shared_ptr<signal_board> board;
    std::shared_ptr<rank_context> waits; // whose waits fold the board
    std::vector<remote_part> remotes;
    std::weak_ptr<kernel_route> kernels; // held by the memory
    std::vector<uint8_t> part;
  };

  rank_nic() = default;
  result<nothing> offer(routed_memory& made, const symmetric_memory& memory);
  result<remote_part> read_part(size_t rank, uint64_t slots, const std::vector<uint8_t>& bytes);
  void tell_kernels(kernel_route& kernels, const routed_memory& known, const symmetric_memory& memory) const;
  void tell_kernels_part(kernel_route& kernels, size_t rank, const remote_part& part) const;
  void forget_part(remote_part& part);
  void advance(int32_t peer, host_pair& pair);
  static void forget_gone(host_pair& pair);
  static void note_completed(host_pair& pair, uint64_t prefix);
  static std::vector<work_item> next_batch(host_pair& pair, uint64_t first, uint64_t prefix, uint64_t room);
  void give_up(int32_t peer, host_pair& pair);
  result<nothing> make_signals(routed_memory& made, const symmetric_memory& memory);
  result<nothing> take_down(routed_memory& memory);
  void sweep_sources();
  const routed_memory* find(const symmetric_memory& memory) const;

  std::shared_ptr<rank_context> context_;
  std::unique_ptr<dl::efa_driver> driver_;
  std::unique_ptr<rank_endpoints> endpoints_;
  std::vector<std::unique_ptr<host_pair>> pairs_; // by rank
  std::vector<registered_source> sources_;
  std::vector<routed_memory> memories_;
};

} // namespace ep::efa
