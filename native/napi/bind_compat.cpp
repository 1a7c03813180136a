#include "kernel_run.hpp"

#include <cstring>

#include "device/compat.hpp"

#include "ep/device/compat_dispatch.h"
#include "ep/device/ibgda_endpoint.h"

namespace ep::binding {
namespace {

template <class Word> std::vector<Word> array_of(Napi::Value value, const char* what, napi_typedarray_type type) {
  const byte_span bytes = arg_bytes(value, what);
  if (value.As<Napi::TypedArray>().TypedArrayType() != type) throw_invalid(value.Env(), std::string(what) + " is a typed array of another type");
  std::vector<Word> made(bytes.size / sizeof(Word));
  if (bytes.size != 0) std::memcpy(made.data(), bytes.data, bytes.size);
  return made;
}

// One tensor's metadata and memory. Its vectors are what `native` points into.
struct compat_tensor {
  std::vector<int32_t> dst_rank;
  std::vector<uint32_t> dst_offset;
  std::vector<uint64_t> counts;
  std::vector<std::shared_ptr<const void>> keep;
  ep_compat_route native{};
};

// Everything that a running call points into. Owned by its task.
struct compat_job {
  std::shared_ptr<symmetric_memory> memory;
  std::vector<uint32_t> seq_len;
  std::vector<uint32_t> recv_mask;
  std::vector<uint32_t> recv_seq_len;
  compat_tensor query;
  compat_tensor key_value;
  ep_compat_args args{};
  ep_kernel_status status{};
  simt_options simt;
  double timeout_ms = -1;

  template <class Context> bool kernel(Context& context) const {
    if (args.memory.header.kind == EP_MEMORY_PROXY) return compat_dispatch(context, proxy_endpoint{args.memory}, args);
    if (args.memory.header.kind == EP_MEMORY_IBGDA) return compat_dispatch(context, ibgda_endpoint{args.memory}, args);
    return compat_dispatch(context, load_store_endpoint{args.memory}, args);
  }

