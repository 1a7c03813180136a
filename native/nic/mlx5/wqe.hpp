// Reads a send work request out of a ring, more strictly than hardware: whatever a field may not be is named, with what it should have been.
#pragma once

#include <array>
#include <cstdint>

#include "ep/abi/mlx5_wqe.h"
#include "wire.hpp"

namespace ep::nic {

inline constexpr uint32_t wqe_max_ds = 63; // ctrl.ds has 6 bits
inline constexpr uint32_t wqe_max_bytes = 16 * EP_MLX5_WQEBB_BYTES;

struct wqe_data {
  uint32_t bytes;
  uint32_t lkey;
  uint64_t address;
};

struct work_request {
  uint16_t index = 0;
  uint8_t opcode = 0;
  uint8_t opmod = 0;
  uint8_t ce = 0;    // EP_MLX5_CE_*
  uint8_t fence = 0;
  bool solicited = false;
  bool has_remote = false; // names remote memory
  bool inlined = false;
  uint32_t wqebbs = 1;
  uint32_t immediate = 0; // as it lies in the WQE
  uint64_t address = 0;
  uint32_t rkey = 0;
  uint32_t data_count = 0;
  uint8_t atomic_bytes = 0;
  wire_operation operation = wire_operation::write;
  uint64_t length = 0; // of the data, or of the atomic's word
  std::array<uint64_t, 4> operand{};
  uint32_t inline_at = 0; // of the first inline byte in the WQE
  std::array<wqe_data, wqe_max_ds> data;
};

// What is wrong with a WQE, or with a doorbell.
struct violation {
  uint32_t qpn = 0;
  uint32_t slot = 0;    // of the WQE's first WQEBB in the ring
  uint16_t index = 0;   // that the NIC expected there
  const char* field = nullptr; // static text: "ctrl.ds"
  uint64_t found = 0;
  uint64_t expected = 0;
  const char* rule = nullptr; // static text: what `expected` means, if it is not simply the value
};

// The first dwords of `bytes` say how many of them count; the caller copied them out of the ring, wrapped. False: `wrong` says why (without qpn and slot).
// `posted`: WQEBBs between this one and the producer.
bool wqe_read(const uint8_t* bytes, uint16_t index, uint32_t qpn, uint32_t posted, work_request& request, violation& wrong);
// WQEBBs that the request takes if its head is to be believed; 1 for a ds of 0.
uint32_t wqe_wqebbs(const uint8_t* head);

} // namespace ep::nic
