#include "gpu_moe_wraps.hpp"

#include <atomic>
#include <cstring>

#include "ep/device/moe_cast.h"
#include "moe/members.hpp"

namespace ep::binding {
namespace {

template <class Word> std::vector<Word> numbers_of(Napi::Value value, const char* what) {
  const byte_span bytes = arg_bytes(value, what);
  if (value.As<Napi::TypedArray>().TypedArrayType() != napi_int32_array) throw_invalid(value.Env(), std::string(what) + " must be an Int32Array");
  std::vector<Word> made(bytes.size / sizeof(Word));
  if (bytes.size != 0) std::memcpy(made.data(), bytes.data, bytes.size);
  return made;
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

void describe_moe(moe_contents& made, const Napi::Object& from, const ep_memory_handle& place) {
  const Napi::Env env = from.Env();
  const auto small = [&](const char* name, uint64_t least, uint64_t most) {
    const uint64_t value = arg_size(from.Get(name), name);
    if (value < least || value > most) {
      throw_invalid(env, std::string(name) + " " + std::to_string(value) + " is not in " + std::to_string(least) + ".." + std::to_string(most));
    }
    return static_cast<uint32_t>(value);
  };
  made.rank = place.rank;
  made.world_size = static_cast<uint32_t>(place.world_size);
  ep_moe_buffer& b = made.buffer;
  b.header = {EP_MAGIC_MOE, EP_ABI_MAJOR, EP_ABI_MINOR, small("mode", EP_MOE_LOW_LATENCY, EP_MOE_HIGH_THROUGHPUT), sizeof(ep_moe_buffer)};
  b.memory = place;
  b.payload = small("payload", EP_MOE_F32, EP_MOE_F8_UE8M0);
  b.result_payload = small("resultPayload", EP_MOE_F32, EP_MOE_LOGFMT10);
  b.hidden = small("hidden", 1, uint64_t{1} << 24);
  b.max_tokens = small("maxTokens", 1, EP_MOE_COUNT_ROWS);
  b.top_k = small("topK", 1, 65536);
  b.calls = small("calls", 1, EP_MOE_MAX_CALLS);
  b.alignment = small("alignment", 1, INT32_MAX);
  b.recv_rows = arg_size(from.Get("recvRows"), "recvRows");
  if (b.recv_rows > INT32_MAX) throw_invalid(env, "recvRows " + std::to_string(b.recv_rows) + " exceeds 2^31 - 1");
  b.payload_bytes = payload_bytes(b.payload, b.hidden);
  b.row_bytes = aligned_row_bytes(b.payload, b.hidden);
  b.result_bytes = payload_bytes(b.result_payload, b.hidden);
  b.result_row_bytes = aligned_row_bytes(b.result_payload, b.hidden);
  made.replica_rank = numbers_of<int32_t>(from.Get("replicaRank"), "replicaRank");
  made.replica_expert = numbers_of<int32_t>(from.Get("replicaExpert"), "replicaExpert");
  made.rank_begin = numbers_of<uint32_t>(from.Get("rankBegin"), "rankBegin");
  const uint64_t replicas = made.replica_rank.size();
  const uint64_t world = made.world_size;
  if (made.rank_begin.size() != world + 1 || made.rank_begin.front() != 0 || made.rank_begin.back() != replicas) {
    throw_invalid(env, "rankBegin must hold " + std::to_string(world + 1) + " offsets from 0 to " + std::to_string(replicas));
  }
  uint32_t most = 0;
  for (uint32_t r = 0; r < world; ++r) {
    if (made.rank_begin[r] > made.rank_begin[r + 1]) throw_invalid(env, "rankBegin must ascend");
    most = std::max(most, made.rank_begin[r + 1] - made.rank_begin[r]);
    for (uint32_t p = made.rank_begin[r]; p < made.rank_begin[r + 1]; ++p) {
      if (made.replica_rank[p] != static_cast<int32_t>(r)) throw_invalid(env, "replicaRank and rankBegin contradict each other");
    }
  }
  const auto experts = static_cast<int32_t>(small("experts", 1, replicas));
  if (made.replica_expert.size() != replicas) throw_invalid(env, "replicaExpert must name the expert of each replica");
  for (const int32_t expert : made.replica_expert) {
    if (expert < 0 || expert >= experts) throw_invalid(env, "replicaExpert names expert " + std::to_string(expert) + " of " + std::to_string(experts));
  }
  made.local_experts = made.rank_begin[static_cast<size_t>(made.rank) + 1] - made.rank_begin[static_cast<size_t>(made.rank)];
  b.experts.replica_rank = address_of(made.replica_rank.data());
  b.experts.replica_expert = address_of(made.replica_expert.data());
  b.experts.rank_begin = address_of(made.rank_begin.data());
  b.experts.experts = static_cast<uint32_t>(experts);
  b.experts.replicas = static_cast<uint32_t>(replicas);
  b.experts.most_local = most;
  const byte_span parts = arg_bytes(from.Get("parts"), "parts");
  if (from.Get("parts").As<Napi::TypedArray>().TypedArrayType() != napi_float64_array || parts.size != 14 * sizeof(double)) {
    throw_invalid(env, "parts must be a Float64Array of seven offsets, each with its stride");
  }
  double words[14];
  std::memcpy(words, parts.data, sizeof words);
  const uint64_t available = place.byte_length;
  const bool low_latency = b.header.kind == EP_MOE_LOW_LATENCY;
  const bool staged = from.Get("staged").ToBoolean();
  const bool zero_copy = from.Get("zeroCopy").ToBoolean();
  b.flags = zero_copy ? EP_MOE_ZERO_COPY : 0;
  const uint64_t results = low_latency ? uint64_t{most} * world * b.max_tokens : b.recv_rows;
  const uint64_t received = (low_latency ? results : b.recv_rows) * (sizeof(ep_moe_header) + b.row_bytes);
  read_part(b.received, words, env, b.calls, received, available, "received");
  read_part(b.returned, words + 2, env, b.calls, EP_MOE_BANKS * uint64_t{b.max_tokens} * b.top_k * b.result_row_bytes, available, "returned");
  read_part(b.staged_tokens, words + 4, env, b.calls, staged ? b.max_tokens * b.row_bytes : 0, available, "staged tokens");
  read_part(b.staged_results, words + 6, env, b.calls, staged || zero_copy ? results * b.result_row_bytes : 0, available, "staged results");
  read_part(b.counts, words + 8, env, b.calls, uint64_t{most} * world * sizeof(uint64_t), available, "counts");
  read_part(b.starts, words + 10, env, b.calls, low_latency ? 0 : replicas * sizeof(uint64_t), available, "starts");
  read_part(b.refusals, words + 12, env, b.calls, world * sizeof(uint64_t), available, "refusals");
  b.first_signal = arg_size(from.Get("firstSignal"), "firstSignal");
  const uint64_t slots = uint64_t{b.calls} * EP_MOE_SIGNAL_KINDS * world;
  if (b.first_signal > place.signal_slots || slots > place.signal_slots - b.first_signal) {
    throw_invalid(env, std::to_string(slots) + " signals from slot " + std::to_string(b.first_signal) + " exceed " + std::to_string(place.signal_slots));
  }
  made.peers.resize(b.calls * world);
  b.peers = address_of(made.peers.data());
}

// ({handle, mode, payload, resultPayload, hidden, maxTokens, topK, calls, alignment, recvRows, staged, zeroCopy, parts, firstSignal, experts, replicaRank, rankBegin, blocks, simt?})
moe_buffer_wrap::moe_buffer_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a buffer is made from a description");
  const auto from = info[0].As<Napi::Object>();
  const auto memory = memory_of_handle(from.Get("handle"));
  auto made = std::make_shared<moe_contents>();
  made->memory = memory;
  made->simt = executor_of(from);
  describe_moe(*made, from, memory->device_handle());
  native = std::move(made);
  tag<moe_buffer_wrap>(info.This().As<Napi::Object>());
}

std::shared_ptr<const moe_candidates> candidates_of(const ep_moe_buffer& buffer, Napi::Value begin, Napi::Value replicas) {
  auto made = std::make_shared<moe_candidates>();
  made->begin = numbers_of<uint32_t>(begin, "begin");
  made->replicas = numbers_of<uint32_t>(replicas, "replicas");
  const uint32_t experts = buffer.experts.experts;
  bool sound = made->begin.size() == uint64_t{experts} + 1 && made->begin.front() == 0 && made->begin.back() <= made->replicas.size();
  for (uint32_t e = 0; sound && e < experts; ++e) sound = made->begin[e] <= made->begin[e + 1];
  for (size_t i = 0; sound && i < made->begin.back(); ++i) sound = made->replicas[i] < buffer.experts.replicas;
  if (!sound) throw_invalid(begin.Env(), "candidates must be offsets of " + std::to_string(experts) + " experts into a list of replicas");
  return made;
}

// (begin: Int32Array [experts + 1], replicas: Int32Array)
void moe_buffer_wrap::set_candidates(const Napi::CallbackInfo& info) { candidates = candidates_of(native->buffer, info[0], info[1]); }

// (rank, signalSlot): what moe_forget() does, and a signal word more
void moe_buffer_wrap::forget(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto memory = native->memory.lock();
  if (!memory || !memory->connected()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  const int32_t rank = arg_int(info[0], "rank");
  const uint64_t slot = arg_size(info[1], "signalSlot");
  if (rank < 0 || rank >= static_cast<int32_t>(native->world_size)) throw_invalid(env, "rank " + std::to_string(rank) + " is no rank of this buffer");
  if (slot >= memory->signal_slots()) throw_invalid(env, "slot " + std::to_string(slot) + " of a pad with " + std::to_string(memory->signal_slots()) + " slots");
  // HAZARD: what a NIC has left elsewhere of the rank's signals belongs to the words that are cleared now, not to those of its successor.
  memory->context().progress().run();
  moe_forget(native->buffer, memory->own_data(), memory->own_signals(), rank);
  std::atomic_ref<uint64_t>(memory->own_signals()[slot]).store(0, std::memory_order_seq_cst);
}

void moe_buffer_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["MoeBuffer"] = DefineClass(env, "MoeBuffer",
                                     {InstanceMethod<&moe_buffer_wrap::set_candidates>("setCandidates"), InstanceMethod<&moe_buffer_wrap::forget>("forget"),
                                      InstanceMethod<&moe_buffer_wrap::dispatch>("dispatch"),
                                      InstanceMethod<&moe_buffer_wrap::combine>("combine"), InstanceMethod<&moe_buffer_wrap::release>("release"),
                                      InstanceMethod<&moe_buffer_wrap::steps>("steps")});
}

namespace {

struct routing_array {
  uint64_t* address;
  uint64_t elements;
  uint64_t bytes;
  uint64_t room() const { return rounded(elements * bytes); }
};

std::vector<routing_array> arrays_of(moe_routing_wrap::contents& made) {
  const ep_moe_buffer& b = made.of->buffer;
  const uint64_t choices = uint64_t{b.max_tokens} * b.top_k;
  const uint64_t world = made.of->world_size;
  const uint64_t local = made.of->local_experts;
  const uint64_t rows = b.header.kind == EP_MOE_LOW_LATENCY ? local * world * b.max_tokens : b.recv_rows;
  ep_moe_routing& r = made.routing;
  return {
      {&r.topk, choices, 4},       {&r.choice_replica, choices, 4},     {&r.choice_slot, choices, 4},
      {&r.send_words, b.experts.replicas, 8}, {&r.send_headers, choices, sizeof(ep_moe_header)}, {&r.send_first, uint64_t{b.experts.replicas} + 1, 4},
      {&r.recv_count, local, 4},   {&r.block_start, local + 1, 4},          {&r.layout_range, local * world, 8},
      {&r.src_token, rows, 4},     {&r.src_choice, rows, 4},            {&made.ranks, world, 8},
      {&made.wait_ns, world, 8},  {&r.send_start, b.experts.replicas, 4},
  };
}

// The order in which arrays_of() lie: what the host fills in, with what it also looks at at its end; the rest of what it looks at; what only kernels use.
constexpr size_t placement[] = {0, 11, 12, 6, 7, 8, 1, 9, 10, 2, 3, 4, 5, 13};
constexpr size_t first_reported = 11;
constexpr size_t last_filled = 12;
constexpr size_t last_seen = 10;
constexpr uint64_t status_room = rounded(sizeof(ep_kernel_status));

// Memory of the host, where NICs can read it.
void place_on_host(Napi::Env env, moe_routing_wrap::contents& made, uint64_t bytes) {
  auto memory = host_memory::create(bytes);
  const std::shared_ptr<host_memory> own = value_or_throw(env, memory);
  made.data = own->data();
  made.memory = own;
  const auto symmetric = made.of->memory.lock();
  if (!symmetric) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this buffer was closed"});
  auto ready = symmetric->prepare_source(address_of(made.data), bytes, own);
  value_or_throw(env, ready);
}

} // namespace

// (buffer): a MoeBuffer or a GpuMoeBuffer
moe_routing_wrap::moe_routing_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  auto made = std::make_shared<contents>();
  const gpu_moe_contents* gpu = gpu_moe_of(info[0], made->of);
  if (gpu == nullptr) made->of = unwrap<moe_buffer_wrap>(info[0], "buffer").native;
  const std::vector<routing_array> arrays = arrays_of(*made);
  made->bytes = status_room;
  for (const routing_array& one : arrays) made->bytes += one.room();
  if (gpu != nullptr) place_in_pinned(env, *gpu, *made);
  else place_on_host(env, *made, made->bytes);
  made->layout.resize(2 * arrays.size());
  uint64_t at = 0;
  for (const size_t index : placement) {
    const routing_array& one = arrays[index];
    if (index == first_reported) {
      made->status = at;
      made->report = at += status_room;
    }
    *one.address = address_of(made->data + at);
    made->layout[2 * index] = static_cast<double>(at);
    made->layout[2 * index + 1] = static_cast<double>(one.elements);
    at += one.room();
    if (index == last_filled) made->filled = at;
    if (index == last_seen) made->seen = at;
  }
  native = std::move(made);
  tag<moe_routing_wrap>(info.This().As<Napi::Object>());
}

Napi::Value moe_routing_wrap::window(const Napi::CallbackInfo& info) {
  return window_over(info.Env(), native->data, native->bytes, native->memory);
}

Napi::Value moe_routing_wrap::layout(const Napi::CallbackInfo& info) {
  auto made = Napi::Float64Array::New(info.Env(), native->layout.size());
  std::copy(native->layout.begin(), native->layout.end(), made.Data());
  return made;
}

// () -> GpuMemory: the same bytes on the device
Napi::Value moe_routing_wrap::mirror(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!native->mirror) throw_invalid(env, "a routing of the host has no mirror on a device");
  const Napi::Object made = state_of(env).classes["GpuMemory"].New({});
  gpu_memory_wrap::Unwrap(made)->native = native->mirror;
  return made;
}

void moe_routing_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["MoeRouting"] = DefineClass(env, "MoeRouting",
                                      {InstanceMethod<&moe_routing_wrap::window>("window"), InstanceMethod<&moe_routing_wrap::layout>("layout"),
                                       InstanceMethod<&moe_routing_wrap::mirror>("mirror")});
}

void bind_moe(Napi::Env env, Napi::Object exports) {
  moe_buffer_wrap::define(env, exports);
  gpu_moe_buffer_wrap::define(env, exports);
  gpu_moe_union_wrap::define(env, exports);
  moe_routing_wrap::define(env, exports);
}

} // namespace ep::binding
