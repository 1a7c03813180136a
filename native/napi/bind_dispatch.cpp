#include "kernel_run.hpp"

#include <cstring>

#include "ep/device/replica_sum.h"
#include "ep/device/staged_dispatch.h"

namespace ep::binding {

std::shared_ptr<symmetric_memory> memory_of_handle(Napi::Value value) {
  const Napi::Env env = value.Env();
  const byte_span bytes = arg_bytes(value, "handle");
  ep_memory_handle handle{};
  if (bytes.size < sizeof(ep_handle_header)) throw_invalid(env, "a memory handle has at least 16 bytes, got " + std::to_string(bytes.size));
  std::memcpy(&handle, bytes.data, std::min(bytes.size, sizeof handle));
  if (handle.header.magic != EP_MAGIC_MEMORY) throw_invalid(env, "these bytes are not a memory handle");
  if (handle.header.abi_major != EP_ABI_MAJOR) {
    throw_failure(env, {EP_STATUS_ABI_MISMATCH, 0,
                        "memory handle has ABI " + std::to_string(handle.header.abi_major) + "." + std::to_string(handle.header.abi_minor) +
                            ", this build has " + std::to_string(EP_ABI_MAJOR) + "." + std::to_string(EP_ABI_MINOR)});
  }
  if (bytes.size != sizeof handle) throw_invalid(env, "a memory handle has " + std::to_string(sizeof handle) + " bytes, got " + std::to_string(bytes.size));
  auto memory = symmetric_memory::find(handle.memory_id);
  if (!memory || !memory->connected()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this handle was closed"});
  return memory;
}

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

Napi::Value field(const Napi::Object& object, const char* name) { return object.Get(name); }

// Everything that a running dispatch points into. Owned by its task.
struct dispatch_job {
  std::shared_ptr<symmetric_memory> memory;
  std::vector<std::shared_ptr<const void>> keep;
  std::vector<std::shared_ptr<const dispatch_program_wrap::contents>> programs;
  std::vector<std::shared_ptr<const sum_program_wrap::contents>> sum_programs;
  std::vector<ep_dispatch_part> parts;
  std::vector<ep_replica_sum_args> sums;
  std::vector<uint64_t> arrivals;
  std::vector<uint64_t> credits;
  ep_dispatch_args args{};
  ep_kernel_status status{};
  std::vector<ep_staged_part> staged; // empty: rows go straight from tensor to tensor
  simt_options simt{.blocks = 1, .lanes = 0}; // lanes 0: the `fast` executor
  double timeout_ms = -1;
  bool sent = false; // by try_inline

  // The kernel, on whatever machine.
  template <class Context> bool kernel(Context& context) const {
    if (args.memory.header.kind == EP_MEMORY_PROXY) return attention_gradient(context, proxy_endpoint{args.memory}, args, sums.data(), static_cast<uint32_t>(sums.size()));
    const load_store_endpoint endpoint{args.memory};
    if (sent) {
      if (!dispatch_wait(context, endpoint, args)) return false;
      for (const ep_replica_sum_args& sum : sums) replica_sum(context, sum);
      return true;
    }
    if (staged.empty()) return attention_gradient(context, endpoint, args, sums.data(), static_cast<uint32_t>(sums.size()));
    if (!staged_dispatch(context, endpoint, args, staged.data())) return false;
    for (const ep_replica_sum_args& sum : sums) replica_sum(context, sum);
    return true;
  }

  // A small call on the calling thread: waits a little for the credits, sends, which then cannot block, and waits a little for its own rows. True: the call has ended, and well. Otherwise the stream does what is left.
  bool try_inline() {
    const symmetric_memory& own = *memory;
    const int32_t self = own.context().rank();
    const auto reached = [&](uint64_t first, const std::vector<uint64_t>& wanted) {
      for (size_t rank = 0; rank < wanted.size(); ++rank) {
        if (wanted[rank] != 0 && std::atomic_ref<uint64_t>(*own.signal(self, first + rank)).load(std::memory_order_acquire) < wanted[rank]) return false;
      }
      return true;
    };
    const auto wait = [&](uint64_t first, const std::vector<uint64_t>& wanted) {
      return wait_inline(own.context().policy(), own.context().wake(), [&] { return reached(first, wanted); });
    };
    if (!wait(args.credit_slot, credits)) return false;
    const kernel_environment environment{own.context().waits(nullptr, no_deadline)};
    fast_context context{environment, 0, 1, nullptr};
    const load_store_endpoint endpoint{args.memory};
    for (const ep_dispatch_part& part : parts) dispatch_send_part(context, endpoint, args, part);
    sent = true;
    if (!wait(args.arrival_slot, arrivals)) return false;
    for (const ep_replica_sum_args& sum : sums) replica_sum(context, sum);
    return true;
  }

  outcome run(const std::atomic<uint32_t>& cancel) {
    return run_kernel(*memory, simt, timeout_ms, cancel, status, [this](auto& context) { return kernel(context); });
  }
};

void add_part(dispatch_job& job, const Napi::Object& part, uint64_t memory_bytes, const std::vector<uint64_t>& row_limits) {
  const Napi::Env env = part.Env();
  const operand source = operand_of(field(part, "source"), "source");
  const auto& program = unwrap<dispatch_program_wrap>(field(part, "program"), "program").native;
  ep_dispatch_part out{};
  const uint64_t offset = arg_size(field(part, "srcOffset"), "srcOffset");
  out.src_stride_bytes = arg_size(field(part, "strideBytes"), "strideBytes");
  out.row_bytes = arg_size(field(part, "rowBytes"), "rowBytes");
  out.dst_offset_bytes = arg_size(field(part, "dstOffset"), "dstOffset");
  const uint64_t capacity = arg_size(field(part, "dstRows"), "dstRows");
  if (offset > source.byte_length) throw_invalid(env, "srcOffset " + std::to_string(offset) + " lies beyond its " + std::to_string(source.byte_length) + " bytes");
  if (out.row_bytes == 0 || out.row_bytes > (uint64_t{1} << 32)) throw_invalid(env, "rowBytes " + std::to_string(out.row_bytes) + " is not in 1..2^32");
  if (out.src_stride_bytes < out.row_bytes && out.src_stride_bytes != 0) throw_invalid(env, "strideBytes is smaller than rowBytes");
  if (out.dst_offset_bytes > memory_bytes || capacity > (memory_bytes - out.dst_offset_bytes) / out.row_bytes) {
    throw_invalid(env, "receive tensor of " + std::to_string(capacity) + " rows at " + std::to_string(out.dst_offset_bytes) + " exceeds the memory of " +
                           std::to_string(memory_bytes) + " bytes");
  }
  // Checked here, before anything moves: a kernel has no way to refuse.
  const uint64_t available = source.byte_length - offset;
  for (const ep_dispatch_entry& entry : program->entries) {
    if (entry.rows == 0) continue;
    const uint64_t last = entry.src_row + entry.rows - 1;
    if (!rows_fit(last, out.src_stride_bytes, out.row_bytes, available)) {
      throw_invalid(env, "source rows " + std::to_string(entry.src_row) + " + " + std::to_string(entry.rows) + " exceed the " + std::to_string(available) +
                             " bytes of the source");
    }
    if (entry.dst_row + entry.rows > capacity) {
      throw_invalid(env, "rows " + std::to_string(entry.dst_row) + " + " + std::to_string(entry.rows) + " for rank " + std::to_string(entry.dst_rank) +
                             " exceed a receive tensor of " + std::to_string(capacity) + " rows");
    }
    if (entry.dst_rank < 0 || static_cast<size_t>(entry.dst_rank) >= row_limits.size()) {
      throw_invalid(env, "destination rank " + std::to_string(entry.dst_rank) + " is not in a world of " + std::to_string(row_limits.size()));
    }
  }
  out.src = source.address + offset;
  out.entries = reinterpret_cast<uint64_t>(program->entries.data());
  out.entry_count = static_cast<uint32_t>(program->entries.size());
  out.chunk_rows = program->chunk_rows;
  out.chunk_count = program->chunk_count;
  job.parts.push_back(out);
  job.keep.push_back(source.keep);
  job.programs.push_back(program);
  const Napi::Value staging = field(part, "staging");
  if (staging.IsUndefined()) return;
  const auto buffers = staging.As<Napi::Object>();
  ep_staged_part staged{arg_size(field(buffers, "sendOffset"), "sendOffset"), arg_size(field(buffers, "recvOffset"), "recvOffset"),
                        arg_size(field(buffers, "sendRows"), "sendRows"), arg_size(field(buffers, "recvRows"), "recvRows")};
  const auto fits = [&](uint64_t at, uint64_t rows) { return at <= memory_bytes && rows <= (memory_bytes - at) / out.row_bytes; };
  if (!fits(staged.send_offset_bytes, staged.send_rows) || !fits(staged.recv_offset_bytes, std::max(capacity, staged.recv_rows)) ||
      !fits(out.dst_offset_bytes, staged.recv_rows)) {
    throw_invalid(env, "staging buffers exceed the memory of " + std::to_string(memory_bytes) + " bytes");
  }
  if (staged.send_rows != 0 && !rows_fit(staged.send_rows - 1, out.src_stride_bytes, out.row_bytes, available)) {
    throw_invalid(env, std::to_string(staged.send_rows) + " rows exceed the " + std::to_string(available) + " bytes of the source");
  }
  for (const ep_dispatch_entry& entry : program->entries) {
    if (entry.src_row + entry.rows > staged.send_rows) throw_invalid(env, "an entry exceeds the " + std::to_string(staged.send_rows) + " staged rows");
  }
  job.staged.push_back(staged);
}

void add_sum(dispatch_job& job, const Napi::Object& sum) {
  const Napi::Env env = sum.Env();
  const operand source = operand_of(field(sum, "source"), "source");
  const operand target = operand_of(field(sum, "target"), "target");
  const auto& program = unwrap<sum_program_wrap>(field(sum, "program"), "program").native;
  const uint64_t dtype = arg_size(field(sum, "dtype"), "dtype");
  if (dtype < 1 || dtype > 3) throw_invalid(env, "dtype " + std::to_string(dtype) + " is not one of 1..3");
  ep_replica_sum_args out{};
  const uint64_t src_offset = arg_size(field(sum, "srcOffset"), "srcOffset");
  const uint64_t dst_offset = arg_size(field(sum, "dstOffset"), "dstOffset");
  out.dst_stride_bytes = arg_size(field(sum, "strideBytes"), "strideBytes");
  out.row_elements = arg_size(field(sum, "rowElements"), "rowElements");
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
  job.sums.push_back(out);
  job.keep.push_back(source.keep);
  job.keep.push_back(target.keep);
  job.sum_programs.push_back(program);
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

// ({handle, parts, sums, arrivalSlot, creditSlot, arrivals, credits, nonTemporal, inline, blocks, timeoutMs}) -> operation, or 0 when it has ended already
Napi::Value stream_wrap::dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "dispatch takes a description");
  const auto description = info[0].As<Napi::Object>();
  auto job = std::make_shared<dispatch_job>();
  job->memory = memory_of_handle(field(description, "handle"));
  const auto world = static_cast<size_t>(job->memory->context().world_size());
  job->arrivals = words_of(field(description, "arrivals"), "arrivals");
  job->credits = words_of(field(description, "credits"), "credits");
  if (job->arrivals.size() != world || job->credits.size() != world) throw_invalid(env, "arrivals and credits have one entry per rank");
  job->args.arrival_slot = arg_size(field(description, "arrivalSlot"), "arrivalSlot");
  job->args.credit_slot = arg_size(field(description, "creditSlot"), "creditSlot");
  const uint64_t slots = job->memory->signal_slots();
  if (job->args.arrival_slot + world > slots || job->args.credit_slot + world > slots) {
    throw_invalid(env, "counters at slots " + std::to_string(job->args.arrival_slot) + " and " + std::to_string(job->args.credit_slot) + " exceed " +
                           std::to_string(slots) + " signal slots");
  }
  const auto parts = field(description, "parts").As<Napi::Array>();
  for (uint32_t i = 0; i < parts.Length(); ++i) add_part(*job, parts.Get(i).As<Napi::Object>(), job->memory->byte_length(), job->credits);
  const auto sums = field(description, "sums").As<Napi::Array>();
  for (uint32_t i = 0; i < sums.Length(); ++i) add_sum(*job, sums.Get(i).As<Napi::Object>());
  if (!job->staged.empty() && (job->staged.size() != job->parts.size() || job->memory->device_handle().header.kind != EP_MEMORY_LOAD_STORE)) {
    throw_invalid(env, "staging needs buffers for every part, and a load/store memory");
  }
  job->simt = executor_of(description);
  job->timeout_ms = arg_double(field(description, "timeoutMs"), "timeoutMs");
  job->args.header = {EP_MAGIC_DISPATCH, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_dispatch_args)};
  job->args.memory = job->memory->device_handle();
  job->args.parts = reinterpret_cast<uint64_t>(job->parts.data());
  job->args.part_count = static_cast<uint32_t>(job->parts.size());
  job->args.flags = field(description, "nonTemporal").ToBoolean() ? EP_DISPATCH_NON_TEMPORAL : 0;
  job->args.arrivals = reinterpret_cast<uint64_t>(job->arrivals.data());
  job->args.credits = reinterpret_cast<uint64_t>(job->credits.data());
  job->args.status = reinterpret_cast<uint64_t>(&job->status);
  const bool alone = open(env).depth() == 0; // nothing launched before may be overtaken
  const bool plain = job->simt.lanes == 0 && job->simt.blocks == 1 && job->staged.empty() && job->args.memory.header.kind == EP_MEMORY_LOAD_STORE;
  if (alone && plain && field(description, "inline").ToBoolean() && job->try_inline()) return Napi::Number::New(env, 0);
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) { return job->run(cancel); })));
}

} // namespace ep::binding
