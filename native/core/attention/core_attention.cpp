#include "core_attention.hpp"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <thread>

#include "attention_job.hpp"

namespace ep::attention {
namespace {

struct free_floats {
  void operator()(float* p) const { std::free(p); }
};
using float_buffer = std::unique_ptr<float, free_floats>;

const kernels* kernels_of(isa path) {
  if (path == isa::best) path = isa_best();
  if (!isa_available(path)) return nullptr;
  switch (path) {
#if defined(__x86_64__)
    case isa::avx512: return &avx512_kernels();
    case isa::avx2: return &avx2_kernels();
#endif
    case isa::portable: return &portable_kernels();
    default: return nullptr;
  }
}

struct tensor {
  const char* name;
  const void* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  int64_t element;
};

status check_tensor(const tensor& t, std::string& why) {
  if (t.rows == 0) return status::ok;
  const int64_t bytes = t.columns * t.element;
  if (t.data == nullptr) {
    why = std::string(t.name) + " is null but has " + std::to_string(t.rows) + " rows";
    return status::bad_argument;
  }
  int64_t span;
  if (t.stride < bytes || t.stride % t.element != 0 || __builtin_mul_overflow(t.rows, t.stride, &span)) {
    why = std::string(t.name) + " has a row stride of " + std::to_string(t.stride) + " bytes, expected a multiple of " +
          std::to_string(t.element) + " and at least the " + std::to_string(bytes) + " bytes of a row";
    return status::bad_argument;
  }
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(t.element) != 0) {
    why = std::string(t.name) + " is not aligned to its element of " + std::to_string(t.element) + " bytes";
    return status::bad_argument;
  }
  return status::ok;
}

tensor query_tensor(const char* name, const problem& what, const void* data, int64_t stride) {
  return {name, data, stride, what.q_rows, int64_t{what.q_heads} * what.head_dim, what.type == dtype::f32 ? 4 : 2};
}

tensor key_tensor(const char* name, const problem& what, const void* data, int64_t stride) {
  return {name, data, stride, what.kv_rows, int64_t{what.kv_heads} * what.head_dim, what.type == dtype::f32 ? 4 : 2};
}

tensor statistic_tensor(const char* name, const problem& what, const void* data, int64_t stride) {
  return {name, data, stride, what.q_rows, what.q_heads, 4};
}

template <size_t Count>
status check_tensors(const tensor (&tensors)[Count], std::string& why) {
  for (const tensor& t : tensors) {
    if (const status found = check_tensor(t, why); found != status::ok) return found;
  }
  return status::ok;
}

/// Runs every item on `threads` threads, the caller's among them; an item belongs to whoever takes it first, so no result may depend on
/// the worker. All memory and all threads are there before the first item runs.
template <typename Job, typename Item>
status run_items(const Job& job, const std::vector<Item>& items, bool (*run)(const Job&, const Item&, float*), int64_t scratch_floats,
                 std::string& why) {
  if (items.empty()) return status::ok;
  const size_t workers = std::min(items.size(), static_cast<size_t>(job.args.what.threads));
  std::vector<float_buffer> scratch;
  for (size_t i = 0; i < workers; ++i) {
    const size_t bytes = static_cast<size_t>(round_up(scratch_floats, 16)) * sizeof(float);
    scratch.emplace_back(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (scratch.back() == nullptr) {
      why = "no memory for worker " + std::to_string(i) + " of " + std::to_string(workers) + " (" + std::to_string(bytes) +
            " bytes each); use fewer threads";
      return status::out_of_memory;
    }
  }

  enum : uint32_t { waiting, running, abandoned };
  std::atomic<uint32_t> gate{waiting};
  std::atomic<size_t> next{0};
  std::atomic<bool> stopped{false};
  const auto work = [&](float* memory) {
    while (!stopped.load(std::memory_order_relaxed)) {
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= items.size()) return;
      if (!run(job, items[i], memory)) stopped.store(true, std::memory_order_relaxed);
    }
  };
  std::vector<std::thread> others;
  others.reserve(workers - 1);
  const auto open_gate = [&](uint32_t state) {
    gate.store(state, std::memory_order_release);
    gate.notify_all();
  };
  const auto join_all = [&] {
    for (std::thread& other : others) other.join();
  };
  for (size_t i = 1; i < workers; ++i) {
    try {
      others.emplace_back([&, memory = scratch[i].get()] {
        gate.wait(waiting, std::memory_order_acquire);
        if (gate.load(std::memory_order_acquire) == running) work(memory);
      });
    } catch (const std::exception& error) {  // std::system_error, or std::bad_alloc for the thread's state
      open_gate(abandoned);
      join_all();
      why = "could not start thread " + std::to_string(i + 1) + " of " + std::to_string(workers) + ": " + error.what() +
            "; use fewer threads or raise the limit on tasks";
      return status::no_threads;
    }
  }
  open_gate(running);
  work(scratch[0].get());
  join_all();
  if (stopped.load(std::memory_order_relaxed)) {
    why = "cancelled by the caller; outputs are partly written";
    return status::cancelled;
  }
  return status::ok;
}

status choose_kernels(isa path, const kernels*& out, std::string& why) {
  out = kernels_of(path);
  if (out != nullptr) return status::ok;
  why = std::string("instruction set ") + isa_name(path) + " is not available on this cpu; leave the choice at best";
  return status::unsupported_isa;
}

status run_forward(const forward_args& args, std::string& why) {
  const problem& what = args.what;
  plan todo;
  status found = make_plan(what, false, todo, why);
  if (found != status::ok) return found;
  const tensor tensors[] = {
      query_tensor("q", what, args.q.data, args.q.stride),         key_tensor("k", what, args.k.data, args.k.stride),
      key_tensor("v", what, args.v.data, args.v.stride),           query_tensor("o", what, args.o.data, args.o.stride),
      statistic_tensor("lse", what, args.lse.data, args.lse.stride)};
  if (found = check_tensors(tensors, why); found != status::ok) return found;
  const kernels* chosen = nullptr;
  if (found = choose_kernels(what.path, chosen, why); found != status::ok) return found;

  // The blocks that see most keys come first, so that no thread is left with a long one at the end.
  std::vector<std::pair<int64_t, forward_item>> items;
  const int64_t step = tokens_per_block(what);
  for (size_t i = 0; i < todo.shards.size(); ++i) {
    const planned_shard& shard = todo.shards[i];
    for (int64_t token = 0; token < shard.q_length; token += step) {
      const int64_t seen = shard.context - shard.q_length + std::min(shard.q_length, token + step);
      for (int64_t head = 0; head < what.kv_heads; ++head) items.push_back({seen, {static_cast<int64_t>(i), head, token}});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<forward_item> ordered;
  ordered.reserve(items.size());
  for (const auto& item : items) ordered.push_back(item.second);
  return run_items(forward_job{args, todo}, ordered, chosen->forward, forward_scratch(what), why);
}

void clear_rows(const output_rows& rows, const std::vector<piece>& unread, size_t bytes) {
  for (const piece& gap : unread) {
    for (int64_t row = gap.row; row < gap.row + gap.length; ++row) {
      std::fill_n(static_cast<char*>(rows.data) + row * rows.stride, bytes, char{0});
    }
  }
}

status run_backward(const backward_args& args, std::string& why) {
  const problem& what = args.what;
  plan todo;
  status found = make_plan(what, true, todo, why);
  if (found != status::ok) return found;
  if (what.q_rows > 0 && (args.o.data == nullptr) == (args.delta.data == nullptr)) {
    why = std::string("give exactly one of o and delta, found ") + (args.o.data == nullptr ? "neither" : "both");
    return status::bad_argument;
  }
  const tensor tensors[] = {query_tensor("d_o", what, args.d_o.data, args.d_o.stride),
                            query_tensor("q", what, args.q.data, args.q.stride),
                            key_tensor("k", what, args.k.data, args.k.stride),
                            key_tensor("v", what, args.v.data, args.v.stride),
                            statistic_tensor("lse", what, args.lse.data, args.lse.stride),
                            args.delta.data == nullptr ? query_tensor("o", what, args.o.data, args.o.stride)
                                                       : statistic_tensor("delta", what, args.delta.data, args.delta.stride),
                            query_tensor("d_q", what, args.d_q.data, args.d_q.stride),
                            key_tensor("d_k", what, args.d_k.data, args.d_k.stride),
                            key_tensor("d_v", what, args.d_v.data, args.d_v.stride)};
  if (found = check_tensors(tensors, why); found != status::ok) return found;
  const kernels* chosen = nullptr;
  if (found = choose_kernels(what.path, chosen, why); found != status::ok) return found;

  std::vector<backward_item> items;
  int64_t most_rows = 0;
  for (size_t i = 0; i < todo.parts.size(); ++i) {
    most_rows = std::max(most_rows, todo.parts[i].sum_rows);
    for (int64_t head = 0; head < what.kv_heads; ++head) items.push_back({static_cast<int64_t>(i), head});
  }
  found = run_items(backward_job{args, todo}, items, chosen->backward, backward_scratch(what, most_rows), why);
  if (found != status::ok) return found;
  const size_t row_bytes = static_cast<size_t>(what.kv_heads) * static_cast<size_t>(what.head_dim) * (what.type == dtype::f32 ? 4 : 2);
  clear_rows(args.d_k, todo.unread, row_bytes);
  clear_rows(args.d_v, todo.unread, row_bytes);
  return status::ok;
}

// The planner's lists are the only allocations that throw.
template <typename Args>
status guarded(status (*run)(const Args&, std::string&), const Args& args, std::string* why) {
  std::string text;
  status result;
  try {
    result = run(args, text);
  } catch (const std::bad_alloc&) {
    result = status::out_of_memory;
    text = "no memory for the plan of " + std::to_string(args.what.shard_count) + " shards and " + std::to_string(args.what.piece_count) +
           " pieces";
  }
  if (why != nullptr) *why = std::move(text);
  return result;
}

}  // namespace

status forward(const forward_args& args, std::string* why) { return guarded(run_forward, args, why); }

status backward(const backward_args& args, std::string* why) { return guarded(run_backward, args, why); }

bool isa_available(isa path) {
  switch (path) {
    case isa::best:
    case isa::portable: return true;
#if defined(__x86_64__)
    case isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#endif
    default: return false;
  }
}

isa isa_best() {
  if (isa_available(isa::avx512)) return isa::avx512;
  return isa_available(isa::avx2) ? isa::avx2 : isa::portable;
}

const char* isa_name(isa path) {
  switch (path) {
    case isa::best: return "best";
    case isa::portable: return "portable";
    case isa::avx2: return "avx2";
    case isa::avx512: return "avx512";
  }
  return "unknown";
}

const char* status_name(status value) {
  switch (value) {
    case status::ok: return "ok";
    case status::bad_argument: return "bad_argument";
    case status::bad_shard: return "bad_shard";
    case status::bad_piece: return "bad_piece";
    case status::shards_overlap: return "shards_overlap";
    case status::unsupported_isa: return "unsupported_isa";
    case status::out_of_memory: return "out_of_memory";
    case status::no_threads: return "no_threads";
    case status::cancelled: return "cancelled";
  }
  return "unknown";
}

}  // namespace ep::attention
