// What a fabric is looked for by, as JS says it.
#pragma once

#include "nic_arguments.hpp"

#include "dl/fabric.hpp"

namespace ep::binding {

inline dl::fabric_query fabric_query_of(Napi::Value value) {
  if (!value.IsObject()) throw_invalid(value.Env(), "a fabric is looked for by a description");
  const auto description = value.As<Napi::Object>();
  const auto text = [&](const char* name) {
    const Napi::Value found = description.Get(name);
    if (!found.IsString()) throw_invalid(value.Env(), std::string(name) + " is not a string");
    return found.As<Napi::String>().Utf8Value();
  };
  const Napi::Value gpu = description.Get("gpu");
  return {text("library"), text("provider"), text("address"), gpu.IsUndefined() ? -1 : arg_int(gpu, "gpu"), true};
}

} // namespace ep::binding
