#include "wraps.hpp"

#include <cstring>

#include "attention/core_attention.hpp"

namespace ep::binding {
namespace {

// One row-strided tensor of a call, found inside its operand and checked to lie there: the kernel sees addresses and strides only.
struct rows_operand {
  std::string name;
  uint64_t address = 0;
  uint64_t stride = 0;
  uint64_t rows = 0;
  uint64_t row_bytes = 0;
  std::shared_ptr<const void> keep;

  uint64_t end() const { return address + (rows - 1) * stride + row_bytes; } // of a tensor with rows
  attention::input_rows input() const { return {reinterpret_cast<const void*>(address), static_cast<int64_t>(stride)}; }
  attention::output_rows output() const { return {reinterpret_cast<void*>(address), static_cast<int64_t>(stride)}; }
};

rows_operand rows_of(const Napi::Object& description, const char* name, uint64_t rows, uint64_t row_bytes) {
  const Napi::Env env = description.Env();
  const Napi::Value value = description.Get(name);
  if (!value.IsObject()) throw_invalid(env, std::string(name) + " is not {operand, byteOffset, strideBytes}");
  const auto object = value.As<Napi::Object>();
  if (rows == 0) return {name, 0, 0, 0, row_bytes, nullptr}; // nothing to read: an empty tensor need not lie anywhere
  const operand memory = operand_of(object.Get("operand"), name);
  const uint64_t offset = arg_size(object.Get("byteOffset"), "byteOffset");
  rows_operand out{name, 0, arg_size(object.Get("strideBytes"), "strideBytes"), rows, row_bytes, memory.keep};
  if (offset > memory.byte_length) {
    throw_invalid(env, out.name + " starts at byte " + std::to_string(offset) + ", beyond its operand of " + std::to_string(memory.byte_length) + " bytes");
  }
  const uint64_t available = memory.byte_length - offset;
  if (out.stride < row_bytes) {
    throw_invalid(env, out.name + " has a row stride of " + std::to_string(out.stride) + " bytes, its rows have " + std::to_string(row_bytes));
  }
  if (!rows_fit(rows - 1, out.stride, row_bytes, available)) {
    throw_invalid(env, out.name + " needs " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes every " + std::to_string(out.stride) +
                           " bytes, its operand holds " + std::to_string(available) + " bytes from byte " + std::to_string(offset));
  }
  out.address = memory.address + offset;
  return out;
}

// Whether two tensors may touch one byte. Exact for tensors of the same stride (columns of one matrix), else by their ranges.
bool may_share(const rows_operand& a, const rows_operand& b) {
  if (a.rows == 0 || b.rows == 0) return false;
  if (a.end() <= b.address || b.end() <= a.address) return false;
  if (a.stride != b.stride) return true;
  const rows_operand& low = a.address <= b.address ? a : b;
  const rows_operand& high = a.address <= b.address ? b : a;
  const uint64_t shift = (high.address - low.address) % low.stride;
  return shift < low.row_bytes || shift + high.row_bytes > low.stride;
}

// HAZARD: the kernel reads rows again after it has written others; an output over an input gives a wrong result without any error.
void check_disjoint(Napi::Env env, const std::vector<const rows_operand*>& inputs, const std::vector<const rows_operand*>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const rows_operand* input : inputs) {
      if (may_share(*outputs[i], *input)) throw_invalid(env, "output " + outputs[i]->name + " overlaps input " + input->name);
    }
    for (size_t j = i + 1; j < outputs.size(); ++j) {
      if (may_share(*outputs[i], *outputs[j])) throw_invalid(env, "outputs " + outputs[i]->name + " and " + outputs[j]->name + " overlap");
    }
  }
}

// Everything that a running call points into. Owned by its task.
struct attention_job {
  attention::problem what{};
  std::vector<attention::query_shard> shards;
  std::vector<attention::piece> pieces;
  uint64_t q_row_bytes = 0;
  uint64_t kv_row_bytes = 0;
  uint64_t lse_row_bytes = 0;
};

