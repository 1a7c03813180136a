// Measurements of posting and of the software NIC, for packages/ibgda/bench. They hold the calling thread while they run: for programs that do nothing else.
#include "nic_driver.hpp"

#include <algorithm>

#include "nic/mlx5/speed.hpp"

namespace ep::binding {
namespace {

ibgda::post_load load_of(const Napi::CallbackInfo& info) {
  const auto small = [&](size_t at, const char* name, uint64_t most) {
    const uint64_t found = arg_size(info[at], name);
    if (found > most) throw_invalid(info.Env(), std::string(name) + " " + std::to_string(found) + " exceeds " + std::to_string(most));
    return static_cast<uint32_t>(found);
  };
  return {small(0, "way", 64), small(1, "posters", 64), small(2, "batch", 512), arg_size(info[3], "posts")};
}

// -> [{name, sharing, shared}]
Napi::Value post_ways(const Napi::CallbackInfo& info) {
  auto out = Napi::Array::New(info.Env());
  for (const ibgda::post_way& way : ibgda::post_ways()) {
    auto one = Napi::Object::New(info.Env());
    one["name"] = way.name;
    one["sharing"] = way.sharing;
    one["shared"] = Napi::Boolean::New(info.Env(), way.shared);
    out[out.Length()] = one;
  }
  return out;
}

// (way, posters, batch, posts, executed) -> posts each second
Napi::Value posts_per_second(const Napi::CallbackInfo& info) {
  const ibgda::post_load load = load_of(info);
  auto rate = info[4].ToBoolean() ? nic::executed_posts_per_second(load) : ibgda::drained_posts_per_second(load);
  return Napi::Number::New(info.Env(), value_or_throw(info.Env(), rate));
}

// (batch, requests, region) -> {requestsPerSecond, bytesPerSecond, copyPerSecond}
Napi::Value software_nic_speed(const Napi::CallbackInfo& info) {
  const uint64_t batch = arg_size(info[0], "batch");
  auto speed = nic::software_nic_speed(static_cast<uint32_t>(std::min<uint64_t>(batch, UINT32_MAX)), arg_size(info[1], "requests"), arg_size(info[2], "region"));
  const nic::nic_speed& found = value_or_throw(info.Env(), speed);
  auto out = Napi::Object::New(info.Env());
  out["requestsPerSecond"] = found.requests_per_second;
  out["bytesPerSecond"] = found.bytes_per_second;
  out["copyPerSecond"] = found.copy_per_second;
  return out;
}

} // namespace

void bind_ibgda_bench(Napi::Env env, Napi::Object exports) {
  exports["postWays"] = Napi::Function::New(env, post_ways);
  exports["postsPerSecond"] = Napi::Function::New(env, posts_per_second);
  exports["softwareNicSpeed"] = Napi::Function::New(env, software_nic_speed);
}

} // namespace ep::binding
