// Which GID of a port a queue pair uses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dl/mlx5.hpp"

namespace ep::ibgda {

struct chosen_gid {
  uint32_t index = 0;
  dl::mlx5_gid gid;
};

// The rule. InfiniBand: the first GID of type InfiniBand. Ethernet: the first RoCE v2 GID that carries an IPv4 address, because those are routed in most
// clusters; else the first RoCE v2 one that is routable; else the first RoCE v2 one. RoCE v1 is never taken by the rule: it does not cross routers.
// `wanted` overrides the rule; it must name an entry that is there and fits the port's link.
// EP_STATUS_INVALID: `wanted` does not fit. EP_STATUS_SYSTEM with ENODATA: the port has no usable GID; the message lists what it has.
result<chosen_gid> gid_choose(dl::mlx5_device& device, uint8_t port, const dl::mlx5_port& facts, std::optional<uint32_t> wanted);

// "fe80:0000:0000:0000:0000:0000:0000:0001", with IPv4 addresses as "::ffff:10.0.0.1".
std::string gid_text(const std::array<uint8_t, 16>& raw);

} // namespace ep::ibgda
