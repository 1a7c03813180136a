// Measurements of puts over EFA's GIN facade, for packages/efa-gda/bench. They hold the calling thread while they run: for programs that do nothing else.
#include "efa_wraps.hpp"

#include "efa/post_bench.hpp"

namespace ep::binding {
namespace {

uint32_t small_of(const Napi::CallbackInfo& info, size_t at, const char* name, uint64_t most) {
  const uint64_t found = arg_size(info[at], name);
  if (found > most) throw_invalid(info.Env(), std::string(name) + " " + std::to_string(found) + " exceeds " + std::to_string(most));
  return static_cast<uint32_t>(found);
}

// -> [{name, sharing, shared}]
Napi::Value put_ways(const Napi::CallbackInfo& info) {
  auto out = Napi::Array::New(info.Env());
  for (const efa::put_way& way : efa::put_ways()) {
    auto one = Napi::Object::New(info.Env());
    one["name"] = way.name;
    one["sharing"] = way.sharing;
    one["shared"] = Napi::Boolean::New(info.Env(), way.shared);
    out[out.Length()] = one;
  }
  return out;
}

// (way, posters, run, puts) -> puts each second
Napi::Value puts_per_second(const Napi::CallbackInfo& info) {
  auto rate = efa::drained_puts_per_second({small_of(info, 0, "way", 64), small_of(info, 1, "posters", 64), small_of(info, 2, "run", 512), arg_size(info[3], "puts")});
  return Napi::Number::New(info.Env(), value_or_throw(info.Env(), rate));
}

// (way, run, puts) -> {puts, doorbells, words, registerFences, systemFences}
Napi::Value put_counts(const Napi::CallbackInfo& info) {
  auto counted = efa::count_puts(small_of(info, 0, "way", 64), small_of(info, 1, "run", 512), arg_size(info[2], "puts"));
  const efa::put_counts& found = value_or_throw(info.Env(), counted);
  auto out = Napi::Object::New(info.Env());
  out["puts"] = static_cast<double>(found.puts);
  out["doorbells"] = static_cast<double>(found.doorbells);
  out["words"] = static_cast<double>(found.words);
  out["registerFences"] = static_cast<double>(found.register_fences);
  out["systemFences"] = static_cast<double>(found.system_fences);
  return out;
}

} // namespace

void bind_efa_bench(Napi::Env env, Napi::Object exports) {
  exports["efaPutWays"] = Napi::Function::New(env, put_ways);
  exports["efaPutsPerSecond"] = Napi::Function::New(env, puts_per_second);
  exports["efaPutCounts"] = Napi::Function::New(env, put_counts);
}

} // namespace ep::binding
