#include "dispatch_parts.hpp"
#include "kernel_run.hpp"

#include <algorithm>
#include <cstring>

#include "endpoint_of.hpp"
#include "ep/device/replica_sum.h"
#include "ep/device/staged_dispatch.h"
#include "hand_over.hpp"

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
  // HAZARD: what a handle leads to lies in the GPU then, and its queue pairs here are JS's.
  if (!memory->serves_host_kernels()) throw_invalid(env, "the kernels of this transport run on a GPU, whose queues no kernel of the host reaches: they take memory of space 'device'");
  return memory;
}

namespace {

Napi::Value field(const Napi::Object& object, const char* name) { return object.Get(name); }

} // namespace

// Everything about a dispatch that is the same in every call. HAZARD: its memories are held weakly. JS objects hold this one, and memory that was closed must
// not stay mapped until they are collected.
struct dispatch_wrap::contents {
  std::weak_ptr<symmetric_memory> memory;
  std::vector<std::weak_ptr<const void>> operands;
  std::vector<std::shared_ptr<const dispatch_program_wrap::contents>> programs;
  std::vector<std::shared_ptr<const sum_program_wrap::contents>> sum_programs;
  std::vector<ep_dispatch_part> parts;      // without sources
  std::vector<uint64_t> source_rows;        // by part: how many rows its source must have
  std::vector<ep_staged_part> staged;       // empty: rows go straight from tensor to tensor
  std::vector<ep_replica_sum_args> sums;
  ep_dispatch_args args{};
  simt_options simt{.blocks = 1, .lanes = 0}; // lanes 0: the `fast` executor
};

namespace {

using dispatch_contents = dispatch_wrap::contents;

// Everything that a running dispatch points into. Owned by its task.
struct dispatch_job {
  std::shared_ptr<const dispatch_contents> prepared;
  std::shared_ptr<symmetric_memory> memory;
  std::vector<std::shared_ptr<const void>> keep;
  std::vector<ep_dispatch_part> parts;
  std::vector<uint64_t> arrivals;
  std::vector<uint64_t> credits;
  ep_dispatch_args args{};
  ep_kernel_status status{};
  double timeout_ms = -1;
  bool sent = false; // by try_inline

  // The kernel, on whatever machine.
  template <class Context> bool kernel(Context& context) const {
    const std::vector<ep_replica_sum_args>& sums = prepared->sums;
    const auto sum_count = static_cast<uint32_t>(sums.size());
    if (args.memory.header.kind != EP_MEMORY_LOAD_STORE) {
      return with_endpoint(args.memory, [&](const auto& endpoint) { return attention_gradient(context, endpoint, args, sums.data(), sum_count); });
    }
    const load_store_endpoint endpoint{args.memory};
    if (sent) {
      if (!dispatch_wait(context, endpoint, args)) return false;
      for (const ep_replica_sum_args& sum : sums) replica_sum(context, sum);
      return true;
    }
    if (prepared->staged.empty()) return attention_gradient(context, endpoint, args, sums.data(), sum_count);
    if (!staged_dispatch(context, endpoint, args, prepared->staged.data())) return false;
    for (const ep_replica_sum_args& sum : sums) replica_sum(context, sum);
    return true;
  }

  bool reached(uint64_t first_slot, const std::vector<uint64_t>& wanted) const {
    const int32_t self = memory->context().rank();
    for (size_t rank = 0; rank < wanted.size(); ++rank) {
      if (wanted[rank] != 0 && std::atomic_ref<uint64_t>(*memory->signal(self, first_slot + rank)).load(std::memory_order_acquire) < wanted[rank]) return false;
    }
    return true;
  }

  // A small call on the calling thread: waits a little for the credits, sends, which then cannot block, and waits a little for its own rows. True: the call
  // has ended, and well. Otherwise the stream does what is left.
  bool try_inline() {
    const rank_context& own = memory->context();
    const auto wait = [&](uint64_t first_slot, const std::vector<uint64_t>& wanted) {
      return wait_inline(own.policy(), own.wake(), [&] { return reached(first_slot, wanted); });
    };
    if (!wait(args.credit_slot, credits)) return false;
    const kernel_environment environment{own.waits(nullptr, no_deadline)};
    fast_context context{environment, 0, 1, nullptr};
    const load_store_endpoint endpoint{args.memory};
    for (const ep_dispatch_part& part : parts) dispatch_send_part(context, endpoint, args, part);
    sent = true;
    if (!wait(args.arrival_slot, arrivals)) return false;
    for (const ep_replica_sum_args& sum : prepared->sums) replica_sum(context, sum);
    return true;
  }

