// The calls of a buffer for experts: what JS describes becomes the arguments of a kernel, every bound checked.
#include "moe_wraps.hpp"

#include <cstring>

#include "ep/device/ibgda_endpoint.h"
#include "ep/device/moe_combine.h"
#include "ep/device/moe_compact.h"
#include "ep/device/moe_dispatch.h"
#include "hand_over.hpp"

namespace ep::binding {
namespace {

constexpr uint32_t send_half = 1;
constexpr uint32_t receive_half = 2;

// Everything that a running half points into. Owned by its task.
struct moe_job {
  std::shared_ptr<moe_contents> of;
  std::shared_ptr<symmetric_memory> memory;
  std::shared_ptr<const moe_candidates> candidates;
  std::shared_ptr<const moe_routing_wrap::contents> routing;
  std::shared_ptr<const moe_routing_wrap::contents> report;
  std::vector<std::shared_ptr<const void>> keep;
  ep_moe_buffer buffer{};
  ep_kernel_status status{};
  double timeout_ms = -1;
};

struct dispatch_half : moe_job {
  ep_moe_dispatch_args args{};
  uint32_t halves = 0;
  void start() {
    if (timeout_ms < 0) return;
    const bool low_latency = buffer.header.kind == EP_MOE_LOW_LATENCY;
    args.call.credits_by_ns = static_cast<uint64_t>(deadline_after(low_latency ? timeout_ms / 2 : timeout_ms / 4));
    args.call.counts_by_ns = static_cast<uint64_t>(deadline_after(timeout_ms / 2));
    args.call.answers_by_ns = static_cast<uint64_t>(deadline_after(timeout_ms * 3 / 4));
  }
  template <class Context, class Endpoint> bool kernel(Context& context, const Endpoint& endpoint) const {
    if (buffer.header.kind == EP_MOE_LOW_LATENCY) {
      if ((halves & send_half) != 0 && !moe_dispatch_send(context, endpoint, buffer, args)) return false;
      return (halves & receive_half) == 0 || moe_dispatch_receive(context, endpoint, buffer, args);
    }
    if ((halves & send_half) != 0 && !moe_compact_send(context, endpoint, buffer, args)) return false;
    return (halves & receive_half) == 0 || moe_compact_receive(context, endpoint, buffer, args);
  }
};

struct combine_half : moe_job {
  ep_moe_combine_args args{};
  uint32_t halves = 0;
  void start() {}
  template <class Context, class Endpoint> bool kernel(Context& context, const Endpoint& endpoint) const {
    if ((halves & send_half) != 0 && !moe_combine_send(context, endpoint, buffer, args)) return false;
    if ((halves & receive_half) == 0) return true;
    // Low latency has granted its credit at the end of dispatch.
    return moe_combine_receive(context, endpoint, buffer, args) &&
           (buffer.header.kind == EP_MOE_LOW_LATENCY || moe_release(context, endpoint, buffer, args.call));
  }
};

struct slot_release : moe_job {
  ep_moe_call call{};
  void start() {}
  template <class Context, class Endpoint> bool kernel(Context& context, const Endpoint& endpoint) const {
    return moe_release(context, endpoint, buffer, call);
  }
};

// HAZARD: after the kernel, whoever sends through a NIC waits until it reads no source any more, and finds the queue pairs to dead ranks broken. That is one more way in
// which a rank is found missing, and no failure of the call; but what came from it is placed or summed already, so it is missing from the next half on.
template <class Job> outcome run_job(Job& job, const std::atomic<uint32_t>& cancel) {
  job.start();
  auto* ranks = reinterpret_cast<uint64_t*>(job.report->ranks);
  for (uint32_t rank = 0; rank < job.of->world_size; ++rank) {
    if (ranks[rank] == EP_MOE_RANK_LEAVES) ranks[rank] = EP_STATUS_PEER_LOST;
  }
  ep_kernel_status after{};
  outcome end = run_kernel(*job.memory, job.of->simt, job.timeout_ms, cancel, after, [&job](auto& context) {
    const ep_memory_handle& memory = job.buffer.memory;
    switch (memory.header.kind) {
      case EP_MEMORY_PROXY: return job.kernel(context, proxy_endpoint{memory});
      case EP_MEMORY_IBGDA: return job.kernel(context, ibgda_endpoint{memory});
      default: return job.kernel(context, load_store_endpoint{memory});
    }
  });
  const bool broken_pair = after.status != EP_STATUS_OK && after.stage == EP_STAGE_NIC && after.rank >= 0 && !moe_own_nic(after);
  if (broken_pair && ranks[after.rank] == 0) ranks[after.rank] = EP_MOE_RANK_LEAVES;
  const ep_kernel_status& said = job.status.status != EP_STATUS_OK || broken_pair ? job.status : after;
  end.status = said.status;
  end.rank = said.rank;
  end.stage = said.stage;
  end.expected = said.expected;
  end.found = said.found;
  return end;
}

template <class Job> Napi::Value launch_job(const Napi::CallbackInfo& info, std::shared_ptr<Job> job) {
  auto& stream = unwrap<stream_wrap>(info[0], "stream");
  return Napi::Number::New(info.Env(), static_cast<double>(stream.launch(info.Env(), [job](const std::atomic<uint32_t>& cancel) { return run_job(*job, cancel); })));
}

// What every call has: {routing, report, slot, epoch, timeoutMs}.
void begin_job(moe_job& job, ep_moe_call& call, const moe_buffer_wrap& wrap, const Napi::Object& description) {
  const Napi::Env env = description.Env();
  job.of = wrap.native;
  job.candidates = wrap.candidates;
  job.memory = job.of->memory.lock();
  if (!job.memory || !job.memory->connected()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  if (!job.candidates) throw_invalid(env, "a buffer takes calls after setCandidates()");
  job.routing = unwrap<moe_routing_wrap>(description.Get("routing"), "routing").native;
  if (job.routing->of != job.of) throw_invalid(env, "this routing belongs to another buffer");
  job.buffer = job.of->buffer;
  job.buffer.experts.candidate_begin = address_of(job.candidates->begin.data());
  job.buffer.experts.candidates = address_of(job.candidates->replicas.data());
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
  // Of the call, also where several calls under way share a routing.
  job.report = unwrap<moe_routing_wrap>(description.Get("report"), "report").native;
  if (job.report->of != job.of) throw_invalid(env, "this report belongs to another buffer");
  call.ranks = job.report->ranks;
  call.wait_ns = job.report->wait_ns;
}

// Rows of a tensor at `name`, `nameOffset`, `nameStride`. Registered, so that a NIC may read them.
uint64_t rows_of(moe_job& job, const Napi::Object& from, const std::string& name, uint64_t rows, uint64_t row_bytes, uint64_t stride) {
  const Napi::Env env = from.Env();
  const operand found = operand_of(from.Get(name), name.c_str());
  const uint64_t offset = arg_size(from.Get(name + "Offset"), "offset");
  if (offset > found.byte_length || (rows != 0 && (!rows_fit(rows - 1, stride, row_bytes, found.byte_length - offset) || (stride < row_bytes && stride != 0)))) {
    throw_invalid(env, name + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes, " + std::to_string(stride) + " from row to row, exceed " +
                           std::to_string(found.byte_length) + " bytes from byte " + std::to_string(offset));
  }
  auto ready = job.memory->prepare_source(found.address, found.byte_length, found.keep);
  value_or_throw(env, ready);
  job.keep.push_back(found.keep);
  return found.address + offset;
}

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

std::shared_ptr<dispatch_half> dispatch_of(const moe_buffer_wrap& wrap, const Napi::Object& from);
std::shared_ptr<combine_half> combine_of(const moe_buffer_wrap& wrap, const Napi::Object& from);

} // namespace

// (stream, {routing, halves, slot, epoch, timeoutMs, tokens, flags, dtype, x, xOffset, xStride, out, outOffset, scales?, scalesOffset, scaleRowStride,
//  scaleBlockStride, totals?, totalsOffset}) -> operation
Napi::Value moe_buffer_wrap::dispatch(const Napi::CallbackInfo& info) { return launch_job(info, dispatch_of(*this, info[1].As<Napi::Object>())); }

namespace {

uint32_t flags_of(const Napi::Object& from, uint64_t row_bytes) {
  const auto flags = static_cast<uint32_t>(arg_size(from.Get("flags"), "flags"));
  return hands_over_past_caches(row_bytes) ? flags | EP_MOE_NON_TEMPORAL : flags;
}

std::shared_ptr<dispatch_half> dispatch_of(const moe_buffer_wrap& wrap, const Napi::Object& from) {
  const Napi::Env env = from.Env();
  auto job = std::make_shared<dispatch_half>();
  ep_moe_dispatch_args& args = job->args;
  begin_job(*job, args.call, wrap, from);
  job->halves = halves_of(from);
  args.call.flags = flags_of(from, job->buffer.row_bytes);
  args.call.status = address_of(&job->status);
  args.dtype = dtype_of(from);
  const ep_moe_buffer& b = job->buffer;
  if ((job->halves & send_half) != 0 && (args.call.flags & EP_MOE_CACHED) == 0) check_choices(*job, env, args.call.routing.tokens);
  const bool cast = args.dtype != b.payload;
  if (cast && b.payload < EP_MOE_F8_F32) throw_invalid(env, "rows of another type than the payload are cast to e4m3 only");
  if (cast && b.staged_tokens.stride < b.max_tokens * b.row_bytes) throw_invalid(env, "a cast needs a buffer with staged parts");
  args.x_stride_bytes = arg_size(from.Get("xStride"), "xStride");
  args.x = rows_of(*job, from, "x", args.call.routing.tokens, payload_bytes(args.dtype, b.hidden), args.x_stride_bytes);
  const uint64_t codes = payload_code_bytes(b.payload, b.hidden);
  if (b.header.kind == EP_MOE_HIGH_THROUGHPUT) {
    // In place: peers write rows where they are handed out.
    args.out = address_of(job->memory->own_data()) + b.received.offset + args.call.slot * b.received.stride;
    args.out_stride_bytes = b.row_bytes;
  } else {
    args.out_stride_bytes = codes;
    args.out = rows_of(*job, from, "out", uint64_t{job->of->local_experts} * job->of->world_size * b.max_tokens, codes, codes);
  }
  args.scale_group = 1;
  if (b.payload >= EP_MOE_F8_F32) {
    const uint64_t rows = b.header.kind == EP_MOE_HIGH_THROUGHPUT ? b.recv_rows : uint64_t{job->of->local_experts} * job->of->world_size * b.max_tokens;
    const uint64_t bytes = payload_scale_bytes(b.payload);
    args.scale_row_stride = 1;
    args.scale_block_stride = rows;
    args.out_scales = rows_of(*job, from, "scales", payload_blocks(b.hidden), rows * bytes, rows * bytes);
  }
  args.totals = rows_of(*job, from, "totals", job->of->local_experts, sizeof(uint64_t), sizeof(uint64_t));
  return job;
}

} // namespace

// (stream, {routing, halves, slot, epoch, timeoutMs, tokens, flags, dtype, y, yOffset, yStride, out, outOffset, weights?, weightsOffset, bias0?, bias0Offset, …})
Napi::Value moe_buffer_wrap::combine(const Napi::CallbackInfo& info) { return launch_job(info, combine_of(*this, info[1].As<Napi::Object>())); }

namespace {

std::shared_ptr<combine_half> combine_of(const moe_buffer_wrap& wrap, const Napi::Object& from) {
  const Napi::Env env = from.Env();
  auto job = std::make_shared<combine_half>();
  ep_moe_combine_args& args = job->args;
  begin_job(*job, args.call, wrap, from);
  job->halves = halves_of(from);
  args.call.flags = flags_of(from, job->buffer.result_row_bytes);
  args.call.status = address_of(&job->status);
  args.dtype = dtype_of(from);
  const ep_moe_buffer& b = job->buffer;
  if (args.dtype != b.result_payload && b.result_payload != EP_MOE_LOGFMT10) throw_invalid(env, "results of another type than their payload are cast to LogFMT-10 only");
  if (args.dtype != b.result_payload && b.staged_results.stride == 0 && b.recv_rows != 0) throw_invalid(env, "a cast needs a buffer with staged parts");
  const uint64_t row_bytes = payload_bytes(args.dtype, b.hidden);
  args.y_stride_bytes = arg_size(from.Get("yStride"), "yStride");
  const uint64_t rows = arg_size(from.Get("yRows"), "yRows");
  args.y = rows_of(*job, from, "y", rows, row_bytes, args.y_stride_bytes);
  const uint32_t tokens = args.call.routing.tokens;
  args.out_stride_bytes = row_bytes;
  args.out = rows_of(*job, from, "out", tokens, row_bytes, row_bytes);
  if (!from.Get("weights").IsUndefined()) args.weights = rows_of(*job, from, "weights", tokens, b.top_k * sizeof(float), b.top_k * sizeof(float));
  for (uint32_t i = 0; i < 2; ++i) {
    const std::string name = "bias" + std::to_string(i);
    if (!from.Get(name).IsUndefined()) args.bias[i] = rows_of(*job, from, name, tokens, row_bytes, row_bytes);
  }
  // HAZARD: kernels read the rows of y that the dispatch has placed, which its caller cannot be trusted with.
  const auto* block_start = reinterpret_cast<const uint32_t*>(args.call.routing.block_start);
  const auto* counts = reinterpret_cast<const int32_t*>(args.call.routing.recv_count);
  for (uint32_t e = 0; e < job->of->local_experts; ++e) {
    if (block_start[e] + static_cast<uint64_t>(counts[e]) > rows) throw_invalid(env, "y has " + std::to_string(rows) + " rows, fewer than were dispatched");
  }
  return job;
}

// The first token whose result is not the row that it began with; none: -1.
int64_t changed_token(const ep_moe_dispatch_args& there, const ep_moe_combine_args& back) {
  const uint64_t bytes = back.out_stride_bytes;
  for (uint64_t token = 0; token < there.call.routing.tokens; ++token) {
    const auto* x = reinterpret_cast<const uint8_t*>(there.x + token * there.x_stride_bytes);
    const auto* result = reinterpret_cast<const uint8_t*>(back.out + token * bytes);
    if (std::memcmp(x, result, bytes) != 0) return static_cast<int64_t>(token);
  }
  return -1;
}

// Dispatch and combine, one after the other on this thread, as calls from JS would do them.
outcome run_steps(dispatch_half& even, dispatch_half& odd, combine_half& back, uint64_t rounds, double* samples, const std::atomic<uint32_t>& cancel) {
  const uint32_t first = even.args.call.epoch;
  auto* ranks = reinterpret_cast<uint64_t*>(even.report->ranks);
  outcome end;
  for (uint64_t round = 0; round < rounds; ++round) {
    dispatch_half& there = round % 2 == 0 ? even : odd;
    there.args.call.epoch = back.args.call.epoch = first + static_cast<uint32_t>(round);
    const int64_t begin = clock_now_ns();
    end = run_job(there, cancel);
    if (end.status == EP_STATUS_OK) end = run_job(back, cancel);
    samples[round] = static_cast<double>(clock_now_ns() - begin);
    if (end.status != EP_STATUS_OK) return end;
    for (uint32_t rank = 0; rank < there.of->world_size; ++rank) {
      if (ranks[rank] == 0) continue;
      end.status = static_cast<uint32_t>(ranks[rank]);
      end.rank = static_cast<int32_t>(rank);
      return end;
    }
    const int64_t changed = changed_token(there.args, back.args);
    if (changed < 0) continue;
    end.status = EP_STATUS_SYSTEM;
    end.message = "round " + std::to_string(round) + " gave token " + std::to_string(changed) + " another row than it had";
    return end;
  }
  return end;
}

} // namespace

// (stream, even, odd, combine, rounds, samples) -> operation. Of a buffer with one call, whose last one had the epoch before and the same numbers of rows.
Napi::Value moe_buffer_wrap::steps(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto even = dispatch_of(*this, info[1].As<Napi::Object>());
  const auto odd = dispatch_of(*this, info[2].As<Napi::Object>());
  const auto back = combine_of(*this, info[3].As<Napi::Object>());
  const uint64_t rounds = arg_size(info[4], "rounds");
  const operand samples = operand_of(info[5], "samples");
  const uint32_t tokens = even->args.call.routing.tokens;
  if (native->buffer.calls != 1 || even->halves != (send_half | receive_half) || odd->halves != even->halves || back->halves != even->halves) {
    throw_invalid(env, "steps are measured of whole calls in a buffer with one call slot");
  }
  if (odd->args.call.routing.tokens != tokens || back->args.call.routing.tokens != tokens || back->args.dtype != even->args.dtype || odd->args.dtype != even->args.dtype) {
    throw_invalid(env, "all halves of steps have the same tokens and the same dtype");
  }
  if (samples.byte_length / sizeof(double) < rounds) throw_invalid(env, std::to_string(rounds) + " rounds do not fit the samples");
  even->keep.push_back(samples.keep);
  auto* out = reinterpret_cast<double*>(samples.address);
  auto& stream = unwrap<stream_wrap>(info[0], "stream");
  return Napi::Number::New(env, static_cast<double>(stream.launch(env, [=](const std::atomic<uint32_t>& cancel) { return run_steps(*even, *odd, *back, rounds, out, cancel); })));
}

// (stream, {routing, slot, epoch, timeoutMs, tokens}) -> operation
Napi::Value moe_buffer_wrap::release(const Napi::CallbackInfo& info) {
  auto job = std::make_shared<slot_release>();
  begin_job(*job, job->call, *this, info[1].As<Napi::Object>());
  job->call.status = address_of(&job->status);
  return launch_job(info, std::move(job));
}

} // namespace ep::binding
