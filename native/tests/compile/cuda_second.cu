// A second unit with kernels of its own over every device header, and a third; cuda/kernels.cu is the first.
#include "all_headers.h"

namespace {

template <class Endpoint> __global__ void everything(ep::cuda_environment environment, ep_dispatch_args dispatch, ep_compat_args compat) {
  ep::cuda_context ctx{environment};
  const uint32_t lane = ctx.shuffle(ctx.lane(), 0) + ctx.match_any(ctx.lane());
  ctx.sync_named(1, ctx.lanes());
  if (ctx.ballot(lane == 0) == 0 && ep::attention_dispatch(ctx, Endpoint{dispatch.memory}, dispatch)) {
    ep::compat_dispatch(ctx, Endpoint{compat.memory}, compat);
  }
}

} // namespace

/* The kernels for experts, over one endpoint: each is another minute of the compiler. */
__global__ void experts(ep::cuda_environment environment, ep_moe_buffer buffer, ep_moe_dispatch_args dispatch, ep_moe_combine_args combine) {
  ep::cuda_context ctx{environment};
  const ep::load_store_endpoint endpoint{buffer.memory};
  if (buffer.header.kind == EP_MOE_HIGH_THROUGHPUT) {
    if (!ep::moe_compact_send(ctx, endpoint, buffer, dispatch) || !ep::moe_compact_receive(ctx, endpoint, buffer, dispatch)) return;
  } else if (!ep::moe_dispatch_send(ctx, endpoint, buffer, dispatch) || !ep::moe_dispatch_receive(ctx, endpoint, buffer, dispatch)) {
    return;
  }
  if (ep::moe_combine_send(ctx, endpoint, buffer, combine)) ep::moe_combine_receive(ctx, endpoint, buffer, combine);
}

const void* efa_kernel() { return reinterpret_cast<const void*>(everything<ep::efa_endpoint>); }

const void* second_kernel(bool proxy) {
  return proxy ? reinterpret_cast<const void*>(everything<ep::proxy_endpoint>)
               : reinterpret_cast<const void*>(everything<ep::load_store_endpoint>);
}