  outcome run(const std::atomic<uint32_t>& cancel) {
    const wait_debts debts{memory->signal(memory->context().rank(), args.arrival_slot), arrivals.data()};
    return run_kernel(*memory, prepared->simt, timeout_ms, cancel, status, [this](auto& context) { return kernel(context); }, debts);
  }
};

void add_part(dispatch_contents& made, const Napi::Object& part, uint64_t memory_bytes, int32_t world_size) {
  const Napi::Env env = part.Env();
  const auto& program = unwrap<dispatch_program_wrap>(field(part, "program"), "program").native;
  uint64_t rows = 0;
  const ep_dispatch_part out = checked_part(part, memory_bytes, world_size, &rows);
  const uint64_t capacity = arg_size(field(part, "dstRows"), "dstRows");
  const Napi::Value staging = field(part, "staging");
  if (!staging.IsUndefined()) {
    const auto buffers = staging.As<Napi::Object>();
    const ep_staged_part staged{arg_size(field(buffers, "sendOffset"), "sendOffset"), arg_size(field(buffers, "recvOffset"), "recvOffset"),
                                arg_size(field(buffers, "sendRows"), "sendRows"), arg_size(field(buffers, "recvRows"), "recvRows")};
    const auto fits = [&](uint64_t at, uint64_t count) { return at <= memory_bytes && count <= (memory_bytes - at) / out.row_bytes; };
    if (!fits(staged.send_offset_bytes, staged.send_rows) || !fits(staged.recv_offset_bytes, std::max(capacity, staged.recv_rows)) ||
        !fits(out.dst_offset_bytes, staged.recv_rows)) {
      throw_invalid(env, "staging buffers exceed the memory of " + std::to_string(memory_bytes) + " bytes");
    }
    if (rows > staged.send_rows) throw_invalid(env, "an entry exceeds the " + std::to_string(staged.send_rows) + " staged rows");
    rows = staged.send_rows; // all of them are copied, sent or not
    made.staged.push_back(staged);
  }
  made.parts.push_back(out);
  made.source_rows.push_back(rows);
  made.programs.push_back(program);
}

// One call's source of a part.
void add_source(dispatch_job& job, const Napi::CallbackInfo& info, size_t argument) {
  const operand source = operand_of(info[argument], "source");
  const uint64_t rows = job.prepared->source_rows[job.parts.size()];
  ep_dispatch_part part = job.prepared->parts[job.parts.size()];
  const source_rows found = checked_source(info.Env(), source, info[argument + 1], info[argument + 2], part.row_bytes, rows);
  if (rows != 0) {
    auto ready = job.memory->prepare_source(source.address, source.byte_length, source.keep);
    value_or_throw(info.Env(), ready);
  }
  part.src = found.address;
  part.src_stride_bytes = found.stride_bytes;
  job.parts.push_back(part);
  job.keep.push_back(source.keep);
}

// The first three arguments of a call: (dispatch, counters, timeoutMs).
void begin_job(dispatch_job& job, const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  job.prepared = unwrap<dispatch_wrap>(info[0], "dispatch").native;
  const dispatch_contents& prepared = *job.prepared;
  job.memory = prepared.memory.lock();
  if (!job.memory || !job.memory->connected()) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory of this dispatch was closed"});
  for (const auto& operand : prepared.operands) {
    job.keep.push_back(operand.lock());
    if (!job.keep.back()) throw_failure(env, {EP_STATUS_CLOSED, 0, "a memory that this dispatch sums in was closed"});
  }
  const auto world = static_cast<size_t>(job.memory->context().world_size());
  const byte_span counters = arg_bytes(info[1], "counters");
  if (info[1].As<Napi::TypedArray>().TypedArrayType() != napi_float64_array || counters.size != 2 * world * sizeof(double)) {
    throw_invalid(env, "counters must be a Float64Array of two entries per rank");
  }
  job.arrivals.resize(world);
  job.credits.resize(world);
  for (size_t i = 0; i < 2 * world; ++i) {
    double count = 0;
    std::memcpy(&count, counters.data + i * sizeof count, sizeof count);
    if (!(count >= 0) || count > 9007199254740991.0) throw_invalid(env, "counters[" + std::to_string(i) + "] is " + std::to_string(count));
    (i < world ? job.arrivals[i] : job.credits[i - world]) = static_cast<uint64_t>(count);
  }
  job.timeout_ms = arg_double(info[2], "timeoutMs");
}

// Once its vectors stay where they are.
void finish_job(dispatch_job& job) {
  job.args = job.prepared->args;
  job.args.parts = reinterpret_cast<uint64_t>(job.parts.data());
  job.args.arrivals = reinterpret_cast<uint64_t>(job.arrivals.data());
  job.args.credits = reinterpret_cast<uint64_t>(job.credits.data());
  job.args.status = reinterpret_cast<uint64_t>(&job.status);
}

void add_sum(dispatch_contents& made, const Napi::Object& sum) {
  const operand source = operand_of(field(sum, "source"), "source");
  const operand target = operand_of(field(sum, "target"), "target");
  made.sums.push_back(checked_sum(sum, source, target));
  made.operands.push_back(source.keep);
  made.operands.push_back(target.keep);
  made.sum_programs.push_back(unwrap<sum_program_wrap>(field(sum, "program"), "program").native);
}

} // namespace

