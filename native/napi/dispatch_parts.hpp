// Descriptions of a dispatch from JS, checked before anything moves: a kernel has no way to refuse.
#pragma once

#include "wraps.hpp"

namespace ep::binding {

// A part {rowBytes, dstOffset, dstRows, program} without its source. `source_rows`: how many rows its entries read. Its entries are the program's.
ep_dispatch_part checked_part(const Napi::Object& part, uint64_t memory_bytes, int32_t world_size, uint64_t* source_rows);

// A sum {program, dtype, srcOffset, dstOffset, strideBytes, rowElements} of these operands. Its arrays are the program's.
ep_replica_sum_args checked_sum(const Napi::Object& sum, const operand& source, const operand& target);

// rows that a part's source must have, and where they are read.
struct source_rows {
  uint64_t address;
  uint64_t stride_bytes;
};
source_rows checked_source(Napi::Env env, const operand& source, Napi::Value offset, Napi::Value stride, uint64_t row_bytes, uint64_t rows);

} // namespace ep::binding
