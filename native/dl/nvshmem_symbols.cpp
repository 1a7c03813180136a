#include "nvshmem_symbols.hpp"

#include <cerrno>
#include <cstdlib>

namespace ep::dl {

std::string nvshmem_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." + std::to_string(version % 100);
}

result<std::shared_ptr<const nvshmem_symbols>> nvshmem_symbols_load(const std::string& name) {
  auto opened = library::open(name);
  if (!opened.ok()) return opened.why();
  const library& file = *opened.value();
  auto symbols = std::make_shared<nvshmem_symbols>();
  symbols->path = name;
  symbols->nvshmemx_vendor_get_version_info = reinterpret_cast<void (*)(int*, int*, int*)>(file.find("nvshmemx_vendor_get_version_info"));
  if (symbols->nvshmemx_vendor_get_version_info == nullptr) {
    return failure{EP_STATUS_SYSTEM, ELIBBAD, name + " is no host library of NVSHMEM 3: it does not say which version it is"};
  }
  int major = 0;
  int minor = 0;
  int patch = 0;
  symbols->nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  symbols->version = major * 10000 + minor * 100 + patch;
  if (major != nvshmem_major) {
    return failure{EP_STATUS_SYSTEM, ELIBBAD, name + " is NVSHMEM " + nvshmem_version_text(symbols->version) + ": versions " + std::to_string(nvshmem_major) + ".x are known here"};
  }
  std::string missing;
#define EP_LOAD(symbol, returned, arguments)                                              \
  symbols->symbol = reinterpret_cast<returned(*) arguments>(file.find(#symbol));          \
  if (symbols->symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(#symbol);
  EP_NVSHMEM_SYMBOLS(EP_LOAD)
#undef EP_LOAD
  if (!missing.empty()) return failure{EP_STATUS_SYSTEM, ELIBBAD, name + ", version " + nvshmem_version_text(symbols->version) + ", lacks " + missing};
  return std::shared_ptr<const nvshmem_symbols>(symbols);
}

} // namespace ep::dl
