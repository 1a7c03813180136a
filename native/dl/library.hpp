// A shared library that is opened by name at run time, never linked: the addon loads where it is missing, and says what is missing.
#pragma once

#include <memory>
#include <string>

#include "status.hpp"

namespace ep::dl {

class library {
 public:
  // `name` as dlopen takes it: searched for, or a path. ELIBACC: it is not there, or cannot be loaded; the message has the loader's reason.
  // It stays loaded until the process ends: libraries of drivers leave handlers (fork, threads) behind that must not dangle.
  static result<std::shared_ptr<library>> open(const std::string& name);

  const std::string& name() const { return name_; }
  // nullptr: not there in this version. Without a version: whichever the library holds.
  void* find(const char* symbol, const char* version = nullptr) const;

 private:
  library(std::string name, void* handle) : name_(std::move(name)), handle_(handle) {}
  std::string name_;
  void* handle_;
};

} // namespace ep::dl
