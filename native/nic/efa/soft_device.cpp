#include "soft_device.hpp"

#include <cerrno>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <ostream>

#include <sched.h>

#include "nic/doorbells.hpp"
#include "thread.hpp"

namespace ep::nic::efa {
soft_device::soft_device(std::string name, port_view port, directory_entry entry, std::unique_ptr<net::hub> hub, const soft_options& options)
    : name_(std::move(name)), port_(port), entry_(std::move(entry)), options_(options), hub_(std::move(hub)), qkeys_(options.engine.seed ^ port.mapping()->handle().nonce) {
  port_.header().number = entry_.number();
  engine_ = std::make_unique<engine>(port, hub_.get(), options.engine);
  const engine_options& can = options.engine;
  capabilities_.max_depth = can.max_depth;
  capabilities_.max_batch = can.max_batch;
  capabilities_.max_inline_write = can.inline_write ? EP_EFA_MAX_INLINE_WRITE : 0;
  capabilities_.max_cq_depth = uint32_t{1} << 16;
  capabilities_.max_endpoints = can.max_endpoints;
  capabilities_.max_counters = can.counters ? can.max_counters : 0;
  capabilities_.max_addresses = EP_EFA_UNKNOWN_AH - 1;
  capabilities_.max_message = can.max_message;
  capabilities_.counters = can.counters;
  capabilities_.wide_ids = can.wide_ids;
  capabilities_.read = true;
}

result<std::unique_ptr<soft_device>> soft_device::open(const std::string& name, const soft_options& options) {
  if (options.engine.fragment_bytes == 0 || options.engine.fragment_bytes % 8 != 0) {
    return failure{EP_STATUS_INVALID, 0, "fragment_bytes of a software EFA is " + std::to_string(options.engine.fragment_bytes) + ", expected a multiple of 8"};
  }
  auto port = port_view::create();
  if (!port.ok()) return port.why();
  auto entry = directory_entry::take(port.value().mapping()->handle());
  if (!entry.ok()) return entry.why();
  std::unique_ptr<net::hub> hub;
  if (options.network) {
    auto opened = net::hub::open(*options.network, entry.value().number());
    if (!opened.ok()) return opened.why();
    hub = std::move(opened.value());
  }
  std::unique_ptr<soft_device> made(new soft_device(name, port.value(), std::move(entry.value()), std::move(hub), options));
  auto started = made->start();
  if (!started.ok()) return started.why();
  return made;
}

result<nothing> soft_device::start() {
  if (!options_.threaded && hub_) return failure{EP_STATUS_INVALID, 0, "a software EFA on a network has threads: time is not its caller's"};
  if (!options_.threaded) return life_.begin(port_.header().life, port_.mapping());
  // Peers may look at the life word as soon as open() has returned, and it is the thread's own.
  std::mutex mutex;
  std::condition_variable begun;
  bool known = false;
  result<nothing> outcome = nothing{};
  auto thread = thread_start(
      "ep-nic-efa",
      [this, &mutex, &begun, &known, &outcome] {
        auto alive = life_.begin(port_.header().life, port_.mapping());
        const bool ok = alive.ok();
        {
          const std::lock_guard lock(mutex);
          outcome = std::move(alive);
          known = true;
          begun.notify_one();
        }
        if (ok) run_thread();
      },
      "thread of a software EFA; raise the limit on tasks");
  if (!thread.ok()) return thread.why();
  thread_ = std::move(thread.value());
  {
    std::unique_lock lock(mutex);
    begun.wait(lock, [&] { return known; });
  }
  if (!outcome.ok() || !hub_) return outcome;
  return hub_->start(answerer_of(port_), doorbell_wake());
}

bool soft_device::poll(int64_t now_ns) {
  // A caller of the table must not starve: this thread would take the lock again before the other one has woken up.
  while (wanting_.load(std::memory_order_relaxed) > 0) sched_yield();
  const size_t lives = hub_ ? hub_->untold_lives() : 0;
  bool any = false;
  {
    const std::lock_guard lock(mutex_);
    any = engine_->work(now_ns);
  }
  // Nothing was left to do: what had come before them is in its completion queue.
  if (lives != 0 && !any) hub_->tell_lives(lives);
  return any || lives != 0;
}

void soft_device::run_thread() {
  serve_doorbells(
      doorbell_wake(), stopping_, [this](int64_t now_ns) { return poll(now_ns); }, [this] { return next_due_ns(); });
  life_.end(true);
}

void soft_device::stop() {
  if (stopped_) return;
  stopped_ = true;
  if (thread_.joinable()) {
    stopping_.store(true, std::memory_order_seq_cst);
    notify();
    thread_.join();
  }
  // Endpoints first: what has landed whole is counted at its peers while they still know this device.
  while (!engine_->qps.empty()) engine_->remove(*engine_->qps.begin()->second);
  life_.end(true);
  if (hub_) hub_->stop();
  // From here on peers find nobody. Who is inside still comes out before the memory goes.
  const int64_t deadline = clock_now_ns() + let_go_ns;
  while (engine_->in_use(0, nullptr) && clock_now_ns() < deadline) sched_yield();
}

soft_device::~soft_device() { stop(); }

size_t soft_device::objects() const {
  return engine_->memory.count() + engine_->cqs.size() + engine_->counters.size() + engine_->qps.size() + engine_->handles();
}

result<nothing> soft_device::close() {
  {
    const turn mine(*this);
    const size_t living = objects();
    if (living != 0) return refuse("close", EBUSY, std::to_string(living) + " objects of the device live");
  }
  stop();
  return nothing{};
}

failure soft_device::refuse(const char* call, int error, const std::string& why) const {
  return {EP_STATUS_SYSTEM, error, std::string(call) + " of " + name_ + " (software NIC): " + why};
}

result<nothing> soft_device::set_faults(std::string_view text) {
  auto script = fault_script::parse(text);
  if (!script.ok()) return script.why();
  const turn mine(*this);
  engine_->set_faults(std::move(script.value()));
  return nothing{};
}

void soft_device::release_held() {
  {
    const turn mine(*this);
    engine_->release_held();
  }
  notify();
}

void soft_device::set_link(bool up) {
  const turn mine(*this);
  engine_->set_link(up);
}

void soft_device::notify() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_notify(doorbell_wake());
}

