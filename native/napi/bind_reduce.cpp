#include "env_state.hpp"

#include <vector>

#include "collective/reduce.hpp"

namespace ep::binding {
namespace {

// (target, sources, dtype, reduction, factor): target[i] = fold of the sources, in their order. HAZARD: on this thread, which runs nothing else meanwhile.
void reduce_arrays(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const byte_span target = arg_bytes(info[0], "target");
  const uint64_t dtype = arg_size(info[2], "dtype");
  const uint64_t op = arg_size(info[3], "reduction");
  if (dtype > static_cast<uint64_t>(element_type::ue8m0) || op > static_cast<uint64_t>(reduce_op::premul_sum)) throw_invalid(env, "no such dtype or reduction");
  const auto type = static_cast<element_type>(dtype);
  if (!reduces(static_cast<reduce_op>(op), type)) throw_invalid(env, "the reduction does not take this dtype");
  if (!info[1].IsArray() || info[1].As<Napi::Array>().Length() == 0) throw_invalid(env, "sources is no list of arrays");
  const auto list = info[1].As<Napi::Array>();
  std::vector<const void*> sources(list.Length());
  for (uint32_t i = 0; i < list.Length(); ++i) {
    const byte_span source = arg_bytes(list.Get(i), "source");
    if (source.size != target.size) throw_invalid(env, "source " + std::to_string(i) + " has " + std::to_string(source.size) + " bytes, the target " + std::to_string(target.size));
    sources[i] = source.data;
  }
  const double factor = arg_double(info[4], "factor");
  if (target.size != 0) reduce_elements(target.data, sources.data(), static_cast<int>(sources.size()), target.size / element_bytes(type), type, static_cast<reduce_op>(op), factor, false);
}

} // namespace

void bind_reduce(Napi::Env env, Napi::Object exports) { exports["reduceElements"] = Napi::Function::New(env, reduce_arrays); }

} // namespace ep::binding
