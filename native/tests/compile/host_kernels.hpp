// Every kernel on every host context and endpoint, instantiated into two translation units that are linked together (run.mjs).
#pragma once

#include "all_headers.h"
#include "core/device/compat.hpp"
#include "core/device/fast.hpp"
#include "core/simt/simt.hpp"

namespace compile_test {

template <class Ctx, class Endpoint> bool kernels(Ctx& ctx, const ep_dispatch_args& dispatch, const ep_compat_args& compat) {
  const ep_replica_sum_args sums{};
  return ep::attention_gradient(ctx, Endpoint{dispatch.memory}, dispatch, &sums, 1) &&
         ep::compat_dispatch(ctx, Endpoint{compat.memory}, compat);
}

template <class Ctx> bool group(Ctx& ctx, const ep_group_args& args) { return ep::group_call(ctx, ep::load_store_endpoint{args.memory}, args); }

template <class Ctx, class Endpoint> bool experts(Ctx& ctx, const ep_moe_buffer& buffer, const ep_moe_dispatch_args& dispatch, const ep_moe_combine_args& combine) {
  const Endpoint endpoint{buffer.memory};
  return ep::moe_dispatch_send(ctx, endpoint, buffer, dispatch) && ep::moe_dispatch_receive(ctx, endpoint, buffer, dispatch) &&
         ep::moe_compact_send(ctx, endpoint, buffer, dispatch) && ep::moe_compact_receive(ctx, endpoint, buffer, dispatch) &&
         ep::moe_combine_send(ctx, endpoint, buffer, combine) && ep::moe_combine_receive(ctx, endpoint, buffer, combine) &&
         ep::moe_release(ctx, endpoint, buffer, combine.call) && ep::moe_release_uncombined(ctx, endpoint, buffer, combine.call);
}

using experts_of_fast = bool (*)(ep::fast_context&, const ep_moe_buffer&, const ep_moe_dispatch_args&, const ep_moe_combine_args&);
using experts_of_simt = bool (*)(ep::simt_context&, const ep_moe_buffer&, const ep_moe_dispatch_args&, const ep_moe_combine_args&);
using kernel_of_fast = bool (*)(ep::fast_context&, const ep_dispatch_args&, const ep_compat_args&);
using kernel_of_simt = bool (*)(ep::simt_context&, const ep_dispatch_args&, const ep_compat_args&);

// What a unit sees: the kernels' addresses (so that they are emitted), and results of inline code that also exists for the GPU.
struct unit_view {
  kernel_of_fast fast[4];
  kernel_of_simt simt[4];
  experts_of_fast fast_experts[3];
  experts_of_simt simt_experts[3];
  bool (*fast_group)(ep::fast_context&, const ep_group_args&);
  bool (*simt_group)(ep::simt_context&, const ep_group_args&);
  uint16_t bf16_of_third;
  uint16_t f16_of_third;
};

inline unit_view view() {
  return {{kernels<ep::fast_context, ep::load_store_endpoint>, kernels<ep::fast_context, ep::proxy_endpoint>,
           kernels<ep::fast_context, ep::ibgda_endpoint>, kernels<ep::fast_context, ep::efa_endpoint>},
          {kernels<ep::simt_context, ep::load_store_endpoint>, kernels<ep::simt_context, ep::proxy_endpoint>,
           kernels<ep::simt_context, ep::ibgda_endpoint>, kernels<ep::simt_context, ep::efa_endpoint>},
          {experts<ep::fast_context, ep::load_store_endpoint>, experts<ep::fast_context, ep::proxy_endpoint>,
           experts<ep::fast_context, ep::ibgda_endpoint>},
          {experts<ep::simt_context, ep::load_store_endpoint>, experts<ep::simt_context, ep::proxy_endpoint>,
           experts<ep::simt_context, ep::ibgda_endpoint>},
          group<ep::fast_context>,
          group<ep::simt_context>,
          ep::number_bf16::store(1.0f / 3.0f),
          ep::number_f16::store(1.0f / 3.0f)};
}

unit_view first_view();
unit_view second_view();

} // namespace compile_test