template <class Item> std::vector<Item> items_of(Napi::Value value, const char* what) {
  static_assert(std::is_trivially_copyable_v<Item> && sizeof(Item) % sizeof(int64_t) == 0);
  if (!value.IsTypedArray() || value.As<Napi::TypedArray>().TypedArrayType() != napi_bigint64_array) {
    throw_invalid(value.Env(), std::string(what) + " must be a BigInt64Array");
  }
  const byte_span bytes = arg_bytes(value, what);
  if (bytes.size % sizeof(Item) != 0) {
    throw_invalid(value.Env(), std::string(what) + " must hold a multiple of " + std::to_string(sizeof(Item) / sizeof(int64_t)) + " elements, found " +
                                   std::to_string(bytes.size / sizeof(int64_t)));
  }
  std::vector<Item> items(bytes.size / sizeof(Item));
  if (bytes.size != 0) std::memcpy(static_cast<void*>(items.data()), bytes.data, bytes.size);
  return items;
}

int32_t shape_of(const Napi::Object& description, const char* name, int32_t most) {
  const uint64_t value = arg_size(description.Get(name), name);
  if (value < 1 || value > static_cast<uint64_t>(most)) {
    throw_invalid(description.Env(), std::string(name) + " " + std::to_string(value) + " is not in 1.." + std::to_string(most));
  }
  return static_cast<int32_t>(value);
}

int64_t row_count_of(const Napi::Object& description, const char* name) {
  const uint64_t value = arg_size(description.Get(name), name);
  if (value > uint64_t{1} << 40) throw_invalid(description.Env(), std::string(name) + " " + std::to_string(value) + " exceeds 2^40");
  return static_cast<int64_t>(value);
}

void read_problem(attention_job& job, const Napi::Object& description) {
  const Napi::Env env = description.Env();
  attention::problem& what = job.what;
  const uint64_t dtype = arg_size(description.Get("dtype"), "dtype");
  if (dtype != EP_DTYPE_F32 && dtype != EP_DTYPE_BF16) {
    throw_invalid(env, "dtype " + std::to_string(dtype) + " is neither f32 (" + std::to_string(EP_DTYPE_F32) + ") nor bf16 (" + std::to_string(EP_DTYPE_BF16) + ")");
  }
  what.type = dtype == EP_DTYPE_F32 ? attention::dtype::f32 : attention::dtype::bf16;
  what.q_rows = row_count_of(description, "qRows");
  what.kv_rows = row_count_of(description, "kvRows");
  what.q_heads = shape_of(description, "qHeads", attention::max_heads);
  what.kv_heads = shape_of(description, "kvHeads", attention::max_heads);
  what.head_dim = shape_of(description, "headDim", attention::max_head_dim);
  what.threads = shape_of(description, "threads", attention::max_threads);
  what.scale = static_cast<float>(arg_double(description.Get("scale"), "scale"));
  job.shards = items_of<attention::query_shard>(description.Get("shards"), "shards");
  job.pieces = items_of<attention::piece>(description.Get("pieces"), "pieces");
  what.shards = job.shards.data();
  what.shard_count = static_cast<int64_t>(job.shards.size());
  what.pieces = job.pieces.data();
  what.piece_count = static_cast<int64_t>(job.pieces.size());
  const uint64_t element = what.type == attention::dtype::f32 ? 4 : 2;
  job.q_row_bytes = static_cast<uint64_t>(what.q_heads) * static_cast<uint64_t>(what.head_dim) * element;
  job.kv_row_bytes = static_cast<uint64_t>(what.kv_heads) * static_cast<uint64_t>(what.head_dim) * element;
  job.lse_row_bytes = static_cast<uint64_t>(what.q_heads) * sizeof(float);
}

uint32_t status_of(attention::status value) {
  switch (value) {
    case attention::status::ok: return EP_STATUS_OK;
    case attention::status::cancelled: return EP_STATUS_ABORTED;
    case attention::status::out_of_memory: return EP_STATUS_MEMORY_LIMIT;
    case attention::status::no_threads: return EP_STATUS_SYSTEM;
    case attention::status::bad_argument:
    case attention::status::bad_shard:
    case attention::status::bad_piece:
    case attention::status::shards_overlap:
    case attention::status::unsupported_isa: return EP_STATUS_INVALID;
  }
  return EP_STATUS_SYSTEM;
}

