// Control memory in a GPU: over a driver of our own making, whose every call can be told to fail, and over the real one where there is a GPU.
#include "core/ibgda/gpu_memory.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.hpp"
#include "core/ibgda/control_places.hpp"
#include "core/ibgda/queues.hpp"
#include "core/segment.hpp"
#include "scripted_nic.hpp"

namespace {

using namespace ep::ibgda;
using ep::dl::cuda_pointer;

bool says(const std::string& message, const std::string& part) {
  const bool found = message.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "  '%s' does not say '%s'\n", message.c_str(), part.c_str());
  return found;
}

// "Device memory" is memory of this process, at odd places, so that alignment is not by chance.
struct pretended_gpu {
  std::string failing; // name of a call
  std::map<std::string, int> calls;
  std::set<uint64_t> allocations;
  std::set<uint64_t> registered;
  int contexts = 0;
  int pushed = 0;
  int streams = 0;
  bool gpudirect = true;
  bool same_address = false; // what is registered has one address for both
  unsigned flags = 0;        // of the last registration
  bool dmabuf = true;
} gpu;

int enter(const char* call) {
  ++gpu.calls[call];
  return gpu.failing == call ? 2 : 0;
}

std::shared_ptr<const ep::dl::cuda_symbols> pretended_driver() {
  auto cuda = std::make_shared<ep::dl::cuda_symbols>();
  cuda->cuGetErrorName = [](int error, const char** name) {
    *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
    return error == 2 ? 0 : 1;
  };
  cuda->cuDeviceGet = [](int* device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? enter("cuDeviceGet") : 101;
  };
  cuda->cuDeviceGetPCIBusId = [](char* text, int bytes, int) {
    std::snprintf(text, static_cast<size_t>(bytes), "00000000:8A:00.0");
    return 0;
  };
  cuda->cuDeviceGetAttribute = [](int* value, int attribute, int) {
    *value = attribute == ep::dl::cuda_attribute_dmabuf ? gpu.dmabuf : attribute == ep::dl::cuda_attribute_gpudirect ? gpu.gpudirect : 0;
    return 0;
  };
  cuda->cuDevicePrimaryCtxRetain = [](void** context, int) {
    *context = &gpu;
    ++gpu.contexts;
    return 0;
  };
  cuda->cuDevicePrimaryCtxRelease_v2 = [](int) {
    --gpu.contexts;
    return 0;
  };
  cuda->cuCtxPushCurrent_v2 = [](void*) {
    ++gpu.pushed;
    return 0;
  };
  cuda->cuCtxPopCurrent_v2 = [](void**) {
    --gpu.pushed;
    return 0;
  };
  cuda->cuStreamCreate = [](void** stream, unsigned flags) {
    EP_CHECK_EQ(flags, ep::dl::cuda_stream_non_blocking);
    if (enter("cuStreamCreate") != 0) return 2;
    *stream = &gpu.streams;
    ++gpu.streams;
    return 0;
  };
  cuda->cuStreamDestroy_v2 = [](void*) {
    --gpu.streams;
    return 0;
  };
  cuda->cuStreamSynchronize = [](void*) { return enter("cuStreamSynchronize"); };
  cuda->cuStreamWriteValue64_v2 = [](void*, cuda_pointer address, uint64_t value, unsigned) {
    if (enter("cuStreamWriteValue64") != 0) return 2;
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
    return 0;
  };
  cuda->cuMemAlloc_v2 = [](cuda_pointer* address, size_t bytes) {
    if (enter("cuMemAlloc") != 0) return 2;
    *address = reinterpret_cast<uint64_t>(std::malloc(bytes + 512)) + 512;
    std::memset(reinterpret_cast<void*>(*address), 0xcd, bytes);
    gpu.allocations.insert(*address);
    return 0;
  };
  cuda->cuMemFree_v2 = [](cuda_pointer address) {
    EP_CHECK_EQ(gpu.allocations.erase(address), size_t{1});
    std::free(reinterpret_cast<void*>(address - 512));
    return 0;
  };
  cuda->cuMemcpyHtoDAsync_v2 = [](cuda_pointer to, const void* from, size_t bytes, void*) {
    if (enter("cuMemcpyHtoDAsync") != 0) return 2;
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return 0;
  };
  cuda->cuMemcpyDtoHAsync_v2 = [](void* to, cuda_pointer from, size_t bytes, void*) {
    if (enter("cuMemcpyDtoHAsync") != 0) return 2;
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return 0;
  };
  cuda->cuMemsetD8Async = [](cuda_pointer address, unsigned char value, size_t bytes, void*) {
    if (enter("cuMemsetD8Async") != 0) return 2;
    std::memset(reinterpret_cast<void*>(address), value, bytes);
    return 0;
  };
  cuda->cuPointerSetAttribute = [](const void* value, int attribute, cuda_pointer) {
    EP_CHECK(attribute == ep::dl::cuda_pointer_sync_memops && *static_cast<const unsigned*>(value) == 1);
    return enter("cuPointerSetAttribute");
  };
  cuda->cuMemGetHandleForAddressRange = [](void* handle, cuda_pointer address, size_t bytes, int type, uint64_t) {
    EP_CHECK(type == ep::dl::cuda_handle_dmabuf && address % 65536 == 0 && bytes % 65536 == 0);
    if (enter("cuMemGetHandleForAddressRange") != 0) return 2;
    *static_cast<int*>(handle) = memfd_create("pretended dma-buf", MFD_CLOEXEC);
    return 0;
  };
  cuda->cuMemHostRegister_v2 = [](void* address, size_t bytes, unsigned flags) {
    EP_CHECK(reinterpret_cast<uint64_t>(address) % 4096 == 0 && bytes % 4096 == 0);
    EP_CHECK(bytes == 4096 || flags == (ep::dl::cuda_host_device_map | ep::dl::cuda_host_portable));
    gpu.flags = flags;
    if (enter("cuMemHostRegister") != 0) return 2;
    gpu.registered.insert(reinterpret_cast<uint64_t>(address));
    return 0;
  };
  cuda->cuMemHostUnregister = [](void* address) {
    EP_CHECK_EQ(gpu.registered.erase(reinterpret_cast<uint64_t>(address)), size_t{1});
    return 0;
  };
  cuda->cuMemHostGetDevicePointer_v2 = [](cuda_pointer* device, void* host, unsigned) {
    *device = reinterpret_cast<uint64_t>(host) + (gpu.same_address ? 0 : uint64_t{1} << 44);
    return enter("cuMemHostGetDevicePointer");
  };
  return cuda;
}