std::vector<violation> soft_device::violations() const {
  const turn mine(*this);
  return engine_->violations();
}

engine_counts soft_device::counts() const {
  const turn mine(*this);
  return engine_->counts();
}

std::vector<trace_event> soft_device::trace() const {
  const turn mine(*this);
  return engine_->trace().events();
}

void soft_device::write_trace_jsonl(std::ostream& out) const { trace_write_jsonl(out, port_number(), trace()); }
void soft_device::write_trace_chrome(std::ostream& out) const { trace_write_chrome(out, port_number(), trace()); }

bool soft_device::store64(uint64_t writer, uint64_t address, uint64_t value) {
  const turn mine(*this);
  return engine_->store64(writer, address, value);
}

bool soft_device::store32(uint64_t writer, uint64_t address, uint32_t value) {
  const turn mine(*this);
  return engine_->store32(writer, address, value);
}

void soft_device::fence(uint64_t writer) {
  const turn mine(*this);
  engine_->fence(writer);
}

void soft_device::pending(std::vector<event>& out, int64_t now_ns) {
  const turn mine(*this);
  engine_->pending(out, now_ns);
}

bool soft_device::run(const event& what, int64_t now_ns) {
  const turn mine(*this);
  return engine_->run(what, now_ns);
}

int64_t soft_device::next_due_ns() const {
  const turn mine(*this);
  return engine_->next_due_ns();
}

std::string violation_text(const violation& what) {
  char text[160];
  std::snprintf(text, sizeof text, "queue pair 0x%" PRIx32 ", slot %" PRIu32 " (WQE %" PRIu64 ", writer %" PRIu64 "): ", what.qpn, what.slot, what.number, what.writer);
  std::string line = std::string(text) + what.field;
  std::snprintf(text, sizeof text, " is 0x%" PRIx64 ", expected 0x%" PRIx64, what.found, what.expected);
  line += text;
  if (what.rule != nullptr) line += std::string(" (") + what.rule + ")";
  return line;
}

result<std::vector<dl::efa_device_info>> soft_driver::list_devices() {
  return std::vector<dl::efa_device_info>{{soft_device_name, true, ""}};
}

result<std::unique_ptr<dl::efa_device>> soft_driver::open(const std::string& name) {
  if (name != soft_device_name) return failure{EP_STATUS_SYSTEM, ENODEV, "open of a software NIC: there is no device '" + name + "', only '" + soft_device_name + "'"};
  auto made = soft_device::open(name, options_);
  if (!made.ok()) return made.why();
  return std::unique_ptr<dl::efa_device>(std::move(made.value()));
}

} // namespace ep::nic::efa
