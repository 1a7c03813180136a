#include "cuda_symbols.hpp"

#include <cerrno>

namespace ep::dl {

std::string cuda_error_text(const cuda_symbols& cuda, cuda_result error) {
  const char* name = nullptr;
  if (cuda.cuGetErrorName(error, &name) == 0 && name != nullptr) return name;
  return "CUDA error " + std::to_string(error);
}

result<std::shared_ptr<const cuda_symbols>> cuda_symbols_load(const std::string& name) {
  auto opened = library::open(name);
  if (!opened.ok()) return opened.why();
  auto symbols = std::make_shared<cuda_symbols>();
  std::string missing;
#define EP_LOAD(symbol, arguments)                                                                 \
  symbols->symbol = reinterpret_cast<cuda_result(*) arguments>(opened.value()->find(#symbol));     \
  if (symbols->symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(#symbol);
  EP_CUDA_SYMBOLS(EP_LOAD)
#undef EP_LOAD
  if (!missing.empty()) return failure{EP_STATUS_SYSTEM, ELIBBAD, name + " lacks " + missing + ": a driver for CUDA 11.7 or newer has them"};
  if (const cuda_result error = symbols->cuInit(0); error != 0) {
    return failure{EP_STATUS_SYSTEM, ENODEV, "cuInit failed: " + cuda_error_text(*symbols, error) + "; is there a GPU, and does this process see it?"};
  }
  return std::shared_ptr<const cuda_symbols>(symbols);
}

} // namespace ep::dl
