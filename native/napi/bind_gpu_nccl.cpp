#include <algorithm>
#include <cstring>

#include "gpu_wraps.hpp"

namespace ep::binding {

// (path, as dlopen takes it)
nccl_library_wrap::nccl_library_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  if (!info[0].IsString()) throw_invalid(info.Env(), "NCCL is opened by its name or path");
  auto loaded = dl::nccl_symbols_load(info[0].As<Napi::String>().Utf8Value());
  native = value_or_throw(info.Env(), loaded);
  tag<nccl_library_wrap>(info.This().As<Napi::Object>());
}
Napi::Value nccl_library_wrap::version(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), dl::nccl_version_text(native->version)); }
// () -> what a communicator is made by on all of its ranks
Napi::Value nccl_library_wrap::unique_id(const Napi::CallbackInfo& info) {
  dl::nccl_unique_id id{};
  if (const dl::nccl_result error = native->ncclGetUniqueId(&id); error != dl::nccl_success) {
    throw_failure(info.Env(), {EP_STATUS_SYSTEM, 0, "NCCL gives no unique id: " + dl::nccl_error_text(*native, error, nullptr)});
  }
  return bytes_copy(info.Env(), &id, sizeof id);
}
void nccl_library_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["NcclLibrary"] = DefineClass(env, "NcclLibrary", {InstanceMethod<&nccl_library_wrap::version>("version"), InstanceMethod<&nccl_library_wrap::unique_id>("uniqueId")});
}

// (nccl, GPUs' library, device, rank, size, id)
nccl_communicator_wrap::nccl_communicator_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& nccl = unwrap<nccl_library_wrap>(info[0], "nccl").native;
  const auto& of = unwrap<gpu_library_wrap>(info[1], "library").native;
  const int32_t device = arg_int(info[2], "device");
  if (device < 0 || device >= of->device_count()) throw_invalid(env, "GPU " + std::to_string(device) + " is not one of " + std::to_string(of->device_count()));
  const int32_t rank = arg_int(info[3], "rank");
  const int32_t size = arg_int(info[4], "size");
  if (size < 1 || rank < 0 || rank >= size) throw_invalid(env, "rank " + std::to_string(rank) + " of " + std::to_string(size) + " ranks");
  const byte_span bytes = arg_bytes(info[5], "id");
  dl::nccl_unique_id id{};
  if (bytes.size != sizeof id) throw_invalid(env, "an id of NCCL has " + std::to_string(sizeof id) + " bytes, not " + std::to_string(bytes.size));
  std::memcpy(&id, bytes.data, sizeof id);
  native = std::make_shared<holder>();
  auto made = gpu::nccl_communicator::create(nccl, of, device, rank, size, id, state_of(env));
  native->made = value_or_throw(env, made);
  // HAZARD: streams wait for words that its thread writes: it is told to give up before any of them is stopped.
  end_key = state_of(env).at_end([held = native] { held->made.reset(); }, [held = native] {
    if (held->made) held->made->stop();
  });
  tag<nccl_communicator_wrap>(info.This().As<Napi::Object>());
}
gpu::nccl_communicator& nccl_communicator_wrap::opened(Napi::Env env) const {
  if (!native->made) throw_failure(env, {EP_STATUS_CLOSED, 0, "the communicator was released"});
  return *native->made;
}
// (timeoutMs) -> operation that ends when all ranks have come
Napi::Value nccl_communicator_wrap::open(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::nccl_communicator& made = opened(env);
  const int64_t deadline = deadline_after(arg_double(info[0], "timeoutMs"));
  auto cancel = std::make_shared<cancel_flag>();
  const uint64_t id = state_of(env).begin(env, cancel);
  made.open(id, std::move(cancel), deadline);
  return Napi::Number::New(env, static_cast<double>(id));
}
// () -> why it is of no use any more, or undefined
Napi::Value nccl_communicator_wrap::failed(const Napi::CallbackInfo& info) {
  if (!native->made) return info.Env().Undefined();
  const std::string why = native->made->failed();
  return why.empty() ? info.Env().Undefined() : Napi::String::New(info.Env(), why);
}
// (timeoutMs of what is under way) -> operation that ends when NCCL holds nothing any more; once, after open()
Napi::Value nccl_communicator_wrap::end(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::nccl_communicator& made = opened(env);
  const int64_t deadline = deadline_after(arg_double(info[0], "timeoutMs"));
  const uint64_t id = state_of(env).begin(env, std::make_shared<cancel_flag>());
  made.end(id, deadline);
  return Napi::Number::New(env, static_cast<double>(id));
}
// Waits for its thread: after the operation of end(), or where open() was never called.
void nccl_communicator_wrap::release(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->made.reset();
}
void nccl_communicator_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["NcclCommunicator"] =
      DefineClass(env, "NcclCommunicator",
                  {InstanceMethod<&nccl_communicator_wrap::open>("open"), InstanceMethod<&nccl_communicator_wrap::failed>("failed"), InstanceMethod<&nccl_communicator_wrap::end>("end"),
                   InstanceMethod<&nccl_communicator_wrap::release>("release")});
}

