#include "queues.hpp"

#include <atomic>

#include "bits.hpp"

namespace ep::nic {

uint32_t completion_backlog(const completion_queue& cq) {
  const uint32_t consumer = be32(load_acquire(*reinterpret_cast<const uint32_t*>(cq.dbr)));
  return (static_cast<uint32_t>(cq.produced) - consumer) & EP_MLX5_CQ_DBR_COUNTER_MASK;
}

bool completion_write(completion_queue& cq, const completion& what) {
  if (cq.overrun) return false;
  const uint32_t entries = uint32_t{1} << cq.log_size;
  if (!cq.ignore_overrun && completion_backlog(cq) >= entries) {
    cq.overrun = true;
    return false;
  }
  const bool failed = what.opcode == EP_MLX5_CQE_REQ_ERR || what.opcode == EP_MLX5_CQE_RESP_ERR;
  alignas(8) std::array<uint8_t, EP_MLX5_CQE_SIZE> bytes{};
  store_be32(bytes.data() + 32, what.user_index);
  if (failed) {
    bytes[55] = what.syndrome;
  } else {
    std::memcpy(bytes.data() + 36, &what.immediate, 4);
    store_be32(bytes.data() + 44, what.byte_count);
    store_be64(bytes.data() + 48, what.timestamp);
  }
  store_be32(bytes.data() + 56, uint32_t{what.wqe_opcode} << 24 | what.qpn);
  bytes[60] = static_cast<uint8_t>(what.wqe_counter >> 8);
  bytes[61] = static_cast<uint8_t>(what.wqe_counter);
  const auto owner = static_cast<uint8_t>((cq.produced >> cq.log_size) & 1);
  bytes[63] = static_cast<uint8_t>(what.opcode << 4 | (what.solicited ? 2 : 0) | owner);
  uint8_t* entry = cq.ring + (cq.collapsed ? 0 : (cq.produced & (entries - 1)) * EP_MLX5_CQE_SIZE);
  // Whole words: a collapsed entry is overwritten while somebody polls it. The last one has the opcode and the counter; it is written last.
  auto* words = reinterpret_cast<uint64_t*>(entry);
  for (size_t i = 0; i < 7; ++i) {
    std::atomic_ref<uint64_t>(words[i]).store(load_raw<uint64_t>(bytes.data() + i * 8), std::memory_order_relaxed);
  }
  store_release(words[7], load_raw<uint64_t>(bytes.data() + 56));
  ++cq.produced;
  return true;
}

} // namespace ep::nic
