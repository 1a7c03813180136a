#include "library.hpp"

#include <cerrno>

#include <dlfcn.h>

namespace ep::dl {

result<std::shared_ptr<library>> library::open(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return failure{EP_STATUS_SYSTEM, ELIBACC, "cannot load " + name + ": " + (reason == nullptr ? "no reason given" : reason)};
  }
  return std::shared_ptr<library>(new library(name, handle));
}

void* library::find(const char* symbol, const char* version) const {
  return version == nullptr ? dlsym(handle_, symbol) : dlvsym(handle_, symbol, version);
}

} // namespace ep::dl