void expect_nothing_left() {
  EP_CHECK(gpu.allocations.empty());
  EP_CHECK(gpu.registered.empty());
  EP_CHECK_EQ(gpu.contexts, 0);
  EP_CHECK_EQ(gpu.streams, 0);
  EP_CHECK_EQ(gpu.pushed, 0);
}

void reads_facts() {
  gpu = {};
  auto facts = gpu_facts_read(*pretended_driver(), 0);
  EP_CHECK(facts.ok());
  EP_CHECK_EQ(facts.value().address, "0000:8a:00.0");
  EP_CHECK(facts.value().dmabuf && facts.value().gpudirect);
  auto none = gpu_facts_read(*pretended_driver(), 1);
  EP_CHECK(!none.ok() && none.why().sys_errno == ENODEV);
}

// All of the control path in "GPU memory": structs and rings there, doorbells under the GPU's addresses, everything given back.
void holds_queues(placement where) {
  gpu = {};
  ep::test::nic_script script;
  {
    auto source = gpu_control_memory(pretended_driver(), 0, where);
    EP_CHECK(source.ok());
    control_memory* const sources[] = {source.value().get()};
    ep::test::scripted_driver driver(script);
    queue_options options;
    options.depth = 64;
    auto port = device_open(driver, {});
    auto made = rank_queues::create(std::move(port.value()), options, sources);
    EP_CHECK(made.ok());
    EP_CHECK_EQ(made.value()->where(), where);
    EP_CHECK_EQ(script.umems.at(0).dmabuf_fd >= 0, where == placement::gpu_dmabuf);
    EP_CHECK_EQ(script.umems.at(0).address % 65536, uint64_t{0});
    const auto* device = reinterpret_cast<const ep_ibgda_device*>(made.value()->device_address());
    const auto* qp = reinterpret_cast<const ep_ibgda_qp*>(device->qps);
    EP_CHECK_EQ(qp->header.magic, EP_MAGIC_IBGDA_QP);
    EP_CHECK(qp->bf > uint64_t{1} << 44);
    EP_CHECK_EQ(gpu.flags, ep::dl::cuda_host_device_map | ep::dl::cuda_host_io_memory);
    EP_CHECK_EQ(*reinterpret_cast<const uint64_t*>(qp->cq), ~uint64_t{0});
    EP_CHECK_EQ(*reinterpret_cast<const uint64_t*>(qp->sq), uint64_t{0});
    EP_CHECK(device->ranges != 0);
    EP_CHECK_EQ(gpu.calls["cuStreamWriteValue64"], 1);
    EP_CHECK(made.value()->register_memory({0x1000, 0x100}, 0).ok());
    EP_CHECK_EQ(gpu.calls["cuStreamWriteValue64"], 2);
    EP_CHECK(made.value()->close().ok());
  }
  expect_nothing_left();
  EP_CHECK(script.alive.empty());
}

