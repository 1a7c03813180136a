// What the software NIC costs: for `ep bench ibgda`. Figures of an emulator, never of a network. Every run checks what was moved, and fails where it is not as it should
// be (EP_STATUS_SYSTEM, EPROTO).
#pragma once

#include "core/ibgda/post_bench.hpp"

namespace ep::nic {

// WQEs posted each second while a software NIC, with its thread, executes them: writes of 64 bytes within this process. Until the last one has completed.
result<double> executed_posts_per_second(const ibgda::post_load& load);

struct nic_speed {
  double requests_per_second = 0; // 8-byte inline writes
  double bytes_per_second = 0;    // writes of 64 KiB
  double copy_per_second = 0;     // bytes that this thread copies between the same memories, through the caches or past them, whichever is faster
};
// In time of this thread, which is the NIC's. `batch`: WQEs a doorbell, 1 to 512. `requests`: how many inline writes. `region`: bytes that the large writes go
// through, a multiple of 2 MiB.
result<nic_speed> software_nic_speed(uint32_t batch, uint64_t requests, uint64_t region);

} // namespace ep::nic
