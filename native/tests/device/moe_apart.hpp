// The kernels of experts are compiled once on each executor (moe_apart_*.cpp), not in each of the tests that call them, where it takes half a minute.
#pragma once

#include "moe_case.hpp"

#define EP_MOE_APART(context, endpoint) bool ep::test::moe_kernels::run(ep::context&, const ep::endpoint&, const ep_moe_buffer&, ep::test::moe_case::one_rank&, uint32_t)

extern template EP_MOE_APART(fast_context, ibgda_endpoint);
extern template EP_MOE_APART(fast_context, load_store_endpoint);
extern template EP_MOE_APART(fast_context, proxy_endpoint);
extern template EP_MOE_APART(simt_context, ibgda_endpoint);
extern template EP_MOE_APART(simt_context, load_store_endpoint);
extern template EP_MOE_APART(simt_context, proxy_endpoint);
