// Reads a send work request of an EFA queue pair, more strictly than hardware is known to: whatever a field may not be is named, with what it should have been.
#pragma once

#include <array>
#include <cstdint>

#include "ep/abi/efa_wqe.h"

namespace ep::nic::efa {

// What becomes of bits that must be zero and are not, and of words of an entry that nobody stored: what hardware does with them is not documented.
enum class lint : uint8_t {
  error, // the request fails with status 2, and its queue pair is in error
  warn,  // a violation is reported, the request is carried out
};

// What is wrong with a WQE, a store or a doorbell.
struct violation {
  uint32_t qpn = 0;
  uint32_t slot = 0;           // in the ring
  uint64_t number = 0;         // of the WQE that the NIC expected there
  uint64_t writer = 0;         // who stored it, where stores are watched
  const char* field = nullptr; // static text: "meta.ctrl2"
  uint64_t found = 0;
  uint64_t expected = 0;
  const char* rule = nullptr;  // static text: what `expected` means, if it is not simply the value
};

struct wqe_limits {
  uint32_t entry_bytes = EP_EFA_WQE_BYTES;
  bool wide_ids = false;
  lint reserved = lint::error;
};

struct work_request {
  uint64_t id = 0; // as the completion returns it: 16 bits, or 64
  uint8_t opcode = 0;
  bool has_immediate = false;
  bool inlined = false;
  uint16_t ah = 0;
  uint16_t qpn = 0;
  uint32_t qkey = 0;
  uint32_t immediate = 0;
  uint32_t rkey = 0;
  uint64_t address = 0;      // remote
  uint64_t length = 0;
  uint32_t lkey = 0;
  uint64_t local = 0;
};

// What reading a WQE comes to.
struct wqe_outcome {
  uint8_t status = 0; // EP_EFA_STATUS_* that the request ends with before it has begun
  bool noted = false;                 // `wrong` says what was found (without qpn, slot, number and writer)
  violation wrong;
};

// `bytes`: a copy of the entry at `number` of a ring of 1 << shift. The NIC overwrites an entry that it has fetched with wqe_scrub, so one that was not stored since is seen.
wqe_outcome wqe_read(const uint8_t* bytes, uint64_t number, uint32_t shift, const wqe_limits& limits, work_request& request);

inline constexpr uint8_t wqe_scrub = 0xdd;

} // namespace ep::nic::efa
