// This process as a PE of NVSHMEM: its place in the world, and one piece of the symmetric heap that memories are cut from.
//
// HAZARD: NVSHMEM knows no failures. A collective call of its own waits for every PE for ever, and nothing ends it. So there is one only, at the begin, on a thread that nobody joins; what comes later is agreed on
// by other means, and the rest is put on streams, whose ends are awaited with limits. NVSHMEM stays initialised until the process ends: finalising is collective, too.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "dl/nvshmem_symbols.hpp"
#include "library.hpp"
#include "operation.hpp"

namespace ep::gpu {

struct nvshmem_place {
  int device = 0;
  int pe = 0;
  int pes = 0;
  uint64_t heap_bytes = 0; // of every PE
  dl::nvshmem_unique_id id;
};

class nvshmem_world : public std::enable_shared_from_this<nvshmem_world> {
 public:
  // The one of this process, of whichever of its threads; null before the first.
  static std::shared_ptr<nvshmem_world> here();
  // The one of this process if it is in that place, else a new one. EP_STATUS_BUSY: it is in another place.
  static result<std::shared_ptr<nvshmem_world>> join(std::shared_ptr<const dl::nvshmem_symbols> nvshmem, library_ref of, const nvshmem_place& place);

  const nvshmem_place& place() const { return place_; }
  const dl::nvshmem_symbols& calls() const { return *nvshmem_; }
  const library_ref& of() const { return of_; }
  // Why it is of no use any more; empty: it is, or may yet be.
  std::string failed() const;
  bool ready() const;
  // Several PEs share this GPU by turns: kernels of two of them never run at once.
  bool by_turns() const { return status_ == dl::nvshmem_limited_mpg; }
  // Every PE's heap is mapped here.
  bool mapped() const;
  // Address of this PE's heap as kernels here reach it in a PE's place; 0: by a network only. Once ready.
  uint64_t heap(int pe) const { return heaps_[static_cast<size_t>(pe)]; }

  // Bytes of the heap from an offset on, the same on all PEs once they agree; free again when the last reference has gone.
  class part {
   public:
    ~part() { of_->give_back(offset_); }
    part(std::shared_ptr<nvshmem_world> of, uint64_t offset, uint64_t bytes) : of_(std::move(of)), offset_(offset), bytes_(bytes) {}
    part(const part&) = delete;
    const std::shared_ptr<nvshmem_world>& of() const { return of_; }
    uint64_t offset() const { return offset_; }
    uint64_t byte_length() const { return bytes_; }

   private:
    std::shared_ptr<nvshmem_world> of_;
    uint64_t offset_;
    uint64_t bytes_;
  };
  // The first free one at or behind `from`. EP_STATUS_MEMORY_LIMIT: there is none.
  result<std::shared_ptr<const part>> take(uint64_t bytes, uint64_t from);
  uint64_t bytes_free() const;

  // Waits, with whoever else waits, until all PEs have come, for at most so long; starts it at first. Aborted where `cancel` is set.
  outcome meet(const cancel_flag& cancel, int64_t deadline_ns);

 private:
  nvshmem_world(std::shared_ptr<const dl::nvshmem_symbols> nvshmem, library_ref of, const nvshmem_place& place) : nvshmem_(std::move(nvshmem)), of_(std::move(of)), place_(place) {}
  enum class state { idle, meeting, ready, failed };
  void initialize();
  void end(state how, const std::string& why);
  void give_back(uint64_t offset);

  std::shared_ptr<const dl::nvshmem_symbols> nvshmem_;
  library_ref of_;
  nvshmem_place place_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  state state_ = state::idle;
  std::string failed_;
  int status_ = 0;
  std::vector<uint64_t> heaps_;
  std::map<uint64_t, uint64_t> taken_; // bytes by offset
};

// A wait for the world to come together, which must end before its sink does.
class nvshmem_opening {
 public:
  static result<std::shared_ptr<nvshmem_opening>> start(std::shared_ptr<nvshmem_world> world, uint64_t operation, cancel_ref cancel, int64_t deadline_ns, completion_sink& sink);
  // Gives up, and waits for that.
  ~nvshmem_opening();
  nvshmem_opening(const nvshmem_opening&) = delete;

 private:
  explicit nvshmem_opening(cancel_ref cancel) : cancel_(std::move(cancel)) {}
  cancel_ref cancel_;
  std::thread thread_;
};

} // namespace ep::gpu
