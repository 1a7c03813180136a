#include "queues.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "waiting.hpp"

namespace ep::nic::efa {

void free_memory::operator()(uint8_t* at) const { std::free(at); }

std::unique_ptr<uint8_t, free_memory> page_memory(uint64_t bytes) {
  constexpr uint64_t page = 4096;
  const uint64_t whole = (bytes + page - 1) / page * page;
  auto* at = static_cast<uint8_t*>(std::aligned_alloc(page, whole));
  if (at != nullptr) std::memset(at, 0, whole);
  return std::unique_ptr<uint8_t, free_memory>(at);
}

uint64_t completion_queue::backlog() const {
  if (nobody_polls) return produced;
  return polled == nullptr ? 0 : produced - load_acquire(*polled);
}

bool completion_write(completion_queue& cq, const completion& what) {
  if (cq.overrun) return false;
  if (cq.backlog() >= cq.depth) {
    cq.overrun = true;
    return false;
  }
  ep_efa_tx_cqe entry{};
  // The first round of entries has phase 1.
  const uint32_t phase = (cq.produced / cq.depth & 1) == 0 ? 1 : 0;
  entry.head.req_id = static_cast<uint16_t>(what.id);
  entry.head.status = what.status;
  entry.head.flags = static_cast<uint8_t>(phase | EP_EFA_QUEUE_SEND << 1 | uint32_t{what.opcode} << 4);
  entry.head.qpn = static_cast<uint16_t>(what.qpn);
  for (uint32_t i = 0; i < 3; ++i) entry.req_id_ex[i] = static_cast<uint16_t>(what.id >> (16 + 16 * i));
  uint64_t words[2];
  std::memcpy(words, &entry, sizeof words);
  uint8_t* at = cq.memory.get() + (cq.produced % cq.depth) * cq.entry_bytes;
  if (cq.entry_bytes == EP_EFA_CQE_BYTES) words[0] &= 0x0000ffffffffffff; // the old form ends in reserved bytes
  // The word with the phase is stored last.
  for (uint32_t word = cq.entry_bytes / 8; word-- > 1;) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at + word * 8)).store(word < 2 ? words[word] : 0, std::memory_order_relaxed);
  }
  store_release(*reinterpret_cast<uint64_t*>(at), words[0]);
  ++cq.produced;
  if (cq.wake != nullptr) {
    std::atomic_thread_fence(std::memory_order_seq_cst); // the entry before a look for sleepers
    wake_notify(cq.wake);
  }
  return true;
}

} // namespace ep::nic::efa