// What this process posts itself lies in its own memory, wherever the kernels' queues do; both know the same keys.
void holds_the_hosts_apart() {
  gpu = {};
  ep::test::nic_script script;
  {
    auto source = gpu_control_memory(pretended_driver(), 0, placement::gpu_address);
    EP_CHECK(source.ok());
    control_memory* const sources[] = {source.value().get()};
    ep::test::scripted_driver driver(script);
    queue_options options;
    options.depth = 64;
    options.world_size = 2;
    options.qps_per_peer = 3;
    options.host_qps = 1;
    auto port = device_open(driver, {});
    auto made = rank_queues::create(std::move(port.value()), options, sources);
    EP_CHECK(made.ok());
    rank_queues& queues = *made.value();
    const auto* kernels = reinterpret_cast<const ep_ibgda_device*>(queues.device_address());
    const auto* own = reinterpret_cast<const ep_ibgda_device*>(queues.host_device_address());
    EP_CHECK_EQ(kernels->qps_per_peer, 2u);
    EP_CHECK_EQ(kernels->active_qps, 2u);
    EP_CHECK_EQ(own->qps_per_peer, 1u);
    EP_CHECK_EQ(script.umems.size(), size_t{2});
    const auto in_gpu = [](uint64_t address) {
      const auto at = gpu.allocations.upper_bound(address);
      return at != gpu.allocations.begin() && address - *std::prev(at) < (uint64_t{1} << 20);
    };
    for (uint32_t i = 0; i < 6; ++i) {
      const bool hosts = i % 3 == 2;
      const auto& qp = reinterpret_cast<const ep_ibgda_qp*>(hosts ? own->qps : kernels->qps)[hosts ? i / 3 : i / 3 * 2 + i % 3];
      EP_CHECK_EQ(qp.qpn, queues.qpn(i));
      EP_CHECK_EQ(qp.peer, static_cast<int32_t>(i / 3));
      EP_CHECK_EQ(qp.bf > uint64_t{1} << 44, !hosts);
      for (const uint64_t address : {qp.sq, qp.cq, qp.dbr, qp.response, qp.marks}) EP_CHECK_EQ(in_gpu(address), !hosts);
    }
    EP_CHECK_EQ(queues.connection().size(), sizeof(ep_ibgda_peer) + 12 * sizeof(uint32_t));
    auto known = queues.register_memory({0x1000, 0x100}, 0);
    EP_CHECK(known.ok());
    for (const auto* device : {kernels, own}) EP_CHECK_EQ(reinterpret_cast<const ep_ibgda_range_table*>(device->ranges)->count, uint64_t{1});
    // Published to the kernels, whose copy fails next: neither of them keeps the range.
    gpu.failing = "cuStreamWriteValue64";
    EP_CHECK(!queues.register_memory({0x3000, 0x100}, 0).ok());
    gpu.failing = "";
    for (const auto* device : {kernels, own}) EP_CHECK_EQ(reinterpret_cast<const ep_ibgda_range_table*>(device->ranges)->count, uint64_t{1});
    EP_CHECK(queues.release_memory(known.value()).ok());
    // What kernels have written is read out of the GPU.
    reinterpret_cast<ep_ibgda_qp*>(kernels->qps)[1].broken = EP_IBGDA_BROKEN;
    EP_CHECK_EQ(queues.pair_now(1).value().broken, uint64_t{EP_IBGDA_BROKEN});
    EP_CHECK_EQ(queues.device_now().value().rank, 0);
    EP_CHECK(!queues.pair_now(4).ok());
    EP_CHECK(gpu.calls["cuMemcpyDtoHAsync"] >= 2);
    EP_CHECK(queues.close().ok());
  }
  expect_nothing_left();
  EP_CHECK(script.alive.empty());
}

