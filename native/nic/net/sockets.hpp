// TCP sockets of software NICs: IPv4, non-blocking, from and to the address of one interface.
#pragma once

#include <string>

#include "status.hpp"
#include "place.hpp"

namespace ep::nic::net {

// Binds and listens; `own` gets address and port. EP_STATUS_INVALID: not the address of one interface. EP_STATUS_SYSTEM: it cannot be bound.
result<int> listen_at(const std::string& address, place& own);
// Begins to connect from the address of `own`: the peer's way back is the same network. -1: errno says why.
int dial(const place& own, const place& to);
// One that has come. -1: errno says why.
int accept_from(int listener);

} // namespace ep::nic::net
