// The engine behind what JS calls FabricNic.
#pragma once

#include "setup.hpp"

#include <memory>

namespace ep::fabric {
class engine;
}

namespace ep::binding {

// Throws into JS where the value is something else, or was closed.
std::shared_ptr<fabric::engine> fabric_engine_of(Napi::Value value);

} // namespace ep::binding