// Pages of a segment, locked for the GPU; a doorbell that is memory is none of PCI's.
void locks_pages_of_the_host() {
  gpu = {};
  {
    auto source = pinned_control_memory(pretended_driver(), 0, true);
    EP_CHECK(source.ok());
    EP_CHECK_EQ(source.value()->where(), placement::host);
    auto apart = source.value()->allocate(8192);
    EP_CHECK(!apart.ok() && apart.why().sys_errno == EOPNOTSUPP && says(apart.why().message, "by another address"));
    EP_CHECK(gpu.registered.empty());
    gpu.same_address = true;
    auto block = source.value()->allocate(5000);
    EP_CHECK(block.ok());
    EP_CHECK(ep::segment::containing(reinterpret_cast<const void*>(block.value().address), 5000) != nullptr);
    EP_CHECK_EQ(gpu.registered.count(block.value().address), size_t{1});
    const uint64_t word = 0x1122334455667788;
    EP_CHECK(source.value()->write(block.value(), 4096, &word, sizeof word).ok());
    EP_CHECK(source.value()->publish(block.value(), 8, 7).ok());
    uint64_t found[2] = {};
    EP_CHECK(source.value()->read(block.value(), 0, found, sizeof found).ok());
    EP_CHECK(found[0] == 0 && found[1] == 7);
    alignas(4096) static char page[4096];
    EP_CHECK_EQ(source.value()->map_doorbell(reinterpret_cast<uint64_t>(page) + 2048, 512).value(), reinterpret_cast<uint64_t>(page) + 2048);
    EP_CHECK_EQ(gpu.flags, ep::dl::cuda_host_device_map);
    source.value()->unmap_doorbell(reinterpret_cast<uint64_t>(page) + 2048);
    gpu.failing = "cuMemHostRegister";
    EP_CHECK(!source.value()->allocate(4096).ok());
  }
  expect_nothing_left();
}

// In the order that was asked for; who reads rings on a processor takes none of a GPU's memory.
void takes_places_in_order() {
  gpu = {};
  gpu.dmabuf = false;
  const std::vector<placement> order = {placement::gpu_dmabuf, placement::host, placement::gpu_address};
  {
    auto places = gpu_places(pretended_driver(), 0, order, "");
    EP_CHECK(places.ok());
    EP_CHECK_EQ(places.value().sources.size(), size_t{2});
    EP_CHECK_EQ(places.value().sources.at(0)->where(), placement::host);
    EP_CHECK_EQ(places.value().sources.at(1)->where(), placement::gpu_address);
    const std::vector<fallback> all = all_fallbacks(places.value(), {{placement::gpu_address, "second"}, {placement::host, "first"}});
    EP_CHECK_EQ(all.size(), size_t{3});
    EP_CHECK(all.at(0).wished == placement::gpu_dmabuf && all.at(1).why == "first" && all.at(2).why == "second");
    auto read = gpu_places(pretended_driver(), 0, order, "a thread");
    EP_CHECK(read.ok());
    EP_CHECK_EQ(read.value().sources.size(), size_t{1});
    EP_CHECK_EQ(read.value().passed_over.size(), size_t{2});
    auto none = gpu_places(pretended_driver(), 0, {placement::gpu_dmabuf}, "");
    EP_CHECK(!none.ok() && none.why().sys_errno == EOPNOTSUPP && says(none.why().message, "GPU memory by DMA-BUF: GPU 0000:8a:00.0 exports no DMA-BUFs"));
  }
  expect_nothing_left();
}

void refuses_what_cannot_be() {
  gpu = {};
  gpu.dmabuf = false;
  gpu.gpudirect = false;
  auto no_dmabuf = gpu_control_memory(pretended_driver(), 0, placement::gpu_dmabuf);
  EP_CHECK(!no_dmabuf.ok() && no_dmabuf.why().sys_errno == EOPNOTSUPP && says(no_dmabuf.why().message, "0000:8a:00.0 exports no DMA-BUFs"));
  auto no_direct = gpu_control_memory(pretended_driver(), 0, placement::gpu_address);
  EP_CHECK(!no_direct.ok() && no_direct.why().sys_errno == EOPNOTSUPP && says(no_direct.why().message, "has no GPUDirect RDMA"));
  auto host = gpu_control_memory(pretended_driver(), 0, placement::host);
  EP_CHECK(!host.ok() && host.why().status == EP_STATUS_INVALID);
  expect_nothing_left();
}

