#include "moe_wraps.hpp"

#include <cstring>

#include "ep/device/ibgda_endpoint.h"
#include "ep/device/moe_combine.h"
#include "ep/device/moe_compact.h"
#include "ep/device/moe_dispatch.h"

namespace ep::binding {
namespace {

constexpr uint32_t send_half = 1;
constexpr uint32_t receive_half = 2;

template <class Word> std::vector<Word> numbers_of(Napi::Value value, const char* what) {
  const byte_span bytes = arg_bytes(value, what);
  if (value.As<Napi::TypedArray>().TypedArrayType() != napi_int32_array) throw_invalid(value.Env(), std::string(what) + " must be an Int32Array");
  std::vector<Word> made(bytes.size / sizeof(Word));
  if (bytes.size != 0) std::memcpy(made.data(), bytes.data, bytes.size);
  return made;
}

uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }

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
// which a rank is found missing, and no failure of the call.
template <class Job> outcome run_job(Job& job, const std::atomic<uint32_t>& cancel) {
  job.start();
  ep_kernel_status after{};
  outcome end = run_kernel(*job.memory, job.of->simt, job.timeout_ms, cancel, after, [&job](auto& context) {
    const ep_memory_handle& memory = job.buffer.memory;
    switch (memory.header.kind) {
      case EP_MEMORY_PROXY: return job.kernel(context, proxy_endpoint{memory});
      case EP_MEMORY_IBGDA: return job.kernel(context, ibgda_endpoint{memory});
      default: return job.kernel(context, load_store_endpoint{memory});
    }
  });
  const bool broken_pair = after.status != EP_STATUS_OK && after.stage == EP_STAGE_NIC && after.rank >= 0;
  if (broken_pair) {
    uint64_t& rank = reinterpret_cast<uint64_t*>(job.report->ranks)[after.rank];
    if (rank == 0) rank = EP_STATUS_PEER_LOST;
  }
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

// HAZARD: kernels follow these numbers without a look; a choice beyond the experts would read behind the tables.
void check_choices(const moe_job& job, Napi::Env env, uint32_t tokens) {
  const auto* topk = reinterpret_cast<const int32_t*>(job.routing->routing.topk);
  const auto experts = static_cast<int32_t>(job.buffer.experts.experts);
  for (uint64_t i = 0; i < uint64_t{tokens} * job.buffer.top_k; ++i) {
    if (topk[i] < -1 || topk[i] >= experts) {
      throw_invalid(env, "topkIdx[" + std::to_string(i) + "] is " + std::to_string(topk[i]) + ", experts are 0.." + std::to_string(experts - 1) + ", -1 is none");
    }
  }
}

void read_part(ep_moe_part& into, const double* words, Napi::Env env, uint64_t calls, uint64_t needed, uint64_t available, const char* what) {
  into.offset = static_cast<uint64_t>(words[0]);
  into.stride = static_cast<uint64_t>(words[1]);
  if (into.stride < needed || into.offset > available || into.stride > (available - into.offset) / calls) {
    throw_invalid(env, std::string(what) + ": " + std::to_string(calls) + " times " + std::to_string(into.stride) + " bytes at " + std::to_string(into.offset) +
                           ", needed " + std::to_string(needed) + " each, in " + std::to_string(available) + " bytes");
  }
}

} // namespace

// ({handle, mode, payload, resultPayload, hidden, maxTokens, topK, calls, alignment, recvRows, staged, parts, firstSignal, experts, replicaRank, rankBegin, blocks, simt?})
moe_buffer_wrap::moe_buffer_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a buffer is made from a description");
  const auto from = info[0].As<Napi::Object>();
  const auto small = [&](const char* name, uint64_t least, uint64_t most) {
    const uint64_t value = arg_size(from.Get(name), name);
    if (value < least || value > most) {
      throw_invalid(env, std::string(name) + " " + std::to_string(value) + " is not in " + std::to_string(least) + ".." + std::to_string(most));
    }
    return static_cast<uint32_t>(value);
  };
  auto made = std::make_shared<moe_contents>();
  const auto memory = memory_of_handle(from.Get("handle"));
  // HAZARD: a call that goes on without a rank counts on each peer having a queue pair of its own, and on words of late traffic that say which call they are of. EFA has neither.
  if (memory->device_handle().header.kind == EP_MEMORY_EFA) throw_invalid(env, "calls of experts cannot travel by queue pairs of EFA: one lost rank would break those to all others");
  made->memory = memory;
  made->rank = memory->context().rank();
  made->world_size = static_cast<uint32_t>(memory->context().world_size());
  made->simt = executor_of(from);
  ep_moe_buffer& b = made->buffer;
  b.header = {EP_MAGIC_MOE, EP_ABI_MAJOR, EP_ABI_MINOR, small("mode", EP_MOE_LOW_LATENCY, EP_MOE_HIGH_THROUGHPUT), sizeof(ep_moe_buffer)};
  b.memory = memory->device_handle();
  b.payload = small("payload", EP_MOE_F32, EP_MOE_F8_UE8M0);
  b.result_payload = small("resultPayload", EP_MOE_F32, EP_MOE_LOGFMT10);
  b.hidden = small("hidden", 1, uint64_t{1} << 24);
  b.max_tokens = small("maxTokens", 1, INT32_MAX);
  b.top_k = small("topK", 1, 65536);
  b.calls = small("calls", 1, EP_MOE_MAX_CALLS);
  b.alignment = small("alignment", 1, INT32_MAX);
  b.recv_rows = arg_size(from.Get("recvRows"), "recvRows");
  if (b.recv_rows > INT32_MAX) throw_invalid(env, "recvRows " + std::to_string(b.recv_rows) + " exceeds 2^31 - 1");
  b.payload_bytes = payload_bytes(b.payload, b.hidden);
  b.row_bytes = aligned_row_bytes(b.payload, b.hidden);
  b.result_bytes = payload_bytes(b.result_payload, b.hidden);
  b.result_row_bytes = aligned_row_bytes(b.result_payload, b.hidden);
  made->replica_rank = numbers_of<int32_t>(from.Get("replicaRank"), "replicaRank");
  made->replica_expert = numbers_of<int32_t>(from.Get("replicaExpert"), "replicaExpert");
  made->rank_begin = numbers_of<uint32_t>(from.Get("rankBegin"), "rankBegin");
  const uint64_t replicas = made->replica_rank.size();
  const uint64_t world = made->world_size;
  if (made->rank_begin.size() != world + 1 || made->rank_begin.front() != 0 || made->rank_begin.back() != replicas) {
    throw_invalid(env, "rankBegin must hold " + std::to_string(world + 1) + " offsets from 0 to " + std::to_string(replicas));
  }
  uint32_t most = 0;
  for (uint32_t r = 0; r < world; ++r) {
    if (made->rank_begin[r] > made->rank_begin[r + 1]) throw_invalid(env, "rankBegin must ascend");
    most = std::max(most, made->rank_begin[r + 1] - made->rank_begin[r]);
    for (uint32_t p = made->rank_begin[r]; p < made->rank_begin[r + 1]; ++p) {
      if (made->replica_rank[p] != static_cast<int32_t>(r)) throw_invalid(env, "replicaRank and rankBegin contradict each other");
    }
  }
  const auto experts = static_cast<int32_t>(small("experts", 1, replicas));
  if (made->replica_expert.size() != replicas) throw_invalid(env, "replicaExpert must name the expert of each replica");
  for (const int32_t expert : made->replica_expert) {
    if (expert < 0 || expert >= experts) throw_invalid(env, "replicaExpert names expert " + std::to_string(expert) + " of " + std::to_string(experts));
  }
  made->local_experts = made->rank_begin[static_cast<size_t>(made->rank) + 1] - made->rank_begin[static_cast<size_t>(made->rank)];
  b.experts.replica_rank = address_of(made->replica_rank.data());
  b.experts.replica_expert = address_of(made->replica_expert.data());
  b.experts.rank_begin = address_of(made->rank_begin.data());
  b.experts.experts = static_cast<uint32_t>(experts);
  b.experts.replicas = static_cast<uint32_t>(replicas);
  b.experts.most_local = most;
  const byte_span parts = arg_bytes(from.Get("parts"), "parts");
  if (from.Get("parts").As<Napi::TypedArray>().TypedArrayType() != napi_float64_array || parts.size != 12 * sizeof(double)) {
    throw_invalid(env, "parts must be a Float64Array of six offsets, each with its stride");
  }
  double words[12];
  std::memcpy(words, parts.data, sizeof words);
  const uint64_t available = memory->byte_length();
  const bool low_latency = b.header.kind == EP_MOE_LOW_LATENCY;
  const bool staged = from.Get("staged").ToBoolean();
  const uint64_t results = low_latency ? uint64_t{most} * world * b.max_tokens : b.recv_rows;
  const uint64_t received = (low_latency ? results : b.recv_rows) * (sizeof(ep_moe_header) + b.row_bytes);
  read_part(b.received, words, env, b.calls, received, available, "received");
  read_part(b.returned, words + 2, env, b.calls, uint64_t{b.max_tokens} * b.top_k * b.result_row_bytes, available, "returned");
  read_part(b.staged_tokens, words + 4, env, b.calls, staged ? b.max_tokens * b.row_bytes : 0, available, "staged tokens");
  read_part(b.staged_results, words + 6, env, b.calls, staged ? results * b.result_row_bytes : 0, available, "staged results");
  read_part(b.counts, words + 8, env, b.calls, uint64_t{most} * world * sizeof(uint64_t), available, "counts");
  read_part(b.starts, words + 10, env, b.calls, low_latency ? 0 : replicas * sizeof(uint64_t), available, "starts");
  b.first_signal = arg_size(from.Get("firstSignal"), "firstSignal");
  const uint64_t slots = uint64_t{b.calls} * EP_MOE_SIGNAL_KINDS * world;
  if (b.first_signal > memory->signal_slots() || slots > memory->signal_slots() - b.first_signal) {
    throw_invalid(env, std::to_string(slots) + " signals from slot " + std::to_string(b.first_signal) + " exceed " + std::to_string(memory->signal_slots()));
  }
  made->peers.resize(b.calls * world);
  b.peers = address_of(made->peers.data());
  native = std::move(made);
  tag<moe_buffer_wrap>(info.This().As<Napi::Object>());
}

