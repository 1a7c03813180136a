// Measurements of the machine and the transport that have to run natively: a JS loop would measure itself.
#include "wraps.hpp"

#include "launch.hpp"
#include "round_marks.hpp"

#include "ep/device/attention_dispatch.h"

namespace ep::binding {
namespace {

// One duration per round, in nanoseconds, into a HostMemory of doubles.
double* samples_of(Napi::Value value, uint64_t rounds, std::shared_ptr<const void>* keep) {
  const operand samples = operand_of(value, "samples");
  if (samples.byte_length / sizeof(double) < rounds) {
    throw_invalid(value.Env(), std::to_string(rounds) + " rounds do not fit samples of " + std::to_string(samples.byte_length) + " bytes");
  }
  *keep = samples.keep;
  return reinterpret_cast<double*>(samples.address);
}

outcome outcome_of(const ep_kernel_status& status) {
  outcome end;
  end.status = status.status;
  end.rank = status.rank;
  end.stage = status.stage;
  end.expected = status.expected;
  end.found = status.found;
  return end;
}

} // namespace

// ({handle, peer, first, rounds, byteLength, slot, base, samples, timeoutMs, bare}) -> operation. Both ranks run it; `first` on one of them. A round is a put with signal
// there and one back; its bytes lie at offset 0 and at byteLength of the memory, and each side checks that what it got is the round's number. `bare`, over a load/store memory: two plain
// stores and a spin instead of the put and the wait: what no put with signal can be faster than between the cores that the ranks are on.
// `base` is the slot's value before either began: read here, it could already hold the peer's first signal.
Napi::Value stream_wrap::ping_pong(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto description = info[0].As<Napi::Object>();
  auto memory = memory_of_handle(description.Get("handle"));
  const int32_t peer = arg_int(description.Get("peer"), "peer");
  const bool first = description.Get("first").ToBoolean();
  const uint64_t rounds = arg_size(description.Get("rounds"), "rounds");
  const uint64_t size = arg_size(description.Get("byteLength"), "byteLength");
  const uint64_t slot = arg_size(description.Get("slot"), "slot");
  const uint64_t base = arg_u64(description.Get("base"), "base");
  const double timeout = arg_double(description.Get("timeoutMs"), "timeoutMs");
  const bool bare = description.Get("bare").ToBoolean();
  const uint32_t kind = memory->device_handle().header.kind;
  if (peer < 0 || peer >= memory->context().world_size()) throw_invalid(env, "peer " + std::to_string(peer) + " is not in the world");
  if (kind != EP_MEMORY_LOAD_STORE && (kind != EP_MEMORY_PROXY || bare)) {
    throw_invalid(env, std::string("a ping-pong is measured over a load/store memory") + (bare ? "" : " or one that a rank's thread serves"));
  }
  if (size < sizeof(uint64_t) || size % sizeof(uint64_t) != 0 || size > memory->byte_length() / 2) throw_invalid(env, "byteLength must be a multiple of 8 that fits twice");
  if (slot >= memory->signal_slots()) throw_invalid(env, "slot " + std::to_string(slot) + " is not in the pad");
  std::shared_ptr<const void> keep;
  double* samples = samples_of(description.Get("samples"), rounds, &keep);
  return Napi::Number::New(env, static_cast<double>(launch(env, [=](const std::atomic<uint32_t>& cancel) {
                             const std::shared_ptr<const void> held = keep;
                             const kernel_environment environment{memory->context().waits(&cancel, deadline_after(timeout))};
                             const ep_memory_handle& handle = memory->device_handle();
                             ep_kernel_status status{};
                             auto* out = reinterpret_cast<uint64_t*>(memory->own_data());
                             const auto* in = reinterpret_cast<const uint64_t*>(memory->own_data() + size);
                             const auto play = [&](fast_context& context, const auto& endpoint) {
                               const block_coop<fast_context> coop{context};
                               const auto send = [&](uint64_t round) {
                                 if constexpr (requires { endpoint.view(peer); }) {
                                   if (bare) {
                                     *reinterpret_cast<volatile uint64_t*>(endpoint.data(peer, size)) = round;
                                     store_release(context, const_cast<uint64_t*>(reinterpret_cast<const uint64_t*>(endpoint.view(peer).signals)) + slot, base + round);
                                     return true;
                                   }
                                 }
                                 out[0] = round;
                                 return endpoint.put_rows(context, coop, peer, size, out, size, size, 1, false, slot, 1, &status);
                               };
                               const auto receive = [&](uint64_t round) {
                                 // Long enough for any peer that runs; a wait that can end takes over from there.
                                 for (int looks = 0; bare && looks < 1'000'000 && load_acquire(context, endpoint.local_signal(slot)) < base + round; ++looks) cpu_relax();
                                 if (!context.wait(endpoint.local_signal(slot), base + round, peer, EP_STAGE_ARRIVAL, &status)) return false;
                                 if (in[0] == round) return true;
                                 kernel_status_fail(&status, {EP_STATUS_MISMATCH, peer, in[0]}, EP_STAGE_ARRIVAL, round);
                                 return false;
                               };
                               for (uint64_t round = 1; round <= rounds; ++round) {
                                 const int64_t begin = clock_now_ns();
                                 if (first && !send(round)) return false;
                                 if (!receive(round)) return false;
                                 if (!first && !send(round)) return false;
                                 samples[round - 1] = static_cast<double>(clock_now_ns() - begin);
                               }
                               return true;
                             };
                             const result<nothing> ran = fast_run(1, environment, [&](fast_context& context) {
                               return kind == EP_MEMORY_PROXY ? play(context, proxy_endpoint{handle}) : play(context, load_store_endpoint{handle});
                             });
                             outcome end = outcome_of(status);
                             if (!ran.ok()) {
                               end.status = ran.why().status;
                               end.message = ran.why().message;
                             }
                             return end;
                           })));
}

// ({handle, peer, messages, byteLength, window, slot, timeoutMs}) -> operation: puts with signal, at most `window` under way, until the last has landed; `found` is their time in ns. Message i lies at
// (i modulo window) times byteLength of this rank's memory, and goes there in the second half of the peer's.
Napi::Value stream_wrap::put_stream(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto description = info[0].As<Napi::Object>();
  auto memory = memory_of_handle(description.Get("handle"));
  const int32_t peer = arg_int(description.Get("peer"), "peer");
  const uint64_t messages = arg_size(description.Get("messages"), "messages");
  const uint64_t size = arg_size(description.Get("byteLength"), "byteLength");
  const uint64_t window = arg_size(description.Get("window"), "window");
  const uint64_t slot = arg_size(description.Get("slot"), "slot");
  const double timeout = arg_double(description.Get("timeoutMs"), "timeoutMs");
  const ep_memory_handle& handle = memory->device_handle();
  if (peer < 0 || peer >= memory->context().world_size()) throw_invalid(env, "peer " + std::to_string(peer) + " is not in the world");
  if (handle.header.kind != EP_MEMORY_PROXY) throw_invalid(env, "a stream of puts is measured over a memory that a rank's thread serves");
  if (window == 0 || size == 0 || size > memory->byte_length() / 2 / window) throw_invalid(env, "window and byteLength must be at least 1, and a window must fit twice");
  if (slot >= memory->signal_slots()) throw_invalid(env, "slot " + std::to_string(slot) + " is not in the pad");
  return Napi::Number::New(env, static_cast<double>(launch(env, [=](const std::atomic<uint32_t>& cancel) {
                             const kernel_environment environment{memory->context().waits(&cancel, deadline_after(timeout))};
                             const proxy_endpoint endpoint{memory->device_handle()};
                             ep_kernel_status status{};
                             const int64_t begin = clock_now_ns();
                             const result<nothing> ran = fast_run(1, environment, [&](fast_context& context) {
                               const block_coop<fast_context> coop{context};
                               const ep_proxy_ring& ring = endpoint.ring();
                               const uint64_t first = load_relaxed(context, &ring.tail);
                               const auto landed = [&](uint64_t count) { return context.wait(&ring.completed, first + count, peer, EP_STAGE_COMPLETION, &status); };
                               for (uint64_t i = 0; i < messages; ++i) {
                                 const uint64_t at = i % window * size;
                                 if (i >= window && !landed(i + 1 - window)) return false;
                                 if (!endpoint.put_rows(context, coop, peer, window * size + at, memory->own_data() + at, size, size, 1, false, slot, 1, &status)) return false;
                               }
                               return landed(messages);
                             });
                             const int64_t end_ns = clock_now_ns();
                             outcome end = outcome_of(status);
                             if (ran.ok() && end.status == EP_STATUS_OK) end.found = static_cast<uint64_t>(end_ns - begin);
                             if (!ran.ok()) {
                               end.status = ran.why().status;
                               end.message = ran.why().message;
                             }
                             return end;
                           })));
}

// ({team, handle, first, rounds, samples, timeoutMs}) -> operation: barriers back to back. The first word of each member's part of the memory is its mark; `first` rounds of the
// same memory have been run before. JS must not use the team meanwhile.
Napi::Value stream_wrap::barriers(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto description = info[0].As<Napi::Object>();
  auto members = unwrap<team_wrap>(description.Get("team"), "team").native;
  auto memory = memory_of_handle(description.Get("handle"));
  const uint64_t first = arg_size(description.Get("first"), "first");
  const uint64_t rounds = arg_size(description.Get("rounds"), "rounds");
  const double timeout = arg_double(description.Get("timeoutMs"), "timeoutMs");
  if (memory->device_handle().header.kind != EP_MEMORY_LOAD_STORE) throw_invalid(env, "barriers are measured over a load/store memory");
  if (&memory->context() != &members->context()) throw_invalid(env, "the memory and the team are of different ranks");
  if (memory->byte_length() < sizeof(uint64_t)) throw_invalid(env, "the memory has no room for a mark");
  std::shared_ptr<const void> keep;
  double* samples = samples_of(description.Get("samples"), rounds, &keep);
  return Napi::Number::New(env, static_cast<double>(launch(env, [=](const std::atomic<uint32_t>& cancel) {
                             const std::shared_ptr<const void> held = keep;
                             const wait_scope scope = members->context().waits(&cancel, deadline_after(timeout));
                             const load_store_endpoint endpoint{memory->device_handle()};
                             round_marks marks{{}, reinterpret_cast<uint64_t*>(endpoint.data(members->context().rank(), 0))};
                             for (const int32_t rank : members->ranks()) marks.members.emplace_back(rank, reinterpret_cast<uint64_t*>(endpoint.data(rank, 0)));
                             outcome end;
                             const wait_result passed = timed_rounds(marks, first, rounds, samples, &end.expected, [&] {
                               const uint64_t target = members->barrier_enter();
                               const wait_result left = wait_word(scope, members->barrier_word(), comparison::ge, target, any_rank);
                               if (left.status == EP_STATUS_OK) members->barrier_leave();
                               return left;
                             });
                             end.status = passed.status;
                             end.rank = passed.rank;
                             end.found = passed.found;
                             return end;
                           })));
}

} // namespace ep::binding
