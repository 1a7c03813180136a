#include "verbs_symbols.hpp"

#include <cerrno>

namespace ep::dl {
namespace {

template <class Function> void load(const library& from, const symbol_name& symbol, Function*& to, std::string& missing) {
  to = reinterpret_cast<Function*>(from.find(symbol.name, symbol.version));
  if (to == nullptr && symbol.required) missing += (missing.empty() ? "" : ", ") + std::string(symbol.name) + "@" + symbol.version;
}

failure lacks(const library& from, const std::string& missing) {
  return {EP_STATUS_SYSTEM, ELIBBAD, from.name() + " lacks " + missing + ": rdma-core 32 or newer has them"};
}

} // namespace

#define EP_REQUIRED(result, name, version, arguments) {#name, version, true},
#define EP_OPTIONAL(result, name, version, arguments) {#name, version, false},
std::vector<symbol_name> ibverbs_symbol_names() { return {EP_IBVERBS_SYMBOLS(EP_REQUIRED) EP_IBVERBS_OPTIONAL_SYMBOLS(EP_OPTIONAL)}; }
std::vector<symbol_name> mlx5_symbol_names() { return {EP_MLX5_SYMBOLS(EP_REQUIRED) EP_MLX5_OPTIONAL_SYMBOLS(EP_OPTIONAL)}; }
std::vector<symbol_name> rc_symbol_names() { return {EP_RC_SYMBOLS(EP_REQUIRED)}; }
#undef EP_REQUIRED
#undef EP_OPTIONAL

#define EP_LOAD_REQUIRED(result, name, version, arguments) load(from, {#name, version, true}, symbols->name, missing);
#define EP_LOAD_OPTIONAL(result, name, version, arguments) load(from, {#name, version, false}, symbols->name, missing);

result<std::shared_ptr<const verbs_symbols>> verbs_symbols_load(const std::string& ibverbs, const std::string& mlx5) {
  auto general = library::open(ibverbs);
  if (!general.ok()) return general.why();
  auto special = library::open(mlx5);
  if (!special.ok()) return special.why();
  auto symbols = std::make_shared<verbs_symbols>();
  std::string missing;
  {
    const library& from = *general.value();
    EP_IBVERBS_SYMBOLS(EP_LOAD_REQUIRED)
    EP_IBVERBS_OPTIONAL_SYMBOLS(EP_LOAD_OPTIONAL)
    if (!missing.empty()) return lacks(from, missing);
  }
  {
    const library& from = *special.value();
    EP_MLX5_SYMBOLS(EP_LOAD_REQUIRED)
    EP_MLX5_OPTIONAL_SYMBOLS(EP_LOAD_OPTIONAL)
    if (!missing.empty()) return lacks(from, missing);
  }
  return std::shared_ptr<const verbs_symbols>(symbols);
}

result<std::shared_ptr<const rc_symbols>> rc_symbols_load(const std::string& ibverbs) {
  auto opened = library::open(ibverbs);
  if (!opened.ok()) return opened.why();
  auto symbols = std::make_shared<rc_symbols>();
  std::string missing;
  const library& from = *opened.value();
  EP_IBVERBS_SYMBOLS(EP_LOAD_REQUIRED)
  EP_IBVERBS_OPTIONAL_SYMBOLS(EP_LOAD_OPTIONAL)
  EP_RC_SYMBOLS(EP_LOAD_REQUIRED)
  if (!missing.empty()) return lacks(from, missing);
  return std::shared_ptr<const rc_symbols>(symbols);
}

#undef EP_LOAD_REQUIRED
#undef EP_LOAD_OPTIONAL

} // namespace ep::dl
