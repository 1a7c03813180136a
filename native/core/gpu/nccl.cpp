#include "nccl.hpp"

#include <algorithm>
#include <chrono>
#include <optional>

#include "ep/device/number.h"
#include "limits.hpp"
#include "thread.hpp"

namespace ep::gpu {
namespace {

constexpr auto shortest_pause = std::chrono::microseconds(20);
constexpr auto longest_pause = std::chrono::microseconds(500);
// So long a wait for NCCL looks without sleeping: NCCL puts a call on its stream within some tens of microseconds, and a thread that slept comes back later than that.
constexpr int64_t eager_ns = 300'000;
constexpr int roomy_cores = 4;

std::optional<dl::nccl_type> type_of(element_type element) {
  switch (element) {
    case element_type::f64: return dl::nccl_type::f64;
    case element_type::f32: return dl::nccl_type::f32;
    case element_type::f16: return dl::nccl_type::f16;
    case element_type::bf16: return dl::nccl_type::bf16;
    case element_type::i64: return dl::nccl_type::i64;
    case element_type::u64: return dl::nccl_type::u64;
    case element_type::i32: return dl::nccl_type::i32;
    case element_type::u32: return dl::nccl_type::u32;
    case element_type::i8: return dl::nccl_type::i8;
    case element_type::u8: return dl::nccl_type::u8;
    default: return std::nullopt;
  }
}

// Of one that takes a factor: none, it is made for each call.
std::optional<dl::nccl_fold> fold_of(reduce_op fold) {
  switch (fold) {
    case reduce_op::sum: return dl::nccl_fold::sum;
    case reduce_op::product: return dl::nccl_fold::product;
    case reduce_op::min: return dl::nccl_fold::min;
    case reduce_op::max: return dl::nccl_fold::max;
    case reduce_op::avg: return dl::nccl_fold::avg;
    default: return std::nullopt;
  }
}

bool folds(const nccl_call& call) {
  return std::any_of(call.steps.begin(), call.steps.end(), [](const nccl_step& step) {
    return step.verb == nccl_verb::all_reduce || step.verb == nccl_verb::reduce || step.verb == nccl_verb::reduce_scatter;
  });
}

// Of a job.
constexpr uint32_t pending = 0;
constexpr uint32_t put_on_streams = 1;
constexpr uint32_t refused = 2;

bool cancelled(const slot_ref& slot) { return std::atomic_ref<uint32_t>(slot->cancel).load(std::memory_order_acquire) != 0; }

} // namespace

bool nccl_reduces(element_type element, reduce_op fold) {
  return reduces(fold, element) && type_of(element).has_value() && (fold == reduce_op::premul_sum || fold_of(fold).has_value());
}

result<std::shared_ptr<nccl_communicator>> nccl_communicator::create(std::shared_ptr<const dl::nccl_symbols> nccl, library_ref of, int device, int rank, int size,
                                                                     const dl::nccl_unique_id& id, completion_sink& sink) {
  std::shared_ptr<nccl_communicator> made(new nccl_communicator(std::move(nccl), std::move(of), device, rank, size, id, sink));
  if (const int error = made->of_->table().stream_create(device, 1, &made->own_); error != 0) return made->of_->error(error, "making a stream of GPU " + std::to_string(device) + " for NCCL");
  auto scratch = device_block::allocate(made->of_, device, 2 * static_cast<uint64_t>(size) + 1);
  if (!scratch.ok()) return scratch.why();
  made->scratch_ = scratch.value();
  auto first = event::create(made->of_, device, false);
  if (!first.ok()) return first.why();
  made->first_ = first.value();
  auto started = thread_start("ep-nccl", [self = made.get()] { self->run(); }, "thread that calls NCCL; close groups or raise the limit on tasks");
  if (!started.ok()) return started.why();
  made->thread_ = std::move(started.value());
  return made;
}

nccl_communicator::~nccl_communicator() {
  stop();
  if (thread_.joinable()) thread_.join();
  if (own_ != nullptr) of_->table().stream_destroy(own_);
}

void nccl_communicator::open(uint64_t operation, cancel_ref cancel, int64_t deadline_ns) {
  {
    const std::lock_guard lock(mutex_);
    opening_ = {operation, std::move(cancel), deadline_ns};
  }
  changed_.notify_all();
}

void nccl_communicator::end(uint64_t operation, int64_t deadline_ns) {
  {
    const std::lock_guard lock(mutex_);
    ending_ = {operation, nullptr, deadline_ns};
  }
  changed_.notify_all();
}

void nccl_communicator::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
}

