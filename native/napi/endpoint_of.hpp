// The endpoint of a kernel that runs on the host, by the kind of its memory.
#pragma once

#include "ep/device/efa_endpoint.h"
#include "ep/device/ibgda_endpoint.h"
#include "ep/device/mixed_endpoint.h"

namespace ep::binding {

// Calls `use(endpoint)`. HAZARD: the endpoint refers to the handle.
template <class Use> auto with_endpoint(const ep_memory_handle& memory, Use&& use) {
  switch (memory.header.kind) {
    case EP_MEMORY_PROXY: return use(proxy_endpoint{memory});
    case EP_MEMORY_IBGDA: return use(ibgda_endpoint{memory});
    case EP_MEMORY_EFA: return use(efa_endpoint{memory});
    case EP_MEMORY_MIXED_IBGDA: return use(mixed_endpoint<ibgda_endpoint>{memory, {memory}});
    case EP_MEMORY_MIXED_EFA: return use(mixed_endpoint<efa_endpoint>{memory, {memory}});
    case EP_MEMORY_MIXED_PROXY: return use(mixed_endpoint<proxy_endpoint>{memory, {memory}});
    default: return use(load_store_endpoint{memory});
  }
}

} // namespace ep::binding
