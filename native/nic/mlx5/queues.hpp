// Queue pairs, completion queues and doorbell pages as the NIC keeps them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ep/abi/mlx5_cqe.h"
#include "ep/abi/mlx5_prm.h"
#include "port.hpp"
#include "wire.hpp"
#include "wqe.hpp"

namespace ep::nic {

struct completion_queue {
  uint32_t cqn = 0;
  uint8_t* ring = nullptr;
  uint8_t* dbr = nullptr;
  uint32_t log_size = 0;
  bool collapsed = false;
  bool ignore_overrun = false;
  bool overrun = false;
  uint64_t produced = 0;
  uint32_t users = 0; // queue pairs
  uint32_t cq_umem = 0;
  uint32_t dbr_umem = 0;
  uint32_t uar_page = 0;
  std::array<uint8_t, EP_MLX5_CQC_BYTES> context{};
};

// What a completion says. Requests fill the opcode of the WQE in, receives do not.
struct completion {
  uint8_t opcode = EP_MLX5_CQE_REQ;
  uint8_t wqe_opcode = 0;
  uint8_t syndrome = 0;
  bool solicited = false;
  uint16_t wqe_counter = 0;
  uint32_t qpn = 0;
  uint32_t user_index = 0;
  uint32_t byte_count = 0;
  uint32_t immediate = 0; // as on the wire
  uint64_t timestamp = 0;
};

// Entries that the consumer has not taken, by its doorbell record.
uint32_t completion_backlog(const completion_queue& cq);
// False: there is no room, and the queue has overrun for good.
bool completion_write(completion_queue& cq, const completion& what);

struct queue_pair;

struct doorbell_page {
  uint32_t id = 0;
  uint8_t* page = nullptr; // EP_MLX5_UAR_BYTES
  uint32_t users = 0;      // queues of either kind
  std::vector<queue_pair*> qps;
  std::vector<uint64_t> repeats; // doorbells that a fault makes come twice
};

// A request of a send queue, once it was fetched.
struct flight {
  bool active = false;
  bool held = false;      // by a fault, until release
  bool planned = false;   // the faults of its beginning have been looked up
  bool torn = false;      // an atomic whose word is read in a turn before the one that writes it
  int64_t torn_ns = 0;
  uint32_t tries = 0;
  uint32_t rnr_tries = 0;
  int64_t begun_ns = 0;
  work_request request;
  wire_message message;
  std::vector<wire_piece> pieces;
  std::vector<std::pair<uint64_t, uint64_t>> parts; // of `partial`: what has still to land before the rest
  uint64_t landed = 0; // bytes of a long message that have been delivered
  wire_ticket ticket;
  bool whole = false; // the ticket is of its last part: requests behind it may be asked for
  int64_t asked_ns = 0; // when the ticket was taken, or when its wait last counted as a try
  alignas(16) std::array<uint8_t, wqe_max_bytes> wqe{};
};

struct queue_pair {
  uint32_t qpn = 0;
  uint32_t index = 0;
  uint8_t state = EP_MLX5_QP_STATE_RST;
  uint8_t* sq = nullptr;
  uint32_t log_sq = 0;
  uint8_t* dbr = nullptr;
  uint16_t consumer = 0; // index of the next WQEBB to fetch
  uint16_t producer = 0; // as the last doorbell said
  uint32_t log_rq = 0;
  bool has_rq = false;
  uint16_t receive_consumer = 0;
  doorbell_page* uar = nullptr;
  completion_queue* send_cq = nullptr;
  completion_queue* receive_cq = nullptr;
  uint32_t pdn = 0;
  uint32_t user_index = 0;
  uint32_t wq_umem = 0;
  uint32_t dbr_umem = 0;
  uint8_t log_msg_max = 0;
  uint32_t mtu_bytes = 0;
  uint8_t retry_count = 0;
  uint8_t rnr_retry = 0;
  uint8_t ack_timeout = 0;
  uint32_t send_psn = 0;
  uint32_t most_fetches = 1; // reads and atomics under way
  uint32_t remote_qpn = 0;
  uint32_t remote_port = 0;
  std::shared_ptr<wire_peer> peer;
  bool ready = false; // is in the engine's list of those with work
  int64_t resume_ns = 0;
  std::unique_ptr<flight> current = std::make_unique<flight>(); // at the head
  std::deque<std::unique_ptr<flight>> behind; // asked before the head was answered, in their order; answers are taken at the head
  std::unique_ptr<flight> spare;
  std::array<uint8_t, EP_MLX5_QPC_BYTES> context{};
};

} // namespace ep::nic