std::string nccl_communicator::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

result<std::shared_ptr<event>> nccl_communicator::spare_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      auto taken = std::move(spare_.back());
      spare_.pop_back();
      return taken;
    }
  }
  return event::create(of_, device_, false);
}

void nccl_communicator::give(const job& of, uint32_t taken) {
  {
    const std::lock_guard lock(mutex_);
    of.taken->store(taken, std::memory_order_release);
  }
  taken_.notify_all();
}

result<nothing> nccl_communicator::launch(const stream& on, nccl_call call, const slot_ref& slot, std::vector<std::shared_ptr<const void>> keep, int64_t deadline_ns) {
  auto after = spare_event();
  if (!after.ok()) return after.why();
  auto done = spare_event();
  if (!done.ok()) return done.why();
  const ep_cuda_table& table = of_->table();
  if (const int error = table.event_record(after.value()->native(), on.native()); error != 0) return of_->error(error, "recording on a stream");
  auto taken = std::make_shared<std::atomic<uint32_t>>(pending);
  {
    std::unique_lock lock(mutex_);
    if (!failed_.empty()) return failure{EP_STATUS_CLOSED, 0, failed_};
    if (!ready_ || stopping_ || ending_.operation != 0) return failure{EP_STATUS_CLOSED, 0, "the communicator is not open"};
    jobs_.push_back({std::move(call), after.value(), done.value(), slot, std::move(keep), deadline_ns, taken});
  }
  changed_.notify_all();
  const auto over = [&] { return taken->load(std::memory_order_acquire) != pending; };
  // Where cores are few, the threads that are awaited need this one's.
  const int64_t until = usable_cores() >= roomy_cores ? clock_now_ns() + eager_ns : 0;
  while (!over() && clock_now_ns() < until) std::this_thread::yield();
  if (!over()) {
    std::unique_lock lock(mutex_);
    // A driver that does not come back must not keep the caller for ever.
    constexpr int64_t patience_ns = 5'000'000'000;
    while (!over() && (deadline_ns == no_deadline || clock_now_ns() < deadline_ns + patience_ns)) taken_.wait_for(lock, std::chrono::milliseconds(100), over);
    if (!over()) return failure{EP_STATUS_TIMEOUT, 0, "NCCL did not take a call in time"};
  }
  // After a failure too: what was put on NCCL's stream ends, and with it the event; one that was never recorded is passed at once.
  if (const int error = table.stream_wait(on.native(), done.value()->native()); error != 0) return of_->error(error, "letting a stream wait for NCCL");
  return nothing{};
}

outcome nccl_communicator::meet(const request& how) {
  outcome end;
  // False where the opening is over, and `end` says why.
  const auto go_on = [&] {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ || how.cancel->value.load(std::memory_order_acquire) != 0) end.status = EP_STATUS_ABORTED;
    }
    if (end.status == EP_STATUS_OK && clock_now_ns() >= how.deadline_ns) end.status = EP_STATUS_TIMEOUT;
    if (end.status != EP_STATUS_OK) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  };
  dl::nccl_result state = dl::nccl_success;
  const auto begun = [&](dl::nccl_result found) {
    for (state = found; state == dl::nccl_success || state == dl::nccl_in_progress;) {
      dl::nccl_result now = dl::nccl_success;
      state = nccl_->ncclCommGetAsyncError(comm_, &now);
      if (state != dl::nccl_success) return false;
      state = now;
      if (now == dl::nccl_success) return true;
      if (now != dl::nccl_in_progress || !go_on()) return false;
    }
    return false;
  };
  dl::nccl_config config;
  if (begun(nccl_->ncclCommInitRankConfig(&comm_, size_, id_, rank_, &config)) && begun(put(everybody(), static_cast<int>(dl::nccl_fold::sum)))) {
    const ep_cuda_table& table = of_->table();
    int reached = 0;
    int error = table.event_record(first_->native(), own_);
    while (error == 0 && (error = table.event_query(first_->native(), &reached)) == 0 && reached == 0 && go_on()) {}
    if (error != 0) end = {EP_STATUS_SYSTEM, -1, 0, 0, 0, of_->error(error, "the first calls of NCCL").message};
    if (reached != 0) {
      const std::lock_guard lock(mutex_);
      ready_ = true;
      return end;
    }
  }
  if (end.status == EP_STATUS_OK) {
    end.status = EP_STATUS_SYSTEM;
    end.message = "NCCL " + dl::nccl_version_text(nccl_->version) + " makes no communicator: " + dl::nccl_error_text(*nccl_, state, nullptr);
  }
  fail(end.status, end.message.empty() ? "the communicator was given up before all ranks had come" : end.message);
  return end;
}

