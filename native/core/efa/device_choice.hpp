// Which EFA device a rank uses.
#pragma once

#include <memory>
#include <string>

#include "dl/efa.hpp"

namespace ep::efa {

// The device of this name, or ("") the first that can. EP_STATUS_SYSTEM with ENODEV where there is none: the message lists those that were passed over, and why; otherwise as of
// the table.
result<std::unique_ptr<dl::efa_device>> device_open(dl::efa_driver& driver, const std::string& name);

} // namespace ep::efa