  outcome run(const std::atomic<uint32_t>& cancel) {
    const outcome end = run_kernel(*memory, simt, timeout_ms, cancel, status, [this](auto& context) { return kernel(context); });
    // HAZARD: equality needs counters that begin at zero. Safe only because the caller runs a barrier of all ranks before each call: no peer signals now.
    const int32_t self = memory->context().rank();
    for (const ep_compat_route* route : {&args.query, &args.key_value}) {
      for (int32_t rank = 0; route->src != 0 && rank < memory->context().world_size(); ++rank) {
        std::atomic_ref<uint64_t>(*memory->signal(self, route->signal_slot + static_cast<uint64_t>(rank))).store(0, std::memory_order_seq_cst);
      }
    }
    return end;
  }
};

bool fits(uint64_t offset, uint64_t rows, uint64_t row_bytes, uint64_t available) {
  return offset <= available && rows <= (available - offset) / row_bytes;
}

// {source, srcOffset, target, dstOffset, rowBytes, sendOffset, recvOffset, recvRows, signalSlot, dstRank, dstRow, counts, replicas}
void read_tensor(compat_job& job, compat_tensor& into, const Napi::Object& from, uint64_t received) {
  const Napi::Env env = from.Env();
  const auto size = [&](const char* name) { return arg_size(from.Get(name), name); };
  const symmetric_memory& memory = *job.memory;
  const auto world = static_cast<uint64_t>(memory.context().world_size());
  ep_compat_route& out = into.native;
  out.row_bytes = size("rowBytes");
  if (out.row_bytes == 0 || out.row_bytes > (uint64_t{1} << 32)) throw_invalid(env, "rowBytes " + std::to_string(out.row_bytes) + " is not in 1..2^32");
  out.send_offset = size("sendOffset");
  out.recv_offset = size("recvOffset");
  out.signal_slot = size("signalSlot");
  const uint64_t replicas = size("replicas");
  const uint64_t recv_rows = size("recvRows");
  into.dst_rank = array_of<int32_t>(from.Get("dstRank"), "dstRank", napi_int32_array);
  into.dst_offset = array_of<uint32_t>(from.Get("dstRow"), "dstRow", napi_uint32_array);
  into.counts = array_of<uint64_t>(from.Get("counts"), "counts", napi_biguint64_array);
  if (replicas == 0 || replicas > UINT32_MAX || into.dst_rank.size() != job.seq_len.size() * replicas || into.dst_offset.size() != into.dst_rank.size() ||
      into.counts.size() != world + 1) {
    throw_invalid(env, "dstRank and dstRow have one entry per shard and replica, counts one per rank and their sum");
  }
  out.replicas = static_cast<uint32_t>(replicas);
  const operand source = operand_of(from.Get("source"), "source");
  const operand target = operand_of(from.Get("target"), "target");
  const uint64_t src_offset = size("srcOffset");
  const uint64_t dst_offset = size("dstOffset");
  if (received == UINT64_MAX) received = into.counts.back();
  if (!fits(src_offset, job.args.tokens, out.row_bytes, source.byte_length) || !fits(dst_offset, received, out.row_bytes, target.byte_length)) {
    throw_invalid(env, std::to_string(job.args.tokens) + " rows to send or " + std::to_string(received) + " to receive exceed the tensor");
  }
  if (!fits(out.send_offset, job.args.tokens, out.row_bytes, memory.byte_length()) || !fits(out.recv_offset, recv_rows, out.row_bytes, memory.byte_length()) ||
      received > recv_rows || out.signal_slot > memory.signal_slots() || world > memory.signal_slots() - out.signal_slot) {
    throw_invalid(env, "buffers of " + std::to_string(recv_rows) + " rows or counters at slot " + std::to_string(out.signal_slot) + " exceed the memory");
  }
  for (size_t i = 0; i < into.dst_rank.size(); ++i) {
    const int32_t rank = into.dst_rank[i];
    if (rank < -1 || rank >= static_cast<int32_t>(world)) throw_invalid(env, "destination rank " + std::to_string(rank) + " is not in the world");
    if (rank >= 0 && uint64_t{into.dst_offset[i]} + job.seq_len[i / replicas] > recv_rows) throw_invalid(env, "rows of a shard exceed a receive buffer");
  }
  out.src = source.address + src_offset;
  out.dst = target.address + dst_offset;
  out.dst_rank = reinterpret_cast<uint64_t>(into.dst_rank.data());
  out.dst_offset = reinterpret_cast<uint64_t>(into.dst_offset.data());
  out.num_recv_tokens = reinterpret_cast<uint64_t>(into.counts.data());
  into.keep = {source.keep, target.keep};
}

uint64_t sum_of(const std::vector<uint32_t>& lengths) {
  uint64_t sum = 0;
  for (const uint32_t length : lengths) sum += length;
  return sum;
}

} // namespace

// ({handle, seqLen, query, keyValue?, gradient?: {mask, seqLen, replicas}, blocks, simt?, timeoutMs}) -> operation
Napi::Value stream_wrap::compat_dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "compatDispatch takes a description");
  const auto description = info[0].As<Napi::Object>();
  auto job = std::make_shared<compat_job>();
  job->memory = memory_of_handle(description.Get("handle"));
  switch (job->memory->device_handle().header.kind) {
    case EP_MEMORY_EFA:
    case EP_MEMORY_MIXED_EFA:
      throw_invalid(env, "the compatible kernel sets its counters back to zero after each call; over EFA they are counts that the NIC keeps");
    case EP_MEMORY_MIXED_IBGDA:
    case EP_MEMORY_MIXED_PROXY: throw_invalid(env, "the compatible kernel reaches all peers in one way");
    default: break;
  }
  ep_compat_args& args = job->args;
  args.memory = job->memory->device_handle();
  job->seq_len = array_of<uint32_t>(description.Get("seqLen"), "seqLen", napi_uint32_array);
  args.tokens = sum_of(job->seq_len);
  args.seq_len = reinterpret_cast<uint64_t>(job->seq_len.data());
  args.num_seqs = static_cast<uint32_t>(job->seq_len.size());
  uint64_t received = UINT64_MAX; // as many as the counts say
  const Napi::Value gradient = description.Get("gradient");
  if (!gradient.IsUndefined()) {
    const auto shape = gradient.As<Napi::Object>();
    job->recv_mask = array_of<uint32_t>(shape.Get("mask"), "mask", napi_uint32_array);
    job->recv_seq_len = array_of<uint32_t>(shape.Get("seqLen"), "gradient.seqLen", napi_uint32_array);
    const uint64_t replicas = arg_size(shape.Get("replicas"), "replicas");
    args.recv_tokens = sum_of(job->recv_seq_len);
    if (replicas == 0 || replicas > UINT32_MAX || job->recv_mask.empty() || job->recv_mask.size() != job->recv_seq_len.size() * replicas) {
      throw_invalid(env, "mask has one entry per home shard and replica, and at least one");
    }
    if (const char* why = compat_gradient_refusal(job->recv_seq_len.data(), static_cast<uint32_t>(job->recv_seq_len.size()))) throw_invalid(env, why);
    args.recv_mask = reinterpret_cast<uint64_t>(job->recv_mask.data());
    args.recv_seq_len = reinterpret_cast<uint64_t>(job->recv_seq_len.data());
    args.recv_seqs = static_cast<uint32_t>(job->recv_seq_len.size());
    args.recv_replicas = static_cast<uint32_t>(replicas);
    received = args.recv_tokens * replicas;
  }
  read_tensor(*job, job->query, description.Get("query").As<Napi::Object>(), received);
  args.query = job->query.native;
  const Napi::Value key_value = description.Get("keyValue");
  if (!key_value.IsUndefined()) {
    read_tensor(*job, job->key_value, key_value.As<Napi::Object>(), UINT64_MAX);
    args.key_value = job->key_value.native;
  }
  args.status = reinterpret_cast<uint64_t>(&job->status);
  if (const char* why = compat_refusal(args)) throw_invalid(env, why);
  job->simt = executor_of(description);
  job->simt.blocks = static_cast<uint32_t>(compat_blocks(job->simt.blocks, args.tokens));
  const uint32_t roles = 1 + (args.key_value.src != 0 ? args.key_value.replicas : 0);
  if (job->simt.lanes != 0 && job->simt.lanes / job->simt.warp_lanes < roles) {
    throw_invalid(env, "compat: expected at least " + std::to_string(roles) + " warps, one for the query and one for each replica, found " +
                           std::to_string(job->simt.lanes / job->simt.warp_lanes));
  }
  job->timeout_ms = arg_double(description.Get("timeoutMs"), "timeoutMs");
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) { return job->run(cancel); })));
}

} // namespace ep::binding
