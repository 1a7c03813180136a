// The commands that make RC queue pairs, as bytes for the table's obj_create, obj_modify and general_cmd. Pure: what goes in alone decides what comes out.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "dl/mlx5.hpp"
#include "prm.hpp"

namespace ep::ibgda {

using queue_command = std::array<uint8_t, EP_MLX5_CREATE_QP_IN_BYTES>;
using query_command = std::array<uint8_t, EP_MLX5_CMD_IN_BYTES>;
static_assert(EP_MLX5_CREATE_CQ_IN_BYTES == EP_MLX5_CREATE_QP_IN_BYTES && EP_MLX5_MODIFY_QP_IN_BYTES == EP_MLX5_CREATE_QP_IN_BYTES,
              "one buffer type serves all commands with a context");

// A run of bytes in a registered umem.
struct umem_place {
  uint32_t umem_id = 0;
  uint64_t offset = 0;
};

struct cq_spec {
  umem_place ring; // 64 << log_size bytes, filled with 0xff: opcode "invalid" in every entry
  umem_place doorbell_record;
  uint32_t log_size = 0;
  uint32_t uar_page = 0;
  uint32_t eqn = 0;
  // Every completion overwrites entry 0, and the NIC never looks for room. Otherwise the CQ is a ring that its consumer index keeps from overrun.
  bool collapsed = true;
};

struct qp_spec {
  umem_place ring; // 64 << log_depth bytes
  umem_place doorbell_record;
  uint32_t log_depth = 0; // of the send queue, in WQEBBs; there is no receive queue
  uint32_t pdn = 0;
  uint32_t uar_page = 0;
  uint32_t cqn = 0;
  uint32_t user_index = 0;
};

// What both ends of a connection agree on, and the way to the other.
struct connection_spec {
  uint32_t qpn = 0;
  uint8_t port = 1;
  uint8_t mtu = EP_MLX5_MTU_4096;
  uint32_t remote_qpn = 0;
  uint32_t send_psn = 0; // of the first packet sent; 24 bits
  uint32_t recv_psn = 0; // of the first packet awaited: what the peer has as send_psn
  dl::mlx5_route route;
  dl::mlx5_path path;     // of the route, by resolve_ah
  uint16_t udp_sport = 0; // Ethernet: 0xc000 or more; packets of queue pairs with different ones may take different ways
  uint8_t ack_timeout = 18; // a try waits 4.096 us << ack_timeout: about a second
  uint8_t retry_count = 7; // tries after the first, 0..7
  uint8_t rnr_retry = 7;
  uint8_t log_max_message = 30;
  uint8_t log_outstanding = 4; // 1 << it atomics and reads under way, each way
};

query_command hca_cap_command(uint16_t capability);
queue_command cq_create_command(const cq_spec& spec);
queue_command qp_create_command(const qp_spec& spec);
queue_command qp_init_command(const connection_spec& spec);
queue_command qp_rtr_command(const connection_spec& spec, dl::mlx5_link link);
queue_command qp_rts_command(const connection_spec& spec);
// EP_MLX5_CMD_2ERR_QP, _2RST_QP, _QUERY_QP: commands that name a queue and say no more.
query_command object_command(uint16_t opcode, uint32_t number);

// "status 0x3 (bad parameter), syndrome 0x0012ab34"
std::string command_answer_text(std::span<const uint8_t> out);

} // namespace ep::ibgda
