// The commands of queue pairs; see commands.hpp.
#pragma once

#include "commands.hpp"

namespace ep::nic {

command_answer create_qp(engine& nic, std::span<const uint8_t> in);
// The three transitions, 2ERR and 2RST.
command_answer modify_qp(engine& nic, uint32_t opcode, std::span<const uint8_t> in);
command_answer destroy_qp(engine& nic, uint32_t qpn);
command_answer query_qp(engine& nic, uint32_t qpn, std::span<uint8_t> out);

// Whether all bits that are set belong to a field of CREATE_QP and the transitions.
bool command_qp_bits_known(std::span<const uint8_t> in);

inline constexpr const char* reserved_text = "a reserved bit is set";
inline command_answer refuse(uint8_t status, const char* why) { return {status, why, 0}; }
inline command_answer bad(const char* why) { return refuse(EP_MLX5_CMD_STATUS_BAD_PARAM, why); }
inline command_answer missing(const char* why) { return refuse(EP_MLX5_CMD_STATUS_BAD_RESOURCE, why); }

} // namespace ep::nic