// (begin: Int32Array [experts + 1], replicas: Int32Array)
void moe_buffer_wrap::set_candidates(const Napi::CallbackInfo& info) {
  auto made = std::make_shared<moe_candidates>();
  made->begin = numbers_of<uint32_t>(info[0], "begin");
  made->replicas = numbers_of<uint32_t>(info[1], "replicas");
  const uint32_t experts = native->buffer.experts.experts;
  bool sound = made->begin.size() == uint64_t{experts} + 1 && made->begin.front() == 0 && made->begin.back() <= made->replicas.size();
  for (uint32_t e = 0; sound && e < experts; ++e) sound = made->begin[e] <= made->begin[e + 1];
  for (size_t i = 0; sound && i < made->begin.back(); ++i) sound = made->replicas[i] < native->buffer.experts.replicas;
  if (!sound) throw_invalid(info.Env(), "candidates must be offsets of " + std::to_string(experts) + " experts into a list of replicas");
  candidates = std::move(made);
}

// (stream, {routing, halves, slot, epoch, timeoutMs, tokens, flags, dtype, x, xOffset, xStride, out, outOffset, scales?, scalesOffset, scaleRowStride,
//  scaleBlockStride, totals?, totalsOffset}) -> operation
Napi::Value moe_buffer_wrap::dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto from = info[1].As<Napi::Object>();
  auto job = std::make_shared<dispatch_half>();
  ep_moe_dispatch_args& args = job->args;
  begin_job(*job, args.call, *this, from);
  job->halves = halves_of(from);
  args.call.flags = static_cast<uint32_t>(arg_size(from.Get("flags"), "flags"));
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
  return launch_job(info, std::move(job));
}

