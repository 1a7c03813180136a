// A communicator of NCCL as a group of ours uses it: calls take effect in the order of a stream of ours.
//
// A thread of the communicator makes the calls, on a stream of its own: it waits for an event that is recorded on the caller's stream before, and the caller's stream waits for one that is recorded behind NCCL's work.
// The caller waits until all of that has been put on the streams, never for peers: ranks connect when the communicator opens. HAZARD: a stream that waited for what has yet to be put there would hold up what
// NCCL allocates or loads at a call, for which the driver may wait until the device is idle.
#pragma once

#include "collective/reduce.hpp"
#include "dl/nccl_symbols.hpp"
#include "stream.hpp"

namespace ep::gpu {

enum class nccl_verb : uint32_t { all_reduce = 0, broadcast, reduce, all_gather, reduce_scatter, send, receive };

// One function of NCCL. Of `from` and `to` what it has: a rank that neither gives nor takes has 0 bytes. All-gather: `to` has a part for each rank; reduce-scatter: `from`.
struct nccl_step {
  nccl_verb verb;
  int32_t rank; // root or peer
  uint64_t from;
  uint64_t from_bytes;
  uint64_t to;
  uint64_t to_bytes;
};

// Steps that NCCL carries out together.
struct nccl_call {
  element_type element;
  reduce_op fold;
  double factor; // of premul_sum
  std::vector<nccl_step> steps;
};

// Whether NCCL folds elements of this type so.
bool nccl_reduces(element_type element, reduce_op fold);

class nccl_communicator {
 public:
  // The sink must outlive it. `id`: of one rank's ncclGetUniqueId, the same on all.
  static result<std::shared_ptr<nccl_communicator>> create(std::shared_ptr<const dl::nccl_symbols> nccl, library_ref of, int device, int rank, int size, const dl::nccl_unique_id& id,
                                                           completion_sink& sink);
  // As stop(), and waits for the thread.
  ~nccl_communicator();
  nccl_communicator(const nccl_communicator&) = delete;

  // Meets the other ranks; once. The operation ends when all have come.
  void open(uint64_t operation, cancel_ref cancel, int64_t deadline_ns);
  // Ranges were checked. `slot`: of the caller's operation, which ends when its stream has come behind this; its cancel word, and that of any other call under way, ends the communicator.
  // `keep` stays until NCCL is through with it. What NCCL has not taken until the deadline ends the communicator, too.
  result<nothing> launch(const stream& on, nccl_call call, const slot_ref& slot, std::vector<std::shared_ptr<const void>> keep, int64_t deadline_ns);
  // Waits for what is under way until the deadline, then gives all back. The operation ends when NCCL holds nothing any more; once.
  void end(uint64_t operation, int64_t deadline_ns);
  // Gives up what is under way, and returns at once.
  void stop();

  int device() const { return device_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  // Why it is of no use any more; empty: it is.
  std::string failed() const;

 private:
  struct job {
    nccl_call call;
    std::shared_ptr<event> after; // of the caller's stream
    std::shared_ptr<event> done;  // of the communicator's
    slot_ref slot;
    std::vector<std::shared_ptr<const void>> keep;
    int64_t deadline_ns;
    std::shared_ptr<std::atomic<uint32_t>> taken; // pending, put on the stream or failed
  };
  struct request {
    uint64_t operation = 0; // 0: none
    cancel_ref cancel;
    int64_t deadline_ns = no_deadline;
  };
  nccl_communicator(std::shared_ptr<const dl::nccl_symbols> nccl, library_ref of, int device, int rank, int size, const dl::nccl_unique_id& id, completion_sink& sink)
      : nccl_(std::move(nccl)), of_(std::move(of)), device_(device), rank_(rank), size_(size), id_(id), sink_(sink) {}
  void run();
  outcome meet(const request& how);
  // Of each kind that connects ranks, the least.
  nccl_call everybody() const;
  // EP_STATUS_OK, or why the calls under way must end.
  uint32_t look();
  void retire();
  void perform(job& next);
  // Until NCCL has done what a call began: false where the communicator has failed meanwhile.
  bool settled(dl::nccl_result begun, const char* what, int64_t deadline_ns);
  result<std::shared_ptr<event>> spare_event();
  void give(const job& of, uint32_t taken);
  dl::nccl_result put(const nccl_call& call, int custom_fold);
  void fail(uint32_t status, const std::string& why);
  void give_back(bool orderly, int64_t deadline_ns);

  std::shared_ptr<const dl::nccl_symbols> nccl_;
  library_ref of_;
  int device_;
  int rank_;
  int size_;
  dl::nccl_unique_id id_;
  completion_sink& sink_;
  void* own_ = nullptr; // stream
  std::shared_ptr<const device_block> scratch_; // of the first calls
  std::shared_ptr<event> first_;                // when they have run
  dl::nccl_comm comm_ = nullptr; // the thread's alone
  std::deque<job> under_way_;    // likewise: NCCL has them
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable taken_;
  std::deque<job> jobs_; // that the thread has yet to make
  std::vector<std::shared_ptr<event>> spare_;
  request opening_;
  request ending_;
  bool ready_ = false;
  bool stopping_ = false;
  std::string failed_;
  std::thread thread_;
};

} // namespace ep::gpu
