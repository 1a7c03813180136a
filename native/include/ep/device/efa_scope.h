/* Release scopes of GIN calls. */
#ifndef EP_DEVICE_EFA_SCOPE_H
#define EP_DEVICE_EFA_SCOPE_H

#include "config.h"

EP_MACHINE_BEGIN

/* GIN's numbers: the smaller, the wider. */
enum class gin_scope : uint32_t { system = 0, device = 1, block = 2, thread = 3 };

/* Whether a call must release to the system itself: its transport needs that (`required`), and the caller has released to something narrower (`given`).
 * HAZARD: not `given < required`. System is 0, so nothing is below it, and the fence would never be made. */
EP_HD bool gin_requires_system_fence(gin_scope given, gin_scope required) {
  return required == gin_scope::system && static_cast<uint32_t>(given) > static_cast<uint32_t>(gin_scope::system);
}

EP_MACHINE_END

#endif
