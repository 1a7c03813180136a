// The other half of cuda_second.cu: requests of NICs. Each half is minutes of the compiler.
#include "all_headers.h"

#include <type_traits>

/* T21: what a way of sharing is enough for. On the host all but `thread` are alike. */
template <uint32_t Sharing, cuda::thread_scope Scope>
constexpr bool words_have_scope = std::is_same_v<typename ep::poster_words<Sharing>::ref, cuda::atomic_ref<uint64_t, Scope>>;
static_assert(words_have_scope<EP_EFA_SHARE_DEVICE, cuda::thread_scope_device> && words_have_scope<EP_EFA_SHARE_BLOCK, cuda::thread_scope_block>);

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
    endpoint.masked_swap(ctx, qp, endpoint.remote_data(0, 0), 1, 1, 2, 3, {qp.response, qp.response_lkey}, status);
  }
  if (endpoint.put_rows(ctx, warp, 0, 0, &memory, 64, 64, 1, false, 0, 1, status)) endpoint.quiet(ctx, block, 0, status);
}

const void* post_kernel(uint32_t way) {
  if (way == 0) return reinterpret_cast<const void*>(posts<ep::post_in_turn>);
  return way == 1 ? reinterpret_cast<const void*>(posts<ep::post_by_ringer>) : reinterpret_cast<const void*>(posts<ep::post_under_lock>);
}

/* Every call of the GIN facade, ours and the pull request's. */
template <class Gin, class Device, class Memory>
__global__ void gin_calls(ep::cuda_environment environment, Device* device, const Memory* memory, ep_kernel_status* status) {
  ep::cuda_context ctx{environment};
  const Gin gin{*device};
  const ep::gin_team team{nullptr, 2};
  const ep::block_coop<ep::cuda_context> block{ctx};
  const ep::thread_coop<ep::cuda_context> thread{ctx};
  if (!gin.put(ctx, block, team, 1, *memory, 0, *memory, 64, 64, ep::gin_signal_inc{0}, ep::gin_counter_inc{0}, {}, status)) return;
  gin.put_lanes(ctx, ctx.lane() % 3 != 0, team, 1, *memory, 0, *memory, 64, 64, ep::gin_signal_add{0, 1}, ep::gin_no_action{}, {}, status);
  gin.put_value(ctx, thread, team, 1, *memory, 0, uint16_t{7}, ep::gin_signal_inc{0}, {}, status);
  gin.signal(ctx, block, team, 1, ep::gin_signal_inc{0}, {}, status);
  gin.flush(ctx, block, status);
  gin.wait_signal(ctx, block, 0, gin.read_signal(ctx, 0), status);
  gin.wait_counter(ctx, block, 0, gin.read_counter(ctx, 0), status);
  gin.reset_signal(ctx, block, 0);
  gin.reset_counter(ctx, block, 0);
}

__global__ void gin_list(ep::cuda_environment environment, ep_efa_device* device, const ep_efa_memory* memory, ep_gin_step* steps, ep_kernel_status* status) {
  ep::cuda_context ctx{environment};
  ep::gin_program(ctx, ep::block_coop<ep::cuda_context>{ctx}, ep::efa_gin<EP_EFA_SHARE_BLOCK>{*device}, *memory, steps, 3, status);
}

const void* gin_kernel(bool ours) {
  return ours ? reinterpret_cast<const void*>(gin_calls<ep::efa_gin<>, ep_efa_device, ep_efa_memory>)
              : reinterpret_cast<const void*>(gin_calls<ep::efa_pr_gin, ep_efa_pr_device, ep_efa_pr_mr>);
}
