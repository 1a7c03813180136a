#include "nic_driver.hpp"

#include <sched.h>

#include "dl/cuda_symbols.hpp"
#include "gpu_wraps.hpp"
#include "dl/shim/attach.hpp"
#include "ibgda/gpu_memory.hpp"
#include "ibgda/probe.hpp"
#include "ibgda/topology.hpp"
#include "nic/verbs/proxy.hpp"
#include "nic_network.hpp"

namespace ep::binding {

Napi::Array strings_of(Napi::Env env, const std::vector<std::string>& list) {
  auto out = Napi::Array::New(env);
  for (const std::string& one : list) out[out.Length()] = one;
  return out;
}

namespace {

constexpr std::pair<const char*, ibgda::placement> placement_words[] = {
    {"dma-buf", ibgda::placement::gpu_dmabuf}, {"gpu", ibgda::placement::gpu_address}, {"host", ibgda::placement::host}};

// {library, device, controlMemory, driver}
nic_description::gpu_kernels gpu_kernels_of(const Napi::Object& from) {
  const Napi::Env env = from.Env();
  nic_description::gpu_kernels asked;
  asked.library = unwrap<gpu_library_wrap>(from.Get("library"), "library").native;
  asked.device = arg_int(from.Get("device"), "device");
  if (asked.device < 0 || asked.device >= asked.library->device_count()) {
    throw_invalid(env, "GPU " + std::to_string(asked.device) + " is not one of the " + std::to_string(asked.library->device_count()) + " that are here");
  }
  asked.driver = from.Get("driver").ToString().Utf8Value();
  const auto order = from.Get("controlMemory").As<Napi::Array>();
  for (uint32_t i = 0; i < order.Length(); ++i) {
    const std::string word = order.Get(i).ToString().Utf8Value();
    const auto* known = std::find_if(std::begin(placement_words), std::end(placement_words), [&](const auto& one) { return word == one.first; });
    if (known == std::end(placement_words)) throw_invalid(env, "controlMemory must be of dma-buf, gpu and host, got " + word);
    asked.order.push_back(known->second);
  }
  return asked;
}

// PCI address of that GPU, where sysfs shows it: a container may not.
std::string shown_address(const nic_description::gpu_kernels& of, const std::string& sysfs) {
  ep_cuda_facts facts{};
  if (of.library->table().device_facts(of.device, &facts) != 0) return "";
  const std::vector<ibgda::gpu_place> gpus = ibgda::topology_read(sysfs).gpus;
  const bool shown = std::any_of(gpus.begin(), gpus.end(), [&](const ibgda::gpu_place& gpu) { return gpu.address == facts.pci; });
  return shown ? facts.pci : "";
}

} // namespace

nic_description nic_description_of(Napi::Value value) {
  const Napi::Env env = value.Env();
  if (!value.IsObject()) throw_invalid(env, "a NIC is made from a description");
  const auto description = value.As<Napi::Object>();
  const auto number = [&](const char* name, uint64_t most) {
    const uint64_t found = arg_size(description.Get(name), name);
    if (found > most) throw_invalid(env, std::string(name) + " " + std::to_string(found) + " exceeds " + std::to_string(most));
    return found;
  };
  const auto text = [&](const char* name) { return description.Get(name).ToString().Utf8Value(); };
  nic_description asked;
  const std::string backing = text("backing");
  if (backing == "hardware") asked.table = nic_description::backing::hardware;
  else if (backing == "verbs") asked.table = nic_description::backing::verbs;
  else if (backing != "soft") throw_invalid(env, "backing must be soft, hardware or verbs, got " + backing);
  if (const Napi::Value libraries = description.Get("libraries"); libraries.IsObject()) {
    const auto named = [&](const char* name, std::string& into) {
      const Napi::Value found = libraries.As<Napi::Object>().Get(name);
      if (!found.IsUndefined()) into = found.ToString().Utf8Value();
    };
    named("ibverbs", asked.libraries.ibverbs);
    named("mlx5", asked.libraries.mlx5);
  }
  asked.soft.engine.seed = number("seed", UINT64_MAX);
  asked.soft.engine.trace_events = number("traceEvents", uint64_t{1} << 24);
  asked.soft.engine.ethernet = description.Get("ethernet").ToBoolean();
  asked.soft.network = network_of(description.Get("network"));
  asked.wish.filter = text("devices");
  if (!description.Get("gidIndex").IsUndefined()) asked.wish.gid_index = static_cast<uint32_t>(number("gidIndex", UINT32_MAX));
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  (void)sched_getaffinity(0, sizeof cpus, &cpus);
  if (const Napi::Value kernels = description.Get("kernels"); kernels.IsObject()) asked.kernels = gpu_kernels_of(kernels.As<Napi::Object>());
  asked.gpu = text("gpu");
  if (asked.gpu.empty() && asked.kernels && backing != "soft") asked.gpu = shown_address(*asked.kernels, asked.wish.sysfs);
  auto near = ibgda::poster_place(asked.wish.sysfs, asked.gpu, cpus);
  asked.wish.near = value_or_throw(env, near);
  asked.queues.qps_per_peer = static_cast<uint32_t>(number("qpsPerPeer", 1024));
  asked.queues.depth = static_cast<uint32_t>(number("depth", EP_IBGDA_MAX_DEPTH));
  asked.queues.collapsed = description.Get("collapsed").ToBoolean();
  asked.queues.ack_timeout = static_cast<uint8_t>(number("ackTimeout", 31));
  return asked;
}

result<std::unique_ptr<dl::mlx5_driver>> driver_of(const nic_description& asked) {
  switch (asked.table) {
    case nic_description::backing::hardware: return dl::mlx5_verbs_driver(asked.libraries);
    case nic_description::backing::verbs: return nic::verbs_proxy_driver(asked.libraries.ibverbs);
    case nic_description::backing::soft: break;
  }
  return std::unique_ptr<dl::mlx5_driver>(new nic::soft_driver(asked.soft));
}

result<ibgda::control_places> places_of(const nic_description& asked) {
  if (!asked.kernels) return ibgda::host_places();
  auto cuda = dl::cuda_symbols_load(asked.kernels->driver);
  if (!cuda.ok()) return cuda.why();
  const char* reader = asked.table == nic_description::backing::soft ? "a software NIC" : asked.table == nic_description::backing::verbs ? "the thread that posts for plain verbs" : "";
  return ibgda::gpu_places(cuda.value(), asked.kernels->device, asked.kernels->order, reader);
}

namespace {

// What CUDA says of exporting that GPU's memory; nothing, where nobody could say.
std::optional<bool> exports_dmabuf(const std::string& gpu) {
  auto cuda = dl::cuda_symbols_load();
  if (!cuda.ok()) return std::nullopt;
  for (int ordinal = 0;; ++ordinal) {
    auto facts = ibgda::gpu_facts_read(*cuda.value(), ordinal);
    if (!facts.ok()) return std::nullopt;
    if (facts.value().address == gpu) return facts.value().dmabuf;
  }
}

// (name of the library) -> {version, gpus: [{pci, dmabuf, gpudirect}]}, of GPUs in the driver's order; makes no context on them. Throws what the driver lacks.
Napi::Value gpu_driver(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsString()) throw_invalid(env, "the name of the driver's library is a string");
  auto cuda = dl::cuda_symbols_load(info[0].As<Napi::String>().Utf8Value());
  value_or_throw(env, cuda);
  const dl::cuda_symbols& driver = *cuda.value();
  int version = 0;
  int count = 0;
  if (driver.cuDriverGetVersion(&version) != 0) version = 0;
  if (const dl::cuda_result error = driver.cuDeviceGetCount(&count); error != 0) {
    throw_failure(env, {EP_STATUS_SYSTEM, ENODEV, "cuDeviceGetCount failed: " + dl::cuda_error_text(driver, error)});
  }
  auto gpus = Napi::Array::New(env);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto facts = ibgda::gpu_facts_read(driver, ordinal);
    auto gpu = Napi::Object::New(env);
    gpu["pci"] = facts.ok() ? facts.value().address : "";
    gpu["dmabuf"] = facts.ok() && facts.value().dmabuf;
    gpu["gpudirect"] = facts.ok() && facts.value().gpudirect;
    gpus[gpus.Length()] = gpu;
  }
  auto out = Napi::Object::New(env);
  out["version"] = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  out["gpus"] = gpus;
  return out;
}