// HAZARD: NCCL waits for peers, and allocates, when it connects. So ranks connect here, where nobody waits but who opens the communicator; see nccl_symbols_load for the rest.
nccl_call nccl_communicator::everybody() const {
  nccl_call call{element_type::u8, reduce_op::sum, 0, {}};
  const uint64_t own = scratch_->address();
  const auto world = static_cast<uint64_t>(size_);
  call.steps.push_back({nccl_verb::all_reduce, -1, own + 2 * world, 1, own + 2 * world, 1});
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto at = own + static_cast<uint64_t>(peer);
    call.steps.push_back({nccl_verb::send, peer, at, 1, 0, 0});
    call.steps.push_back({nccl_verb::receive, peer, 0, 0, at + world, 1});
  }
  return call;
}

void nccl_communicator::retire() {
  while (!under_way_.empty()) {
    job& first = under_way_.front();
    if (first.taken->load(std::memory_order_acquire) != put_on_streams) return;
    auto reached = first.done->reached();
    // An error of the device is the caller's stream's to tell.
    if (reached.ok() && !reached.value()) return;
    const std::lock_guard lock(mutex_);
    // Only those of the caller's stream: another may still be about to wait for the one that is reached.
    spare_.push_back(std::move(first.after));
    under_way_.pop_front();
  }
}

uint32_t nccl_communicator::look() {
  retire();
  const auto given_up = [](const job& each) { return cancelled(each.slot); };
  if (std::any_of(under_way_.begin(), under_way_.end(), given_up)) return EP_STATUS_ABORTED;
  const std::lock_guard lock(mutex_);
  if (stopping_ || std::any_of(jobs_.begin(), jobs_.end(), given_up)) return EP_STATUS_ABORTED;
  return EP_STATUS_OK;
}

bool nccl_communicator::settled(dl::nccl_result begun, const char* what, int64_t deadline_ns) {
  dl::nccl_result state = begun;
  auto pause = shortest_pause;
  const int64_t eager_until = std::min(clock_now_ns() + eager_ns, deadline_ns);
  while (state == dl::nccl_in_progress) {
    const int64_t now = clock_now_ns();
    const bool eager = now < eager_until;
    // HAZARD: not in the eager looks: it asks the driver for events, whose lock NCCL's own launch needs.
    const uint32_t why = eager ? uint32_t{EP_STATUS_OK} : now >= deadline_ns ? uint32_t{EP_STATUS_TIMEOUT} : look();
    if (why != EP_STATUS_OK) {
      fail(why, "a call was given up");
      return false;
    }
    dl::nccl_result found = dl::nccl_success;
    state = nccl_->ncclCommGetAsyncError(comm_, &found);
    if (state == dl::nccl_success) state = found;
    if (state != dl::nccl_in_progress) break;
    if (eager) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, longest_pause);
  }
  if (state == dl::nccl_success) return true;
  fail(EP_STATUS_SYSTEM, std::string(what) + ": " + dl::nccl_error_text(*nccl_, state, comm_));
  return false;
}

