// Calls of core attention as JS describes them, on the host or on a GPU: checked before anything is launched, since a kernel has no way to refuse.
#pragma once

#include <functional>

#include "attention/core_attention.hpp"
#include "wraps.hpp"

namespace ep::binding {

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

// The tensor `name` of a description, {operand, byteOffset, strideBytes}; `find` takes the operand.
rows_operand rows_within(const Napi::Object& description, const char* name, uint64_t rows, uint64_t row_bytes, const std::function<operand(Napi::Value, const char*)>& find);

// HAZARD: the kernel reads rows again after it has written others; an output over an input gives a wrong result without any error.
void check_disjoint(Napi::Env env, const std::vector<const rows_operand*>& inputs, const std::vector<const rows_operand*>& outputs);

// Everything that a running call points into. Owned by its task.
struct attention_job {
  attention::problem what{};
  std::vector<attention::query_shard> shards;
  std::vector<attention::piece> pieces;
  uint64_t q_row_bytes = 0;
  uint64_t kv_row_bytes = 0;
  uint64_t lse_row_bytes = 0;
};

// {dtype, qRows, kvRows, qHeads, kvHeads, headDim, scale, threads, shards, pieces}
void read_problem(attention_job& job, const Napi::Object& description);

} // namespace ep::binding
