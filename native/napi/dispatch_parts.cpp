#include "dispatch_parts.hpp"

namespace ep::binding {

ep_dispatch_part checked_part(const Napi::Object& part, uint64_t memory_bytes, int32_t world_size, uint64_t* source_rows) {
  const Napi::Env env = part.Env();
  const auto& program = unwrap<dispatch_program_wrap>(part.Get("program"), "program").native;
  ep_dispatch_part out{};
  out.row_bytes = arg_size(part.Get("rowBytes"), "rowBytes");
  out.dst_offset_bytes = arg_size(part.Get("dstOffset"), "dstOffset");
  const uint64_t capacity = arg_size(part.Get("dstRows"), "dstRows");
  if (out.row_bytes == 0 || out.row_bytes > (uint64_t{1} << 32)) throw_invalid(env, "rowBytes " + std::to_string(out.row_bytes) + " is not in 1..2^32");
  if (out.dst_offset_bytes > memory_bytes || capacity > (memory_bytes - out.dst_offset_bytes) / out.row_bytes) {
    throw_invalid(env, "receive tensor of " + std::to_string(capacity) + " rows at " + std::to_string(out.dst_offset_bytes) + " exceeds the memory of " +
                           std::to_string(memory_bytes) + " bytes");
  }
  uint64_t rows = 0; // of the source, as far as entries read it
  for (const ep_dispatch_entry& entry : program->entries) {
    if (entry.dst_row + entry.rows > capacity) {
      throw_invalid(env, "rows " + std::to_string(entry.dst_row) + " + " + std::to_string(entry.rows) + " for rank " + std::to_string(entry.dst_rank) +
                             " exceed a receive tensor of " + std::to_string(capacity) + " rows");
    }
    if (entry.dst_rank < 0 || entry.dst_rank >= world_size) {
      throw_invalid(env, "destination rank " + std::to_string(entry.dst_rank) + " is not in a world of " + std::to_string(world_size));
    }
    rows = std::max(rows, entry.src_row + entry.rows);
  }
  out.entries = reinterpret_cast<uint64_t>(program->entries.data());
  out.entry_count = static_cast<uint32_t>(program->entries.size());
  out.chunk_rows = program->chunk_rows;
  out.chunk_count = program->chunk_count;
  *source_rows = rows;
  return out;
}

ep_replica_sum_args checked_sum(const Napi::Object& sum, const operand& source, const operand& target) {
  const Napi::Env env = sum.Env();
  const auto& program = unwrap<sum_program_wrap>(sum.Get("program"), "program").native;
  const uint64_t dtype = arg_size(sum.Get("dtype"), "dtype");
  if (dtype < 1 || dtype > 3) throw_invalid(env, "dtype " + std::to_string(dtype) + " is not one of 1..3");
  ep_replica_sum_args out{};
  const uint64_t src_offset = arg_size(sum.Get("srcOffset"), "srcOffset");
  const uint64_t dst_offset = arg_size(sum.Get("dstOffset"), "dstOffset");
  out.dst_stride_bytes = arg_size(sum.Get("strideBytes"), "strideBytes");
  out.row_elements = arg_size(sum.Get("rowElements"), "rowElements");
  const uint64_t row_bytes = out.row_elements * (dtype == EP_DTYPE_F32 ? 4 : 2);
  const auto fits = [](uint64_t offset, uint64_t row, uint64_t rows, uint64_t stride, uint64_t row_bytes, uint64_t size) {
    if (rows == 0) return true;
    uint64_t end = 0;
    // The bound is for rows of no bytes, which fit anywhere: a kernel goes through them all the same.
    if (__builtin_add_overflow(row, rows, &end) || end > (uint64_t{1} << 40)) return false;
    return offset <= size && rows_fit(end - 1, stride, row_bytes, size - offset);
  };
  for (size_t shard = 0; shard < program->shard_rows.size(); ++shard) {
    const uint64_t rows = program->shard_rows[shard];
    if (!fits(dst_offset, program->shard_row[shard], rows, out.dst_stride_bytes, row_bytes, target.byte_length)) {
      throw_invalid(env, "home rows of shard " + std::to_string(shard) + " exceed the target of " + std::to_string(target.byte_length) + " bytes");
    }
    for (uint64_t i = program->replica_begin[shard]; i < program->replica_begin[shard + 1]; ++i) {
      if (!fits(src_offset, program->replica_row[i], rows, row_bytes, row_bytes, source.byte_length)) {
        throw_invalid(env, "replica " + std::to_string(i) + " exceeds the source of " + std::to_string(source.byte_length) + " bytes");
      }
    }
  }
  out.src = source.address + src_offset;
  out.dst = target.address + dst_offset;
  out.shard_row = reinterpret_cast<uint64_t>(program->shard_row.data());
  out.shard_rows = reinterpret_cast<uint64_t>(program->shard_rows.data());
  out.replica_begin = reinterpret_cast<uint64_t>(program->replica_begin.data());
  out.replica_row = reinterpret_cast<uint64_t>(program->replica_row.data());
  out.shard_count = program->shard_rows.size();
  out.dtype = static_cast<uint32_t>(dtype);
  return out;
}

source_rows checked_source(Napi::Env env, const operand& source, Napi::Value offset_value, Napi::Value stride_value, uint64_t row_bytes, uint64_t rows) {
  const uint64_t offset = arg_size(offset_value, "srcOffset");
  const uint64_t stride = arg_size(stride_value, "strideBytes");
  if (offset > source.byte_length) throw_invalid(env, "srcOffset " + std::to_string(offset) + " lies beyond its " + std::to_string(source.byte_length) + " bytes");
  if (stride < row_bytes && stride != 0) throw_invalid(env, "strideBytes is smaller than rowBytes");
  if (rows != 0 && !rows_fit(rows - 1, stride, row_bytes, source.byte_length - offset)) {
    throw_invalid(env, std::to_string(rows) + " source rows exceed the " + std::to_string(source.byte_length - offset) + " bytes of the source");
  }
  return {source.address + offset, stride};
}

} // namespace ep::binding