outcome outcome_of(attention::status value, std::string why) {
  outcome end;
  end.status = status_of(value);
  end.message = std::move(why);
  return end;
}

Napi::Object description_of(const Napi::CallbackInfo& info, const char* call) {
  if (!info[0].IsObject()) throw_invalid(info.Env(), std::string(call) + " takes a description");
  return info[0].As<Napi::Object>();
}

} // namespace

// ({dtype, qRows, kvRows, qHeads, kvHeads, headDim, scale, threads, shards, pieces, q, k, v, o, lse}) -> operation
Napi::Value stream_wrap::attention_forward(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const Napi::Object description = description_of(info, "attentionForward");
  struct forward_job : attention_job {
    rows_operand q, k, v, o, lse;
  };
  auto job = std::make_shared<forward_job>();
  read_problem(*job, description);
  const auto q_rows = static_cast<uint64_t>(job->what.q_rows);
  const auto kv_rows = static_cast<uint64_t>(job->what.kv_rows);
  job->q = rows_of(description, "q", q_rows, job->q_row_bytes);
  job->k = rows_of(description, "k", kv_rows, job->kv_row_bytes);
  job->v = rows_of(description, "v", kv_rows, job->kv_row_bytes);
  job->o = rows_of(description, "o", q_rows, job->q_row_bytes);
  job->lse = rows_of(description, "lse", q_rows, job->lse_row_bytes);
  check_disjoint(env, {&job->q, &job->k, &job->v}, {&job->o, &job->lse});
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) {
                             job->what.cancel = &cancel;
                             const attention::forward_args args{job->what, job->q.input(), job->k.input(), job->v.input(), job->o.output(), job->lse.output()};
                             std::string why;
                             const attention::status end = attention::forward(args, &why);
                             return outcome_of(end, std::move(why));
                           })));
}

// ({as attentionForward, with q, k, v, o, lse as inputs, and dO, dQ, dK, dV}) -> operation
Napi::Value stream_wrap::attention_backward(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const Napi::Object description = description_of(info, "attentionBackward");
  struct backward_job : attention_job {
    rows_operand d_o, q, k, v, o, lse, d_q, d_k, d_v;
  };
  auto job = std::make_shared<backward_job>();
  read_problem(*job, description);
  const auto q_rows = static_cast<uint64_t>(job->what.q_rows);
  const auto kv_rows = static_cast<uint64_t>(job->what.kv_rows);
  job->d_o = rows_of(description, "dO", q_rows, job->q_row_bytes);
  job->q = rows_of(description, "q", q_rows, job->q_row_bytes);
  job->k = rows_of(description, "k", kv_rows, job->kv_row_bytes);
  job->v = rows_of(description, "v", kv_rows, job->kv_row_bytes);
  job->o = rows_of(description, "o", q_rows, job->q_row_bytes);
  job->lse = rows_of(description, "lse", q_rows, job->lse_row_bytes);
  job->d_q = rows_of(description, "dQ", q_rows, job->q_row_bytes);
  job->d_k = rows_of(description, "dK", kv_rows, job->kv_row_bytes);
  job->d_v = rows_of(description, "dV", kv_rows, job->kv_row_bytes);
  check_disjoint(env, {&job->d_o, &job->q, &job->k, &job->v, &job->o, &job->lse}, {&job->d_q, &job->d_k, &job->d_v});
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) {
                             job->what.cancel = &cancel;
                             const attention::backward_args args{job->what,        job->d_o.input(), job->q.input(),
                                                                 job->k.input(),   job->v.input(),   job->lse.input(),
                                                                 job->o.input(),   {nullptr, 0},     job->d_q.output(),
                                                                 job->d_k.output(), job->d_v.output()};
                             std::string why;
                             const attention::status end = attention::backward(args, &why);
                             return outcome_of(end, std::move(why));
                           })));
}

} // namespace ep::binding
