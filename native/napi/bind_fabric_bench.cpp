// Measurements of libfabric itself, for `ep bench fabric`. They hold the calling thread while they run: for programs that do nothing else.
#include "fabric_arguments.hpp"

#include "fabric/raw_link.hpp"

namespace ep::binding {
namespace {

struct fabric_link_wrap : Napi::ObjectWrap<fabric_link_wrap> {
  static constexpr napi_type_tag type_tag{0x6570666162726963ull, 32};
  static constexpr const char* type_name = "FabricLink";

  // (query, byteLength)
  explicit fabric_link_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
    dl::fabric_query query = fabric_query_of(info[0]);
    query.sleeps = false;
    auto port = dl::open_fabric(query);
    value_or_throw(info.Env(), port);
    auto link = fabric::raw_link::open(std::move(port.value()), arg_size(info[1], "byteLength"));
    native = std::move(value_or_throw(info.Env(), link));
    tag<fabric_link_wrap>(info.This().As<Napi::Object>());
  }

  fabric::raw_link& open(Napi::Env env) const {
    if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the link was closed"});
    return *native;
  }

  // -> what the other's connect() takes
  Napi::Value description(const Napi::CallbackInfo& info) {
    auto bytes = open(info.Env()).description();
    const auto& found = value_or_throw(info.Env(), bytes);
    return bytes_copy(info.Env(), found.data(), found.size());
  }
  void connect(const Napi::CallbackInfo& info) {
    const byte_span bytes = arg_bytes(info[0], "description");
    auto done = open(info.Env()).connect({bytes.data, bytes.size});
    value_or_throw(info.Env(), done);
  }
  // (first, samples, timeoutMs)
  void ping_pong(const Napi::CallbackInfo& info) {
    const operand samples = operand_of(info[1], "samples");
    const std::span<double> out(reinterpret_cast<double*>(samples.address), samples.byte_length / sizeof(double));
    auto done = open(info.Env()).ping_pong(info[0].ToBoolean(), out, deadline_after(arg_double(info[2], "timeoutMs")));
    value_or_throw(info.Env(), done);
  }
  // (sends, receives, byteLength, window, places, turn, timeoutMs) -> seconds
  Napi::Value stream(const Napi::CallbackInfo& info) {
    auto seconds = open(info.Env()).stream(arg_size(info[0], "sends"), arg_size(info[1], "receives"), arg_size(info[2], "byteLength"), arg_size(info[3], "window"),
                                           arg_size(info[4], "places"), arg_size(info[5], "turn"), deadline_after(arg_double(info[6], "timeoutMs")));
    return Napi::Number::New(info.Env(), value_or_throw(info.Env(), seconds));
  }
  void close(const Napi::CallbackInfo&) { native.reset(); }

  std::unique_ptr<fabric::raw_link> native;
};

} // namespace

void bind_fabric_bench(Napi::Env env, Napi::Object exports) {
  using wrap = fabric_link_wrap;
  exports["FabricLink"] = wrap::DefineClass(env, "FabricLink",
                                            {wrap::InstanceMethod<&wrap::description>("description"), wrap::InstanceMethod<&wrap::connect>("connect"),
                                             wrap::InstanceMethod<&wrap::ping_pong>("pingPong"), wrap::InstanceMethod<&wrap::stream>("stream"),
                                             wrap::InstanceMethod<&wrap::close>("close")});
}

} // namespace ep::binding
