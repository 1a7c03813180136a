// The calls of a buffer for experts on the host.
#include "moe_call.hpp"

#include <cstring>

#include "endpoint_of.hpp"
#include "ep/device/moe_combine.h"
#include "ep/device/moe_compact.h"
#include "ep/device/moe_dispatch.h"
#include "hand_over.hpp"

namespace ep::binding {
namespace {

// Everything that a running half points into. Owned by its task.
struct host_job : moe_job {
  std::shared_ptr<symmetric_memory> memory;
  std::shared_ptr<const moe_candidates> candidates;
  ep_kernel_status status{};
};

struct dispatch_half : host_job {
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

struct combine_half : host_job {
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

struct slot_release : host_job {
  ep_moe_call call{};
  void start() {}
  template <class Context, class Endpoint> bool kernel(Context& context, const Endpoint& endpoint) const {
    return buffer.header.kind == EP_MOE_LOW_LATENCY ? moe_release_uncombined(context, endpoint, buffer, call) : moe_release(context, endpoint, buffer, call);
  }
};

// HAZARD: after the kernel, whoever sends through a NIC waits until it reads no source any more, and finds the queue pairs to dead ranks broken. That is one more way in
// which a rank is found missing, and no failure of the call; but what came from it is placed or summed already, so it is missing from the next half on. Over EFA it is one (moe_leaves_out).
template <class Job> outcome run_job(Job& job, const std::atomic<uint32_t>& cancel) {
  job.start();
  auto* ranks = reinterpret_cast<uint64_t*>(job.report->ranks);
  for (uint32_t rank = 0; rank < job.of->world_size; ++rank) {
    if (ranks[rank] == EP_MOE_RANK_LEAVES) ranks[rank] = EP_STATUS_PEER_LOST;
  }
  ep_kernel_status after{};
  outcome end = run_kernel(*job.memory, job.of->simt, job.timeout_ms, cancel, after, [&job](auto& context) {
    return with_endpoint(job.buffer.memory, [&](const auto& endpoint) { return job.kernel(context, endpoint); });
  });
  const bool broken = after.status != EP_STATUS_OK && after.stage == EP_STAGE_NIC && after.rank >= 0;
  const bool own = broken && (moe_own_nic(after) || (ranks[after.rank] == 0 && job.memory->own_fault(after.found)));
  if (own && !moe_own_nic(after)) after = {EP_STATUS_SYSTEM, after.rank, EP_STAGE_NIC, 0, 0, 0};
  const bool broken_pair = broken && !own && moe_leaves_out(job.buffer.memory);
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

void begin_job(host_job& job, ep_moe_call& call, const moe_buffer_wrap& wrap, const Napi::Object& description) {
  const Napi::Env env = description.Env();
  job.of = wrap.native;
  job.candidates = wrap.candidates;
  job.memory = job.of->memory.lock();
  if (!job.memory || !job.memory->connected()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  if (!job.candidates) throw_invalid(env, "a buffer takes calls after setCandidates()");
  job.own_data = address_of(job.memory->own_data());
  // Registered, so that a NIC may read them.
  job.find = [memory = job.memory](Napi::Value value, const char* what) {
    operand found = operand_of(value, what);
    auto ready = memory->prepare_source(found.address, found.byte_length, found.keep);
    value_or_throw(value.Env(), ready);
    return found;
  };
  read_call(job, call, description);
  job.buffer.experts.candidate_begin = address_of(job.candidates->begin.data());
  job.buffer.experts.candidates = address_of(job.candidates->replicas.data());
}

std::shared_ptr<dispatch_half> dispatch_of(const moe_buffer_wrap& wrap, const Napi::Object& from);
std::shared_ptr<combine_half> combine_of(const moe_buffer_wrap& wrap, const Napi::Object& from);

} // namespace

// (stream, {routing, halves, slot, epoch, timeoutMs, tokens, flags, dtype, x, xOffset, xStride, out, outOffset, scales?, scalesOffset, scaleRowStride,
//  scaleBlockStride, totals?, totalsOffset}) -> operation
Napi::Value moe_buffer_wrap::dispatch(const Napi::CallbackInfo& info) { return launch_job(info, dispatch_of(*this, info[1].As<Napi::Object>())); }

namespace {

void past_caches(ep_moe_call& call, uint64_t row_bytes) {
  if (hands_over_past_caches(row_bytes)) call.flags |= EP_MOE_NON_TEMPORAL;
}

std::shared_ptr<dispatch_half> dispatch_of(const moe_buffer_wrap& wrap, const Napi::Object& from) {
  auto job = std::make_shared<dispatch_half>();
  begin_job(*job, job->args.call, wrap, from);
  read_dispatch(*job, job->args, job->halves, from);
  past_caches(job->args.call, job->buffer.row_bytes);
  job->args.call.status = address_of(&job->status);
  return job;
}

} // namespace

// (stream, {routing, halves, slot, epoch, timeoutMs, tokens, flags, dtype, y, yOffset, yStride, out, outOffset, weights?, weightsOffset, bias0?, bias0Offset, …})
Napi::Value moe_buffer_wrap::combine(const Napi::CallbackInfo& info) { return launch_job(info, combine_of(*this, info[1].As<Napi::Object>())); }

namespace {

std::shared_ptr<combine_half> combine_of(const moe_buffer_wrap& wrap, const Napi::Object& from) {
  auto job = std::make_shared<combine_half>();
  begin_job(*job, job->args.call, wrap, from);
  read_combine(*job, job->args, job->halves, from);
  past_caches(job->args.call, job->buffer.result_row_bytes);
  job->args.call.status = address_of(&job->status);
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

// What experts do that return rows as they are, where the results are not the rows themselves.
void return_rows(const dispatch_half& there, const combine_half& back) {
  const ep_moe_routing& routing = there.args.call.routing;
  const auto* from = reinterpret_cast<const uint8_t*>(there.args.out);
  auto* to = reinterpret_cast<uint8_t*>(back.args.y);
  for (uint32_t e = 0; e < there.of->local_experts; ++e) {
    const uint64_t first = reinterpret_cast<const uint32_t*>(routing.block_start)[e];
    const auto rows = static_cast<uint64_t>(reinterpret_cast<const int32_t*>(routing.recv_count)[e]);
    for (uint64_t row = first; row < first + rows; ++row) ep_copy(to + row * back.args.y_stride_bytes, from + row * there.args.out_stride_bytes, there.args.out_stride_bytes, 0);
  }
}

// Dispatch and combine, one after the other on this thread, as calls from JS would do them; samples are their time together.
outcome run_steps(dispatch_half& even, dispatch_half& odd, combine_half& back, uint64_t rounds, double* samples, const std::atomic<uint32_t>& cancel) {
  const uint32_t first = even.args.call.epoch;
  auto* ranks = reinterpret_cast<uint64_t*>(even.report->ranks);
  outcome end;
  for (uint64_t round = 0; round < rounds; ++round) {
    dispatch_half& there = round % 2 == 0 ? even : odd;
    there.args.call.epoch = back.args.call.epoch = first + static_cast<uint32_t>(round);
    int64_t begin = clock_now_ns();
    end = run_job(there, cancel);
    if (end.status == EP_STATUS_OK && back.args.y != there.args.out) {
      const int64_t received = clock_now_ns();
      return_rows(there, back);
      begin += clock_now_ns() - received;
    }
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
  if (native->buffer.payload >= EP_MOE_F8_F32) throw_invalid(env, "steps return rows as they came, which casts are not");
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
