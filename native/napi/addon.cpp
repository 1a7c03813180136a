#include "env_state.hpp"

#include "ep/abi/version.h"

namespace ep::binding {
namespace {

Napi::Object init(Napi::Env env, Napi::Object exports) {
  env.SetInstanceData(new env_state(env));
  exports["abi"] = Napi::String::New(env, std::to_string(EP_ABI_MAJOR) + "." + std::to_string(EP_ABI_MINOR));
  exports["configure"] = Napi::Function::New(env, [](const Napi::CallbackInfo& info) {
    if (!info[0].IsFunction() || !info[1].IsFunction()) throw_invalid(info.Env(), "configure takes two functions");
    state_of(info.Env()).configure(info[0].As<Napi::Function>(), info[1].As<Napi::Function>());
  });
  exports["cancel"] = Napi::Function::New(env, [](const Napi::CallbackInfo& info) {
    state_of(info.Env()).cancel(arg_size(info[0], "operation"));
  });
  exports["frame"] = state_of(env).make_frame(env);
  bind_host(env, exports);
  bind_rank(env, exports);
  bind_memory(env, exports);
  bind_stream(env, exports);
  bind_hostile(env, exports);
  bind_ibgda(env, exports);
  bind_efa(env, exports);
  bind_fabric(env, exports);
  bind_fabric_bench(env, exports);
  bind_carrier(env, exports);
  bind_rounds(env, exports);
  bind_collective(env, exports);
  bind_reduce(env, exports);
  bind_gpu(env, exports);
  bind_moe(env, exports);
  return exports;
}

} // namespace
} // namespace ep::binding

static Napi::Object ep_init(Napi::Env env, Napi::Object exports) { return ep::binding::init(env, exports); }
NODE_API_MODULE(ep, ep_init)
