#include "dispatch_parts.hpp"
#include "gpu_image.hpp"
#include "gpu_wraps.hpp"

#include <cstring>

namespace ep::binding {

// ({memory, firstSlot, leases, blocks, lanes}); blocks 0: half of this rank's share of the device
gpu_calls_wrap::gpu_calls_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "calls are made from a description");
  const auto description = info[0].As<Napi::Object>();
  auto& memory = unwrap<gpu_symmetric_wrap>(description.Get("memory"), "memory");
  memory.open(env);
  gpu::lease_slots slots;
  slots.first = arg_size(description.Get("firstSlot"), "firstSlot");
  const uint64_t leases = arg_size(description.Get("leases"), "leases");
  const uint64_t blocks = arg_size(description.Get("blocks"), "blocks");
  if (leases > 1024 || blocks > 65535) throw_invalid(env, std::to_string(leases) + " leases and " + std::to_string(blocks) + " blocks: expected at most 1024 and 65535");
  slots.leases = static_cast<uint32_t>(leases);
  auto made = gpu::calls::create(memory.native, slots, static_cast<uint32_t>(blocks), static_cast<uint32_t>(arg_size(description.Get("lanes"), "lanes")));
  native = value_or_throw(env, made);
  tag<gpu_calls_wrap>(info.This().As<Napi::Object>());
}
gpu::calls& gpu_calls_wrap::open(Napi::Env env) const {
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the calls were released"});
  return *native;
}
// () -> {blocks, lanes, resident}
Napi::Value gpu_calls_wrap::shape(const Napi::CallbackInfo& info) {
  const gpu::calls& calls = open(info.Env());
  auto made = Napi::Object::New(info.Env());
  made["blocks"] = Napi::Number::New(info.Env(), calls.blocks());
  made["lanes"] = Napi::Number::New(info.Env(), calls.lanes());
  made["resident"] = Napi::Number::New(info.Env(), calls.resident());
  return made;
}
void gpu_calls_wrap::rebase(const Napi::CallbackInfo& info) {
  auto based = open(info.Env()).rebase();
  value_or_throw(info.Env(), based);
}
void gpu_calls_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_calls_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuCalls"] = DefineClass(
      env, "GpuCalls", {InstanceMethod<&gpu_calls_wrap::shape>("shape"), InstanceMethod<&gpu_calls_wrap::rebase>("rebase"), InstanceMethod<&gpu_calls_wrap::release>("release")});
}

// HAZARD: its calls and memory are held weakly. JS objects hold this one, and memory that was closed must not stay allocated until they are collected.
struct gpu_dispatch_wrap::contents {
  struct run {
    uint64_t offset; // of bytes that no one sends
    uint64_t bytes;
  };
  struct on_lease {
    ep_device_call call{};      // without sources and status
    ep_call_counts counts{};
    std::vector<run> gaps;
  };
  std::weak_ptr<gpu::calls> calls;
  std::shared_ptr<const gpu::device_block> arrays;
  std::vector<uint64_t> source_rows; // by part
  std::vector<on_lease> leases;
};

