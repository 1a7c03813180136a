// One call of a buffer for experts over the memory of a GPU: what is read of it, and what lies on its stream besides the kernel.
#pragma once

#include <algorithm>
#include <string>

#include "gpu_moe_wraps.hpp"
#include "gpu_pieces.hpp"
#include "moe_call.hpp"

namespace ep::binding {

// A call, with what the device holds on to until it has run.
struct gpu_half : moe_job {
  std::shared_ptr<gpu::symmetric_memory> memory;
  gpu::slot_ref slot;
  uint32_t halves = 0;
  std::string failed; // why nobody will hear how the kernel, which was launched, has ended
  struct {
    uint64_t counted = 0; // addresses, where kernels add and where the host looks
    uint64_t seen = 0;
    uint64_t bytes = 0;
  } totals;
  // Where the device has the status of each rank in the call.
  uint64_t ranks_there() const { return routing->mirror->address() + (routing->ranks - address_of(routing->data)); }
  uint64_t ranks_bytes() const { return of->world_size * sizeof(uint64_t); }
  bool masks = false; // somebody is left out from the start
};

constexpr uint32_t tables_of_slot = 2; // HAZARD: a graph reads the first one in each replay, so what one call wants for itself is the second one's

// The slot's own: no kernel of an earlier call of it runs any more.
void stage_candidates(const moe_candidates& wanted, uint8_t* staged);
// Of a call that begins; `description` says whether it goes by candidates that later ones do not have. Throws.
void place_candidates(gpu_half& job, gpu_moe_buffer_wrap& wrap, gpu::stream& stream, uint32_t slot, const Napi::Object& description);
// What all calls have. Throws.
void begin_call(gpu_half& job, ep_moe_call& call, const gpu_moe_buffer_wrap& wrap, const gpu_stream_wrap& on, const Napi::Object& description);
// A call with all that its kernel is given, but for candidates. Throws.
void read_gpu_dispatch(gpu_half& job, ep_moe_dispatch_args& args, const gpu_moe_buffer_wrap& wrap, const gpu_stream_wrap& on, const Napi::Object& description);
void read_gpu_combine(gpu_half& job, ep_moe_combine_args& args, const gpu_moe_buffer_wrap& wrap, const gpu_stream_wrap& on, const Napi::Object& description);

// Before the launch: what the host has filled in, from `begin` of the routing on, is a piece to copy. Of a captured call nothing is read here when the graph is replayed, and what one replay has found, the next one goes
// by; who is left out from the start is put on the stream at once. As the functions of the table.
int fill_in(gpu_pieces& given, const gpu_half& job, gpu::stream& stream, uint64_t begin);
// The weights of a combine that is not captured, which lie where the host reaches them.
void mirror_weights(gpu_pieces& given, const gpu_half& job, ep_moe_combine_args& args);
// Behind the launch: what the host looks at once the kernel has ended, to `seen` of the routing; in a graph, once all of its calls have.
void hand_back(gpu_pieces& left, const gpu_half& job, const gpu_stream_wrap& on, uint64_t seen);
// Behind that of another: a graph goes by what lies there, so who is left out of one call only would be out of its calls.
int take_back_in(const gpu_half& job, gpu::stream& stream);
// The operation that ends when the stream has come here, 0 in a capture. HAZARD: other ranks take this call as made once any of its kernels runs; a launch that fails (`error`, then this throws) has run none.
double follow_half(Napi::Env env, gpu_stream_wrap& on, gpu_half& job, const gpu_moe_contents& own, int error, const char* what);

} // namespace ep::binding
