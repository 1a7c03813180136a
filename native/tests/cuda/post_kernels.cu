#define EP_SELDOM_APART
#include "post_kernels.hpp"

#include "ep/device/cuda_context.h"
#include "ep/device/gin_putvalue.h"
#include "post_script.h"

namespace {

using namespace ep::test;

constexpr uint64_t generous_cycles = 20'000'000'000; // some ten seconds
constexpr uint32_t all_lanes = 32;

template <post_way Way, bool Asks> __global__ void post_kernel(ep::cuda_environment environment, const __grid_constant__ post_arguments given) {
  const ep::cuda_context base{environment};
  if (given.lanes == 1 && base.lane() != 0) return;
  bool ok;
  if constexpr (Asks) {
    ep::asking_context<ep::cuda_context> ctx(base, *given.log);
    ok = ep::post_run<Way, 0>(ctx, given);
    if (base.lane() == 0) ctx.look();
  } else {
    ep::cuda_context ctx{environment};
    ok = ep::post_run<Way, 0>(ctx, given);
  }
  if (ok && base.lane() == 0 && base.block() == 0) given.log->ok = 1;
}

using kernel = void (*)(ep::cuda_environment, post_arguments);
template <post_way Way, bool Asks> constexpr kernel one = post_kernel<Way, Asks>;

// Null: nobody runs it so.
kernel kernel_of(post_way way, bool asks) {
  switch (way) {
    case post_way::in_turn_device: return asks ? one<post_way::in_turn_device, true> : one<post_way::in_turn_device, false>;
    case post_way::in_turn_block: return asks ? one<post_way::in_turn_block, true> : nullptr;
    case post_way::in_turn_thread: return asks ? one<post_way::in_turn_thread, true> : nullptr;
    case post_way::ringer_device: return asks ? one<post_way::ringer_device, true> : one<post_way::ringer_device, false>;
    case post_way::ringer_block: return asks ? one<post_way::ringer_block, true> : nullptr;
    case post_way::ringer_thread: return asks ? one<post_way::ringer_thread, true> : nullptr;
    case post_way::lock: return asks ? one<post_way::lock, true> : one<post_way::lock, false>;
    case post_way::put_in_turn: return asks ? one<post_way::put_in_turn, true> : nullptr;
    case post_way::put_ringer: return asks ? one<post_way::put_ringer, true> : one<post_way::put_ringer, false>;
    case post_way::put_lock: return asks ? one<post_way::put_lock, true> : nullptr;
    case post_way::gin_device: return asks ? one<post_way::gin_device, true> : one<post_way::gin_device, false>;
    case post_way::gin_block: return asks ? one<post_way::gin_block, true> : nullptr;
    case post_way::gin_thread: return asks ? one<post_way::gin_thread, true> : nullptr;
    case post_way::lanes_device: return asks ? one<post_way::lanes_device, true> : one<post_way::lanes_device, false>;
    case post_way::lanes_block: return asks ? one<post_way::lanes_block, true> : nullptr;
    case post_way::efa_endpoint: return asks ? one<post_way::efa_endpoint, true> : one<post_way::efa_endpoint, false>;
    case post_way::pr: return asks ? one<post_way::pr, true> : one<post_way::pr, false>;
    default: return asks ? one<post_way::pr_lanes, true> : one<post_way::pr_lanes, false>;
  }
}

ep::cuda_environment environment() { return {generous_cycles, nullptr, 0, nullptr}; }

template <class Ctx> __device__ bool send_by_endpoint(Ctx& ctx, const traffic_arguments& of) {
  const ep::efa_endpoint endpoint{of.memory, ctx.block()};
  const ep::warp_coop<Ctx> coop{ctx};
  const uint64_t from = of.part->address + of.half;
  bool ok = true;
  for (uint32_t round = 0; ok && round < of.rounds; ++round) {
    const uint64_t message = uint64_t{ctx.block()} * of.rounds + round;
    const uint64_t row = of.bytes / of.rows;
    ok = endpoint.put_rows(ctx, coop, 1, message * of.bytes, reinterpret_cast<const void*>(from + message * of.rows * of.stride), of.stride, row, of.rows, false, ctx.block() % of.signals, 1, of.status);
  }
  return endpoint.quiet(ctx, coop, 1, of.status) && ok;
}

// One call of either facade; all lanes of the warp come along where `Together`.
template <bool Together, class Gin, class Options, class Part, class Ctx> __device__ bool send_by(Ctx& ctx, const Gin& gin, const Part& part, const traffic_arguments& of) {
  const bool puts = ctx.lane() < of.lanes;
  const uint64_t sender = uint64_t{ctx.block()} * of.lanes + ctx.lane();
  const ep::gin_team team{nullptr, 2};
  const ep::gin_signal_inc signal{ctx.block() % of.signals};
  bool ok = true;
  for (uint32_t round = 0; ok && round < of.rounds; ++round) {
    const uint64_t at = puts ? (sender * of.rounds + round) * of.bytes : 0;
    Options options;
    options.aggregate = (round + 1) % of.run != 0;
    const ep::gin_counter_inc counter{of.counters != 0 ? (ctx.block() + round) % of.counters : 0};
    if constexpr (Together) {
      ok = of.counters != 0 ? gin.put_lanes(ctx, puts, team, 1, part, at, part, of.half + at, of.bytes, signal, counter, options, of.status)
                            : gin.put_lanes(ctx, puts, team, 1, part, at, part, of.half + at, of.bytes, signal, ep::gin_no_action{}, options, of.status);
      ok = ctx.ballot(!ok) == 0;
    } else if (puts) {
      const ep::thread_coop<Ctx> coop{ctx};
      ok = of.counters != 0 ? gin.put(ctx, coop, team, 1, part, at, part, of.half + at, of.bytes, signal, counter, options, of.status)
                            : gin.put(ctx, coop, team, 1, part, at, part, of.half + at, of.bytes, signal, ep::gin_no_action{}, options, of.status);
    }
  }
  return ok;
}

template <traffic_way Way> __global__ void send_kernel(ep::cuda_environment environment, const __grid_constant__ traffic_arguments of) {
  ep::cuda_context ctx{environment};
  if constexpr (Way == traffic_way::endpoint) {
    send_by_endpoint(ctx, of);
  } else if constexpr (Way == traffic_way::gin || Way == traffic_way::gin_lanes) {
    const ep::efa_gin<> gin{*of.device};
    send_by<Way == traffic_way::gin_lanes, ep::efa_gin<>, ep::gin_options>(ctx, gin, *of.part, of);
    gin.flush(ctx, ep::block_coop<ep::cuda_context>{ctx}, of.status);
  } else {
    const ep::efa_pr_gin gin{*of.pr};
    send_by<Way == traffic_way::pr_lanes, ep::efa_pr_gin, ep::efa_pr_options>(ctx, gin, *of.pr_part, of);
    gin.flush(ctx, ep::block_coop<ep::cuda_context>{ctx}, of.status);
  }
}

// By one warp of rank 1.
template <class Gin> __device__ void receive_by(ep::cuda_context& ctx, const Gin& gin, traffic_way way, const uint8_t* data, const traffic_arguments& of) {
  const ep::warp_coop<ep::cuda_context> coop{ctx};
  const uint64_t each = uint64_t{way == traffic_way::endpoint ? 1 : of.lanes} * of.rounds; // messages of a block
  uint64_t wrong = 0;
  for (uint32_t signal = 0; signal < of.signals; ++signal) {
    const uint64_t wanted = (of.blocks - signal + of.signals - 1) / of.signals * each;
    if (!gin.wait_signal(ctx, coop, signal, wanted, of.status)) return;
    for (uint32_t block = signal; block < of.blocks; block += of.signals) {
      const uint64_t begin = block * each * of.bytes;
      for (uint64_t i = ctx.lane(); i < each * of.bytes; i += ctx.lanes()) {
        const uint8_t found = *reinterpret_cast<const volatile uint8_t*>(data + begin + i);
        wrong += found != ep::traffic_byte_of((begin + i) / of.bytes, (begin + i) % of.bytes) ? 1 : 0;
      }
    }
  }
  of.wrong[ctx.lane()] = wrong;
  if (ctx.lane() == 0) of.wrong[all_lanes] = 1;
}

__global__ void receive_kernel(ep::cuda_environment environment, traffic_way way, const __grid_constant__ traffic_arguments of) {
  ep::cuda_context ctx{environment};
  const auto* data = reinterpret_cast<const uint8_t*>(of.part->address);
  if (way == traffic_way::pr || way == traffic_way::pr_lanes) {
    receive_by(ctx, ep::efa_pr_gin{*of.pr}, way, data, of);
  } else {
    receive_by(ctx, ep::efa_gin<>{*of.device}, way, data, of);
  }
}

__global__ void putvalue_kernel(ep::cuda_environment environment, const __grid_constant__ putvalue_arguments of) {
  ep::cuda_context ctx{environment};
  const auto rank = static_cast<int32_t>(ctx.block());
  ep::gin_putvalue(ctx, ep::block_coop<ep::cuda_context>{ctx}, ep::efa_gin<>{*of.devices[rank]}, *of.parts[rank], rank, of.rounds, of.behind, of.status[rank]);
}

} // namespace