// ({calls, leaseBytes, parts, sums, chunks: Float64Array by source, leases: [{offset, gaps: Float64Array}]}). Offsets of parts and sums are those of lease 0; of another
// lease they are `offset` bytes further. Gaps: offset and bytes of each run that no one sends.
gpu_dispatch_wrap::gpu_dispatch_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsObject()) throw_invalid(env, "a dispatch is made from a description");
  const auto description = info[0].As<Napi::Object>();
  const auto& calls_here = unwrap<gpu_calls_wrap>(description.Get("calls"), "calls");
  const gpu::calls& calls = calls_here.open(env);
  const gpu::symmetric_memory& memory = *calls.memory();
  const int32_t world_size = memory.context().world_size();
  const auto world = static_cast<size_t>(world_size);
  const auto parts = description.Get("parts").As<Napi::Array>();
  const auto sums = description.Get("sums").As<Napi::Array>();
  const auto leases = description.Get("leases").As<Napi::Array>();
  if (parts.Length() > EP_CALL_PARTS) throw_invalid(env, std::to_string(parts.Length()) + " parts: a dispatch on a GPU has at most " + std::to_string(EP_CALL_PARTS));
  if (leases.Length() != calls.leases()) throw_invalid(env, "descriptions of " + std::to_string(leases.Length()) + " leases for " + std::to_string(calls.leases()));
  const byte_span chunk_bytes = arg_bytes(description.Get("chunks"), "chunks");
  if (chunk_bytes.size != world * sizeof(double)) throw_invalid(env, "chunks must be a Float64Array of one entry for each rank");
  std::vector<uint64_t> chunks(world);
  for (size_t rank = 0; rank < world; ++rank) {
    double count = 0;
    std::memcpy(&count, chunk_bytes.data + rank * sizeof count, sizeof count);
    if (!(count >= 0) || count > 9007199254740991.0) throw_invalid(env, "chunks[" + std::to_string(rank) + "] is " + std::to_string(count));
    chunks[rank] = static_cast<uint64_t>(count);
  }

  auto made = std::make_shared<contents>();
  // Parts and sums lie in a lease: what fits lease 0 fits each.
  const uint64_t used = arg_size(description.Get("leaseBytes"), "leaseBytes");
  if (used > memory.byte_length()) throw_invalid(env, "leases of " + std::to_string(used) + " bytes exceed the memory of " + std::to_string(memory.byte_length()));
  gpu_image arrays;
  std::vector<ep_dispatch_part> first; // of lease 0, `entries` as places
  for (uint32_t i = 0; i < parts.Length(); ++i) {
    const auto part = parts.Get(i).As<Napi::Object>();
    uint64_t rows = 0;
    first.push_back(checked_part(part, used, world_size, &rows));
    made->source_rows.push_back(rows);
    first.back().entries = arrays.add(unwrap<dispatch_program_wrap>(part.Get("program"), "program").native->entries);
  }
  const operand own{memory.data(memory.context().rank()), used, nullptr};
  std::vector<ep_replica_sum_args> added; // of lease 0, arrays as places
  for (uint32_t i = 0; i < sums.Length(); ++i) {
    const auto sum = sums.Get(i).As<Napi::Object>();
    added.push_back(checked_sum(sum, own, own));
    const auto& program = *unwrap<sum_program_wrap>(sum.Get("program"), "program").native;
    added.back().shard_row = arrays.add(program.shard_row);
    added.back().shard_rows = arrays.add(program.shard_rows);
    added.back().replica_begin = arrays.add(program.replica_begin);
    added.back().replica_row = arrays.add(program.replica_row);
  }
  const uint64_t chunk_place = arrays.add(chunks);
  std::vector<uint64_t> offsets;
  std::vector<uint64_t> sum_places;
  std::vector<uint64_t> counter_places;
  for (uint32_t lease = 0; lease < leases.Length(); ++lease) {
    const auto here = leases.Get(lease).As<Napi::Object>();
    const uint64_t offset = arg_size(here.Get("offset"), "offset");
    if (offset > memory.byte_length() || used > memory.byte_length() - offset) throw_invalid(env, "lease " + std::to_string(lease) + " exceeds the memory");
    offsets.push_back(offset);
    sum_places.push_back(arrays.add(added));
    counter_places.push_back(arrays.add(std::vector<uint64_t>(2 * world)));
  }
  auto block = gpu::device_block::allocate(memory.of(), memory.device(), arrays.byte_length());
  made->arrays = value_or_throw(env, block);
  const uint64_t base = made->arrays->address();
  for (uint32_t lease = 0; lease < leases.Length(); ++lease) {
    contents::on_lease& out = made->leases.emplace_back();
    const uint64_t offset = offsets[lease];
    for (size_t i = 0; i < first.size(); ++i) {
      out.call.parts[i] = first[i];
      out.call.parts[i].entries += base;
      out.call.parts[i].dst_offset_bytes += offset;
    }
    for (size_t i = 0; i < added.size(); ++i) {
      auto& sum = arrays.at<ep_replica_sum_args>(sum_places[lease] + i * sizeof(ep_replica_sum_args));
      sum.src += offset;
      sum.dst += offset;
      for (uint64_t* address : {&sum.shard_row, &sum.shard_rows, &sum.replica_begin, &sum.replica_row}) *address += base;
    }
    out.call.sums = base + sum_places[lease];
    out.call.sum_count = static_cast<uint32_t>(added.size());
    ep_dispatch_args& args = out.call.args;
    args.header = {EP_MAGIC_DISPATCH, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof args};
    args.memory = memory.device_handle();
    args.part_count = static_cast<uint32_t>(first.size());
    args.arrival_slot = calls.arrival_slot(lease);
    args.credit_slot = calls.credit_slot(lease);
    args.arrivals = base + counter_places[lease];
    args.credits = args.arrivals + world * sizeof(uint64_t);
    out.counts = {calls.counts(lease), base + chunk_place, args.arrivals, args.credits, world_size, 0};
    const byte_span gaps = arg_bytes(leases.Get(lease).As<Napi::Object>().Get("gaps"), "gaps");
    for (size_t at = 0; at + 2 * sizeof(double) <= gaps.size; at += 2 * sizeof(double)) {
      double pair[2] = {};
      std::memcpy(pair, gaps.data + at, sizeof pair);
      const contents::run gap{static_cast<uint64_t>(pair[0]), static_cast<uint64_t>(pair[1])};
      if (!(pair[0] >= 0) || !(pair[1] >= 0) || gap.offset > memory.byte_length() || gap.bytes > memory.byte_length() - gap.offset) throw_invalid(env, "a gap exceeds the memory");
      out.gaps.push_back(gap);
    }
  }
  auto copied = arrays.copy_to(memory.of(), memory.device(), base);
  value_or_throw(env, copied);
  made->calls = calls_here.native;
  native = std::move(made);
  tag<gpu_dispatch_wrap>(info.This().As<Napi::Object>());
}
void gpu_dispatch_wrap::define(Napi::Env env, Napi::Object exports) { exports["GpuDispatch"] = DefineClass(env, "GpuDispatch", {}); }

