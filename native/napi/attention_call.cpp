#include "attention_call.hpp"

#include <cstring>

namespace ep::binding {
namespace {

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

} // namespace

rows_operand rows_within(const Napi::Object& description, const char* name, uint64_t rows, uint64_t row_bytes, const std::function<operand(Napi::Value, const char*)>& find) {
  const Napi::Env env = description.Env();
  const Napi::Value value = description.Get(name);
  if (!value.IsObject()) throw_invalid(env, std::string(name) + " is not {operand, byteOffset, strideBytes}");
  const auto object = value.As<Napi::Object>();
  if (rows == 0) return {name, 0, 0, 0, row_bytes, nullptr}; // nothing to read: an empty tensor need not lie anywhere
  const operand memory = find(object.Get("operand"), name);
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

} // namespace ep::binding
