// Memory of a GPU that a port knows: what requests are sent from or read into, or what peers reach.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "dl/fabric.hpp"

namespace ep::fabric {

class gpu_range {
 public:
  // `keep` holds the bytes.
  gpu_range(dl::fabric_port* port, dl::fabric_region region, const dl::gpu_bytes& bytes, std::shared_ptr<const void> keep)
      : port_(port), region_(region), address_(bytes.address), byte_length_(bytes.byte_length), keep_(std::move(keep)) {}
  ~gpu_range() { end(); }
  gpu_range(const gpu_range&) = delete;
  // HAZARD: before the port is closed: it takes back no region of a domain that is gone.
  void end() {
    if (!ended_.exchange(true, std::memory_order_acq_rel)) port_->give_back(region_);
  }
  uint64_t address() const { return address_; }
  uint64_t byte_length() const { return byte_length_; }
  const dl::fabric_region& region() const { return region_; }

 private:
  dl::fabric_port* port_;
  dl::fabric_region region_;
  uint64_t address_;
  uint64_t byte_length_;
  std::shared_ptr<const void> keep_;
  std::atomic<bool> ended_{false};
};

} // namespace ep::fabric
