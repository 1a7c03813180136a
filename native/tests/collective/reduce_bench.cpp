// How fast a reduction moves bytes, beside the non-temporal copy of ep_copy over the same arrays: reduce_bench [KiB of each array, 65536]. Everything takes
// turns, for a machine's speed changes from one moment to the next. Bytes are all that is read and written, each once. Every result is verified.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "collective/reduce_kernels.hpp"
#include "ep/device/copy.h"

namespace {

using ep::element_type;
using ep::reduce_isa;
using ep::reduce_op;

/// Memory as ranks share it: a file in memory, 4 KiB pages, touched.
uint8_t* shared_array(std::size_t bytes) {
  const int file = memfd_create("reduce-bench", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (at == MAP_FAILED) std::abort();
  close(file);
  return static_cast<uint8_t*>(at);
}

/// Small integers: every sum of sixteen of them is exact in all formats.
void fill(uint8_t* to, std::size_t bytes, element_type type, unsigned rank) {
  const uint16_t bf16[] = {0x3f80, 0x4000, 0x4040, 0x4080};
  const uint16_t f16[] = {0x3c00, 0x4000, 0x4200, 0x4400};
  for (std::size_t i = 0; i < bytes / ep::element_bytes(type); ++i) {
    const unsigned which = (static_cast<unsigned>(i) + rank) % 4;
    if (type == element_type::f32) reinterpret_cast<float*>(to)[i] = static_cast<float>(which + 1);
    if (type == element_type::bf16) reinterpret_cast<uint16_t*>(to)[i] = bf16[which];
    if (type == element_type::f16) reinterpret_cast<uint16_t*>(to)[i] = f16[which];
  }
}

double number(const uint8_t* from, std::size_t i, element_type type) {
  if (type == element_type::f32) return reinterpret_cast<const float*>(from)[i];
  const uint16_t code = reinterpret_cast<const uint16_t*>(from)[i];
  const int fraction = type == element_type::bf16 ? 7 : 10;
  const int bias = type == element_type::bf16 ? 127 : 15;
  const int exponent = (code >> fraction) - bias;
  return (1.0 + static_cast<double>(code & ((1 << fraction) - 1)) / (1 << fraction)) * (exponent < 0 ? 0.5 : static_cast<double>(1 << exponent));
}

bool right(const uint8_t* out, std::size_t bytes, element_type type, int count) {
  for (std::size_t i = 0; i < bytes / ep::element_bytes(type); ++i) {
    double expected = 0;
    for (int s = 0; s < count; ++s) expected += static_cast<double>((i + static_cast<std::size_t>(s)) % 4 + 1);
    if (number(out, i, type) != expected) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t bytes = (argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 65536) * 1024;
  const char* const walk_names[] = {", through the caches", ", through them in rows", ", past the caches"};
  const char* const isa_names[] = {"portable", "avx2", "avx512"};
  constexpr std::size_t most = 8;
  constexpr int rounds = 11;
  std::vector<uint8_t*> sources;
  for (std::size_t s = 0; s < most; ++s) sources.push_back(shared_array(bytes));
  std::vector<uint8_t*> outs = {shared_array(bytes + 64), shared_array(bytes + 64)};

  struct task {
    element_type type;
    const char* name;
    int count;
    int dst_count;
    std::size_t shift;  // of the second destination
  };
  const task tasks[] = {
      {element_type::f32, "f32", 2, 2, 0},  {element_type::bf16, "bf16", 2, 2, 0}, {element_type::f16, "f16", 2, 2, 0},
      {element_type::f32, "f32", 2, 2, 16}, {element_type::bf16, "bf16", 2, 1, 0}, {element_type::f32, "f32", 3, 1, 0},
      {element_type::f32, "f32", 4, 1, 0},  {element_type::f32, "f32", 8, 1, 0},   {element_type::bf16, "bf16", 8, 1, 0},
  };
  struct rival {
    std::string name;
    double bytes_moved;
    std::function<void()> run;
    std::vector<double> seconds;
  };
  int wrong = 0;
  for (const task& t : tasks) {
    const std::size_t count = static_cast<std::size_t>(t.count);
    for (std::size_t s = 0; s < count; ++s) fill(sources[s], bytes, t.type, static_cast<unsigned>(s));
    const void* srcs[most];
    for (std::size_t s = 0; s < count; ++s) srcs[s] = sources[s];
    void* dsts[] = {outs[0], outs[1] + t.shift};
    const double size = static_cast<double>(bytes);

    std::vector<rival> rivals;
    rivals.push_back({"copy", 2.0 * t.count * size,
                      [&] {
                        for (std::size_t s = 0; s < count; ++s) ep_copy(outs[s % 2], sources[s], bytes, 1);
                        ep_copy_fence();
                      },
                      {}});
    for (const reduce_isa isa : {reduce_isa::portable, reduce_isa::avx2, reduce_isa::avx512}) {
      if (!ep::reduce_isa_usable(isa)) continue;
      for (int walk = 0; walk < 3; ++walk) {
        rivals.push_back({std::string(isa_names[static_cast<int>(isa)]) + walk_names[walk],
                          (t.count + t.dst_count) * size,
                          [&, isa, walk] {
                            ep::reduce_push_with(isa, static_cast<ep::reduce_walk>(walk), dsts, t.dst_count, srcs, t.count, bytes / ep::element_bytes(t.type), t.type,
                                                 reduce_op::sum, 1);
                          },
                          {}});
      }
    }
    // What fits the caches is over too soon for the clock.
    const int times = static_cast<int>(std::max<std::size_t>(1, (std::size_t{1} << 20) / bytes));
    for (int round = 0; round < rounds; ++round) {
      for (rival& r : rivals) {
        const auto start = std::chrono::steady_clock::now();
        for (int n = 0; n < times; ++n) r.run();
        r.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times);
      }
    }
    std::printf("%s, %d sources, %d destinations%s\n", t.name, t.count, t.dst_count, t.shift != 0 ? ", the second 16 bytes off" : "");
    for (rival& r : rivals) {
      if (&r != &rivals[0]) {
        for (int d = 0; d < t.dst_count; ++d) std::memset(dsts[d], 0, bytes);
        r.run();
        for (int d = 0; d < t.dst_count; ++d) wrong += right(static_cast<uint8_t*>(dsts[d]), bytes, t.type, t.count) ? 0 : 1;
      }
      std::sort(r.seconds.begin(), r.seconds.end());
      std::printf("  %-28s best %6.1f, median %6.1f GB/s\n", r.name.c_str(), r.bytes_moved / r.seconds.front() / 1e9,
                  r.bytes_moved / r.seconds[r.seconds.size() / 2] / 1e9);
    }
  }
  if (wrong != 0) std::printf("%d results are wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
