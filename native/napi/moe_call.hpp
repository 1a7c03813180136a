// What JS says of one call of a buffer for experts, wherever its kernels run.
#pragma once

#include <functional>

#include "moe_wraps.hpp"

namespace ep::binding {

constexpr uint32_t send_half = 1;
constexpr uint32_t receive_half = 2;

// A call as it is read. Before: `of`, `own_data` and `find`.
struct moe_job {
  std::shared_ptr<const moe_contents> of;
  uint64_t own_data = 0; // address of this rank's part of the symmetric memory
  std::function<operand(Napi::Value, const char*)> find; // what kernels can read
  std::shared_ptr<const moe_routing_wrap::contents> routing;
  std::shared_ptr<const moe_routing_wrap::contents> report;
  std::vector<std::shared_ptr<const void>> keep;
  ep_moe_buffer buffer{}; // its candidates are the caller's to fill in
  double timeout_ms = -1;
  // A part of a graph: nobody here knows how many rows each replay will bring.
  bool captured = false;
  bool finds_choices = false; // they lie where kernels read them, which is the caller's, not with the routing
};

// {routing, report, slot, epoch, timeoutMs, tokens, captured?, choices?, choicesOffset}
void read_call(moe_job& job, ep_moe_call& call, const Napi::Object& description);
// Of a job whose call was read: {halves, flags, dtype, x, xOffset, xStride, out, outOffset, scales?, scalesOffset, totals, totalsOffset}
void read_dispatch(moe_job& job, ep_moe_dispatch_args& args, uint32_t& halves, const Napi::Object& from);
// {halves, flags, dtype, y, yOffset, yStride, yRows, out, outOffset, weights?, weightsOffset, bias0?, bias0Offset, …}
void read_combine(moe_job& job, ep_moe_combine_args& args, uint32_t& halves, const Napi::Object& from);

} // namespace ep::binding
