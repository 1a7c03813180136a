// A second unit with kernels of its own over every device header; cuda/kernels.cu is the first.
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

/* Every way to post, every request, by lanes of a warp and by one. */
template <class Post> __global__ void posts(ep::cuda_environment environment, ep_memory_handle memory, ep_kernel_status* status) {
  ep::cuda_context ctx{environment};
  const ep::ibgda_endpoint_of<Post> endpoint{memory};
  ep_ibgda_qp& qp = endpoint.qp_of(0, ctx.block());
  const auto build = [&](uint64_t i, const ep::mlx5_writer& writer) {
    const ep::mlx5_place to = endpoint.remote_data(0, i * 8);
    const ep::mlx5_place from{qp.response, qp.response_lkey};
    switch (i) {
      case 0: return writer.write(to, from, 8);
      case 1: return writer.write_immediate(to, from, 8, 7);
      case 2: return writer.write_inline(to, &memory, 8);
      case 3: return writer.read(to, from, 8);
      case 4: return writer.fetch_add4(to, 1, from);
      case 5: return writer.compare_swap8(to, 1, 2, from);
      default: return writer.fetch_add8(to, 1, from);
    }
  };
  const ep::block_coop<ep::cuda_context> block{ctx};
  const ep::warp_coop<ep::cuda_context> warp{ctx};
  if (endpoint.post(ctx, ep::warp_poster<ep::cuda_context>{ctx}, qp, 7, build, status) && ctx.lane() == 0) {
    endpoint.round_trip(ctx, qp, build, status);
  }
  if (endpoint.put_rows(ctx, warp, 0, 0, &memory, 64, 64, 1, false, 0, 1, status)) endpoint.quiet(ctx, block, 0, status);
}

const void* post_kernel(uint32_t way) {
  if (way == 0) return reinterpret_cast<const void*>(posts<ep::post_in_turn>);
  return way == 1 ? reinterpret_cast<const void*>(posts<ep::post_by_ringer>) : reinterpret_cast<const void*>(posts<ep::post_under_lock>);
}

const void* second_kernel(bool proxy) {
  return proxy ? reinterpret_cast<const void*>(everything<ep::proxy_endpoint>)
               : reinterpret_cast<const void*>(everything<ep::load_store_endpoint>);
}
