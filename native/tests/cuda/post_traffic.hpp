// What blocks of a GPU put over the software EFA.
#pragma once

#include <cstdint>

#include "post_kernels.hpp"

namespace ep::test {

// `stream` sends to what `other` receives; every byte and every count is checked on both sides.
void traffic(traffic_way way, uint64_t seed, void* stream, void* other);
// The kernel of gin_putvalue.h, by two ranks of one GPU.
void values(uint64_t seed, void* stream);

} // namespace ep::test
