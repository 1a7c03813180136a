// The DevX commands of abi/mlx5_prm.h, executed byte for byte. Stricter than firmware: a bit that no field has, or a field outside of what its object
// can be, refuses the command.
#pragma once

#include <cstdint>
#include <span>

#include "engine.hpp"

namespace ep::nic {

inline constexpr uint32_t command_gids = 4;     // entries of the GID table; on InfiniBand the first alone is used
inline constexpr uint32_t command_max_log_sq = 15;
inline constexpr uint32_t command_max_log_cq = 22;
inline constexpr uint32_t command_eqn = 0;      // of the only completion vector

struct command_answer {
  uint8_t status = 0;        // EP_MLX5_CMD_STATUS_*; also in `out`
  const char* why = nullptr; // static text; its hash is the syndrome in `out`
  uint32_t object = 0;
};

// Writes the answer into `out`, also that of a refusal. DESTROY_QP, 2RST_QP and 2ERR_QP answer RESOURCE_BUSY while a peer is inside of an access: ask again.
command_answer command_run(engine& nic, std::span<const uint8_t> in, std::span<uint8_t> out);

} // namespace ep::nic