// (root of sysfs) -> {nics, gpus, text}
Napi::Value nic_topology(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!info[0].IsString()) throw_invalid(env, "the root of sysfs is a string");
  const ibgda::topology machine = ibgda::topology_read(info[0].As<Napi::String>().Utf8Value());
  auto out = Napi::Object::New(env);
  auto nics = Napi::Array::New(env);
  for (const ibgda::nic_place& nic : machine.nics) nics[nics.Length()] = nic.name;
  auto gpus = Napi::Array::New(env);
  for (const ibgda::gpu_place& gpu : machine.gpus) gpus[gpus.Length()] = gpu.address;
  out["nics"] = nics;
  out["gpus"] = gpus;
  out["text"] = ibgda::topology_text(machine);
  return out;
}

// (options) -> {missing, reason, remedy, device, port, link, gid, distance, passedOver, placements}: nothing stays open.
Napi::Value probe_nic(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const nic_description asked = nic_description_of(info[0]);
  ibgda::probe_wish wish{asked.wish, !asked.gpu.empty(), std::nullopt};
  if (wish.gpu) wish.gpu_dmabuf = exports_dmabuf(asked.gpu);
  auto driver = driver_of(asked);
  const ibgda::probe_report report = driver.ok() ? ibgda::probe_driver(*driver.value(), wish)
                                                 : ibgda::probe_without_driver(asked.table == nic_description::backing::verbs ? "verbs" : "hardware", driver.why());
  auto out = Napi::Object::New(env);
  out["missing"] = ibgda::missing_name(report.what);
  out["reason"] = report.reason;
  out["remedy"] = report.remedy;
  out["device"] = report.device;
  out["port"] = report.port;
  out["link"] = report.link == dl::mlx5_link::ethernet ? "ethernet" : "infiniband";
  out["gid"] = ibgda::gid_text(report.gid.gid.raw);
  out["distance"] = ibgda::distance_name(report.far);
  out["passedOver"] = strings_of(env, report.passed_over);
  auto placements = Napi::Array::New(env);
  for (const ibgda::placement_finding& one : report.placements) {
    auto finding = Napi::Object::New(env);
    finding["where"] = ibgda::placement_name(one.where);
    finding["possible"] = one.possible;
    finding["why"] = one.why;
    placements[placements.Length()] = finding;
  }
  out["placements"] = placements;
  return out;
}

// (path of the shim, NativeIbgdaOptions of the software NIC behind it): for tests of the hardware's path. The shim is one of a process, as libibverbs is, so the
// driver behind it stays until the process ends.
void attach_verbs_shim(const Napi::CallbackInfo& info) {
  if (!info[0].IsString()) throw_invalid(info.Env(), "the path of the shim is a string");
  auto behind = std::make_unique<nic::soft_driver>(nic_description_of(info[1]).soft);
  auto attached = dl::verbs_shim_attach(info[0].As<Napi::String>().Utf8Value(), behind.get());
  value_or_throw(info.Env(), attached);
  (void)behind.release();
}

} // namespace

void bind_nic_driver(Napi::Env env, Napi::Object exports) {
  exports["gpuDriver"] = Napi::Function::New(env, gpu_driver);
  exports["nicTopology"] = Napi::Function::New(env, nic_topology);
  exports["probeNic"] = Napi::Function::New(env, probe_nic);
  exports["attachVerbsShim"] = Napi::Function::New(env, attach_verbs_shim);
}

} // namespace ep::binding
