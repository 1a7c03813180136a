#include "gpu_wraps.hpp"

#include <algorithm>
#include <cstring>

#include "gpu_pieces.hpp"

namespace ep::binding {

gpu_graph_wrap::contents::~contents() {
  if (graph != nullptr) of->table().graph_destroy(graph);
}

void gpu_graph_wrap::contents::report(const ep_cuda_piece& piece) {
  const auto same = std::ranges::find(reports, piece.from, &ep_cuda_piece::from);
  if (same == reports.end()) reports.push_back(piece);
  else *same = piece;
}

// Made by GpuStream.captureEnd only.
gpu_graph_wrap::gpu_graph_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) { tag<gpu_graph_wrap>(info.This().As<Napi::Object>()); }
void gpu_graph_wrap::release(const Napi::CallbackInfo&) { native.reset(); }
void gpu_graph_wrap::define(Napi::Env env, Napi::Object exports) {
  const Napi::Function made = DefineClass(env, "GpuGraph", {InstanceMethod<&gpu_graph_wrap::release>("release")});
  exports["GpuGraph"] = made;
  state_of(env).classes["GpuGraph"] = Napi::Persistent(made);
}

// (library, device, highPriority)
gpu_stream_wrap::gpu_stream_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  const auto& of = unwrap<gpu_library_wrap>(info[0], "library").native;
  const int32_t device = arg_int(info[1], "device");
  if (device < 0 || device >= of->device_count()) throw_invalid(env, "GPU " + std::to_string(device) + " is not one of " + std::to_string(of->device_count()));
  native = std::make_shared<holder>();
  auto made = gpu::stream::create(of, device, info[2].ToBoolean(), state_of(env));
  native->stream = value_or_throw(env, made);
  // Its thread completes operations of this environment: it must have ended before the environment does.
  // HAZARD: ending a stream waits for what is on it, and that may wait for an event of another stream, whose kernel waits for a peer. So all are told to give up first.
  end_key = state_of(env).at_end([held = native] { held->stream.reset(); }, [held = native] { held->stream->stop(); });
  tag<gpu_stream_wrap>(info.This().As<Napi::Object>());
}

gpu::stream& gpu_stream_wrap::open(Napi::Env env) const {
  if (!native->stream) throw_failure(env, {EP_STATUS_CLOSED, 0, "the stream was closed"});
  return *native->stream;
}

void gpu_stream_wrap::check(Napi::Env env, int error, const char* what) const {
  if (error != 0) throw_failure(env, open(env).of()->error(error, what));
}

uint64_t gpu_stream_wrap::begin(Napi::Env env, gpu::stream::watch how) {
  gpu::stream& stream = open(env);
  auto cancel = std::make_shared<cancel_flag>();
  const uint64_t id = state_of(env).begin(env, cancel);
  auto followed = stream.follow(id, std::move(cancel), std::move(how));
  if (!followed.ok()) {
    // What was launched runs on, but nobody can be told of its end: the operation ends here.
    outcome end;
    end.status = followed.why().status;
    end.message = followed.why().message;
    state_of(env).complete(id, end);
  }
  return id;
}

// (to, toOffset, from, fromOffset, byteLength)
void gpu_stream_wrap::copy(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const operand to = gpu_operand_of(info[0], "the target of a copy", stream, true);
  const operand from = gpu_operand_of(info[2], "the source of a copy", stream, true);
  const uint64_t dst = arg_size(info[1], "toOffset");
  const uint64_t src = arg_size(info[3], "fromOffset");
  const uint64_t size = arg_size(info[4], "byteLength");
  if (src > from.byte_length || size > from.byte_length - src || dst > to.byte_length || size > to.byte_length - dst) {
    throw_invalid(env, "a copy of " + std::to_string(size) + " bytes from " + std::to_string(src) + " of " + std::to_string(from.byte_length) + " to " + std::to_string(dst) +
                           " of " + std::to_string(to.byte_length));
  }
  if (capturing) capturing->keep.insert(capturing->keep.end(), {to.keep, from.keep});
  if (size != 0) check(env, stream.of()->table().copy(stream.native(), to.address + dst, from.address + src, size), "a copy");
}

// (memory, offset, value, byteLength)
void gpu_stream_wrap::fill(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const operand at = gpu_operand_of(info[0], "memory", stream, false);
  const uint64_t offset = arg_size(info[1], "offset");
  const uint64_t value = arg_size(info[2], "value");
  const uint64_t size = arg_size(info[3], "byteLength");
  if (offset > at.byte_length || size > at.byte_length - offset || value > 255) {
    throw_invalid(env, "a fill of " + std::to_string(size) + " bytes at " + std::to_string(offset) + " of " + std::to_string(at.byte_length) + " with " + std::to_string(value));
  }
  if (capturing) capturing->keep.push_back(at.keep);
  if (size != 0) check(env, stream.of()->table().fill(stream.native(), at.address + offset, static_cast<uint8_t>(value), size), "a fill");
}

// (event): it is reached when everything put on the stream so far has run
void gpu_stream_wrap::record(const Napi::CallbackInfo& info) {
  gpu::stream& stream = open(info.Env());
  const auto& event = unwrap<gpu_event_wrap>(info[0], "event").native;
  if (capturing) capturing->keep.push_back(event);
  check(info.Env(), stream.of()->table().event_record(event->native(), stream.native()), "recording an event");
}

