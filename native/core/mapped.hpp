// Whether memory of the caller is there at all, before anything reads addresses that JS gave.
#pragma once

#include <cstdint>

#include "status.hpp"

namespace ep {

// EFAULT: not all of it is mapped, or a processor cannot read it. It says nothing of later: the caller keeps the memory.
result<nothing> check_mapped(uint64_t address, uint64_t byte_length);

} // namespace ep
