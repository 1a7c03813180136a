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
  return {text("library"), text("provider"), text("address"), true};
}

} // namespace ep::binding