// ({handle, parts, sums, arrivalSlot, creditSlot, nonTemporal, blocks, simt?})
dispatch_wrap::dispatch_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a dispatch is made from a description");
  const auto description = info[0].As<Napi::Object>();
  auto made = std::make_shared<contents>();
  const auto memory = memory_of_handle(field(description, "handle"));
  const int32_t world_size = memory->context().world_size();
  ep_dispatch_args& args = made->args;
  args.arrival_slot = arg_size(field(description, "arrivalSlot"), "arrivalSlot");
  args.credit_slot = arg_size(field(description, "creditSlot"), "creditSlot");
  const uint64_t slots = memory->signal_slots();
  const auto world = static_cast<uint64_t>(world_size);
  if (args.arrival_slot + world > slots || args.credit_slot + world > slots) {
    throw_invalid(env, "counters at slots " + std::to_string(args.arrival_slot) + " and " + std::to_string(args.credit_slot) + " exceed " + std::to_string(slots) +
                           " signal slots");
  }
  const auto parts = field(description, "parts").As<Napi::Array>();
  for (uint32_t i = 0; i < parts.Length(); ++i) add_part(*made, parts.Get(i).As<Napi::Object>(), memory->byte_length(), world_size);
  const auto sums = field(description, "sums").As<Napi::Array>();
  for (uint32_t i = 0; i < sums.Length(); ++i) add_sum(*made, sums.Get(i).As<Napi::Object>());
  args.header = {EP_MAGIC_DISPATCH, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_dispatch_args)};
  args.memory = memory->device_handle();
  args.part_count = static_cast<uint32_t>(made->parts.size());
  const bool hands_over = std::all_of(made->parts.begin(), made->parts.end(), [](const ep_dispatch_part& part) { return hands_over_past_caches(part.row_bytes); });
  args.flags = hands_over || field(description, "nonTemporal").ToBoolean() ? EP_DISPATCH_NON_TEMPORAL : 0;
  if (!made->staged.empty() && (made->staged.size() != made->parts.size() || args.memory.header.kind != EP_MEMORY_LOAD_STORE)) {
    throw_invalid(env, "staging needs buffers for every part, and a load/store memory");
  }
  made->simt = executor_of(description);
  made->memory = memory;
  native = std::move(made);
  tag<dispatch_wrap>(info.This().As<Napi::Object>());
}

void dispatch_wrap::define(Napi::Env env, Napi::Object exports) { exports["Dispatch"] = DefineClass(env, "Dispatch", {}); }

