// Protection domains, memory regions and umems of one NIC. Keys live in the port segment, where peers look them up.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "dl/mlx5.hpp"
#include "port.hpp"

namespace ep::nic {

class registrations {
 public:
  explicit registrations(const port_view& port) : port_(port), local_(port_max_keys) {}

  uint32_t pd_add();
  bool pd_known(uint32_t pdn) const { return pds_.count(pdn) != 0; }
  // EBUSY while regions or, says `used`, queue pairs belong to it.
  result<nothing> pd_remove(uint32_t pdn, bool used);

  // Returns the key, for both uses. Errors as of mlx5_device::reg_mr.
  result<uint32_t> region_add(uint32_t pdn, const dl::mlx5_memory& memory, uint32_t access);
  // Clears the key; whoever uses it just now is not waited for.
  result<nothing> region_clear(uint32_t key);
  // Frees the key's place after nobody uses it any more.
  void region_forget(uint32_t key);
  // Landed writes and atomics of peers on this region notify `wake`, which must lie in a segment.
  result<nothing> region_wake(uint32_t key, const ep_wake_word* wake);
  size_t regions() const { return region_count_; }

  // Local memory that a data segment names; null and `why` (static text) where it may not.
  uint8_t* local(uint32_t lkey, uint32_t pdn, uint64_t address, uint64_t bytes, bool write, const char** why) const;

  result<uint32_t> umem_add(const dl::mlx5_memory& memory, uint32_t access);
  result<nothing> umem_remove(uint32_t id);
  // Null: no such umem, or the range is outside of it, or (`write`) it is for reading only.
  uint8_t* umem(uint32_t id, uint64_t offset, uint64_t bytes, bool write) const;
  void umem_use(uint32_t id, int change);
  size_t umems() const { return umems_.size(); }
  size_t pds() const { return pds_.size(); }

 private:
  struct local_region {
    uint8_t variant = 0;
    bool used = false;
    bool dying = false;
    uint8_t* base = nullptr;
    std::shared_ptr<segment> memory; // keeps the mapping while the NIC may use it
    std::shared_ptr<segment> wake;
  };
  struct umem_entry {
    uint8_t* base;
    uint64_t bytes;
    uint32_t access;
    int users;
    std::shared_ptr<segment> memory;
  };

  port_view port_;
  std::vector<local_region> local_;
  size_t region_count_ = 0;
  uint64_t generation_ = 0;
  uint32_t next_pd_ = 1;
  uint32_t next_umem_ = 1;
  std::unordered_set<uint32_t> pds_;
  std::unordered_map<uint32_t, umem_entry> umems_;
};

// EFAULT where an address is not mapped.
result<nothing> memory_check(const char* call, const dl::mlx5_memory& memory);

} // namespace ep::nic
