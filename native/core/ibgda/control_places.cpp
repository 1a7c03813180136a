#include "control_places.hpp"

#include <algorithm>
#include <cerrno>

#include "gpu_memory.hpp"

namespace ep::ibgda {

control_places host_places() {
  control_places places;
  places.order = {placement::host};
  places.sources.push_back(host_control_memory());
  return places;
}

result<control_places> gpu_places(const std::shared_ptr<const dl::cuda_symbols>& cuda, int ordinal, const std::vector<placement>& order, const std::string& reader) {
  control_places places;
  places.order = order;
  places.gpu = true;
  std::string reasons;
  const auto pass = [&](placement where, const std::string& why) {
    places.passed_over.push_back({where, why});
    reasons += (reasons.empty() ? "" : "; ") + std::string(placement_name(where)) + ": " + why;
  };
  for (const placement where : order) {
    if (where != placement::host && !reader.empty()) {
      pass(where, reader + " reads the rings on a processor, which reaches host memory only");
      continue;
    }
    auto source = where == placement::host ? pinned_control_memory(cuda, ordinal, !reader.empty()) : gpu_control_memory(cuda, ordinal, where);
    if (source.ok()) places.sources.push_back(std::move(source.value()));
    else pass(where, source.why().message);
  }
  if (places.sources.empty()) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "there is no place for the queues of kernels on GPU " + std::to_string(ordinal) + ": " + reasons};
  return places;
}

std::vector<fallback> all_fallbacks(const control_places& places, const std::vector<fallback>& later) {
  std::vector<fallback> all = places.passed_over;
  all.insert(all.end(), later.begin(), later.end());
  const auto asked = [&](const fallback& one) { return std::find(places.order.begin(), places.order.end(), one.wished); };
  std::stable_sort(all.begin(), all.end(), [&](const fallback& a, const fallback& b) { return asked(a) < asked(b); });
  return all;
}

} // namespace ep::ibgda
