#include "nccl_symbols.hpp"

#include <cerrno>
#include <cstdlib>

namespace ep::dl {

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." + std::to_string(version % 100);
}

std::string nccl_error_text(const nccl_symbols& nccl, nccl_result error, nccl_comm comm) {
  const char* text = nccl.ncclGetErrorString(error);
  const std::string name = text == nullptr ? "NCCL error " + std::to_string(error) : text;
  const char* last = nccl.ncclGetLastError(comm);
  return last == nullptr || *last == '\0' ? name : name + ": " + last;
}

result<std::shared_ptr<const nccl_symbols>> nccl_symbols_load(const std::string& name) {
  auto opened = library::open(name);
  if (!opened.ok()) return opened.why();
  const library& file = *opened.value();
  auto symbols = std::make_shared<nccl_symbols>();
  symbols->path = name;
  symbols->ncclGetVersion = reinterpret_cast<nccl_result (*)(int*)>(file.find("ncclGetVersion"));
  if (symbols->ncclGetVersion == nullptr || symbols->ncclGetVersion(&symbols->version) != nccl_success) {
    return failure{EP_STATUS_SYSTEM, ELIBBAD, name + " is no NCCL: it does not say which version it is"};
  }
  // Versions before 2.9 are numbered in another way, and come out far smaller.
  if (symbols->version < nccl_oldest || symbols->version > nccl_newest) {
    return failure{EP_STATUS_SYSTEM, ELIBBAD,
                   name + " is NCCL with version code " + std::to_string(symbols->version) + ": 2.14 (" + std::to_string(nccl_oldest) + ") and later ones of 2.x are known here"};
  }
  std::string missing;
#define EP_LOAD(symbol, arguments)                                                               \
  symbols->symbol = reinterpret_cast<nccl_result(*) arguments>(file.find(#symbol));              \
  if (symbols->symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(#symbol);
  EP_NCCL_SYMBOLS(EP_LOAD)
#undef EP_LOAD
  symbols->ncclGetErrorString = reinterpret_cast<const char* (*)(nccl_result)>(file.find("ncclGetErrorString"));
  symbols->ncclGetLastError = reinterpret_cast<const char* (*)(nccl_comm)>(file.find("ncclGetLastError"));
  if (symbols->ncclGetErrorString == nullptr || symbols->ncclGetLastError == nullptr) missing += (missing.empty() ? "" : ", ") + std::string("its error texts");
  if (!missing.empty()) return failure{EP_STATUS_SYSTEM, ELIBBAD, name + ", version " + nccl_version_text(symbols->version) + ", lacks " + missing};
  // HAZARD: without that a call of an algorithm that was not used before connects ranks, and its caller waits for them. A user's own setting stays.
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
  return std::shared_ptr<const nccl_symbols>(symbols);
}

} // namespace ep::dl
