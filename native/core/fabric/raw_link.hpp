// What a provider does between two ranks with nothing of the engine between: one thread that posts writes with data and polls. What `ep bench fabric` compares the engine with.
//
// Both ranks make the same calls in the same order, and hold their thread meanwhile. Every call ends: well, with EP_STATUS_TIMEOUT, with EP_STATUS_MISMATCH where bytes are not those that
// were sent, or with EP_STATUS_PEER_LOST where the provider says that something could not be delivered.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dl/fabric.hpp"

namespace ep::fabric {

class raw_link {
 public:
  // `bytes`: of the memory that is written from, and of the one that is written to.
  static result<std::unique_ptr<raw_link>> open(std::unique_ptr<dl::fabric_port> port, uint64_t bytes);
  ~raw_link();

  const dl::fabric_offer& offer() const { return port_->offer(); }
  // For connect() of the other.
  result<std::vector<uint8_t>> description();
  result<nothing> connect(std::span<const uint8_t> description);

  // A round is a write of 8 bytes there and one back; its time in ns goes to `samples`. `first` on one of the two.
  result<nothing> ping_pong(bool first, std::span<double> samples, int64_t deadline_ns);
  // Writes `sends` messages of `bytes`, at most `window` under way, and waits until `receives` of the other's have arrived and the other has all of this one's. Returns seconds. They come from, and go to, so
  // many places one after the other: few of them stay in caches. What arrived is compared with `turn`, of which each has its own bytes.
  result<double> stream(uint64_t sends, uint64_t receives, uint64_t bytes, uint64_t window, uint64_t places, uint64_t turn, int64_t deadline_ns);

 private:
  raw_link(std::unique_ptr<dl::fabric_port> port, uint64_t bytes);
  result<nothing> write(uint64_t at, uint64_t bytes, uint32_t data, int64_t deadline_ns);
  // Until `arrivals` have come in all, and at most `under_way` writes have no event.
  result<nothing> wait(uint64_t arrivals, uint64_t under_way, int64_t deadline_ns);
  result<nothing> look();

  struct region_holder {
    dl::fabric_port* port;
    dl::fabric_region region;
    ~region_holder() { port->give_back(region); }
  };
  const uint64_t bytes_;
  std::vector<dl::fabric_context> contexts_; // HAZARD: before the port, which may write to them until it is closed
  std::vector<dl::fabric_context*> free_;
  std::vector<uint8_t> out_;
  std::vector<uint8_t> in_;
  std::unique_ptr<dl::fabric_port> port_;
  std::unique_ptr<region_holder> region_;
  std::vector<dl::fabric_event> events_;
  uint64_t to_ = 0;
  uint64_t remote_base_ = 0;
  uint64_t remote_key_ = 0;
  uint64_t arrivals_ = 0; // so far
  uint64_t awaited_ = 0;
  uint64_t rounds_ = 0;
};

} // namespace ep::fabric
