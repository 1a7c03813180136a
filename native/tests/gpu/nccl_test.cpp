// Communicators of NCCL under streams of ours: what is kept in which order, and how calls end that peers do not make. NCCL and the device are the host's stand-ins.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "../check.hpp"
#include "../until.hpp"
#include "core/gpu/nccl.hpp"

namespace {

using ep::element_type;
using ep::reduce_op;
using ep::gpu::nccl_call;
using ep::gpu::nccl_verb;
using ep::test::until;

struct sink : ep::completion_sink {
  std::mutex mutex;
  std::map<uint64_t, ep::outcome> ended;
  std::atomic<uint64_t> next{1};
  void complete(uint64_t operation, const ep::outcome& end) override {
    const std::lock_guard lock(mutex);
    ended[operation] = end;
  }
  bool over(uint64_t operation) {
    const std::lock_guard lock(mutex);
    return ended.count(operation) != 0;
  }
  // 60 s at most; then it is pending.
  ep::outcome end_of(uint64_t operation) {
    if (!until([&] { return over(operation); })) return {EP_STATUS_PENDING, -1, 0, 0, 0, "it did not end"};
    const std::lock_guard lock(mutex);
    return ended[operation];
  }
};

struct rank {
  std::shared_ptr<ep::gpu::stream> stream;
  std::shared_ptr<ep::gpu::nccl_communicator> by;
  std::shared_ptr<const ep::gpu::device_block> memory;
  uint64_t opening = 0;
  ep::cancel_ref cancel = std::make_shared<ep::cancel_flag>();
};

ep::gpu::library_ref device() {
  auto opened = ep::gpu::library::open(EP_CUDA_HOST);
  EP_CHECK(opened.ok());
  return opened.value();
}

std::shared_ptr<const ep::dl::nccl_symbols> nccl() {
  auto loaded = ep::dl::nccl_symbols_load(EP_NCCL_HOST);
  EP_CHECK(loaded.ok());
  return loaded.value();
}

constexpr uint64_t block_bytes = 1 << 20;

rank join(sink& ends, const ep::dl::nccl_unique_id& id, int number, int size, int64_t deadline_ns = ep::no_deadline) {
  rank made;
  made.stream = ep::gpu::stream::create(device(), 0, false, ends).value();
  made.memory = ep::gpu::device_block::allocate(device(), 0, block_bytes).value();
  made.by = ep::gpu::nccl_communicator::create(nccl(), device(), 0, number, size, id, ends).value();
  made.opening = ends.next++;
  made.by->open(made.opening, made.cancel, deadline_ns);
  return made;
}

std::vector<rank> world(sink& ends, int size) {
  ep::dl::nccl_unique_id id{};
  EP_CHECK_EQ(nccl()->ncclGetUniqueId(&id), 0);
  std::vector<rank> all;
  for (int number = 0; number < size; ++number) all.push_back(join(ends, id, number, size));
  for (rank& each : all) EP_CHECK_EQ(ends.end_of(each.opening).status, uint32_t{EP_STATUS_OK});
  return all;
}

// The operation; its calls go behind what the rank's stream has.
uint64_t call(sink& ends, rank& of, nccl_call what, int64_t deadline_ns = ep::no_deadline, ep::cancel_ref cancel = std::make_shared<ep::cancel_flag>()) {
  auto slot = of.stream->slot();
  EP_CHECK(slot.ok());
  const auto launched = of.by->launch(*of.stream, std::move(what), slot.value(), {of.memory}, deadline_ns);
  if (!launched.ok()) return 0;
  ep::gpu::stream::watch how;
  how.kernels.push_back({slot.value(), nullptr});
  how.deadline_ns = deadline_ns;
  const uint64_t operation = ends.next++;
  EP_CHECK(of.stream->follow(operation, std::move(cancel), std::move(how)).ok());
  return operation;
}

nccl_call sum(const rank& of, uint64_t bytes, element_type element = element_type::i32, reduce_op fold = reduce_op::sum, double factor = 0) {
  return {element, fold, factor, {{nccl_verb::all_reduce, -1, of.memory->address(), bytes, of.memory->address(), bytes}}};
}

template <class Value> Value* values(const rank& of) { return reinterpret_cast<Value*>(of.memory->address()); }

// Calls are made before peers have come to theirs, and what is put on the stream behind them waits.
void order_is_kept() {
  sink ends;
  auto all = world(ends, 3);
  const ep::gpu::library_ref of = device();
  constexpr int rounds = 50;
  std::vector<std::vector<uint64_t>> operations(3);
  // One rank after the other: the first has made all of its calls before the second makes one.
  for (size_t number = 0; number < 3; ++number) {
    rank& each = all[number];
    EP_CHECK_EQ(of->table().fill(each.stream->native(), each.memory->address(), static_cast<uint8_t>(number + 1), 4096), 0);
    for (int round = 0; round < rounds; ++round) {
      operations[number].push_back(call(ends, each, sum(each, 4096, element_type::u8)));
      // The result goes into row 1 + round, and the tensor begins anew.
      const uint64_t row = each.memory->address() + 4096 * static_cast<uint64_t>(1 + round);
      EP_CHECK_EQ(of->table().copy(each.stream->native(), row, each.memory->address(), 4096), 0);
      EP_CHECK_EQ(of->table().fill(each.stream->native(), each.memory->address(), static_cast<uint8_t>(number + 1 + static_cast<size_t>(round) + 1), 4096), 0);
    }
    if (number < 2) EP_CHECK(!ends.over(operations[number][0]));
  }
  for (auto& list : operations) {
    for (const uint64_t operation : list) EP_CHECK_EQ(ends.end_of(operation).status, uint32_t{EP_STATUS_OK});
  }
  for (rank& each : all) {
    EP_CHECK_EQ(of->table().stream_finish(each.stream->native()), 0);
    for (int round = 0; round < rounds; ++round) EP_CHECK_EQ(+values<uint8_t>(each)[4096 * (1 + round) + 17], 6 + 3 * round);
  }
}

void every_verb() {
  sink ends;
  auto all = world(ends, 2);
  const auto run = [&](const std::function<nccl_call(rank&, int)>& make) {
    std::vector<uint64_t> operations;
    for (int number = 0; number < 2; ++number) operations.push_back(call(ends, all[static_cast<size_t>(number)], make(all[static_cast<size_t>(number)], number)));
    for (const uint64_t operation : operations) EP_CHECK_EQ(ends.end_of(operation).status, uint32_t{EP_STATUS_OK});
  };
  const auto fill = [&] {
    for (int number = 0; number < 2; ++number) {
      for (int i = 0; i < 64; ++i) values<float>(all[static_cast<size_t>(number)])[i] = static_cast<float>(number * 100 + i);
    }
  };
  const auto at = [&](size_t number, int i) { return values<float>(all[number])[i]; };
  const auto f32 = [](nccl_verb verb, int of, uint64_t from, uint64_t from_bytes, uint64_t to, uint64_t to_bytes) {
    return nccl_call{element_type::f32, reduce_op::sum, 0, {{verb, of, from, from_bytes, to, to_bytes}}};
  };
  fill();
  run([&](rank& of, int) { return sum(of, 16, element_type::f32, reduce_op::premul_sum, 0.5); });
  EP_CHECK_EQ(at(0, 3), 53.0f);
  EP_CHECK_EQ(at(1, 3), 53.0f);
  fill();
  run([&](rank& of, int) { return sum(of, 16, element_type::f32, reduce_op::avg); });
  EP_CHECK_EQ(at(1, 2), 52.0f);
  fill();
  run([&](rank& of, int number) { return f32(nccl_verb::broadcast, 1, number == 1 ? of.memory->address() : 0, number == 1 ? 32 : 0, number == 1 ? 0 : of.memory->address(), number == 1 ? 0 : 32); });
  EP_CHECK_EQ(at(0, 7), 107.0f);
  EP_CHECK_EQ(at(0, 8), 8.0f);
  fill();
  run([&](rank& of, int number) { return f32(nccl_verb::reduce, 0, of.memory->address(), 32, number == 0 ? of.memory->address() : 0, number == 0 ? 32 : 0); });
  EP_CHECK_EQ(at(0, 7), 114.0f);
  EP_CHECK_EQ(at(1, 7), 107.0f);
  fill();
  run([&](rank& of, int) { return f32(nccl_verb::all_gather, -1, of.memory->address(), 16, of.memory->address() + 128, 32); });
  EP_CHECK_EQ(at(0, 32 + 5), 101.0f);
  EP_CHECK_EQ(at(1, 32 + 1), 1.0f);
  fill();
  run([&](rank& of, int) { return f32(nccl_verb::reduce_scatter, -1, of.memory->address(), 32, of.memory->address() + 128, 16); });
  EP_CHECK_EQ(at(0, 32), 100.0f);
  EP_CHECK_EQ(at(1, 32), 108.0f);
  fill();
  run([&](rank& of, int number) {
    const uint64_t here = of.memory->address();
    return nccl_call{element_type::u8, reduce_op::sum, 0, {{nccl_verb::send, 1 - number, here, 8, 0, 0}, {nccl_verb::receive, 1 - number, 0, 0, here + 128, 8}, {nccl_verb::send, number, here, 4, 0, 0}, {nccl_verb::receive, number, 0, 0, here + 192, 4}}};
  });
  EP_CHECK_EQ(at(0, 33), 101.0f);
  EP_CHECK_EQ(at(1, 48), 100.0f);
  run([&](rank&, int) { return nccl_call{element_type::f32, reduce_op::sum, 0, {}}; });
}

// A rank that does not come ends by the deadline of those that wait: the calls behind, too, and nothing stays behind them on the stream.
void calls_end() {
  sink ends;
  auto all = world(ends, 2);
  rank& here = all[0];
  // More than the stand-in holds on its way, so that the other cannot end well either.
  constexpr uint64_t bytes = 65536;
  const uint64_t first = call(ends, here, sum(here, bytes), ep::deadline_after(100));
  const uint64_t second = call(ends, here, sum(here, 64));
  EP_CHECK_EQ(ends.end_of(first).status, uint32_t{EP_STATUS_TIMEOUT});
  EP_CHECK_EQ(ends.end_of(second).status, uint32_t{EP_STATUS_ABORTED});
  EP_CHECK_EQ(device()->table().stream_finish(here.stream->native()), 0);
  EP_CHECK(!here.by->failed().empty());
  EP_CHECK_EQ(call(ends, here, sum(here, 64)), uint64_t{0});
  const uint64_t over = ends.next++;
  here.by->end(over, ep::deadline_after(0));
  EP_CHECK_EQ(ends.end_of(over).status, uint32_t{EP_STATUS_OK});
  // The other is not told; its own call ends by its caller's wish.
  auto cancel = std::make_shared<ep::cancel_flag>();
  const uint64_t other = call(ends, all[1], sum(all[1], bytes), ep::no_deadline, cancel);
  cancel->value.store(1);
  EP_CHECK_EQ(ends.end_of(other).status, uint32_t{EP_STATUS_ABORTED});
}

// Likewise once ranks are connected: then NCCL's work, not its call, is what waits.
void connected_calls_end() {
  sink ends;
  auto all = world(ends, 2);
  std::vector<uint64_t> operations;
  for (rank& each : all) operations.push_back(call(ends, each, sum(each, 64)));
  for (const uint64_t operation : operations) EP_CHECK_EQ(ends.end_of(operation).status, uint32_t{EP_STATUS_OK});
  const uint64_t alone = call(ends, all[0], sum(all[0], 64), ep::deadline_after(100));
  EP_CHECK_EQ(ends.end_of(alone).status, uint32_t{EP_STATUS_TIMEOUT});
  const uint64_t over = ends.next++;
  all[1].by->end(over, ep::deadline_after(1000));
  EP_CHECK_EQ(ends.end_of(over).status, uint32_t{EP_STATUS_OK});
  EP_CHECK_EQ(all[1].by->failed(), std::string("the communicator was closed"));
}

void openings_end() {
  sink ends;
  ep::dl::nccl_unique_id id{};
  EP_CHECK_EQ(nccl()->ncclGetUniqueId(&id), 0);
  rank late = join(ends, id, 0, 2, ep::deadline_after(50));
  EP_CHECK_EQ(ends.end_of(late.opening).status, uint32_t{EP_STATUS_TIMEOUT});
  rank cut = join(ends, id, 0, 2);
  cut.cancel->value.store(1);
  EP_CHECK_EQ(ends.end_of(cut.opening).status, uint32_t{EP_STATUS_ABORTED});
  rank wrong = join(ends, id, 0, 1000);
  const ep::outcome end = ends.end_of(wrong.opening);
  EP_CHECK_EQ(end.status, uint32_t{EP_STATUS_SYSTEM});
  EP_CHECK(end.message.find("invalid argument") != std::string::npos);
  // Never opened, and gone in the middle of a call.
  auto never = ep::gpu::nccl_communicator::create(nccl(), device(), 0, 0, 2, id, ends);
  EP_CHECK(never.ok());
  auto all = world(ends, 2);
  const uint64_t left = call(ends, all[0], sum(all[0], 64));
  all[0].by.reset();
  EP_CHECK_EQ(ends.end_of(left).status, uint32_t{EP_STATUS_ABORTED});
}

void errors_are_told() {
  sink ends;
  auto all = world(ends, 2);
  setenv("EP_NCCL_HOST_BROKEN", "1", 1);
  const uint64_t broken = call(ends, all[0], sum(all[0], 64));
  EP_CHECK_EQ(ends.end_of(broken).status, uint32_t{EP_STATUS_SYSTEM});
  unsetenv("EP_NCCL_HOST_BROKEN");
  EP_CHECK(all[0].by->failed().find("remote process exited") != std::string::npos);
}

void versions() {
  for (const auto& [said, taken] : {std::pair{"21400", true}, {"22809", true}, {"21399", false}, {"2804", false}, {"30000", false}}) {
    setenv("EP_NCCL_HOST_VERSION", said, 1);
    const auto loaded = ep::dl::nccl_symbols_load(EP_NCCL_HOST);
    EP_CHECK_EQ(loaded.ok(), taken);
    if (!taken) EP_CHECK(loaded.why().message.find(said) != std::string::npos);
  }
  unsetenv("EP_NCCL_HOST_VERSION");
  EP_CHECK_EQ(ep::dl::nccl_version_text(22809), std::string("2.28.9"));
  EP_CHECK(!ep::dl::nccl_symbols_load("libno-such-nccl.so").ok());
  EP_CHECK(!ep::dl::nccl_symbols_load(EP_CUDA_HOST).ok());
  EP_CHECK(ep::gpu::nccl_reduces(element_type::bf16, reduce_op::premul_sum));
  EP_CHECK(!ep::gpu::nccl_reduces(element_type::i16, reduce_op::sum));
  EP_CHECK(!ep::gpu::nccl_reduces(element_type::i32, reduce_op::band));
  EP_CHECK(!ep::gpu::nccl_reduces(element_type::i32, reduce_op::avg));
}

} // namespace

int main() {
  versions();
  order_is_kept();
  every_verb();
  calls_end();
  connected_calls_end();
  openings_end();
  errors_are_told();
  return ep::check::finish();
}
