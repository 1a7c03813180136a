// Casts and sums of one row for the `fast` executor, by the widest instructions of this CPU; the bits are those of ep/device/moe_cast.h and moe_sum.h, whatever
// the instructions.
#pragma once

#include <cstdint>

#include "ep/device/moe_sum.h"

namespace ep::moe {

enum class isa : uint32_t { portable, avx2, avx512 };

bool isa_usable(isa which);

/// As ep_moe_cast_row and ep_moe_sum_row, by an instruction set that is usable here.
void cast_row_with(isa which, uint32_t dtype, const void* src, uint64_t hidden, uint32_t payload, void* dst);
void sum_row_with(isa which, const ep_moe_sum& sum, const ep_moe_term* terms, uint32_t count);

}  // namespace ep::moe