namespace ep::test {

bool gpu_is_there() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices != 0;
}

bool gpu_pin(void* memory, size_t bytes) {
  void* there = nullptr;
  return cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess && cudaHostGetDevicePointer(&there, memory, 0) == cudaSuccess && there == memory;
}
void gpu_unpin(void* memory) { cudaHostUnregister(memory); }

bool gpu_over(void* stream, int* error) {
  const cudaError_t found = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (found == cudaErrorNotReady) return false;
  *error = found;
  return true;
}

int gpu_post(void* stream, post_way way, bool asks, const post_arguments& given) {
  const kernel run = kernel_of(way, asks);
  if (run == nullptr) return cudaErrorInvalidDeviceFunction;
  run<<<1, all_lanes, 0, static_cast<cudaStream_t>(stream)>>>(environment(), given);
  return cudaGetLastError();
}

int gpu_post_together(void* stream, post_way way, uint32_t blocks, const post_arguments& given) {
  kernel run = kernel_of(way, false);
  if (run == nullptr) return cudaErrorInvalidDeviceFunction;
  ep::cuda_environment waits = environment();
  post_arguments copy = given;
  void* arguments[] = {&waits, &copy};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(run), dim3(blocks), dim3(all_lanes), arguments, 0, static_cast<cudaStream_t>(stream));
}

