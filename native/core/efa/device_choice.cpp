#include "device_choice.hpp"

#include <cerrno>

namespace ep::efa {

result<std::unique_ptr<dl::efa_device>> device_open(dl::efa_driver& driver, const std::string& name) {
  auto listed = driver.list_devices();
  if (!listed.ok()) return listed.why();
  std::string passed_over;
  const auto pass = [&](const std::string& device, const std::string& why) { passed_over += (passed_over.empty() ? "" : "; ") + device + ": " + why; };
  failure last{EP_STATUS_SYSTEM, ENODEV, ""};
  for (const dl::efa_device_info& one : listed.value()) {
    if (!name.empty() && one.name != name) {
      pass(one.name, "is not the one that was asked for");
    } else if (!one.supported) {
      pass(one.name, one.unsupported);
    } else {
      auto opened = driver.open(one.name);
      if (opened.ok()) return opened;
      last = opened.why();
      pass(one.name, last.message);
    }
  }
  last.message = (name.empty() ? std::string("no EFA device can be used") : "the EFA device " + name + " cannot be used") +
                 (passed_over.empty() ? ": there is none" : ": " + passed_over);
  return last;
}

} // namespace ep::efa
