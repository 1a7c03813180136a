#include "gpu_moe_call.hpp"

#include <cstring>

namespace ep::binding {
namespace {

bool same_candidates(const std::shared_ptr<const moe_candidates>& placed, const moe_candidates& wanted) {
  return placed && placed->begin == wanted.begin && placed->replicas == wanted.replicas;
}

void point_at_candidates(gpu_half& job, const gpu_moe_contents& own, uint64_t table) {
  const uint64_t begin = own.tables->address() + own.first_candidates + table * own.candidate_bytes;
  job.buffer.experts.candidate_begin = begin;
  job.buffer.experts.candidates = begin + rounded((uint64_t{job.buffer.experts.experts} + 1) * sizeof(uint32_t));
}

// Where kernels find what `routing` holds for the host.
void onto_device(ep_moe_call& call, const moe_routing_wrap::contents& routing, bool finds_choices) {
  const uint64_t shift = routing.mirror->address() - address_of(routing.data); // modulo 2^64
  ep_moe_routing& r = call.routing;
  for (uint64_t* one : {&r.topk, &r.choice_replica, &r.choice_slot, &r.send_words, &r.send_headers, &r.send_first, &r.recv_count, &r.block_start, &r.layout_range, &r.src_token,
                        &r.src_choice, &r.send_start, &call.ranks, &call.wait_ns}) {
    if (one != &r.topk || !finds_choices) *one += shift;
  }
  call.status = routing.mirrored_status();
}

uint64_t nanoseconds(double timeout_ms, double share) { return timeout_ms < 0 ? 0 : static_cast<uint64_t>(timeout_ms * share * 1e6) + 1; }

// The kernel ends its waits by itself, rank by rank; the host ends what has taken far longer than that, and that is a failure. A rank that dies ends the waits for it (peer_losses), not the call.
constexpr double host_patience = 4;

} // namespace

void stage_candidates(const moe_candidates& wanted, uint8_t* staged) {
  std::memcpy(staged, wanted.begin.data(), wanted.begin.size() * sizeof(uint32_t));
  std::memcpy(staged + rounded(wanted.begin.size() * sizeof(uint32_t)), wanted.replicas.data(), wanted.begin.back() * sizeof(uint32_t));
}

void place_candidates(gpu_half& job, gpu_moe_buffer_wrap& wrap, gpu::stream& stream, uint32_t slot, const Napi::Object& description) {
  const Napi::Env env = description.Env();
  gpu_moe_contents& own = *wrap.native;
  const auto& wanted = wrap.candidates;
  const uint64_t table = uint64_t{slot} * tables_of_slot + (description.Get("apart").ToBoolean() ? 1 : 0);
  point_at_candidates(job, own, table);
  if (same_candidates(own.placed[table], *wanted)) return;
  if (job.captured) throw_invalid(env, "replicas were chosen anew since the last call of slot " + std::to_string(slot) + ": make one that is not captured first");
  uint8_t* staged = own.staged_candidates->data() + table * own.candidate_bytes;
  stage_candidates(*wanted, staged);
  own.placed[table] = nullptr;
  if (const int error = stream.of()->table().copy(stream.native(), job.buffer.experts.candidate_begin, address_of(staged), own.candidate_bytes); error != 0) {
    throw_failure(env, stream.of()->error(error, "copying the candidates of a call"));
  }
  own.placed[table] = wanted;
}

void begin_call(gpu_half& job, ep_moe_call& call, const gpu_moe_buffer_wrap& wrap, const gpu_stream_wrap& on, const Napi::Object& description) {
  const Napi::Env env = description.Env();
  gpu::stream& stream = on.open(env);
  const bool capturing = on.capturing != nullptr;
  if (!wrap.native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the buffer was closed"});
  gpu_moe_contents& own = *wrap.native;
  job.of = wrap.native;
  job.memory = own.device_memory.lock();
  if (!job.memory) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  if (job.memory->device() != stream.device()) throw_invalid(env, "the buffer is of GPU " + std::to_string(job.memory->device()) + ", the stream of GPU " + std::to_string(stream.device()));
  if (!wrap.candidates) throw_invalid(env, "a buffer takes calls after setCandidates()");
  job.own_data = job.memory->data(own.rank);
  job.find = [&stream](Napi::Value value, const char* what) { return gpu_operand_of(value, what, stream, true); };
  read_call(job, call, description);
  if (capturing && !job.captured) throw_invalid(env, "the stream is being captured: captureDispatch(), captureCombine() and their halves put calls into a graph, and nothing else does");
  if (!capturing && job.captured) throw_invalid(env, "the stream is not being captured");
  if (job.report != job.routing) throw_invalid(env, "a call on a GPU is reported where its routing is");
  const auto* ranks = reinterpret_cast<const uint64_t*>(job.report->ranks);
  if (ranks[own.rank] != 0) throw_invalid(env, "this rank takes no part in its own call");
  job.masks = std::any_of(ranks, ranks + own.world_size, [](uint64_t why) { return why != 0; });
  point_at_candidates(job, own, uint64_t{call.slot} * tables_of_slot);
  if (!capturing) job.keep.push_back(gpu::kernels_wait()); // a captured call waits when it is replayed
  auto slot = stream.slot();
  job.slot = value_or_throw(env, slot);
  onto_device(call, *job.routing, job.finds_choices);
}

void read_gpu_dispatch(gpu_half& job, ep_moe_dispatch_args& args, const gpu_moe_buffer_wrap& wrap, const gpu_stream_wrap& on, const Napi::Object& description) {
  begin_call(job, args.call, wrap, on, description);
  read_dispatch(job, args, job.halves, description);
  args.call.flags |= EP_MOE_DEVICE_EPOCH; // graphs count there, too
  const operand totals = gpu_operand_of(description.Get("totalsSeen"), "totalsSeen", on.open(description.Env()), true);
  job.totals = {args.totals, totals.address, std::min<uint64_t>(totals.byte_length, job.of->local_experts * sizeof(uint64_t))};
  job.keep.push_back(totals.keep);
  // As on the host (bind_moe_call.cpp), counted from the kernel's begin.
  args.call.credits_by_ns = nanoseconds(job.timeout_ms, job.buffer.header.kind == EP_MOE_LOW_LATENCY ? 0.5 : 0.25);
  args.call.counts_by_ns = nanoseconds(job.timeout_ms, 0.5);
  args.call.answers_by_ns = nanoseconds(job.timeout_ms, 0.75);
}

void read_gpu_combine(gpu_half& job, ep_moe_combine_args& args, const gpu_moe_buffer_wrap& wrap, const gpu_stream_wrap& on, const Napi::Object& description) {
  begin_call(job, args.call, wrap, on, description);
  read_combine(job, args, job.halves, description);
  args.call.flags |= EP_MOE_DEVICE_EPOCH;
}

int fill_in(gpu_pieces& given, const gpu_half& job, gpu::stream& stream, uint64_t begin) {
  const moe_routing_wrap::contents& routing = *job.routing;
  if (!job.captured) {
    given.add({routing.mirror->address() + begin, address_of(routing.data + begin), routing.filled - begin});
    return 0;
  }
  const auto* ranks = reinterpret_cast<const uint64_t*>(routing.ranks);
  for (uint32_t rank = 0; rank < job.of->world_size; ++rank) {
    if (ranks[rank] == 0) continue;
    if (const int error = stream.of()->table().fill(stream.native(), job.ranks_there() + rank * sizeof(uint64_t), 0xff, sizeof(uint64_t)); error != 0) return error; /* EP_MOE_RANK_MASKED */
  }
  return 0;
}

void mirror_weights(gpu_pieces& given, const gpu_half& job, ep_moe_combine_args& args) {
  const uint64_t bytes = uint64_t{args.call.routing.tokens} * job.buffer.top_k * sizeof(float);
  if (args.weights == 0 || bytes == 0 || job.captured) return;
  given.add({job.routing->mirrored_weights(), args.weights, bytes});
  args.weights = job.routing->mirrored_weights();
}

// HAZARD: the status is wiped in front of a call, by what fill_in() copies, not here: what clears words is a kernel, and one behind a kernel that waits may hold up other ranks' (gpu_pieces.hpp). In a graph nobody wipes
// it: a replay that failed is followed by others, whose kernels would write over what it said before anybody has looked.
// HAZARD of time alone: three copies behind each kernel of a graph took as long as half of a call of few tokens; and what a call of it leaves, the next one of its slot leaves anew.
void hand_back(gpu_pieces& left, const gpu_half& job, const gpu_stream_wrap& on, uint64_t seen) {
  const moe_routing_wrap::contents& routing = *job.routing;
  const auto put = [&](const ep_cuda_piece& piece) {
    if (job.captured) on.capturing->report(piece);
    else left.add(piece);
  };
  put({address_of(&job.slot->status), routing.mirrored_status(), sizeof(ep_kernel_status)});
  put({job.totals.seen, job.totals.counted, job.totals.bytes});
  const uint64_t end = job.captured ? routing.filled : seen;
  put({address_of(routing.data + routing.report), routing.mirror->address() + routing.report, end - routing.report});
}

int take_back_in(const gpu_half& job, gpu::stream& stream) {
  return job.masks && !job.captured ? stream.of()->table().fill(stream.native(), job.ranks_there(), 0, job.ranks_bytes()) : 0;
}

double follow_half(Napi::Env env, gpu_stream_wrap& on, gpu_half& job, const gpu_moe_contents& own, int error, const char* what) {
  if (on.capturing) {
    on.check(env, error, what);
    if (on.capturing->failed.empty()) on.capturing->failed = job.failed;
    on.capturing->kernels.push_back({job.slot, nullptr});
    if (std::ranges::find(on.capturing->losses, own.losses) == on.capturing->losses.end()) on.capturing->losses.push_back(own.losses);
    on.capturing->keep.insert(on.capturing->keep.end(), job.keep.begin(), job.keep.end());
    on.capturing->keep.insert(on.capturing->keep.end(), {job.of, job.memory, job.routing, own.share});
    return 0;
  }
  gpu::stream::watch how;
  how.kernels.push_back({job.slot, nullptr});
  how.losses.push_back(own.losses);
  how.deadline_ns = job.timeout_ms < 0 ? no_deadline : deadline_after(host_patience * job.timeout_ms + 1000);
  how.failed = std::move(job.failed);
  how.keep = std::move(job.keep);
  how.keep.insert(how.keep.end(), {job.of, job.memory, job.routing, own.share});
  on.check(env, error, what);
  return static_cast<double>(on.begin(env, std::move(how)));
}

} // namespace ep::binding
