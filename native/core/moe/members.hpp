// Ranks that come back into a buffer for experts.
#pragma once

#include <cstdint>

#include "ep/abi/moe.h"

namespace ep {

// Forgets what this rank knows of another: its words in every slot of this rank's part, its counts and row starts, and what is remembered of it between calls. `data` and
// `signals` are this rank's own.
//
// HAZARD: a rank that died may have been ahead: its words can name calls that are still to come. Nobody may write here meanwhile, nor may a call be under way.
void moe_forget(const ep_moe_buffer& buffer, uint8_t* data, uint64_t* signals, int32_t rank);

} // namespace ep