// (stream, {routing, halves, slot, epoch, timeoutMs, tokens, flags, dtype, y, yOffset, yStride, out, outOffset, weights?, weightsOffset, bias0?, bias0Offset, …})
Napi::Value moe_buffer_wrap::combine(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto from = info[1].As<Napi::Object>();
  auto job = std::make_shared<combine_half>();
  ep_moe_combine_args& args = job->args;
  begin_job(*job, args.call, *this, from);
  job->halves = halves_of(from);
  args.call.flags = static_cast<uint32_t>(arg_size(from.Get("flags"), "flags"));
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
  return launch_job(info, std::move(job));
}

// (stream, {routing, slot, epoch, timeoutMs, tokens}) -> operation
Napi::Value moe_buffer_wrap::release(const Napi::CallbackInfo& info) {
  auto job = std::make_shared<slot_release>();
  begin_job(*job, job->call, *this, info[1].As<Napi::Object>());
  job->call.status = address_of(&job->status);
  return launch_job(info, std::move(job));
}

void moe_buffer_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["MoeBuffer"] = DefineClass(env, "MoeBuffer",
                                     {InstanceMethod<&moe_buffer_wrap::set_candidates>("setCandidates"), InstanceMethod<&moe_buffer_wrap::dispatch>("dispatch"),
                                      InstanceMethod<&moe_buffer_wrap::combine>("combine"), InstanceMethod<&moe_buffer_wrap::release>("release")});
}

