// Who has which address: the subnet manager of the software NICs of one machine. A port takes a number (its LID; its GIDs are made of it) and names its
// segment; a peer finds the segment by any of these addresses.
//
// The directory has no file and no server: entries are abstract sockets, which the kernel removes with the process that made them, and which all
// processes of a network namespace can list. Nothing is left behind after SIGKILL, and a stopped process is still found.
#pragma once

#include <array>
#include <cstdint>

#include "ep/abi/segment.h"
#include "status.hpp"

namespace ep::nic {

using gid_bytes = std::array<uint8_t, 16>;

inline constexpr uint32_t directory_ports = 0xbfff; // the last unicast LID

gid_bytes gid_link_local(uint32_t number); // fe80::/64, from the port's MAC
gid_bytes gid_ipv4(uint32_t number);       // ::ffff:10.109.x.y
std::array<uint8_t, 6> mac_of(uint32_t number);
// 0: not an address of a software NIC.
uint32_t number_of_gid(const gid_bytes& gid);

// One's own entry; gone with this object.
class directory_entry {
 public:
  static result<directory_entry> take(const ep_segment_handle& port);
  directory_entry() = default;
  directory_entry(directory_entry&& other) noexcept;
  directory_entry& operator=(directory_entry&& other) noexcept;
  ~directory_entry();
  uint32_t number() const { return number_; }

 private:
  uint32_t number_ = 0;
  int number_fd_ = -1; // holds the number
  int handle_fd_ = -1; // names the segment
};

// EP_STATUS_STALE_HANDLE with EHOSTUNREACH: nobody has this number (any more).
result<ep_segment_handle> directory_find(uint32_t number);

} // namespace ep::nic