int gpu_send(void* stream, traffic_way way, const traffic_arguments& given) {
  void (*run)(ep::cuda_environment, traffic_arguments) = nullptr;
  switch (way) {
    case traffic_way::gin: run = send_kernel<traffic_way::gin>; break;
    case traffic_way::gin_lanes: run = send_kernel<traffic_way::gin_lanes>; break;
    case traffic_way::endpoint: run = send_kernel<traffic_way::endpoint>; break;
    case traffic_way::pr: run = send_kernel<traffic_way::pr>; break;
    default: run = send_kernel<traffic_way::pr_lanes>;
  }
  ep::cuda_environment waits = environment();
  traffic_arguments copy = given;
  void* arguments[] = {&waits, &copy};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(run), dim3(given.blocks), dim3(all_lanes), arguments, 0, static_cast<cudaStream_t>(stream));
}

int gpu_receive(void* stream, traffic_way way, const traffic_arguments& given) {
  receive_kernel<<<1, all_lanes, 0, static_cast<cudaStream_t>(stream)>>>(environment(), way, given);
  return cudaGetLastError();
}

int gpu_putvalue(void* stream, const putvalue_arguments& given) {
  ep::cuda_environment waits = environment();
  putvalue_arguments copy = given;
  void* arguments[] = {&waits, &copy};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(putvalue_kernel), dim3(2), dim3(all_lanes), arguments, 0, static_cast<cudaStream_t>(stream));
}

} // namespace ep::test
