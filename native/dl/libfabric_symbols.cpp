#include "libfabric_symbols.hpp"

#include <cerrno>

namespace ep::dl {
namespace {

template <class Function> void load(const library& from, const char* name, Function*& to, std::string& missing) {
  to = reinterpret_cast<Function*>(from.find(name));
  if (to == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

} // namespace

std::string libfabric_version(uint32_t version) { return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff); }

failure libfabric_refused(const libfabric_symbols& lib, const char* call, int code, const std::string& about) {
  const int error = -code;
  return {EP_STATUS_SYSTEM, error < 256 ? error : EIO, std::string(call) + ": " + about + ": " + lib.strerror(error)};
}

result<libfabric_ref> open_libfabric(const std::string& name, uint32_t since, const std::string& why_since) {
  auto opened = library::open(name);
  if (!opened.ok()) return opened.why();
  auto made = std::make_shared<libfabric_symbols>();
  made->from = opened.value();
  std::string missing;
  load(*made->from, "fi_version", made->version, missing);
  load(*made->from, "fi_getinfo", made->getinfo, missing);
  load(*made->from, "fi_freeinfo", made->freeinfo, missing);
  load(*made->from, "fi_dupinfo", made->dupinfo, missing);
  load(*made->from, "fi_fabric", made->fabric, missing);
  load(*made->from, "fi_strerror", made->strerror, missing);
  if (!missing.empty()) return failure{EP_STATUS_SYSTEM, ELIBBAD, name + " lacks " + missing};
  if (const uint32_t version = made->version(); version < since) {
    return failure{EP_STATUS_SYSTEM, ELIBBAD, name + " is libfabric " + libfabric_version(version) + ": " + why_since};
  }
  return libfabric_ref(std::move(made));
}

} // namespace ep::dl