// (dispatch, counters: Float64Array [arrivals by rank, credits by rank], timeoutMs, inline, then for each part: source, srcOffset, strideBytes)
//   -> operation, or 0 when it has ended already
Napi::Value stream_wrap::dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto job = std::make_shared<dispatch_job>();
  begin_job(*job, info);
  const dispatch_contents& prepared = *job->prepared;
  constexpr size_t fixed = 4;
  if (info.Length() != fixed + 3 * prepared.parts.size()) {
    throw_invalid(env, "a dispatch of " + std::to_string(prepared.parts.size()) + " parts takes three arguments for each source");
  }
  job->parts.reserve(prepared.parts.size());
  for (size_t i = 0; i < prepared.parts.size(); ++i) add_source(*job, info, fixed + 3 * i);
  finish_job(*job);
  const bool alone = open(env).depth() == 0; // nothing launched before may be overtaken
  const bool plain =
      prepared.simt.lanes == 0 && prepared.simt.blocks == 1 && prepared.staged.empty() && prepared.args.memory.header.kind == EP_MEMORY_LOAD_STORE;
  if (alone && plain && info[3].ToBoolean() && job->try_inline()) return Napi::Number::New(env, 0);
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) { return job->run(cancel); })));
}

namespace {

outcome mismatch(int32_t rank, uint64_t expected, uint64_t found) {
  outcome end;
  end.status = EP_STATUS_MISMATCH;
  end.rank = rank;
  end.expected = expected;
  end.found = found;
  return end;
}

// One step after the other on this thread, each with credits, as `dispatch` and `Lease.release` do them: fills the source with the round's number, runs the
// kernel, checks every received word, grants the next round.
outcome run_steps(dispatch_job& job, uint64_t rounds, uint64_t received_bytes, double* samples, const std::atomic<uint32_t>& cancel) {
  const std::vector<uint64_t> chunks = job.arrivals;
  const ep_dispatch_part& part = job.parts[0];
  const int32_t self = job.memory->context().rank();
  const auto* received = reinterpret_cast<const uint64_t*>(job.memory->data(self) + part.dst_offset_bytes);
  outcome end;
  for (uint64_t round = 1; round <= rounds; ++round) {
    std::fill_n(reinterpret_cast<uint64_t*>(part.src), job.prepared->source_rows[0] * part.row_bytes / sizeof(uint64_t), round);
    for (size_t rank = 0; rank < chunks.size(); ++rank) {
      job.arrivals[rank] = chunks[rank] * round;
      job.credits[rank] = round - 1;
    }
    const int64_t begin = clock_now_ns();
    end = job.run(cancel);
    samples[round - 1] = static_cast<double>(clock_now_ns() - begin);
    if (end.status != EP_STATUS_OK) return end;
    for (uint64_t word = 0; word < received_bytes / sizeof(uint64_t); ++word) {
      if (received[word] != round) return mismatch(self, round, received[word]);
    }
    for (size_t rank = 0; rank < chunks.size(); ++rank) {
      job.memory->signal_update(static_cast<int32_t>(rank), job.args.credit_slot + static_cast<uint64_t>(self), signal_op::add, 1);
    }
  }
  return end;
}

} // namespace

// (dispatch, chunks: Float64Array [by rank: arrivals of one step, unused], timeoutMs, rounds, source, srcOffset, strideBytes, receivedBytes, samples)
//   -> operation. Of a dispatch of one part of packed rows, in a memory whose counters are all 0.
Napi::Value stream_wrap::dispatch_steps(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto job = std::make_shared<dispatch_job>();
  begin_job(*job, info);
  if (job->prepared->parts.size() != 1 || job->prepared->parts[0].row_bytes % sizeof(uint64_t) != 0) {
    throw_invalid(env, "steps are measured of one part with rows of whole 8-byte words");
  }
  if (job->prepared->args.memory.header.kind != EP_MEMORY_LOAD_STORE) throw_invalid(env, "steps are measured over a load/store memory");
  const uint64_t rounds = arg_size(info[3], "rounds");
  add_source(*job, info, 4);
  if (job->parts[0].src_stride_bytes != job->parts[0].row_bytes) throw_invalid(env, "steps are measured of packed rows");
  const uint64_t received = arg_size(info[7], "receivedBytes");
  if (received > job->memory->byte_length() - job->parts[0].dst_offset_bytes) throw_invalid(env, "receivedBytes exceeds the memory");
  const operand samples = operand_of(info[8], "samples");
  if (samples.byte_length / sizeof(double) < rounds) throw_invalid(env, std::to_string(rounds) + " rounds do not fit the samples");
  job->keep.push_back(samples.keep);
  finish_job(*job);
  auto* out = reinterpret_cast<double*>(samples.address);
  return Napi::Number::New(
      env, static_cast<double>(launch(env, [=](const std::atomic<uint32_t>& cancel) { return run_steps(*job, rounds, received, out, cancel); })));
}

} // namespace ep::binding
