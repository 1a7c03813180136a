#include "attach.hpp"

#include <cerrno>

#include <dlfcn.h>

namespace ep::dl {

result<nothing> verbs_shim_attach(const std::string& path, mlx5_driver* driver) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return failure{EP_STATUS_SYSTEM, ELIBACC, "cannot load " + path + ": " + (reason == nullptr ? "no reason given" : reason)};
  }
  auto* attach = reinterpret_cast<void (*)(mlx5_driver*)>(dlsym(handle, "ep_verbs_shim_attach"));
  if (attach == nullptr) return failure{EP_STATUS_SYSTEM, ELIBBAD, path + " is not the shim: it has no ep_verbs_shim_attach"};
  attach(driver);
  return nothing{};
}

} // namespace ep::dl
