// How fast experts get their tokens and send results back, between ranks that are streams of one GPU, against the device's own copy in the same run.
// experts_bench [tokens of a high-throughput call, 4096; 0: low latency alone] [repetitions, 15]
//
// Time is of CUDA events around the kernels of all ranks, which are launched behind a gate, so that no launch is in it; the median of the repetitions. Before and after them every
// received row and every sum is checked. Results are sent, or stay where experts have written them ("results in place"). Low latency is also timed with one launch for all ranks ("together") in place of one for each,
// and either in graphs: of one call of all ranks, and of 16 dispatches and 16 calls that follow each other, of which combine is the difference. Floor of a low-latency call: what must be read and written once, at 4.0 TB/s: dispatch, the selections, 16 bytes of header
// each; combine, the selections read and the tokens written. Beside it, what a launch of as many blocks and one word among all ranks take alone, launched alike. High throughput: the bytes of the selections, counted once, over a copy of as many bytes.
#include <algorithm>

#include "exchange.cuh"
#include "experts_world.cuh"

namespace {

using namespace ep::test;

uint32_t repetitions = 15;
constexpr double formula_rate = 4.0e6 / 2; // bytes of a copy each microsecond, where 4.0 TB are read or written each second

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

__global__ void gate_kernel(const volatile uint32_t* open) {
  while (*open == 0) __nanosleep(200);
}

// Microseconds from when all streams may begin until all have ended.
class stopwatch {
 public:
  stopwatch() {
    check(cudaHostAlloc(&open, sizeof *open, cudaHostAllocMapped), "cudaHostAlloc");
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaStreamCreateWithFlags(&before, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  template <class Launch> double time(const std::vector<cudaStream_t>& streams, const Launch& launch) {
    *static_cast<volatile uint32_t*>(open) = 0;
    gate_kernel<<<1, 1, 0, before>>>(open);
    check(cudaEventRecord(begin, before), "cudaEventRecord");
    for (cudaStream_t stream : streams) check(cudaStreamWaitEvent(stream, begin, 0), "cudaStreamWaitEvent");
    launch();
    for (cudaStream_t stream : streams) {
      check(cudaEventRecord(done, stream), "cudaEventRecord");
      check(cudaStreamWaitEvent(before, done, 0), "cudaStreamWaitEvent");
    }
    check(cudaEventRecord(end, before), "cudaEventRecord");
    *static_cast<volatile uint32_t*>(open) = 1;
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  uint32_t* open = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr, done = nullptr;
  cudaStream_t before = nullptr;
};

// Bytes each microsecond: of the fastest of four pairs of buffers, since where they lie changes a copy by a tenth.
double copy_rate(stopwatch& watch, cudaStream_t stream) {
  constexpr uint64_t bytes = uint64_t{1} << 31;
  constexpr uint64_t apart = 12 << 20;
  double best = 0;
  for (uint64_t pair = 0; pair < 4; ++pair) {
    auto* from = gpu_array<uint8_t>(bytes + pair * apart);
    auto* to = gpu_array<uint8_t>(bytes);
    std::vector<double> times;
    for (uint32_t i = 0; i < 8; ++i) {
      times.push_back(watch.time({stream}, [&] { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync"); }));
    }
    best = std::max(best, static_cast<double>(bytes) / median(times));
    cudaFree(from);
    cudaFree(to);
  }
  return best;
}

struct call_times {
  double dispatch = 0;
  double combine = 0;
};

// How the kernels of a call are launched.
struct launching {
  uint32_t blocks; // of a rank
  uint32_t lanes;
  bool together; // one kernel for all ranks, on the first one's stream
};

std::vector<cudaStream_t> streams_of(const experts_world& world, const launching& how) {
  std::vector<cudaStream_t> streams;
  for (const auto& rank : world.ranks) {
    if (streams.empty() || !how.together) streams.push_back(rank.stream);
  }
  return streams;
}

// On the stream of one of streams_of.
void dispatch(experts_world& world, const launching& how, size_t stream) {
  if (how.together) world.dispatch_together(how.blocks, how.lanes);
  else world.dispatch(stream, how.blocks, how.lanes);
}
void combine(experts_world& world, const launching& how, size_t stream) {
  if (how.together) world.combine_together(how.blocks, how.lanes);
  else world.combine(stream, how.blocks, how.lanes);
}

call_times call(stopwatch& watch, experts_world& world, const launching& how) {
  const std::vector<cudaStream_t> streams = streams_of(world, how);
  world.next_call();
  call_times took;
  took.dispatch = watch.time(streams, [&] {
    for (size_t stream = 0; stream < streams.size(); ++stream) dispatch(world, how, stream);
  });
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) world.fill(rank);
  world.finish();
  took.combine = watch.time(streams, [&] {
    for (size_t stream = 0; stream < streams.size(); ++stream) combine(world, how, stream);
  });
  world.finish();
  return took;
}

// What the first stream's graph does on all of them.
template <class Launch> cudaGraphExec_t captured(const std::vector<cudaStream_t>& streams, const Launch& launch) {
  const cudaStream_t first = streams[0];
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  check(cudaEventRecord(event, first), "cudaEventRecord");
  for (size_t stream = 1; stream < streams.size(); ++stream) check(cudaStreamWaitEvent(streams[stream], event, 0), "cudaStreamWaitEvent");
  for (size_t stream = 0; stream < streams.size(); ++stream) launch(stream);
  for (size_t stream = 1; stream < streams.size(); ++stream) {
    check(cudaEventRecord(event, streams[stream]), "cudaEventRecord");
    check(cudaStreamWaitEvent(first, event, 0), "cudaStreamWaitEvent");
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  check(cudaStreamEndCapture(first, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&made, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaEventDestroy(event), "cudaEventDestroy");
  return made;
}

// Dispatch, and combine, of all ranks as one graph each: a replay is one launch, so that ranks begin as near to each other as the device lets them.
class replays {
 public:
  replays(experts_world& all, const launching& how) : world(all), streams(streams_of(all, how)) {
    one_dispatch = captured(streams, [&](size_t stream) { dispatch(world, how, stream); });
    one_combine = captured(streams, [&](size_t stream) { combine(world, how, stream); });
    dispatches = captured(streams, [&](size_t stream) {
      for (uint32_t i = 0; i < in_row; ++i) dispatch(world, how, stream);
    });
    both = captured(streams, [&](size_t stream) {
      for (uint32_t i = 0; i < in_row; ++i) {
        dispatch(world, how, stream);
        combine(world, how, stream);
      }
    });
  }
  ~replays() {
    for (cudaGraphExec_t graph : {one_dispatch, one_combine, dispatches, both}) cudaGraphExecDestroy(graph);
  }
  replays(const replays&) = delete;
  call_times call(stopwatch& watch) {
    call_times took;
    const cudaStream_t stream = world.ranks[0].stream;
    took.dispatch = watch.time({stream}, [&] { check(cudaGraphLaunch(one_dispatch, stream), "cudaGraphLaunch"); });
    for (size_t rank = 0; rank < world.ranks.size(); ++rank) world.fill(rank);
    world.finish();
    took.combine = watch.time({stream}, [&] { check(cudaGraphLaunch(one_combine, stream), "cudaGraphLaunch"); });
    world.finish();
    return took;
  }
  // Of one call of many that follow each other, as in a step of a model. Experts' results are those of the call before: all calls route alike.
  call_times call_in_row(stopwatch& watch) {
    call_times took;
    const cudaStream_t stream = world.ranks[0].stream;
    took.dispatch = watch.time({stream}, [&] { check(cudaGraphLaunch(dispatches, stream), "cudaGraphLaunch"); }) / in_row;
    world.finish();
    took.combine = watch.time({stream}, [&] { check(cudaGraphLaunch(both, stream), "cudaGraphLaunch"); }) / in_row - took.dispatch;
    world.finish();
    return took;
  }
  static constexpr uint32_t in_row = 16;

 private:
  experts_world& world;
  std::vector<cudaStream_t> streams;
  cudaGraphExec_t one_dispatch = nullptr, one_combine = nullptr, dispatches = nullptr, both = nullptr;
};

void check_all(experts_world& world) {
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) {
    world.check_dispatch(rank);
    world.check_combine(rank);
  }
  world.finish();
  if (world.wrong_numbers() == 0) return;
  std::fprintf(stderr, "%llu wrong numbers\n", static_cast<unsigned long long>(world.wrong_numbers()));
  std::exit(1);
}

void checked_call(stopwatch& watch, experts_world& world, const launching& how) {
  world.poison();
  world.finish();
  call(watch, world, how);
  check_all(world);
}

// Microseconds of a launch and one word among all ranks: launched, as one graph, and of a graph of many that follow each other, each.
struct exchange_times {
  double launched = 0;
  double one_graph = 0;
  double in_row = 0;
};

exchange_times measure_exchanges(stopwatch& watch, const experts_world& world, const launching& how) {
  const std::vector<cudaStream_t> streams = streams_of(world, how);
  const auto ranks = static_cast<uint32_t>(world.ranks.size());
  const exchanges words(ranks);
  uint32_t calls = 0;
  const auto launch = [&](size_t stream) { words.launch(streams[stream], static_cast<uint32_t>(stream), how.together ? ranks : 1, how.blocks, how.lanes); };
  const auto launch_all = [&] {
    for (size_t stream = 0; stream < streams.size(); ++stream) launch(stream);
  };
  const cudaGraphExec_t one = captured(streams, launch);
  const cudaGraphExec_t many = captured(streams, [&](size_t stream) {
    for (uint32_t i = 0; i < replays::in_row; ++i) launch(stream);
  });
  const auto time = [&](const std::vector<cudaStream_t>& waiting, const auto& once, uint32_t each) {
    std::vector<double> times;
    for (uint32_t i = 0; i <= repetitions; ++i) {
      const double took = watch.time(waiting, once) / each;
      calls += each;
      if (i > 0) times.push_back(took);
    }
    return median(times);
  };
  const auto replay = [&](cudaGraphExec_t graph) { return [&watch, &streams, graph] { check(cudaGraphLaunch(graph, streams[0]), "cudaGraphLaunch"); }; };
  exchange_times took;
  took.launched = time(streams, launch_all, 1);
  took.one_graph = time({streams[0]}, replay(one), 1);
  took.in_row = time({streams[0]}, replay(many), replays::in_row);
  for (cudaGraphExec_t graph : {one, many}) cudaGraphExecDestroy(graph);
  if (!words.complete(calls)) {
    std::fprintf(stderr, "words of %u exchanges have not all come\n", calls);
    std::exit(1);
  }
  std::printf("    %slaunch and words alone: %.1f us, one graph %.1f us, of %u each %.1f us\n", how.together ? "together, " : "          ", took.launched, took.one_graph, replays::in_row, took.in_row);
  return took;
}

void measure_launches(stopwatch& watch, experts_world& world, const launching& how, const call_times& floor) {
  const exchange_times beside = measure_exchanges(watch, world, how);
  const auto measured = [&](const char* name, double words, const auto& once, uint32_t unmeasured) {
    std::vector<double> in, out;
    for (uint32_t i = 0; i < repetitions + unmeasured; ++i) {
      const call_times took = once();
      if (i < unmeasured) continue;
      in.push_back(took.dispatch);
      out.push_back(took.combine);
    }
    std::printf("    %s%-26s dispatch %8.1f us (%.2f of that time, %.2f with launch and words), combine %8.1f us (%.2f, %.2f)\n", how.together ? "together, " : "          ", name, median(in),
                median(in) / floor.dispatch, median(in) / (floor.dispatch + words), median(out), median(out) / floor.combine, median(out) / (floor.combine + words));
    std::fflush(stdout);
  };
  checked_call(watch, world, how);
  measured("launches:", beside.launched, [&] { return call(watch, world, how); }, 0);
  checked_call(watch, world, how);
  if (!world.options.repeated) return;
  replays graphs(world, how);
  world.poison();
  world.finish();
  measured("one graph:", beside.one_graph, [&] { return graphs.call(watch); }, 1); // a graph is brought to the device by its first launch
  check_all(world);
  world.poison();
  for (size_t rank = 0; rank < world.ranks.size(); ++rank) world.fill(rank);
  world.finish();
  measured("graph of 16 calls, each:", beside.in_row, [&] { return graphs.call_in_row(watch); }, 1);
  check_all(world);
}

void measure(stopwatch& watch, double copy, const experts_options& wanted, const std::vector<uint32_t>& shares) {
  experts_world world(wanted);
  const double selections = static_cast<double>(world.rows());
  const double results = static_cast<double>(wanted.hidden) * 2;
  const double tokens = static_cast<double>(wanted.ranks) * wanted.tokens;
  const double rows_in = selections * static_cast<double>(world.payload() + (wanted.compact ? 0 : sizeof(ep_moe_header)));
  const double rows_out = selections * results;
  const double both_ways = (wanted.compact ? 2 * rows_out : rows_out + tokens * results) / 2;
  const double rate = wanted.compact ? copy : formula_rate;
  const call_times floor{rows_in / rate, both_ways / rate};
  std::printf("%s, %d ranks, %u tokens, hidden %u, top-%u of %u, %s, control in %s%s: %.1f us for dispatch, %.1f us for combine at %s",
              wanted.compact ? "high throughput" : "low latency", wanted.ranks, wanted.tokens, wanted.hidden, wanted.top_k, wanted.experts,
              wanted.payload == EP_MOE_BF16 ? "bf16" : "fp8", wanted.pinned ? "pinned memory" : "device memory", wanted.offered ? ", results in place" : "", floor.dispatch, floor.combine,
              wanted.compact ? "the rate of the copy\n" : "4.0 TB/s");
  if (!wanted.compact) std::printf(" (%.1f and %.1f at the rate of the copy)\n", rows_in / copy, both_ways / copy);
  for (const uint32_t lanes : {256u, 512u}) {
    uint32_t resident = 0;
    check(ep::cuda_resident(0, EP_CUDA_KERNEL_MOE, lanes, &resident), "resident");
    for (const uint32_t share : shares) {
      const uint32_t blocks = std::max(1u, resident / static_cast<uint32_t>(wanted.ranks) / share);
      std::printf("  %u blocks of %u lanes for each rank\n", blocks, lanes);
      for (const bool together : {false, true}) {
        if (together && wanted.compact) continue; // low latency alone
        measure_launches(watch, world, {blocks, lanes, together}, floor);
      }
    }
  }
}

} // namespace

int main(int count, char** words) {
  const auto most = static_cast<uint32_t>(count > 1 ? std::atoi(words[1]) : 4096);
  if (count > 2) repetitions = static_cast<uint32_t>(std::atoi(words[2]));
  use_all_queues();
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU\n");
    return 2;
  }
  check(ep::cuda_load_moe(), "loading kernels");
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, 0), "cudaGetDeviceProperties");
  stopwatch watch;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const double copy = copy_rate(watch, stream);
  std::printf("%s, %d multiprocessors, copy %.0f GB/s\n", facts.name, facts.multiProcessorCount, copy / 1e3);
  experts_options wanted;
  const auto measure_all = [&](uint32_t first, uint32_t second) {
    for (const uint32_t payload : {first, second}) {
      wanted.payload = payload;
      for (const bool pinned : {false, true}) {
        wanted.pinned = pinned;
        measure(watch, copy, wanted, pinned ? std::vector<uint32_t>{1} : std::vector<uint32_t>{1, 2});
      }
    }
    wanted.pinned = false;
    wanted.offered = true;
    for (const uint32_t payload : {first, second}) {
      if (wanted.compact && payload != EP_MOE_BF16) continue; // results travel alike, whatever dispatch carried
      wanted.payload = payload;
      measure(watch, copy, wanted, {1, 2});
    }
    wanted.offered = false;
  };
  wanted.repeated = true; // graphs count their calls on the device
  measure_all(EP_MOE_F8_F32, EP_MOE_BF16);
  if (most == 0) return 0;
  wanted.repeated = false;
  wanted.compact = true;
  wanted.tokens = most;
  measure_all(EP_MOE_BF16, EP_MOE_F8_F32);
  return 0;
}