// (communicator, {element, fold, factor, timeoutMs}, then eight for each step: verb, root or peer, and operand, byteOffset, byteLength of what it gives and of what it takes)
// -> operation that ends when the stream has come behind it
Napi::Value gpu_stream_wrap::nccl_call(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  if (capturing) throw_invalid(env, "the stream is being captured: calls of NCCL are launched as they are");
  gpu::nccl_communicator& by = unwrap<nccl_communicator_wrap>(info[0], "communicator").opened(env);
  if (by.device() != stream.device()) {
    throw_invalid(env, "the communicator is of GPU " + std::to_string(by.device()) + ", the stream of GPU " + std::to_string(stream.device()));
  }
  if (!info[1].IsObject()) throw_invalid(env, "a call of NCCL is made from a description");
  const auto description = info[1].As<Napi::Object>();
  const uint64_t element = arg_size(description.Get("element"), "element");
  const uint64_t fold = arg_size(description.Get("fold"), "fold");
  if (element > static_cast<uint64_t>(element_type::ue8m0) || fold > static_cast<uint64_t>(reduce_op::premul_sum)) throw_invalid(env, "a call of NCCL names no element or fold");
  gpu::nccl_call call{static_cast<element_type>(element), static_cast<reduce_op>(fold), arg_double(description.Get("factor"), "factor"), {}};
  const double timeout = arg_double(description.Get("timeoutMs"), "timeoutMs");
  constexpr size_t fixed = 2;
  constexpr size_t of_step = 8;
  if ((info.Length() - fixed) % of_step != 0) throw_invalid(env, "a step of a call of NCCL has eight arguments");
  std::vector<std::shared_ptr<const void>> keep;
  const uint64_t each = element_bytes(call.element);
  const auto piece = [&](size_t from, const char* what, uint64_t& address) -> uint64_t {
    const uint64_t bytes = arg_size(info[from + 2], "byteLength");
    if (bytes == 0) return 0;
    const operand found = gpu_operand_of(info[from], what, stream, false);
    const uint64_t offset = arg_size(info[from + 1], "byteOffset");
    if (offset > found.byte_length || bytes > found.byte_length - offset || bytes % each != 0 || (found.address + offset) % each != 0) {
      throw_invalid(env, std::string(what) + " of " + std::to_string(bytes) + " bytes from " + std::to_string(offset) + " of " + std::to_string(found.byte_length) + ", elements of " +
                             std::to_string(each));
    }
    keep.push_back(found.keep);
    address = found.address + offset;
    return bytes;
  };
  for (size_t at = fixed; at < info.Length(); at += of_step) {
    gpu::nccl_step step{};
    const uint64_t verb = arg_size(info[at], "verb");
    if (verb > static_cast<uint64_t>(gpu::nccl_verb::receive)) throw_invalid(env, "NCCL has no verb " + std::to_string(verb));
    step.verb = static_cast<gpu::nccl_verb>(verb);
    step.rank = arg_int(info[at + 1], "root or peer");
    const bool all = step.verb == gpu::nccl_verb::all_reduce || step.verb == gpu::nccl_verb::all_gather || step.verb == gpu::nccl_verb::reduce_scatter;
    if (!all && (step.rank < 0 || step.rank >= by.size())) throw_invalid(env, "rank " + std::to_string(step.rank) + " is not one of " + std::to_string(by.size()));
    step.from_bytes = piece(at + 2, "a source", step.from);
    step.to_bytes = piece(at + 5, "a target", step.to);
    const auto size = static_cast<uint64_t>(by.size());
    const bool here = step.rank == by.rank();
    bool fits = true;
    bool folds = false;
    switch (step.verb) {
      case gpu::nccl_verb::all_reduce:
        folds = true;
        fits = step.from_bytes == step.to_bytes;
        break;
      case gpu::nccl_verb::broadcast: fits = here ? step.to_bytes == 0 || step.to_bytes == step.from_bytes : step.from_bytes == 0; break;
      case gpu::nccl_verb::reduce:
        folds = true;
        fits = here ? step.to_bytes == step.from_bytes : step.to_bytes == 0;
        break;
      case gpu::nccl_verb::all_gather: fits = step.to_bytes == size * step.from_bytes; break;
      case gpu::nccl_verb::reduce_scatter:
        folds = true;
        fits = step.from_bytes == size * step.to_bytes;
        break;
      case gpu::nccl_verb::send: fits = step.to_bytes == 0; break;
      case gpu::nccl_verb::receive: fits = step.from_bytes == 0; break;
    }
    if (!fits) throw_invalid(env, "a step of NCCL gives " + std::to_string(step.from_bytes) + " bytes and takes " + std::to_string(step.to_bytes) + ", which do not fit together");
    if (folds && !gpu::nccl_reduces(call.element, call.fold)) throw_invalid(env, "NCCL does not fold these elements so");
    // Nothing to move: NCCL need not hear of it, and all ranks leave it out alike.
    if (step.from_bytes + step.to_bytes > 0) call.steps.push_back(step);
  }
  auto slot = stream.slot();
  const gpu::slot_ref own = value_or_throw(env, slot);
  gpu::stream::watch how;
  how.kernels.push_back({own, nullptr});
  how.deadline_ns = deadline_after(timeout);
  how.keep = keep;
  how.keep.push_back(gpu::kernels_wait());
  auto launched = by.launch(stream, std::move(call), own, std::move(keep), how.deadline_ns);
  value_or_throw(env, launched);
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

} // namespace ep::binding
