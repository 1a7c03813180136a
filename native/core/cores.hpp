// Whether the ranks of a host have a core each: who spins where they have not keeps the core from the rank that it waits for.
#pragma once

#include <vector>

#include "ep/abi/rank.h"
#include "limits.hpp"

namespace ep {

// Of the calling thread, by affinity. Empty where that cannot be read.
ep_core_set cores_of_thread();

// Whether a rank on `own` may spin. `others`: ranks of this host whose cores are known; of the rest of `ranks_on_host`, as of those that have not said, it is taken that theirs are the
// same. Ranks that are bound to a core each, as MPI and Slurm do it, have room although either alone sees one core. `quota`: cores that all of them may use at a time; 0: all.
bool cores_suffice(const ep_core_set& own, const std::vector<ep_core_set>& others, int ranks_on_host, int quota = quota_cores());

} // namespace ep
