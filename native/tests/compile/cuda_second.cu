// A second unit with kernels of its own over every device header; attention_dispatch.cu is the first.
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

const void* second_kernel(bool proxy) {
  return proxy ? reinterpret_cast<const void*>(everything<ep::proxy_endpoint>)
               : reinterpret_cast<const void*>(everything<ep::load_store_endpoint>);
}
