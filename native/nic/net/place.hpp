// Where a software NIC is on a network. Its GID says it all: address, port and number, as the GID of a NIC on Ethernet is its IP address. So whoever has connection data has the
// way, too.
#pragma once

#include <array>
#include <cstdint>

#include "nic/mlx5/directory.hpp"

namespace ep::nic::net {

struct place {
  std::array<uint8_t, 4> address{}; // IPv4
  uint16_t port = 0;                // TCP
  uint16_t number = 0;              // in the directory of its own machine
};

// fd65:7000:<address>:<port>:0:0:<number>. Hosts are subnets of their own.
inline gid_bytes gid_of(const place& at) {
  return {0xfd, 0x65, 0x70, 0, at.address[0], at.address[1], at.address[2], at.address[3], static_cast<uint8_t>(at.port >> 8), static_cast<uint8_t>(at.port), 0, 0, 0, 0,
          static_cast<uint8_t>(at.number >> 8), static_cast<uint8_t>(at.number)};
}

// False: not the GID of a software NIC on a network.
inline bool place_of(const gid_bytes& gid, place& at) {
  at.address = {gid[4], gid[5], gid[6], gid[7]};
  at.port = static_cast<uint16_t>(gid[8] << 8 | gid[9]);
  at.number = static_cast<uint16_t>(gid[14] << 8 | gid[15]);
  return at.port != 0 && at.number != 0 && gid == gid_of(at);
}

} // namespace ep::nic::net
