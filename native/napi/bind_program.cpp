// What a plan tells one rank to send and to sum: made once for each bound dispatch.
#include "wraps.hpp"

#include <cstring>

namespace ep::binding {
namespace {

// An Int32Array without negative values (a plan's own arrays) or a BigUint64Array.
std::vector<uint64_t> words_of(Napi::Value value, const char* what) {
  const byte_span bytes = arg_bytes(value, what);
  const napi_typedarray_type type = value.As<Napi::TypedArray>().TypedArrayType();
  if (type == napi_biguint64_array) {
    std::vector<uint64_t> words(bytes.size / sizeof(uint64_t));
    if (bytes.size != 0) std::memcpy(words.data(), bytes.data, bytes.size);
    return words;
  }
  if (type != napi_int32_array) throw_invalid(value.Env(), std::string(what) + " must be an Int32Array or a BigUint64Array");
  std::vector<uint64_t> words(bytes.size / sizeof(int32_t));
  for (size_t i = 0; i < words.size(); ++i) {
    int32_t word = 0;
    std::memcpy(&word, bytes.data + i * sizeof word, sizeof word);
    if (word < 0) throw_invalid(value.Env(), std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(word));
    words[i] = static_cast<uint64_t>(word);
  }
  return words;
}

} // namespace

// (srcRow, dstRow, rows: BigUint64Array; dstRank: Int32Array; chunkRows)
dispatch_program_wrap::dispatch_program_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const std::vector<uint64_t> src = words_of(info[0], "srcRow");
  const std::vector<uint64_t> dst = words_of(info[1], "dstRow");
  const std::vector<uint64_t> rows = words_of(info[2], "rows");
  const std::vector<int32_t> rank = ranks_of(info[3], "dstRank");
  const uint64_t chunk_rows = arg_size(info[4], "chunkRows");
  if (dst.size() != src.size() || rows.size() != src.size() || rank.size() != src.size()) throw_invalid(env, "entry arrays differ in length");
  if (chunk_rows == 0 || chunk_rows > UINT32_MAX) throw_invalid(env, "chunkRows " + std::to_string(chunk_rows) + " is not in 1..2^32-1");
  auto made = std::make_shared<contents>();
  made->chunk_rows = static_cast<uint32_t>(chunk_rows);
  uint64_t chunks = 0;
  for (size_t i = 0; i < src.size(); ++i) {
    if (rows[i] == 0) continue; // a zero-length shard is no message
    if (rows[i] > (uint64_t{1} << 40) || src[i] > (uint64_t{1} << 40) || dst[i] > (uint64_t{1} << 40)) throw_invalid(env, "an entry exceeds 2^40 rows");
    made->entries.push_back({src[i], dst[i], rows[i], rank[i], static_cast<uint32_t>(chunks)});
    chunks += (rows[i] + chunk_rows - 1) / chunk_rows;
    if (chunks > UINT32_MAX) throw_invalid(env, "more than 2^32 chunks: use larger ones");
  }
  made->chunk_count = static_cast<uint32_t>(chunks);
  native = std::move(made);
  tag<dispatch_program_wrap>(info.This().As<Napi::Object>());
}

void dispatch_program_wrap::define(Napi::Env env, Napi::Object exports) { exports["DispatchProgram"] = DefineClass(env, "DispatchProgram", {}); }

// (shardRow, shardRows, replicaBegin, replicaRow: BigUint64Array)
sum_program_wrap::sum_program_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  auto made = std::make_shared<contents>();
  made->shard_row = words_of(info[0], "shardRow");
  made->shard_rows = words_of(info[1], "shardRows");
  made->replica_begin = words_of(info[2], "replicaBegin");
  made->replica_row = words_of(info[3], "replicaRow");
  if (made->shard_rows.size() != made->shard_row.size() || made->replica_begin.size() != made->shard_row.size() + 1) {
    throw_invalid(env, "shard arrays differ in length");
  }
  for (size_t i = 0; i + 1 < made->replica_begin.size(); ++i) {
    if (made->replica_begin[i] > made->replica_begin[i + 1]) throw_invalid(env, "replicaBegin decreases at " + std::to_string(i));
  }
  if (made->replica_begin.front() != 0 || made->replica_begin.back() != made->replica_row.size()) throw_invalid(env, "replicaBegin does not cover replicaRow");
  native = std::move(made);
  tag<sum_program_wrap>(info.This().As<Napi::Object>());
}

void sum_program_wrap::define(Napi::Env env, Napi::Object exports) { exports["ReplicaSumProgram"] = DefineClass(env, "ReplicaSumProgram", {}); }

} // namespace ep::binding