dl::nccl_result nccl_communicator::put(const nccl_call& call, int fold) {
  void* const stream = of_->table().stream_handle(own_);
  const auto at = [](uint64_t address) { return reinterpret_cast<void*>(address); };
  // What is only moved goes as bytes: elements that NCCL does not know, too.
  const int type = static_cast<int>(folds(call) ? *type_of(call.element) : dl::nccl_type::u8);
  const uint64_t each = folds(call) ? element_bytes(call.element) : 1;
  if (const dl::nccl_result error = nccl_->ncclGroupStart(); error != dl::nccl_success) return error;
  dl::nccl_result first = dl::nccl_success;
  for (const nccl_step& step : call.steps) {
    const uint64_t given = step.from_bytes / each;
    const uint64_t taken = step.to_bytes / each;
    dl::nccl_result error = dl::nccl_success;
    switch (step.verb) {
      case nccl_verb::all_reduce: error = nccl_->ncclAllReduce(at(step.from), at(step.to), given, type, fold, comm_, stream); break;
      case nccl_verb::broadcast:
        // The root's own tensor is where it lies already, if it takes none.
        error = step.rank == rank_ ? nccl_->ncclBroadcast(at(step.from), at(step.to_bytes == 0 ? step.from : step.to), given, type, step.rank, comm_, stream)
                                   : nccl_->ncclBroadcast(at(step.to), at(step.to), taken, type, step.rank, comm_, stream);
        break;
      case nccl_verb::reduce: error = nccl_->ncclReduce(at(step.from), at(step.to_bytes == 0 ? step.from : step.to), given, type, fold, step.rank, comm_, stream); break;
      case nccl_verb::all_gather: error = nccl_->ncclAllGather(at(step.from), at(step.to), given, type, comm_, stream); break;
      case nccl_verb::reduce_scatter: error = nccl_->ncclReduceScatter(at(step.from), at(step.to), taken, type, fold, comm_, stream); break;
      case nccl_verb::send: error = nccl_->ncclSend(at(step.from), given, type, step.rank, comm_, stream); break;
      case nccl_verb::receive: error = nccl_->ncclRecv(at(step.to), taken, type, step.rank, comm_, stream); break;
    }
    if (first == dl::nccl_success && error != dl::nccl_in_progress) first = error;
  }
  const dl::nccl_result ended = nccl_->ncclGroupEnd();
  return first == dl::nccl_success ? ended : first;
}

void nccl_communicator::perform(job& next) {
  const ep_cuda_table& table = of_->table();
  const nccl_call call = next.call;
  under_way_.push_back(std::move(next));
  // A copy: a failure lets go of all that is under way.
  const job mine = {{}, under_way_.back().after, under_way_.back().done, under_way_.back().slot, {}, under_way_.back().deadline_ns, under_way_.back().taken};
  if (const int error = table.stream_wait(own_, mine.after->native()); error != 0) return fail(EP_STATUS_SYSTEM, of_->error(error, "letting NCCL's stream wait for another").message);
  if (!call.steps.empty()) {
    int fold = static_cast<int>(fold_of(call.fold).value_or(dl::nccl_fold::sum));
    const bool custom = call.fold == reduce_op::premul_sum && folds(call);
    if (custom) {
      union {
        double f64;
        float f32;
        uint16_t f16;
      } factor{};
      if (call.element == element_type::f64) factor.f64 = call.factor;
      else if (call.element == element_type::f32) factor.f32 = static_cast<float>(call.factor);
      else if (call.element == element_type::f16) factor.f16 = number_f16::store(static_cast<float>(call.factor));
      else factor.f16 = number_bf16::store(static_cast<float>(call.factor));
      const dl::nccl_result made = nccl_->ncclRedOpCreatePreMulSum(&fold, &factor, static_cast<int>(*type_of(call.element)), dl::nccl_scalar_of_host, comm_);
      if (!settled(made, "making a reduction of NCCL", mine.deadline_ns)) return;
    }
    if (!settled(put(call, fold), "a call of NCCL", mine.deadline_ns)) return;
    if (custom && !settled(nccl_->ncclRedOpDestroy(fold, comm_), "giving a reduction of NCCL back", mine.deadline_ns)) return;
  }
  if (const int error = table.event_record(mine.done->native(), own_); error != 0) return fail(EP_STATUS_SYSTEM, of_->error(error, "recording on NCCL's stream").message);
  give(mine, put_on_streams);
}