// (dispatch, lease, timeoutMs, then for each part: source, srcOffset, strideBytes) -> operation; 0 while the stream is being captured
Napi::Value gpu_stream_wrap::dispatch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const auto prepared = unwrap<gpu_dispatch_wrap>(info[0], "dispatch").native;
  const auto calls = prepared->calls.lock();
  if (!calls) throw_failure(env, {EP_STATUS_CLOSED, 0, "the dispatcher of this dispatch was closed"});
  const gpu::symmetric_memory& memory = *calls->memory();
  if (memory.device() != stream.device()) {
    throw_invalid(env, "the dispatch is of GPU " + std::to_string(memory.device()) + ", the stream of GPU " + std::to_string(stream.device()));
  }
  const uint64_t lease = arg_size(info[1], "lease");
  if (lease >= prepared->leases.size()) throw_invalid(env, "lease " + std::to_string(lease) + " is not one of " + std::to_string(prepared->leases.size()));
  const double timeout = arg_double(info[2], "timeoutMs");
  const auto& here = prepared->leases[lease];
  constexpr size_t fixed = 3;
  const size_t count = prepared->source_rows.size();
  if (info.Length() != fixed + 3 * count) throw_invalid(env, "a dispatch of " + std::to_string(count) + " parts takes three arguments for each source");
  ep_device_call call = here.call;
  std::vector<std::shared_ptr<const void>> keep{prepared, calls};
  // A captured call waits when it is replayed.
  if (!capturing) keep.push_back(gpu::kernels_wait());
  for (size_t i = 0; i < count; ++i) {
    if (prepared->source_rows[i] == 0) continue; // nothing is read, and a tensor without rows may have no address
    const size_t at = fixed + 3 * i;
    const operand source = gpu_operand_of(info[at], "source", stream, false);
    const source_rows rows = checked_source(env, source, info[at + 1], info[at + 2], call.parts[i].row_bytes, prepared->source_rows[i]);
    call.parts[i].src = rows.address;
    call.parts[i].src_stride_bytes = rows.stride_bytes;
    if (memory.by_nic()) {
      auto ready = source.keep ? memory.prepare_source(source.address, source.byte_length, source.keep)
                               : memory.prepare_source(rows.address, (prepared->source_rows[i] - 1) * rows.stride_bytes + call.parts[i].row_bytes, nullptr);
      value_or_throw(env, ready);
    }
    keep.push_back(source.keep);
  }
  auto slot = stream.slot();
  const gpu::slot_ref own = value_or_throw(env, slot);
  call.args.status = reinterpret_cast<uint64_t>(&own->status);
  const ep_cuda_table& table = stream.of()->table();
  const ep_cuda_launch one = stream.launch(1, 32, 0, nullptr);
  check(env, table.begin_call(&one, &here.counts), "beginning a dispatch");
  const ep_cuda_launch many = stream.launch(calls->blocks(), calls->lanes(), calls->cycles(timeout), own);
  // HAZARD: the device has counted the call. What goes wrong from here on is a call that fails, not one that is refused: JS must count it, too.
  int error = table.dispatch(&many, &call);
  const char* what = "launching a dispatch";
  const uint64_t data = memory.data(memory.context().rank());
  for (auto gap = here.gaps.begin(); error == 0 && gap != here.gaps.end(); ++gap) {
    error = table.fill(stream.native(), data + gap->offset, 0, gap->bytes);
    what = "zeroing rows that no one sends";
  }
  const std::string failed = error == 0 ? "" : stream.of()->error(error, what).message;
  if (capturing) {
    if (capturing->failed.empty()) capturing->failed = failed;
    capturing->kernels.push_back({own, nullptr});
    capturing->keep.insert(capturing->keep.end(), keep.begin(), keep.end());
    capturing->context = memory.shared_context();
    return Napi::Number::New(env, 0);
  }
  gpu::stream::watch how;
  how.kernels.push_back({own, nullptr});
  how.deadline_ns = deadline_after(timeout);
  how.context = memory.shared_context();
  how.keep = std::move(keep);
  how.failed = failed;
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

// (calls, lease): its rows have been read when the stream comes here
void gpu_stream_wrap::grant(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const auto& calls_here = unwrap<gpu_calls_wrap>(info[0], "calls");
  const gpu::calls& calls = calls_here.open(env);
  const uint64_t lease = arg_size(info[1], "lease");
  if (lease >= calls.leases()) throw_invalid(env, "lease " + std::to_string(lease) + " is not one of " + std::to_string(calls.leases()));
  const ep_device_grant grant{calls.memory()->device_handle(), calls.credit_slot(static_cast<uint32_t>(lease))};
  const ep_cuda_launch one = stream.launch(1, 32, 0, nullptr);
  check(env, stream.of()->table().grant(&one, &grant), "releasing a lease");
  if (capturing) capturing->keep.push_back(calls_here.native);
}

} // namespace ep::binding
