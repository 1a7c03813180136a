#include "attention/attention_job.hpp"
#include "attention_call.hpp"
#include "ep/abi/core_attention.h"
#include "gpu_wraps.hpp"

#include <cstring>

namespace ep::binding {

static_assert(EP_ATTENTION_MOST_HEAD_DIM == attention::max_head_dim);

// Everything but the tensors: the shards lie on the device.
struct gpu_attention_wrap::contents {
  attention_job job;
  ep_attention_args args{};
  std::shared_ptr<const gpu::device_block> shards;
};

// (library, device, {dtype, qRows, kvRows, qHeads, kvHeads, headDim, scale, threads, shards, pieces}); one piece for each shard
gpu_attention_wrap::gpu_attention_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const gpu::library_ref& of = unwrap<gpu_library_wrap>(info[0], "library").native;
  const int32_t device = arg_int(info[1], "device");
  if (device < 0 || device >= of->device_count()) throw_invalid(env, "GPU " + std::to_string(device) + " is not one of " + std::to_string(of->device_count()));
  if (!info[2].IsObject()) throw_invalid(env, "attention on a GPU is made from a description");
  auto made = std::make_shared<contents>();
  read_problem(made->job, info[2].As<Napi::Object>());
  const attention::problem& what = made->job.what;
  attention::plan plan;
  std::string why;
  if (attention::make_plan(what, false, plan, why) != attention::status::ok) throw_invalid(env, why);
  std::vector<ep_attention_shard> shards;
  uint64_t tiles = 0;
  for (const attention::query_shard& shard : made->job.shards) {
    if (shard.piece_count != 1) throw_invalid(env, "a shard with keys in " + std::to_string(shard.piece_count) + " pieces: kernels of a GPU take one run of keys");
    const attention::piece& keys = made->job.pieces[static_cast<size_t>(shard.first_piece)];
    shards.push_back({static_cast<uint64_t>(shard.q_row), static_cast<uint64_t>(shard.q_length), static_cast<uint64_t>(keys.row), static_cast<uint64_t>(keys.length), tiles});
    tiles += (static_cast<uint64_t>(shard.q_length) + EP_ATTENTION_TILE - 1) / EP_ATTENTION_TILE;
  }
  if (tiles > UINT32_MAX || shards.size() > UINT32_MAX) throw_invalid(env, std::to_string(tiles) + " tiles of queries exceed 2^32 - 1");
  ep_attention_args& args = made->args;
  auto block = gpu::device_block::allocate(of, device, std::max<uint64_t>(1, shards.size() * sizeof(ep_attention_shard)));
  made->shards = value_or_throw(env, block);
  if (!shards.empty()) {
    auto copied = gpu::copy_now(of, device, made->shards->address(), reinterpret_cast<uint64_t>(shards.data()), shards.size() * sizeof(ep_attention_shard), "copying shards to the device");
    value_or_throw(env, copied);
  }
  args.shards = made->shards->address();
  args.shard_count = static_cast<uint32_t>(shards.size());
  args.kv_rows = static_cast<uint64_t>(what.kv_rows);
  args.dtype = what.type == attention::dtype::f32 ? EP_DTYPE_F32 : EP_DTYPE_BF16;
  args.tiles = static_cast<uint32_t>(tiles);
  args.q_heads = static_cast<uint32_t>(what.q_heads);
  args.kv_heads = static_cast<uint32_t>(what.kv_heads);
  args.head_dim = static_cast<uint32_t>(what.head_dim);
  std::memcpy(&args.scale_bits, &what.scale, sizeof args.scale_bits);
  native = std::move(made);
  tag<gpu_attention_wrap>(info.This().As<Napi::Object>());
}
void gpu_attention_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_attention_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuAttention"] = DefineClass(env, "GpuAttention", {InstanceMethod<&gpu_attention_wrap::release>("release")});
}

