// The calls of a buffer for experts: what JS describes becomes the arguments of a kernel, every bound checked.
#include "moe_call.hpp"

#include "ep/device/moe_cast.h"

namespace ep::binding {

namespace {

// Rows of a tensor at `name`, `nameOffset`, `nameStride`.
uint64_t rows_of(moe_job& job, const Napi::Object& from, const std::string& name, uint64_t rows, uint64_t row_bytes, uint64_t stride) {
  const Napi::Env env = from.Env();
  const operand found = job.find(from.Get(name), name.c_str());
  const uint64_t offset = arg_size(from.Get(name + "Offset"), "offset");
  if (offset > found.byte_length || (rows != 0 && (!rows_fit(rows - 1, stride, row_bytes, found.byte_length - offset) || (stride < row_bytes && stride != 0)))) {
    throw_invalid(env, name + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes, " + std::to_string(stride) + " from row to row, exceed " +
                           std::to_string(found.byte_length) + " bytes from byte " + std::to_string(offset));
  }
  job.keep.push_back(found.keep);
  return found.address + offset;
}

} // namespace

void read_call(moe_job& job, ep_moe_call& call, const Napi::Object& description) {
  const Napi::Env env = description.Env();
  job.routing = unwrap<moe_routing_wrap>(description.Get("routing"), "routing").native;
  if (job.routing->of != job.of) throw_invalid(env, "this routing belongs to another buffer");
  job.buffer = job.of->buffer;
  job.timeout_ms = arg_double(description.Get("timeoutMs"), "timeoutMs");
  call.header = {EP_MAGIC_MOE_CALL, EP_ABI_MAJOR, EP_ABI_MINOR, job.of->buffer.header.kind, sizeof(ep_moe_call)};
  const uint64_t slot = arg_size(description.Get("slot"), "slot");
  const uint64_t epoch = arg_size(description.Get("epoch"), "epoch");
  if (slot >= job.buffer.calls) throw_invalid(env, "slot " + std::to_string(slot) + " is not one of " + std::to_string(job.buffer.calls));
  if (epoch == 0 || epoch > UINT32_MAX) throw_failure(env, {EP_STATUS_INVALID, 0, "a slot counts 2^32 - 1 calls; open the buffer anew"});
  call.slot = static_cast<uint32_t>(slot);
  call.epoch = static_cast<uint32_t>(epoch);
  call.routing = job.routing->routing;
  const uint64_t tokens = arg_size(description.Get("tokens"), "tokens");
  if (tokens > job.buffer.max_tokens) {
    throw_invalid(env, std::to_string(tokens) + " tokens, the buffer takes at most " + std::to_string(job.buffer.max_tokens));
  }
  call.routing.tokens = static_cast<uint32_t>(tokens);
  job.captured = description.Get("captured").ToBoolean();
  job.finds_choices = !description.Get("choices").IsUndefined();
  if (job.finds_choices) {
    if (!job.captured) throw_invalid(env, "choices on a device are those of a call that is captured");
    const uint64_t row_bytes = uint64_t{job.buffer.top_k} * sizeof(int32_t);
    call.routing.topk = rows_of(job, description, "choices", tokens, row_bytes, row_bytes);
  }
  // Of the call, also where several calls under way share a routing.
  job.report = unwrap<moe_routing_wrap>(description.Get("report"), "report").native;
  if (job.report->of != job.of) throw_invalid(env, "this report belongs to another buffer");
  call.ranks = job.report->ranks;
  call.wait_ns = job.report->wait_ns;
}

namespace {

uint32_t dtype_of(const Napi::Object& description) {
  const uint64_t dtype = arg_size(description.Get("dtype"), "dtype");
  if (dtype < EP_MOE_F32 || dtype > EP_MOE_BF16) throw_invalid(description.Env(), "dtype " + std::to_string(dtype) + " is not one of 1..3");
  return static_cast<uint32_t>(dtype);
}

uint32_t halves_of(const Napi::Object& description) {
  const uint64_t halves = arg_size(description.Get("halves"), "halves");
  if (halves < send_half || halves > (send_half | receive_half)) throw_invalid(description.Env(), "halves " + std::to_string(halves) + " is not in 1..3");
  return static_cast<uint32_t>(halves);
}

// HAZARD: kernels follow these numbers without a look; a choice beyond the experts would read behind the tables, and a token that names an expert twice could
// give it more rows than it has room for.
void check_choices(const moe_job& job, Napi::Env env, uint32_t tokens) {
  const auto* topk = reinterpret_cast<const int32_t*>(job.routing->routing.topk);
  const auto experts = static_cast<int32_t>(job.buffer.experts.experts);
  for (uint64_t i = 0; i < uint64_t{tokens} * job.buffer.top_k; ++i) {
    if (topk[i] < -1 || topk[i] >= experts) {
      throw_invalid(env, "topkIdx[" + std::to_string(i) + "] is " + std::to_string(topk[i]) + ", experts are 0.." + std::to_string(experts - 1) + ", -1 is none");
    }
    for (uint64_t before = i - i % job.buffer.top_k; topk[i] >= 0 && before < i; ++before) {
      if (topk[before] == topk[i]) {
        throw_invalid(env, "topkIdx[" + std::to_string(i) + "] is " + std::to_string(topk[i]) + ", as another choice of its token is; expected each expert once");
      }
    }
  }
}

} // namespace

void read_dispatch(moe_job& job, ep_moe_dispatch_args& args, uint32_t& halves, const Napi::Object& from) {
  const Napi::Env env = from.Env();
  halves = halves_of(from);
  args.call.flags = static_cast<uint32_t>(arg_size(from.Get("flags"), "flags"));
  args.dtype = dtype_of(from);
  const ep_moe_buffer& b = job.buffer;
  if (job.captured && !job.finds_choices && (args.call.flags & EP_MOE_CACHED) == 0) throw_invalid(env, "a call that is captured needs choices on its device, or a kept layout");
  // Of those kernels take what is no expert for none, and look at whether rows fit.
  if ((halves & send_half) != 0 && (args.call.flags & EP_MOE_CACHED) == 0 && !job.captured) check_choices(job, env, args.call.routing.tokens);
  const bool cast = args.dtype != b.payload;
  if (cast && b.payload < EP_MOE_F8_F32) throw_invalid(env, "rows of another type than the payload are cast to e4m3 only");
  if (cast && b.staged_tokens.stride < b.max_tokens * b.row_bytes) throw_invalid(env, "a cast needs a buffer with staged parts");
  args.x_stride_bytes = arg_size(from.Get("xStride"), "xStride");
  args.x = rows_of(job, from, "x", args.call.routing.tokens, payload_bytes(args.dtype, b.hidden), args.x_stride_bytes);
  const uint64_t codes = payload_code_bytes(b.payload, b.hidden);
  if (b.header.kind == EP_MOE_HIGH_THROUGHPUT) {
    // In place: peers write rows where they are handed out.
    args.out = job.own_data + b.received.offset + args.call.slot * b.received.stride;
    args.out_stride_bytes = b.row_bytes;
  } else {
    args.out_stride_bytes = codes;
    args.out = rows_of(job, from, "out", uint64_t{job.of->local_experts} * job.of->world_size * b.max_tokens, codes, codes);
  }
  args.scale_group = 1;
  if (b.payload >= EP_MOE_F8_F32) {
    const uint64_t rows = b.header.kind == EP_MOE_HIGH_THROUGHPUT ? b.recv_rows : uint64_t{job.of->local_experts} * job.of->world_size * b.max_tokens;
    const uint64_t bytes = payload_scale_bytes(b.payload);
    args.scale_row_stride = 1;
    args.scale_block_stride = rows;
    args.out_scales = rows_of(job, from, "scales", payload_blocks(b.hidden), rows * bytes, rows * bytes);
  }
  args.totals = rows_of(job, from, "totals", job.of->local_experts, sizeof(uint64_t), sizeof(uint64_t));
}

void read_combine(moe_job& job, ep_moe_combine_args& args, uint32_t& halves, const Napi::Object& from) {
  const Napi::Env env = from.Env();
  halves = halves_of(from);
  args.call.flags = static_cast<uint32_t>(arg_size(from.Get("flags"), "flags"));
  args.dtype = dtype_of(from);
  const ep_moe_buffer& b = job.buffer;
  if (args.dtype != b.result_payload && b.result_payload != EP_MOE_LOGFMT10) throw_invalid(env, "results of another type than their payload are cast to LogFMT-10 only");
  if (args.dtype != b.result_payload && b.staged_results.stride == 0 && b.recv_rows != 0) throw_invalid(env, "a cast needs a buffer with staged parts");
  const uint64_t row_bytes = payload_bytes(args.dtype, b.hidden);
  args.y_stride_bytes = arg_size(from.Get("yStride"), "yStride");
  const uint64_t rows = arg_size(from.Get("yRows"), "yRows");
  args.y = rows_of(job, from, "y", rows, row_bytes, args.y_stride_bytes);
  const uint64_t offered = job.own_data + b.staged_results.offset + args.call.slot * b.staged_results.stride;
  args.call.flags &= ~EP_MOE_OFFERED;
  if ((b.flags & EP_MOE_ZERO_COPY) != 0 && args.y == offered && args.y_stride_bytes == b.result_row_bytes) args.call.flags |= EP_MOE_OFFERED;
  const uint32_t tokens = args.call.routing.tokens;
  args.out_stride_bytes = row_bytes;
  args.out = rows_of(job, from, "out", tokens, row_bytes, row_bytes);
  if (!from.Get("weights").IsUndefined()) args.weights = rows_of(job, from, "weights", tokens, b.top_k * sizeof(float), b.top_k * sizeof(float));
  for (uint32_t i = 0; i < 2; ++i) {
    const std::string name = "bias" + std::to_string(i);
    if (!from.Get(name).IsUndefined()) args.bias[i] = rows_of(job, from, name, tokens, row_bytes, row_bytes);
  }
  if (job.captured) {
    const uint64_t room = b.header.kind == EP_MOE_HIGH_THROUGHPUT ? b.recv_rows : uint64_t{job.of->local_experts} * job.of->world_size * b.max_tokens;
    if (rows < room) throw_invalid(env, "y has " + std::to_string(rows) + " rows, fewer than the " + std::to_string(room) + " that a replay may bring");
    return;
  }
  // HAZARD: kernels read the rows of y that the dispatch has placed, which its caller cannot be trusted with.
  const auto* block_start = reinterpret_cast<const uint32_t*>(job.routing->routing.block_start);
  const auto* counts = reinterpret_cast<const int32_t*>(job.routing->routing.recv_count);
  for (uint32_t e = 0; e < job.of->local_experts; ++e) {
    if (block_start[e] + static_cast<uint64_t>(counts[e]) > rows) throw_invalid(env, "y has " + std::to_string(rows) + " rows, fewer than were dispatched");
  }
}

} // namespace ep::binding
