// Memory regions of one device. Keys live in the port segment, where peers look them up.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dl/efa.hpp"
#include "port.hpp"

namespace ep::nic::efa {

class keys {
 public:
  explicit keys(const port_view& port) : port_(port), local_(port_max_keys) {}

  // Returns the lkey. Errors as of efa_device::reg_mr.
  result<uint32_t> add(const dl::efa_memory& memory, uint32_t access);
  // Clears the key; whoever uses it just now is not waited for.
  result<nothing> clear(uint32_t lkey);
  // Frees the key's place after nobody uses it any more.
  void forget(uint32_t lkey);
  // Landed writes of peers on this region notify `wake`, which must lie in a segment.
  result<nothing> set_wake(uint32_t lkey, const ep_wake_word* wake);
  size_t count() const { return count_; }

  // Local memory that a segment names; null and `why` (static text) where it may not.
  uint8_t* local(uint32_t lkey, uint64_t address, uint64_t bytes, bool write, const char** why) const;

 private:
  struct local_region {
    uint8_t variant = 0;
    bool used = false;
    bool dying = false;
    uint8_t* base = nullptr;
    std::shared_ptr<segment> memory; // keeps the mapping while the device may use it
    std::shared_ptr<segment> wake;
  };
  bool known(uint32_t lkey) const;

  port_view port_;
  std::vector<local_region> local_;
  size_t count_ = 0;
  uint64_t generation_ = 0;
};

} // namespace ep::nic::efa
