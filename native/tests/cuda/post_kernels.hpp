// Launchers of the kernels that post, for the test that compares what they write with what the host writes. CUDA error numbers; none waits for its kernel.
#pragma once

#include "ep/abi/efa_gda.h"
#include "ep/abi/efa_pr.h"
#include "ep/abi/memory.h"
#include "post_rigs.hpp"

namespace ep::test {

bool gpu_is_there();
// Memory of the host's that the device comes to by the same address from here on, until gpu_unpin.
bool gpu_pin(void* memory, size_t bytes);
void gpu_unpin(void* memory);
// Whether all work of the stream is over; *error says how.
bool gpu_over(void* stream, int* error);

// One block of a warp. `asks`: by an asking_context (post_script.h); otherwise as the library's kernels do.
int gpu_post(void* stream, post_way way, bool asks, const post_arguments& given);
// The same by several blocks that share the queue pairs. Of mlx5's writers.
int gpu_post_together(void* stream, post_way way, uint32_t blocks, const post_arguments& given);

enum class traffic_way : uint32_t { gin, gin_lanes, endpoint, pr, pr_lanes };

// Senders of rank 0 put messages to rank 1, whose receiver looks at each sender's when its signal has come to all of them. Message m lies at m * bytes, in the upper half of the sender's part
// (of an endpoint: its rows `stride` apart), and in the lower one of the receiver's.
struct traffic_arguments {
  ep_efa_device* device;
  ep_efa_memory* part;
  ep_memory_handle memory; // of an endpoint
  ep_efa_pr_device* pr;
  const ep_efa_pr_mr* pr_part;
  uint64_t half;
  uint32_t blocks; // of a warp
  uint32_t lanes;  // of it that put
  uint32_t rounds;
  uint32_t signals;  // a block's messages come with signal block % signals
  uint32_t counters; // 0: none
  uint32_t run;      // puts, of which all but the last are aggregated
  uint64_t bytes;
  uint64_t rows; // of an endpoint's message
  uint64_t stride;
  ep_kernel_status* status;
  uint64_t* wrong; // bytes, by each lane of the receiver; word 32: it has looked
};
constexpr uint32_t traffic_senders(traffic_way way, const traffic_arguments& of) { return of.blocks * (way == traffic_way::endpoint ? 1 : of.lanes); }

int gpu_send(void* stream, traffic_way way, const traffic_arguments& given);
int gpu_receive(void* stream, traffic_way way, const traffic_arguments& given);

// gin_putvalue.h by both ranks of a world of two, a block each.
struct putvalue_arguments {
  ep_efa_device* devices[2];
  ep_efa_memory* parts[2];
  uint64_t rounds;
  uint64_t* behind;
  ep_kernel_status* status[2];
};
int gpu_putvalue(void* stream, const putvalue_arguments& given);

} // namespace ep::test