void nccl_communicator::fail(uint32_t status, const std::string& why) {
  std::deque<job> over = std::move(under_way_);
  under_way_.clear();
  {
    const std::lock_guard lock(mutex_);
    if (failed_.empty()) failed_ = why;
    for (job& each : jobs_) over.push_back(std::move(each));
    jobs_.clear();
  }
  // HAZARD: before the abort, behind which streams go on. Whoever is told of the failure waits for end() before tensors are used again, since NCCL may write into them until then.
  for (const job& each : over) {
    auto reached = each.done->reached();
    // One that was never recorded counts as reached.
    if (each.taken->load(std::memory_order_acquire) == put_on_streams && reached.ok() && reached.value()) continue;
    std::atomic_ref<uint32_t>(each.slot->status.status).store(status, std::memory_order_release);
  }
  if (comm_ != nullptr) nccl_->ncclCommAbort(comm_);
  comm_ = nullptr;
  of_->table().stream_finish(own_);
  for (const job& each : over) {
    if (each.taken->load(std::memory_order_acquire) == pending) give(each, refused);
  }
}

void nccl_communicator::give_back(bool orderly, int64_t deadline_ns) {
  if (comm_ == nullptr) return;
  dl::nccl_result state = orderly ? nccl_->ncclCommFinalize(comm_) : dl::nccl_in_progress;
  while (orderly && state == dl::nccl_in_progress && clock_now_ns() < deadline_ns) {
    dl::nccl_result found = dl::nccl_success;
    state = nccl_->ncclCommGetAsyncError(comm_, &found);
    if (state == dl::nccl_success) state = found;
    if (state == dl::nccl_in_progress) std::this_thread::sleep_for(shortest_pause);
  }
  if (state == dl::nccl_success) nccl_->ncclCommDestroy(comm_);
  else nccl_->ncclCommAbort(comm_);
  comm_ = nullptr;
}

void nccl_communicator::run() {
  thread_sleeps_exactly();
  of_->table().device_use(device_);
  request how;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || opening_.operation != 0; });
    how = opening_;
  }
  if (how.operation == 0) return;
  sink_.complete(how.operation, meet(how));
  auto pause = shortest_pause;
  for (;;) {
    std::optional<job> next;
    request ending;
    {
      std::unique_lock lock(mutex_);
      const auto asked = [this] { return stopping_ || !jobs_.empty() || (ending_.operation != 0 && under_way_.empty()); };
      if (under_way_.empty()) changed_.wait(lock, asked);
      else if (!changed_.wait_for(lock, pause, asked)) pause = std::min<std::chrono::microseconds>(2 * pause, longest_pause);
      ending = ending_;
    }
    if (const uint32_t why = look(); why != EP_STATUS_OK) fail(why, "a call was given up");
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
      if (!jobs_.empty()) {
        next = std::move(jobs_.front());
        jobs_.pop_front();
      }
    }
    if (next) {
      pause = shortest_pause;
      perform(*next);
      continue;
    }
    if (comm_ != nullptr && !under_way_.empty()) {
      dl::nccl_result found = dl::nccl_success;
      const dl::nccl_result asked = nccl_->ncclCommGetAsyncError(comm_, &found);
      const dl::nccl_result state = asked == dl::nccl_success ? found : asked;
      if (state != dl::nccl_success && state != dl::nccl_in_progress) fail(EP_STATUS_SYSTEM, "NCCL reports: " + dl::nccl_error_text(*nccl_, state, comm_));
    }
    if (ending.operation == 0) continue;
    if (!under_way_.empty()) {
      if (clock_now_ns() < ending.deadline_ns) continue;
      fail(EP_STATUS_ABORTED, "the communicator was closed");
    }
    give_back(true, ending.deadline_ns);
    {
      const std::lock_guard lock(mutex_);
      if (failed_.empty()) failed_ = "the communicator was closed";
      ending_ = {};
    }
    sink_.complete(ending.operation, {});
  }
  fail(EP_STATUS_ABORTED, "the communicator was closed");
}

} // namespace ep::gpu
