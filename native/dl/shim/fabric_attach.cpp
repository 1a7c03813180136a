#include "fabric_attach.hpp"

#include <cerrno>

#include <dlfcn.h>

namespace ep::dl {

result<nothing> fabric_shim_attach(const std::string& path, efa_driver* driver, const fabric_shim_manner& manner) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return failure{EP_STATUS_SYSTEM, ELIBACC, "cannot load " + path + ": " + (reason == nullptr ? "no reason given" : reason)};
  }
  auto* attach = reinterpret_cast<void (*)(efa_driver*, const fabric_shim_manner*)>(dlsym(handle, "ep_fabric_shim_attach"));
  if (attach == nullptr) return failure{EP_STATUS_SYSTEM, ELIBBAD, path + " is not the shim: it has no ep_fabric_shim_attach"};
  attach(driver, &manner);
  return nothing{};
}

} // namespace ep::dl