// Whichever call fails: the failure arrives, host memory is used instead and the reason is told, and nothing stays.
void falls_back_from_every_failure() {
  for (const char* call : {"cuMemAlloc", "cuPointerSetAttribute", "cuMemGetHandleForAddressRange", "cuMemsetD8Async", "cuStreamSynchronize", "cuMemcpyHtoDAsync",
                           "cuStreamWriteValue64", "cuMemHostRegister", "cuMemHostGetDevicePointer"}) {
    gpu = {};
    ep::test::nic_script script;
    {
      auto source = gpu_control_memory(pretended_driver(), 0, placement::gpu_dmabuf);
      EP_CHECK(source.ok());
      const auto host = host_control_memory();
      control_memory* const sources[] = {source.value().get(), host.get()};
      ep::test::scripted_driver driver(script);
      gpu.failing = call;
      auto port = device_open(driver, {});
      auto made = rank_queues::create(std::move(port.value()), {}, sources);
      EP_CHECK(made.ok());
      EP_CHECK_EQ(made.value()->where(), placement::host);
      EP_CHECK_EQ(made.value()->fallbacks().size(), size_t{1});
      EP_CHECK(says(made.value()->fallbacks().at(0).why, "CUDA_ERROR_OUT_OF_MEMORY"));
    }
    expect_nothing_left();
    EP_CHECK(script.alive.empty());
  }
  gpu = {};
  gpu.failing = "cuStreamCreate";
  EP_CHECK(!gpu_control_memory(pretended_driver(), 0, placement::gpu_dmabuf).ok());
  expect_nothing_left();
}

void uses_the_real_one() {
  auto cuda = ep::dl::cuda_symbols_load();
  if (!cuda.ok()) {
    std::printf("NOT run on a GPU: %s\n", cuda.why().message.c_str());
    return;
  }
  auto library = ep::dl::library::open("libcuda.so.1");
  auto* copy = reinterpret_cast<int (*)(void*, cuda_pointer, size_t)>(library.value()->find("cuMemcpyDtoH_v2"));
  auto facts = gpu_facts_read(*cuda.value(), 0);
  EP_CHECK(facts.ok());
  std::printf("GPU %s: GPUDirect %s, DMA-BUF %s\n", facts.value().address.c_str(), facts.value().gpudirect ? "yes" : "no", facts.value().dmabuf ? "yes" : "no");
  for (const placement where : {placement::gpu_dmabuf, placement::gpu_address}) {
    auto source = gpu_control_memory(cuda.value(), 0, where);
    if (!source.ok()) {
      std::printf("%s: %s\n", placement_name(where), source.why().message.c_str());
      EP_CHECK_EQ(source.why().sys_errno, EOPNOTSUPP);
      continue;
    }
    auto block = source.value()->allocate(12288);
    if (!block.ok()) {
      std::printf("%s: %s\n", placement_name(where), block.why().message.c_str());
      EP_CHECK_EQ(block.why().sys_errno, EOPNOTSUPP);
      continue;
    }
    EP_CHECK_EQ(block.value().address % 65536, uint64_t{0});
    EP_CHECK_EQ(block.value().dmabuf_fd >= 0, where == placement::gpu_dmabuf);
    const uint64_t words[2] = {0x1122334455667788, 42};
    EP_CHECK(source.value()->fill(block.value(), 4096, 0xff, 4096).ok());
    EP_CHECK(source.value()->write(block.value(), 8192, words, sizeof words).ok());
    EP_CHECK(source.value()->publish(block.value(), 8, 0xabcdef).ok());
    void* context = nullptr;
    EP_CHECK_EQ(cuda.value()->cuDevicePrimaryCtxRetain(&context, 0), 0);
    EP_CHECK_EQ(cuda.value()->cuCtxPushCurrent_v2(context), 0);
    std::vector<uint64_t> back(1536);
    EP_CHECK_EQ(copy(back.data(), block.value().address, 12288), 0);
    cuda.value()->cuCtxPopCurrent_v2(&context);
    cuda.value()->cuDevicePrimaryCtxRelease_v2(0);
    EP_CHECK_EQ(back[0], uint64_t{0});
    EP_CHECK_EQ(back[1], uint64_t{0xabcdef});
    EP_CHECK_EQ(back[511], uint64_t{0});
    EP_CHECK_EQ(back[512], ~uint64_t{0});
    EP_CHECK_EQ(back[1023], ~uint64_t{0});
    EP_CHECK_EQ(back[1024], words[0]);
    EP_CHECK_EQ(back[1025], words[1]);
    std::printf("%s: written and read back\n", placement_name(where));
  }
}

} // namespace

int main() {
  reads_facts();
  holds_queues(placement::gpu_dmabuf);
  holds_queues(placement::gpu_address);
  holds_the_hosts_apart();
  locks_pages_of_the_host();
  takes_places_in_order();
  refuses_what_cannot_be();
  falls_back_from_every_failure();
  uses_the_real_one();
  return ep::check::finish();
}