// (event): what comes after runs only once it is reached
void gpu_stream_wrap::wait(const Napi::CallbackInfo& info) {
  gpu::stream& stream = open(info.Env());
  const auto& event = unwrap<gpu_event_wrap>(info[0], "event").native;
  if (capturing) capturing->keep.push_back(event);
  check(info.Env(), stream.of()->table().stream_wait(stream.native(), event->native()), "waiting for an event");
}

// (timeoutMs) -> operation that ends when everything put on the stream so far has run
Napi::Value gpu_stream_wrap::follow(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (capturing) throw_invalid(env, "a stream that is being captured runs nothing that could be waited for");
  gpu::stream::watch how;
  how.deadline_ns = deadline_after(arg_double(info[0], "timeoutMs"));
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

void gpu_stream_wrap::capture_begin(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  if (capturing) throw_invalid(env, "the stream is being captured already");
  check(env, stream.of()->table().capture_begin(stream.native()), "beginning a capture");
  capturing = std::make_shared<gpu_graph_wrap::contents>();
  capturing->of = stream.of();
}

// () -> GpuGraph
Napi::Value gpu_stream_wrap::capture_end(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  if (!capturing) throw_invalid(env, "the stream is not being captured");
  const auto made = std::move(capturing);
  capturing = nullptr;
  gpu_pieces reports(stream, copied_by::kernel);
  for (const ep_cuda_piece& piece : made->reports) reports.add(piece);
  const int unreported = reports.put();
  check(env, stream.of()->table().capture_end(stream.native(), &made->graph), "ending a capture");
  check(env, unreported, "capturing copies of what calls leave");
  if (!made->failed.empty()) throw_failure(env, {EP_STATUS_SYSTEM, 0, made->failed});
  const Napi::Object graph = state_of(env).classes["GpuGraph"].New({});
  gpu_graph_wrap::Unwrap(graph)->native = made;
  return graph;
}

// (graph, timeoutMs) -> operation that ends when this replay has run
Napi::Value gpu_stream_wrap::launch_graph(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  const auto graph = unwrap<gpu_graph_wrap>(info[0], "graph").native;
  if (!graph) throw_failure(env, {EP_STATUS_CLOSED, 0, "the graph was released"});
  if (capturing) throw_invalid(env, "a graph cannot be launched into a capture");
  const double timeout = arg_double(info[1], "timeoutMs");
  auto waiting = gpu::kernels_wait();
  // HAZARD: replays share the words of their launches. What one left there, a failure or the order to give up, would be taken for the next one's; but it may only be
  // wiped while none is on the device, or the order to stop would be lost to the one that runs.
  if (graph->replays.load(std::memory_order_acquire) == 0) {
    for (const gpu::launched_kernel& one : graph->kernels) std::memset(one.slot.get(), 0, sizeof *one.slot);
  }
  check(env, stream.of()->table().graph_launch(graph->graph, stream.native()), "launching a graph");
  graph->replays.fetch_add(1, std::memory_order_relaxed);
  std::shared_ptr<const void> replay(graph.get(), [graph](const void*) { graph->replays.fetch_sub(1, std::memory_order_release); });
  gpu::stream::watch how;
  how.kernels = graph->kernels;
  how.deadline_ns = deadline_after(timeout);
  how.context = graph->context;
  how.losses = graph->losses;
  how.keep = {std::move(replay), std::move(waiting)};
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

Napi::Value gpu_stream_wrap::depth(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), static_cast<double>(open(info.Env()).depth())); }

// What is on it will not end: see gpu::stream. close() comes back at once afterwards.
void gpu_stream_wrap::abandon(const Napi::CallbackInfo& info) { open(info.Env()).abandon(); }

// Cancels what still waits, and waits for the rest; JS awaits the operations first when it wants them to finish.
void gpu_stream_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->stream.reset();
}

void gpu_stream_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["GpuStream"] = DefineClass(
      env, "GpuStream",
      {InstanceMethod<&gpu_stream_wrap::copy>("copy"), InstanceMethod<&gpu_stream_wrap::fill>("fill"), InstanceMethod<&gpu_stream_wrap::record>("record"),
       InstanceMethod<&gpu_stream_wrap::wait>("wait"), InstanceMethod<&gpu_stream_wrap::follow>("follow"), InstanceMethod<&gpu_stream_wrap::dispatch>("dispatch"),
       InstanceMethod<&gpu_stream_wrap::grant>("grant"), InstanceMethod<&gpu_stream_wrap::compat_check>("compatCheck"),
       InstanceMethod<&gpu_stream_wrap::compat_dispatch>("compatDispatch"), InstanceMethod<&gpu_stream_wrap::group_call>("groupCall"), InstanceMethod<&gpu_stream_wrap::nccl_call>("ncclCall"),
       InstanceMethod<&gpu_stream_wrap::attention_forward>("attentionForward"),
       InstanceMethod<&gpu_stream_wrap::attention_backward>("attentionBackward"), InstanceMethod<&gpu_stream_wrap::experts_forward>("expertsForward"),
       InstanceMethod<&gpu_stream_wrap::capture_begin>("captureBegin"),
       InstanceMethod<&gpu_stream_wrap::capture_end>("captureEnd"), InstanceMethod<&gpu_stream_wrap::launch_graph>("launchGraph"),
       InstanceMethod<&gpu_stream_wrap::depth>("depth"), InstanceMethod<&gpu_stream_wrap::abandon>("abandon"), InstanceMethod<&gpu_stream_wrap::close>("close")});
}

} // namespace ep::binding
