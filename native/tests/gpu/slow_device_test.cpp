// What stands between the addon and a library for GPUs tells calls that stand still while they do, and how long they took; others it passes on, and says nothing.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "../check.hpp"
#include "cuda/table.h"

namespace {

constexpr uint64_t many_bytes = uint64_t{1} << 29; // some fills of which take far more than the limit

// What `work` says on stderr.
template <class Work> std::string said(const Work& work) {
  std::FILE* kept = std::tmpfile();
  EP_CHECK(kept != nullptr);
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  dup2(fileno(kept), STDERR_FILENO);
  work();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  std::rewind(kept);
  std::string text;
  char part[512];
  while (std::fgets(part, sizeof part, kept) != nullptr) text += part;
  std::fclose(kept);
  return text;
}

bool holds(const std::string& text, const char* part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "found no '%s' in '%s'\n", part, text.c_str());
  return false;
}

const ep_cuda_table* table_of(const char* path) {
  void* file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  EP_CHECK(file != nullptr);
  return reinterpret_cast<ep_cuda_table_function>(dlsym(file, EP_CUDA_TABLE_SYMBOL))(EP_CUDA_TABLE_VERSION);
}

} // namespace

int main() {
  setenv("EP_CUDA_SLOW_OF", EP_CUDA_HOST, 1);
  setenv("EP_CUDA_SLOW_MS", "25", 1);
  const ep_cuda_table* table = table_of(EP_CUDA_SLOW);
  EP_CHECK(table != nullptr);
  const ep_cuda_table* plain = table_of(EP_CUDA_HOST);
  EP_CHECK_EQ(table->byte_length, plain->byte_length);
  // Every entry is watched, but for three that cannot wait.
  const auto* ours = reinterpret_cast<void* const*>(&table->error_text);
  const auto* theirs = reinterpret_cast<void* const*>(&plain->error_text);
  const size_t entries = (sizeof *table - offsetof(ep_cuda_table, error_text)) / sizeof(void*);
  size_t same = 0;
  for (size_t i = 0; i < entries; ++i) same += ours[i] == theirs[i] ? 1 : 0;
  EP_CHECK_EQ(same, 3u); // error_text, device_count, stream_handle

  uint64_t address = 0;
  void* stream = nullptr;
  EP_CHECK_EQ(table->memory_allocate(0, many_bytes, &address), 0);
  EP_CHECK_EQ(table->stream_create(0, 0, &stream), 0);
  EP_CHECK(address != 0 && stream != nullptr);
  // Some time of three, on a machine that is busy.
  bool silent = false;
  for (int i = 0; i < 3 && !silent; ++i) silent = said([&] { EP_CHECK_EQ(table->stream_finish(stream), 0); }).empty();
  EP_CHECK(silent);
  const std::string slow = said([&] {
    for (uint8_t i = 0; i < 4; ++i) EP_CHECK_EQ(table->fill(stream, address, i, many_bytes), 0);
    EP_CHECK_EQ(table->stream_finish(stream), 0);
  });
  EP_CHECK(holds(slow, "stands in stream_finish"));
  EP_CHECK(holds(slow, "was in stream_finish for "));
  EP_CHECK_EQ(table->stream_destroy(stream), 0);
  EP_CHECK_EQ(table->memory_free(0, address), 0);
  return ep::check::finish();
}
