// Memory of a GPU over the fabric: what libfabric gets when it is registered, byte for byte, and what travels between such memories. Over stand-ins: dl/shim/rdm_shim.cpp for libfabric,
// dl/shim/cuda_driver.cpp for CUDA.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "dl/libfabric_abi.hpp"
#include "fabric/gpu_source.hpp"
#include "fabric_ranks.hpp"

namespace {

using namespace ep;
using namespace ep::test;
using fabric::gpu_range;
using fabric::gpu_source;
using fabric::request_state;

const std::string log_path = std::filesystem::temp_directory_path() / ("ep_rdm_shim_log." + std::to_string(getpid()));

struct registration {
  uint64_t flags;
  std::vector<uint8_t> attr;
  std::vector<uint8_t> of;
};
std::vector<uint8_t> bytes_of(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes.push_back(static_cast<uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}
// Since the last call.
std::vector<registration> registrations() {
  std::vector<registration> all;
  std::ifstream file(log_path);
  std::string flags, attr, of;
  while (file >> flags >> attr >> of) all.push_back({std::stoull(flags, nullptr, 16), bytes_of(attr), bytes_of(of)});
  std::remove(log_path.c_str());
  return all;
}
template <class Word> Word word_at(const std::vector<uint8_t>& bytes, size_t offset) {
  Word word{};
  EP_CHECK(offset + sizeof word <= bytes.size());
  if (offset + sizeof word <= bytes.size()) std::memcpy(&word, bytes.data() + offset, sizeof word);
  return word;
}

void pretend(const char* libfabric, const char* cuda_failing = nullptr) {
  setenv("EP_RDM_SHIM", libfabric, 1);
  if (cuda_failing == nullptr) unsetenv("EP_CUDA_HOST_FAILING");
  else setenv("EP_CUDA_HOST_FAILING", cuda_failing, 1);
}

dl::fabric_query query(int gpu = 0) {
  dl::fabric_query made;
  made.library = EP_RDM_SHIM;
  made.provider = "shim";
  made.gpu = gpu;
  return made;
}

struct gpu_world {
  fabric_ranks ranks{2, 4096, 4, {}, [](int32_t) { return must(dl::open_fabric(query())); }};
  std::unique_ptr<gpu_source> sources[2];
  std::shared_ptr<symmetric_memory> memories[2];
  std::shared_ptr<gpu_range> ranges[2];
  fabric::engine& engine(int32_t rank) { return *ranks.side(rank).engine; }
  gpu_world() {
    for (auto& one : sources) one = must(gpu_source::open(EP_CUDA_DRIVER, 0));
  }
  void allocate(uint64_t bytes) {
    std::vector<std::vector<uint8_t>> parts;
    for (int32_t rank = 0; rank < 2; ++rank) {
      memories[rank] = must(symmetric_memory::create(ranks.side(rank).context, 0, 4));
      ranges[rank] = must(sources[rank]->allocate(engine(rank), bytes));
      parts.push_back(must(engine(rank).add_memory(memories[rank], ranges[rank])));
    }
    for (int32_t rank = 0; rank < 2; ++rank) must(engine(rank).route(*memories[rank], parts));
  }
  fabric::request of_gpu(int32_t from, int32_t to, const gpu_range& range, uint64_t src, uint64_t dst, uint64_t bytes) {
    fabric::request made = ranks.bytes_to(from, to, 0, dst, bytes);
    made.local = range.address() + src;
    made.keep = nullptr;
    made.of_gpu = true;
    made.descriptor = range.region().descriptor;
    return made;
  }
  request_state post(int32_t from, fabric::request wanted) {
    const int32_t to = wanted.peer;
    return ranks.ended(from, to, must(engine(from).post(*memories[from], std::move(wanted))));
  }
  std::vector<uint8_t> read(int32_t rank, uint64_t offset, uint64_t bytes) {
    std::vector<uint8_t> found(bytes);
    must(sources[rank]->read(*ranges[rank], offset, found.data(), bytes));
    return found;
  }
};

// The layouts are libfabric's, fi_domain.h of 1.20 and up; its version of the structs is checked against headers by libfabric_abi_test.
void check_dmabuf(const registration& one, uint64_t address, uint64_t length, uint64_t offset) {
  EP_CHECK_EQ(one.flags, uint64_t{1} << 40); // FI_MR_DMABUF
  EP_CHECK_EQ(word_at<uint64_t>(one.attr, 8), 1u); // iov_count
  EP_CHECK_EQ(word_at<uint64_t>(one.attr, 16), uint64_t{0x3300}); // FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE
  EP_CHECK_EQ(word_at<uint64_t>(one.attr, 24), 0u); // offset
  EP_CHECK(word_at<uint64_t>(one.attr, 32) != 0); // requested_key: nobody guesses it
  for (const size_t at : {40, 48, 56}) EP_CHECK_EQ(word_at<uint64_t>(one.attr, at), 0u); // context, auth_key
  EP_CHECK_EQ(word_at<uint32_t>(one.attr, 64), 1u); // FI_HMEM_CUDA
  EP_CHECK_EQ(word_at<int32_t>(one.attr, 72), 0); // device.cuda
  for (size_t at = 80; at + 8 <= one.attr.size(); at += 8) EP_CHECK_EQ(word_at<uint64_t>(one.attr, at), 0u); // hmem_data and what follows
  EP_CHECK_EQ(one.of.size(), 32u);
  EP_CHECK(word_at<int32_t>(one.of, 0) >= 0); // fd
  EP_CHECK_EQ(word_at<uint64_t>(one.of, 8), offset);
  EP_CHECK_EQ(word_at<uint64_t>(one.of, 16), length);
  EP_CHECK_EQ(word_at<uint64_t>(one.of, 24), address - offset); // base_addr
}

void test_dmabuf() {
  pretend("");
  gpu_world world;
  registrations();
  constexpr uint64_t bytes = 200'000;
  world.allocate(bytes);
  auto seen = registrations();
  EP_CHECK_EQ(seen.size(), 2u);
  for (size_t rank = 0; rank < seen.size(); ++rank) check_dmabuf(seen[rank], world.ranges[rank]->address(), bytes, 0);

  // From memory of the host, of any length: what is short travels within no message. Then back, from GPU to GPU, and read.
  uint8_t* host = world.ranks.side(0).memory->own_data();
  for (uint64_t i = 0; i < 4096; ++i) host[i] = pattern(i, 5);
  for (const uint64_t length : {0, 1, 8, 952, 953, 1000, 4096}) {
    const uint64_t at = 10'000 + length * 3;
    EP_CHECK(world.post(0, fabric_ranks::with_signal(world.ranks.bytes_to(0, 1, 0, at, length), 1, 1)) == request_state::done);
    EP_CHECK(world.read(1, at, length) == std::vector<uint8_t>(host, host + length));
    EP_CHECK_EQ(world.read(1, at + length, 1)[0], 0);
  }
  EP_CHECK_EQ(std::atomic_ref<uint64_t>(world.memories[1]->own_signals()[1]).load(), 7u);
  EP_CHECK(world.post(1, world.of_gpu(1, 0, *world.ranges[1], 10'000 + 4096 * 3, 77, 4000)) == request_state::done);
  EP_CHECK(world.read(0, 77, 4000) == std::vector<uint8_t>(host, host + 4000));
  fabric::request read = world.of_gpu(1, 0, *world.ranges[1], 100'000, 80, 3000);
  read.reads = true;
  EP_CHECK(world.post(1, read) == request_state::done);
  EP_CHECK(world.read(1, 100'000, 3000) == std::vector<uint8_t>(host + 3, host + 3003));
  fabric::request word;
  word.peer = 1;
  word.offset = 64;
  word.word = 0x1122334455667788;
  word.word_bytes = 8;
  EP_CHECK(world.post(0, word) == request_state::done);
  EP_CHECK_EQ(word_at<uint64_t>(world.read(1, 64, 8), 0), 0x1122334455667788u);

  // Somebody's memory: the pages around it.
  const uint64_t address = world.ranges[0]->address() + 100;
  EP_CHECK(world.sources[0]->owns(address) && !world.sources[0]->owns(reinterpret_cast<uint64_t>(host)));
  {
    const auto adopted = must(world.sources[0]->adopt(world.engine(0), address, 5000));
    seen = registrations();
    EP_CHECK_EQ(seen.size(), 1u);
    check_dmabuf(seen[0], address, 5000, 100);
    EP_CHECK(world.post(0, world.of_gpu(0, 1, *adopted, 0, 150'000, 3000)) == request_state::done);
    EP_CHECK(world.read(1, 150'000, 3000) == world.read(0, 100, 3000));
  }

  // What no processor may do is refused, and so is what ends beyond the memory.
  const auto refused = [&](fabric::request wanted, const char* text) {
    const auto posted = world.engine(0).post(*world.memories[0], std::move(wanted));
    EP_CHECK(!posted.ok() && posted.why().message.find(text) != std::string::npos);
  };
  refused(world.ranks.bytes_to(0, 0, 0, 0, 8), "copy it on a stream");
  refused(world.of_gpu(0, 0, *world.ranges[0], 0, 8, 8), "copy it on a stream");
  refused(world.ranks.bytes_to(0, 1, 0, bytes - 7, 8), "ends beyond the memory");
  EP_CHECK_EQ(world.engine(0).violation() + world.engine(1).violation(), std::string());
  EP_CHECK_EQ(world.engine(0).byte_length(*world.memories[0]), bytes);
}

// Where the library knows no DMA-BUFs, refuses this one, or the GPU exports none: by the address, and as memory of CUDA all the same.
void test_by_address() {
  for (const auto& [libfabric, failing] : {std::pair{"version=1.17", static_cast<const char*>(nullptr)}, std::pair{"no-dmabuf", static_cast<const char*>(nullptr)}, std::pair{"", "dmabuf"}}) {
    pretend(libfabric, failing);
    gpu_world world;
    registrations();
    world.allocate(5000);
    const auto seen = registrations();
    EP_CHECK_EQ(seen.size(), std::string(libfabric) == "no-dmabuf" ? 4u : 2u);
    const registration& last = seen.back();
    EP_CHECK_EQ(last.flags, 0u);
    EP_CHECK_EQ(word_at<uint32_t>(last.attr, 64), 1u); // FI_HMEM_CUDA
    EP_CHECK_EQ(word_at<uint64_t>(last.of, 0), world.ranges[1]->address());
    EP_CHECK_EQ(word_at<uint64_t>(last.of, 8), 5000u);
    uint8_t* host = world.ranks.side(0).memory->own_data();
    for (uint64_t i = 0; i < 3000; ++i) host[i] = pattern(i, 9);
    EP_CHECK(world.post(0, world.ranks.bytes_to(0, 1, 0, 1999, 3000)) == request_state::done);
    EP_CHECK(world.read(1, 1999, 3000) == std::vector<uint8_t>(host, host + 3000));
  }
}

void test_refusals() {
  const auto says = [](const std::string& why, const std::string& text) {
    if (why.find(text) == std::string::npos) std::fprintf(stderr, "  '%s' does not say '%s'\n", why.c_str(), text.c_str());
    EP_CHECK(why.find(text) != std::string::npos);
  };
  pretend("no-hmem");
  {
    gpu_world world;
    const auto made = world.sources[0]->allocate(world.engine(0), 4096);
    EP_CHECK(!made.ok() && made.why().sys_errno == EOPNOTSUPP);
    says(made.why().message, "shim of libfabric 2.1 registers no memory of GPUs (FI_HMEM)");
    says(must(dl::probe_fabric(query())).no_gpu, "FI_HMEM");
  }
  pretend("");
  says(must(dl::probe_fabric(query(-1))).no_gpu, "no GPU was named");
  EP_CHECK_EQ(must(dl::probe_fabric(query())).no_gpu, std::string());
  pretend("", "dmabuf,gpudirect");
  {
    gpu_world world;
    const auto made = world.sources[0]->allocate(world.engine(0), 4096);
    EP_CHECK(!made.ok() && made.why().sys_errno == EOPNOTSUPP);
    says(made.why().message, "exports no DMA-BUFs; GPU 0000:00:00.0 has no GPUDirect RDMA");
  }
  pretend("");
  const auto nobody = gpu_source::open(EP_CUDA_DRIVER, 7);
  EP_CHECK(!nobody.ok() && nobody.why().sys_errno == ENODEV);
}

} // namespace

int main() {
  setenv("EP_RDM_SHIM_LOG", log_path.c_str(), 1);
  test_dmabuf();
  test_by_address();
  test_refusals();
  registrations();
  return ep::check::finish();
}
