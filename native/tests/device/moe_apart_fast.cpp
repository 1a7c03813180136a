#include "moe_apart.hpp"

template EP_MOE_APART(fast_context, ibgda_endpoint);
template EP_MOE_APART(fast_context, load_store_endpoint);
template EP_MOE_APART(fast_context, proxy_endpoint);