// (buffer)
moe_routing_wrap::moe_routing_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  auto made = std::make_shared<contents>();
  const auto& buffer = unwrap<moe_buffer_wrap>(info[0], "buffer");
  made->of = buffer.native;
  const ep_moe_buffer& b = made->of->buffer;
  const uint64_t choices = uint64_t{b.max_tokens} * b.top_k;
  const uint64_t world = made->of->world_size;
  const uint64_t local = made->of->local_experts;
  const uint64_t rows = b.header.kind == EP_MOE_LOW_LATENCY ? local * world * b.max_tokens : b.recv_rows;
  ep_moe_routing& r = made->routing;
  struct array {
    uint64_t* address;
    uint64_t elements;
    uint64_t bytes;
  };
  const array arrays[] = {
      {&r.topk, choices, 4},       {&r.choice_replica, choices, 4},     {&r.choice_slot, choices, 4},
      {&r.send_words, b.experts.replicas, 8}, {&r.send_headers, choices, sizeof(ep_moe_header)}, {&r.send_first, uint64_t{b.experts.replicas} + 1, 4},
      {&r.recv_count, local, 4},   {&r.block_start, local + 1, 4},          {&r.layout_range, local * world, 8},
      {&r.src_token, rows, 4},     {&r.src_choice, rows, 4},            {&made->ranks, world, 8},
      {&made->wait_ns, world, 8},  {&r.send_start, b.experts.replicas, 4},
  };
  uint64_t bytes = 0;
  for (const array& one : arrays) bytes += (one.elements * one.bytes + 63) / 64 * 64;
  auto memory = host_memory::create(bytes);
  made->memory = value_or_throw(env, memory);
  uint64_t at = 0;
  for (const array& one : arrays) {
    *one.address = address_of(made->memory->data() + at);
    made->layout.push_back(static_cast<double>(at));
    made->layout.push_back(static_cast<double>(one.elements));
    at += (one.elements * one.bytes + 63) / 64 * 64;
  }
  const auto symmetric = made->of->memory.lock();
  if (!symmetric) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  auto ready = symmetric->prepare_source(address_of(made->memory->data()), bytes, made->memory);
  value_or_throw(env, ready);
  native = std::move(made);
  tag<moe_routing_wrap>(info.This().As<Napi::Object>());
}

Napi::Value moe_routing_wrap::window(const Napi::CallbackInfo& info) {
  return window_over(info.Env(), native->memory->data(), native->memory->byte_length(), native->memory);
}

Napi::Value moe_routing_wrap::layout(const Napi::CallbackInfo& info) {
  auto made = Napi::Float64Array::New(info.Env(), native->layout.size());
  std::copy(native->layout.begin(), native->layout.end(), made.Data());
  return made;
}

void moe_routing_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["MoeRouting"] =
      DefineClass(env, "MoeRouting", {InstanceMethod<&moe_routing_wrap::window>("window"), InstanceMethod<&moe_routing_wrap::layout>("layout")});
}

void bind_moe(Napi::Env env, Napi::Object exports) {
  moe_buffer_wrap::define(env, exports);
  moe_routing_wrap::define(env, exports);
}

} // namespace ep::binding
