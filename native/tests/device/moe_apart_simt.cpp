#include "moe_apart.hpp"

template EP_MOE_APART(simt_context, ibgda_endpoint);
template EP_MOE_APART(simt_context, load_store_endpoint);
template EP_MOE_APART(simt_context, proxy_endpoint);
