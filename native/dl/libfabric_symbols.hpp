// libfabric's functions, opened by name: the addon loads where it is missing.
#pragma once

#include <memory>
#include <string>

#include "libfabric_abi.hpp"
#include "library.hpp"
#include "status.hpp"

namespace ep::dl {

struct libfabric_symbols {
  uint32_t (*version)();
  int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags, const fabric::info* hints, fabric::info** found);
  void (*freeinfo)(fabric::info*);
  fabric::info* (*dupinfo)(const fabric::info*);
  int (*fabric)(fabric::fabric_attr*, fabric::fid_fabric** made, void* context);
  const char* (*strerror)(int);
  std::shared_ptr<library> from;
};
using libfabric_ref = std::shared_ptr<const libfabric_symbols>;

// ELIBACC: it is not there. ELIBBAD: it lacks a function, or is older than `since`; `why_since` ends that sentence.
result<libfabric_ref> open_libfabric(const std::string& name, uint32_t since, const std::string& why_since);

// "2.5"
std::string libfabric_version(uint32_t version);

// libfabric's errors are errno's, negative, but for its own above 255.
failure libfabric_refused(const libfabric_symbols& lib, const char* call, int code, const std::string& about);

// What fi_getinfo gave.
struct libfabric_infos {
  libfabric_ref lib;
  fabric::info* list = nullptr;
  libfabric_infos(libfabric_ref from, fabric::info* found) : lib(std::move(from)), list(found) {}
  libfabric_infos(const libfabric_infos&) = delete;
  libfabric_infos& operator=(const libfabric_infos&) = delete;
  ~libfabric_infos() {
    if (list != nullptr) lib->freeinfo(list);
  }
};

// Whatever is behind a handle of libfabric, with the function that ends it.
inline int libfabric_close(void* handle) {
  auto* base = static_cast<fabric::fid*>(handle);
  return base->ops->close(base);
}

} // namespace ep::dl
