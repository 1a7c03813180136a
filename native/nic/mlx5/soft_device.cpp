#include "soft_device.hpp"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <ostream>

#include <sched.h>

#include "nic/doorbells.hpp"
#include "thread.hpp"

namespace ep::nic {
soft_device::soft_device(std::string name, port_view port, directory_entry entry, std::unique_ptr<net::hub> hub, const soft_options& options)
    : name_(std::move(name)), port_(port), entry_(std::move(entry)), options_(options), hub_(std::move(hub)),
      engine_(std::make_unique<engine>(port, hub_ ? fabric_of_network(*hub_, entry_.number()) : fabric_of_memory(), options.engine)) {
  port_.header().number = entry_.number();
}

result<std::unique_ptr<soft_device>> soft_device::open(const std::string& name, const soft_options& options) {
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
  if (!options_.threaded && hub_) return failure{EP_STATUS_INVALID, 0, "a software NIC on a network has threads: time is not its caller's"};
  if (!options_.threaded) return life_.begin(port_.header().life, port_.mapping());
  // Peers may look at the life word as soon as open() has returned, and it is the thread's own.
  std::mutex mutex;
  std::condition_variable begun;
  bool known = false;
  result<nothing> outcome = nothing{};
  auto thread = thread_start(
      "ep-nic-mlx5",
      [this, &mutex, &begun, &known, &outcome] {
        auto alive = life_.begin(port_.header().life, port_.mapping());
        const bool ok = alive.ok();
        {
          const std::lock_guard lock(mutex);
          outcome = std::move(alive);
          known = true;
          begun.notify_one();
        }
        if (ok) run();
      },
      "thread of a software NIC; raise the limit on tasks");
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
    any = engine_->poll_doorbells(now_ns);
    any = engine_->poll_receives(now_ns) || any;
    any = engine_->work(now_ns) || any;
  }
  // Nothing was left to do: what had come before them is in its completion queue.
  if (lives != 0 && !any) hub_->tell_lives(lives);
  return any || lives != 0;
}

void soft_device::run() {
  serve_doorbells(
      doorbell_wake(), stopping_, [this](int64_t now_ns) { return poll(now_ns); }, [this] { return next_due_ns(); });
  life_.end(true);
}

void soft_device::stop() {
  if (stopped_) return;
  stopped_ = true;
  if (thread_.joinable()) {
    stopping_.store(true, std::memory_order_seq_cst);
    doorbell_wake_now();
    thread_.join();
  }
  life_.end(true);
  if (hub_) hub_->stop();
  // From here on peers find nobody. Who is inside still comes out before the memory goes.
  for (const auto& qp : engine_->qps) {
    if (qp) engine_->stop_qp(*qp, EP_MLX5_QP_STATE_RST);
  }
  const int64_t deadline = clock_now_ns() + let_go_ns;
  while (engine_->in_use(0, nullptr) && clock_now_ns() < deadline) sched_yield();
}

soft_device::~soft_device() { stop(); }

size_t soft_device::objects() const {
  size_t count = engine_->memory.pds() + engine_->memory.regions() + engine_->memory.umems() + engine_->pages.size() + engine_->cqs.size();
  for (const auto& qp : engine_->qps) count += qp ? 1 : 0;
  return count;
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

result<nothing> soft_device::region_wake(const dl::mlx5_mr& mr, const ep_wake_word* wake) {
  const turn mine(*this);
  return engine_->memory.region_wake(mr.rkey, wake);
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
  doorbell_wake_now();
}

void soft_device::set_link(bool up) {
  const turn mine(*this);
  engine_->set_link(up);
}

void soft_device::doorbell_wake_now() {
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

bool soft_device::step(random_source& random, int64_t now_ns) {
  const turn mine(*this);
  return engine_->step(random, now_ns);
}

int64_t soft_device::next_due_ns() const {
  const turn mine(*this);
  return engine_->next_due_ns();
}

std::string hex_text(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%" PRIx64, value);
  return text;
}

std::string violation_text(const violation& what) {
  char text[96];
  std::snprintf(text, sizeof text, "queue pair 0x%" PRIx32 ", slot %" PRIu32 " (index %" PRIu16 "): ", what.qpn, what.slot, what.index);
  std::string line = std::string(text) + what.field;
  std::snprintf(text, sizeof text, " is 0x%" PRIx64 ", expected 0x%" PRIx64, what.found, what.expected);
  line += text;
  if (what.rule != nullptr) line += std::string(" (") + what.rule + ")";
  return line;
}

result<std::vector<dl::mlx5_device_info>> soft_driver::list_devices() {
  dl::mlx5_device_info info;
  info.name = soft_device_name;
  info.supported = true;
  return std::vector<dl::mlx5_device_info>{info};
}

result<std::unique_ptr<dl::mlx5_device>> soft_driver::open(const std::string& name) {
  if (name != soft_device_name) return failure{EP_STATUS_SYSTEM, ENODEV, "open of a software NIC: there is no device '" + name + "', only '" + soft_device_name + "'"};
  auto made = soft_device::open(name, options_);
  if (!made.ok()) return made.why();
  return std::unique_ptr<dl::mlx5_device>(std::move(made.value()));
}

} // namespace ep::nic