// (attention, {q, k, v, o, lse, and of the backward pass dO, dQ, dK, dV}) -> operation; 0 while the stream is being captured
Napi::Value gpu_stream_wrap::attention(const Napi::CallbackInfo& info, bool backward) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const auto prepared = unwrap<gpu_attention_wrap>(info[0], "attention").native;
  if (!prepared) throw_failure(env, {EP_STATUS_CLOSED, 0, "the attention was released"});
  if (prepared->shards->device() != stream.device()) {
    throw_invalid(env, "the attention is of GPU " + std::to_string(prepared->shards->device()) + ", the stream of GPU " + std::to_string(stream.device()));
  }
  if (!info[1].IsObject()) throw_invalid(env, "attention takes a description of its tensors");
  const auto description = info[1].As<Napi::Object>();
  const attention_job& job = prepared->job;
  const auto q_rows = static_cast<uint64_t>(job.what.q_rows);
  const auto kv_rows = static_cast<uint64_t>(job.what.kv_rows);
  const auto rows = [&](const char* name, uint64_t count, uint64_t row_bytes) {
    return rows_within(description, name, count, row_bytes, [&](Napi::Value value, const char* what) { return gpu_operand_of(value, what, stream, false); });
  };
  ep_attention_args args = prepared->args;
  std::vector<rows_operand> inputs;
  std::vector<rows_operand> outputs;
  const auto place = [](ep_attention_rows& into, const rows_operand& from) { into = {from.address, from.stride}; };
  const auto take = [&](std::vector<rows_operand>& as, ep_attention_rows& into, const char* name, uint64_t count, uint64_t row_bytes) {
    as.push_back(rows(name, count, row_bytes));
    place(into, as.back());
  };
  std::vector<rows_operand>& results = backward ? inputs : outputs;
  take(inputs, args.q, "q", q_rows, job.q_row_bytes);
  take(inputs, args.k, "k", kv_rows, job.kv_row_bytes);
  take(inputs, args.v, "v", kv_rows, job.kv_row_bytes);
  take(results, args.o, "o", q_rows, job.q_row_bytes);
  take(results, args.lse, "lse", q_rows, job.lse_row_bytes);
  if (backward) {
    take(inputs, args.d_o, "dO", q_rows, job.q_row_bytes);
    take(outputs, args.d_q, "dQ", q_rows, job.q_row_bytes);
    take(outputs, args.d_k, "dK", kv_rows, job.kv_row_bytes);
    take(outputs, args.d_v, "dV", kv_rows, job.kv_row_bytes);
  }
  std::vector<const rows_operand*> read;
  std::vector<const rows_operand*> written;
  gpu::stream::watch how;
  how.keep.push_back(prepared);
  for (const rows_operand& one : inputs) read.push_back(&one);
  for (const rows_operand& one : outputs) written.push_back(&one);
  for (const auto* list : {&inputs, &outputs}) {
    for (const rows_operand& one : *list) how.keep.push_back(one.keep);
  }
  check_disjoint(env, read, written);
  // Nothing waits for anybody here: the slot only makes an order to give up wait for the kernel's end, so that nothing it uses is freed before.
  auto slot = stream.slot();
  how.kernels.push_back({value_or_throw(env, slot), nullptr});
  const ep_cuda_launch launch = stream.launch(1, 32, 0, nullptr);
  const ep_cuda_table& table = stream.of()->table();
  check(env, (backward ? table.attention_backward : table.attention_forward)(&launch, &args), backward ? "launching attention backward" : "launching attention");
  if (capturing) {
    capturing->kernels.insert(capturing->kernels.end(), how.kernels.begin(), how.kernels.end());
    capturing->keep.insert(capturing->keep.end(), how.keep.begin(), how.keep.end());
    return Napi::Number::New(env, 0);
  }
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}
Napi::Value gpu_stream_wrap::attention_forward(const Napi::CallbackInfo& info) { return attention(info, false); }
Napi::Value gpu_stream_wrap::attention_backward(const Napi::CallbackInfo& info) { return attention(info, true); }

} // namespace ep::binding
