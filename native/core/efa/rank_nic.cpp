#include "rank_nic.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "device/fast.hpp"
#include "ep/device/efa_post.h"
#include "ep/device/ranges.h"

namespace ep::efa {
namespace {

constexpr uint32_t peers_write = dl::EFA_ACCESS_LOCAL_WRITE | dl::EFA_ACCESS_REMOTE_WRITE;
constexpr uint32_t everything = peers_write | dl::EFA_ACCESS_REMOTE_READ;

// What a rank says of its part of a memory, followed by dl::efa_address[slots].
struct part_head {
  uint64_t data;
  uint64_t cells; // address of uint64_t[world_size * slots]
  uint32_t data_rkey;
  uint32_t cells_rkey;
  uint32_t slots;
  uint32_t made; // 1: a part without bytes and slots is one, too
};

bool broken(const ep_efa_qp& qp) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(qp.broken)).load(std::memory_order_acquire) != EP_EFA_SOUND; }

pair_failure failure_in(const ep_efa_qp& qp) {
  pair_failure found;
  if (std::atomic_ref<uint64_t>(const_cast<uint64_t&>(qp.broken)).load(std::memory_order_acquire) != EP_EFA_BROKEN) return found;
  found.status = qp.status;
  found.efa_status = qp.efa_status;
  found.qpn = qp.qpn;
  found.wqe = qp.wqe;
  found.remote_address = qp.remote_address;
  found.peer = qp.peer;
  return found;
}

// Kernels hold the memory, which holds this, which holds the NIC: nothing that they read goes away under them.
struct kernel_route final : memory_route {
  std::shared_ptr<rank_nic> nic;
  ep_efa_memory memory{};
  std::vector<ep_efa_remote> remotes;
  std::vector<ep_efa_target> targets;
  result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) override {
    return nic->prepare_source(address, bytes, keep);
  }
};

} // namespace

result<std::shared_ptr<rank_nic>> rank_nic::create(std::shared_ptr<rank_context> context, std::unique_ptr<dl::efa_driver> driver,
                                                   std::unique_ptr<dl::efa_device> device, endpoint_options options, emulator_hooks hooks) {
  std::shared_ptr<rank_nic> made(new rank_nic);
  made->context_ = std::move(context);
  made->driver_ = std::move(driver);
  options.rank = made->context_->rank();
  options.world_size = made->context_->world_size();
  auto endpoints = rank_endpoints::create(std::move(device), options, std::move(hooks), made->context_->wake());
  if (!endpoints.ok()) return endpoints.why();
  made->endpoints_ = std::move(endpoints.value());
  for (int32_t rank = 0; rank < options.world_size; ++rank) made->pairs_.push_back(std::make_unique<host_pair>());
  return made;
}

rank_nic::~rank_nic() {
  for (routed_memory& memory : memories_) (void)take_down(memory);
  endpoints_.reset();
}

void rank_nic::stop() {
  for (size_t peer = 0; peer < pairs_.size(); ++peer) {
    host_pair& pair = *pairs_[peer];
    const std::lock_guard lock(pair.mutex);
    pair.stopped = true;
    give_up(static_cast<int32_t>(peer), pair);
  }
}

// ---- memory

const rank_nic::routed_memory* rank_nic::find(const symmetric_memory& memory) const {
  const uint64_t id = memory.device_handle().memory_id;
  const auto at = std::find_if(memories_.begin(), memories_.end(), [&](const routed_memory& one) { return one.memory_id == id; });
  return at == memories_.end() ? nullptr : &*at;
}

bool rank_nic::knows(const symmetric_memory& memory) const {
  const routed_memory* known = find(memory);
  return known != nullptr && !known->remotes.empty();
}

uint64_t rank_nic::part_bytes(uint64_t signal_slots) { return sizeof(part_head) + signal_slots * sizeof(dl::efa_address); }

result<std::vector<uint8_t>> rank_nic::add_memory(const symmetric_memory& memory) {
  sweep_sources();
  const uint64_t slots = memory.signal_slots();
  if (slots > endpoints_->counters_left()) {
    return failure{EP_STATUS_BUSY, 0,
                   std::to_string(slots) + " signal slots need as many completion counters, and " + endpoints_->nic().name() + " has " + std::to_string(endpoints_->counters_left()) + " left"};
  }
  routed_memory made;
  made.memory_id = memory.device_handle().memory_id;
  part_head head{};
  head.made = 1;
  head.slots = static_cast<uint32_t>(slots);
  if (memory.byte_length() != 0) {
    auto registered = endpoints_->register_memory({reinterpret_cast<uint64_t>(memory.own_data()), memory.byte_length()}, everything);
    if (!registered.ok()) return registered.why();
    made.data = registered.value();
    head.data = made.data->memory.address;
    head.data_rkey = made.data->mr.rkey;
  }
  if (auto signals = make_signals(made, memory); !signals.ok()) {
    (void)take_down(made);
    return signals.why();
  }
  if (slots != 0) {
    head.cells = reinterpret_cast<uint64_t>(made.control->data()) + slots * sizeof(counter_words);
    head.cells_rkey = made.cells.rkey;
  }
  std::vector<uint8_t> bytes(part_bytes(slots));
  std::memcpy(bytes.data(), &head, sizeof head);
  for (size_t slot = 0; slot < slots; ++slot) {
    std::memcpy(bytes.data() + sizeof head + slot * sizeof(dl::efa_address), &made.signals[slot].address, sizeof(dl::efa_address));
  }
  memories_.push_back(std::move(made));
  return bytes;
}

result<nothing> rank_nic::make_signals(routed_memory& made, const symmetric_memory& memory) {
  const uint64_t slots = memory.signal_slots();
  if (slots == 0) return nothing{};
  dl::efa_device& nic = endpoints_->nic();
  const emulator_hooks& hooks = endpoints_->hooks();
  // In a segment, because the NICs of software of other processes change these words themselves.
  const uint64_t cell_count = slots * static_cast<uint64_t>(context_->world_size());
  auto control = segment::create(slots * sizeof(counter_words) + cell_count * 8);
  if (!control.ok()) return control.why();
  made.control = control.value();
  auto* counts = reinterpret_cast<counter_words*>(made.control->data());
  auto* cells = reinterpret_cast<uint64_t*>(counts + slots);
  auto mr = nic.reg_mr({reinterpret_cast<uint64_t>(cells), cell_count * 8}, peers_write);
  if (!mr.ok()) return mr.why();
  made.cells = mr.value();
  if (hooks.region_wake) {
    if (auto woken = hooks.region_wake(made.cells, context_->wake()); !woken.ok()) return woken;
  }
  dl::efa_cq_spec ring; // they post nothing
  ring.depth = 2;
  auto cq = nic.create_cq(ring);
  if (!cq.ok()) return cq.why();
  made.cq = cq.value();
  for (uint64_t slot = 0; slot < slots; ++slot) {
    auto counter = nic.open_counter({{reinterpret_cast<uint64_t>(&counts[slot].completed), 8}, {reinterpret_cast<uint64_t>(&counts[slot].failed), 8}});
    if (!counter.ok()) return counter.why();
    made.counters.push_back(counter.value());
    endpoints_->counters_taken(-1);
    if (hooks.counter_wake) {
      if (auto woken = hooks.counter_wake(counter.value(), context_->wake()); !woken.ok()) return woken;
    }
    dl::efa_endpoint_spec spec;
    spec.depth = 2;
    spec.cq = made.cq;
    spec.arrived = counter.value();
    auto endpoint = nic.create_endpoint(spec);
    if (!endpoint.ok()) return endpoint.why();
    made.signals.push_back(endpoint.value());
  }
  made.board = std::make_shared<signal_board>(memory.own_signals(), std::span<const counter_words>(counts, slots), std::span<const uint64_t>(cells, cell_count));
  context_->progress().add(made.board.get(), [board = made.board] { board->fold(); });
  return nothing{};
}

result<nothing> rank_nic::route(symmetric_memory& memory, std::span<const std::vector<uint8_t>> parts) {
  auto* known = const_cast<routed_memory*>(find(memory));
  if (known == nullptr) return failure{EP_STATUS_INVALID, 0, "the memory was not registered with this NIC"};
  const auto world = static_cast<size_t>(context_->world_size());
  const uint64_t slots = memory.signal_slots();
  if (parts.size() != world) return failure{EP_STATUS_INVALID, 0, "parts of " + std::to_string(parts.size()) + " ranks were given, the world has " + std::to_string(world)};
  auto held = std::make_shared<kernel_route>();
  held->targets.resize((1 + slots) * world);
  for (size_t rank = 0; rank < world; ++rank) {
    part_head head{};
    if (parts[rank].size() == part_bytes(slots)) std::memcpy(&head, parts[rank].data(), sizeof head);
    if (head.made != 1 || head.slots != slots) return failure{EP_STATUS_MISMATCH, 0, "rank " + std::to_string(rank) + " describes a memory with other signal slots"};
    remote_part& part = known->remotes.emplace_back();
    part.data = head.data;
    part.data_rkey = head.data_rkey;
    part.cells = head.cells + static_cast<uint64_t>(context_->rank()) * slots * 8;
    part.cells_rkey = head.cells_rkey;
    held->remotes.push_back({head.data, head.data_rkey, 0});
    held->targets[rank] = endpoints_->data_target(static_cast<int32_t>(rank));
    for (size_t slot = 0; slot < slots; ++slot) {
      dl::efa_address address;
      std::memcpy(&address, parts[rank].data() + sizeof head + slot * sizeof address, sizeof address);
      auto peer = endpoints_->nic().insert_address(endpoints_->first(), address);
      if (!peer.ok()) return peer.why();
      part.signals.push_back(peer.value());
      held->targets[(1 + slot) * world + rank] = {peer.value().ah, peer.value().qpn, peer.value().qkey};
    }
  }
  held->nic = shared_from_this();
  ep_efa_memory& kernels = held->memory;
  kernels.header = {EP_MAGIC_EFA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof kernels};
  kernels.device = reinterpret_cast<uint64_t>(&endpoints_->device());
  kernels.remotes = reinterpret_cast<uint64_t>(held->remotes.data());
  kernels.address = reinterpret_cast<uint64_t>(memory.own_data());
  kernels.byte_length = memory.byte_length();
  kernels.targets = reinterpret_cast<uint64_t>(held->targets.data());
  kernels.lkey = known->data ? known->data->mr.lkey : 0;
  const auto address = reinterpret_cast<uint64_t>(&kernels);
  return memory.connect_by_nic(std::move(held), EP_MEMORY_EFA, address);
}

void rank_nic::remove_memory(const symmetric_memory& memory) {
  const routed_memory* known = find(memory);
  if (known == nullptr) return;
  const uint64_t id = known->memory_id;
  for (const auto& pair : pairs_) {
    const std::lock_guard lock(pair->mutex);
    pair->gone.push_back(id);
    forget_gone(*pair);
  }
  (void)take_down(*const_cast<routed_memory*>(known));
  memories_.erase(memories_.begin() + (known - memories_.data()));
}

void rank_nic::forget_gone(host_pair& pair) {
  if (pair.gone.empty() || !pair.entries.empty()) return;
  std::erase_if(pair.cells, [&pair](const auto& one) { return std::count(pair.gone.begin(), pair.gone.end(), one.first.first) != 0; });
  pair.gone.clear();
}

// Queue pairs before what they write to.
result<nothing> rank_nic::take_down(routed_memory& memory) {
  dl::efa_device& nic = endpoints_->nic();
  if (memory.board) context_->progress().remove(memory.board.get());
  for (const remote_part& part : memory.remotes) {
    for (const dl::efa_peer& peer : part.signals) (void)nic.remove_address(peer);
  }
  for (const dl::efa_endpoint& endpoint : memory.signals) (void)nic.destroy_endpoint(endpoint);
  for (const dl::efa_counter& counter : memory.counters) {
    (void)nic.close_counter(counter);
    endpoints_->counters_taken(1);
  }
  if (memory.cq.handle != nullptr) (void)nic.destroy_cq(memory.cq);
  if (memory.cells.handle != nullptr) (void)nic.dereg_mr(memory.cells);
  if (memory.data) (void)endpoints_->release_memory(*memory.data);
  return nothing{};
}

// Whose memory has gone: its addresses may be another one's by now.
void rank_nic::sweep_sources() {
  std::erase_if(sources_, [this](const registered_source& one) {
    if (!one.keep.expired()) return false;
    (void)endpoints_->release_memory(one.memory);
    return true;
  });
}

result<nothing> rank_nic::prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) {
  const uint64_t end = address + bytes;
  if (bytes == 0) return nothing{};
  for (const routed_memory& one : memories_) {
    if (one.data && one.data->memory.address <= address && end <= one.data->memory.address + one.data->memory.byte_length) return nothing{};
  }
  for (const registered_source& one : sources_) {
    if (one.begin <= address && end <= one.end && !one.keep.expired()) return nothing{};
  }
  sweep_sources();
  auto registered = endpoints_->register_memory({address, bytes}, dl::EFA_ACCESS_LOCAL_WRITE);
  if (!registered.ok()) return registered.why();
  sources_.push_back({address, end, keep, registered.value()});
  return nothing{};
}

// ---- requests of the host

result<uint64_t> rank_nic::post(const symmetric_memory& memory, const host_request& request) {
  const routed_memory* known = find(memory);
  if (known == nullptr || known->remotes.empty()) return failure{EP_STATUS_INVALID, 0, "the memory belongs to another transport"};
  const auto rank = static_cast<size_t>(request.peer);
  const remote_part& part = known->remotes[rank];
  ep_efa_qp& qp = endpoints_->host_qp(request.peer);
  const kernel_environment environment{context_->waits(nullptr, no_deadline)};
  fast_context context{environment, 0, 1, nullptr};

  entry made;
  made.keep = request.keep;
  const uint64_t longest = max_message();
  const bool one_write = request.what == host_request::kind::word || request.what == host_request::kind::none ||
                         (request.what == host_request::kind::write && request.bytes <= longest);
  const bool by_arrival = request.signals && request.add == 1 && one_write;
  work_item item;
  item.target = endpoints_->data_target(request.peer);
  if (by_arrival) {
    const dl::efa_peer& peer = part.signals[request.slot];
    item.target = {peer.ah, peer.qpn, peer.qkey};
    item.slot = 1 + static_cast<uint32_t>(request.slot);
  }
  item.what = request.what;
  item.remote = part.data + request.offset;
  item.rkey = part.data_rkey;
  const ep_efa_device& device = endpoints_->device();
  if (request.what == host_request::kind::word) {
    item.bytes = static_cast<uint32_t>(request.bytes);
    item.word = request.word;
    made.items.push_back(item);
  } else if (request.what != host_request::kind::none && request.bytes != 0) {
    if (!range_key(context, &device.ranges, request.local, request.bytes, &item.lkey)) {
      return failure{EP_STATUS_INVALID, 0, "the local bytes lie in no registered memory"};
    }
    for (uint64_t at = 0; at < request.bytes; at += longest) {
      item.remote = part.data + request.offset + at;
      item.local = request.local + at;
      item.bytes = static_cast<uint32_t>(std::min(longest, request.bytes - at));
      made.items.push_back(item);
    }
  } else if (by_arrival) {
    const auto& scratch = reinterpret_cast<const ep_efa_remote*>(device.scratch_remotes)[rank];
    item.what = host_request::kind::write;
    item.remote = scratch.address;
    item.rkey = scratch.rkey;
    item.local = device.scratch;
    item.lkey = device.scratch_lkey;
    made.items.push_back(item);
  }
  if (request.signals && !by_arrival && request.add != 0) {
    made.by_cell = true;
    made.cell = {known->memory_id, request.slot};
    made.add = request.add;
    made.cell_write.what = host_request::kind::word;
    made.cell_write.target = endpoints_->data_target(request.peer);
    made.cell_write.remote = part.cells + request.slot * 8;
    made.cell_write.rkey = part.cells_rkey;
    made.cell_write.bytes = 8;
    made.cell_write.slot = 1 + static_cast<uint32_t>(request.slot);
  }

  host_pair& pair = *pairs_[rank];
  const std::lock_guard lock(pair.mutex);
  if (pair.stopped) return failure{EP_STATUS_CLOSED, 0, "the NIC was closed"};
  if (broken(qp)) {
    const pair_failure found = failure_in(qp);
    return failure{found.status == EP_STATUS_OK ? EP_STATUS_CLOSED : found.status, 0, "the queue pair to rank " + std::to_string(request.peer) + " is broken"};
  }
  if (made.items.empty()) made.end = 0;
  pair.entries.push_back(std::move(made));
  ++pair.accepted;
  advance(request.peer, pair);
  return pair.accepted;
}

// What has completed is told to its cell, or has ended.
void rank_nic::note_completed(host_pair& pair, uint64_t prefix) {
  for (; pair.landed < pair.posted && pair.entries[pair.landed].end <= prefix; ++pair.landed) {
    entry& one = pair.entries[pair.landed];
    one.keep.reset();
    if (!one.by_cell) continue;
    cell& to = pair.cells[one.cell];
    const uint64_t total = to.write.word + one.add;
    to.write = one.cell_write;
    to.write.word = total;
    to.changed = true;
  }
  while (pair.landed != 0 && (!pair.entries.front().by_cell || pair.entries.front().cell_end <= prefix)) {
    pair.entries.pop_front();
    --pair.landed;
    --pair.posted;
    ++pair.ended;
  }
  forget_gone(pair);
}

// What comes next: cells first, since they end what is oldest. The first of them becomes WQE `first`.
std::vector<rank_nic::work_item> rank_nic::next_batch(host_pair& pair, uint64_t first, uint64_t prefix, uint64_t room) {
  std::vector<work_item> batch;
  for (auto& [name, one] : pair.cells) {
    // HAZARD: never two at one time: the older total could land last.
    if (!one.changed || one.end > prefix || batch.size() == room) continue;
    batch.push_back(one.write);
    one.end = first + batch.size();
    one.changed = false;
    for (size_t i = 0; i < pair.landed; ++i) {
      entry& told = pair.entries[i];
      if (told.by_cell && told.cell == name && told.cell_end == not_posted) told.cell_end = one.end;
    }
  }
  for (; pair.posted < pair.entries.size(); ++pair.posted, pair.items_posted = 0) {
    entry& one = pair.entries[pair.posted];
    for (; pair.items_posted < one.items.size(); ++pair.items_posted) {
      if (batch.size() == room) return batch;
      batch.push_back(one.items[pair.items_posted]);
    }
    if (!one.items.empty()) one.end = first + batch.size();
  }
  return batch;
}

// Notes what has completed, then posts what there is room for. Under the pair's lock.
void rank_nic::advance(int32_t peer, host_pair& pair) {
  const kernel_environment environment{context_->waits(nullptr, no_deadline)};
  fast_context context{environment, 0, 1, nullptr};
  ep_efa_qp& qp = endpoints_->host_qp(peer);
  for (;;) {
    const uint64_t prefix = efa_poll<EP_EFA_SHARE_DEVICE>(context, qp);
    note_completed(pair, prefix);
    if (broken(qp)) return;
    const uint64_t first = qp.taken;
    const std::vector<work_item> batch = next_batch(pair, first, prefix, qp.depth - (first - prefix));
    if (batch.empty()) {
      const size_t ended = pair.entries.size();
      note_completed(pair, prefix); // those without a WQE
      if (pair.entries.size() == ended) return;
      continue;
    }
    const auto build = [&](uint64_t i, const efa_writer<fast_context>& writer) {
      const work_item& item = batch[i];
      const efa_place remote{item.remote, item.rkey};
      if (item.what == host_request::kind::read) {
        writer.read(item.target, remote, {item.local, item.lkey}, item.bytes);
      } else if (item.what == host_request::kind::write) {
        writer.write(item.target, remote, {item.local, item.lkey}, item.bytes);
      } else if (qp.values == 0) {
        writer.write_value(item.target, remote, item.word, item.bytes);
      } else {
        uint64_t& value = reinterpret_cast<uint64_t*>(qp.values)[writer.number & (qp.depth - 1)];
        store_release(context, &value, item.word);
        writer.write(item.target, remote, {reinterpret_cast<uint64_t>(&value), qp.values_lkey}, item.bytes);
      }
      return ep_efa_request{item.remote, peer, item.slot};
    };
    ep_kernel_status status{};
    if (efa_post<EP_EFA_SHARE_DEVICE>(context, lone_poster<fast_context>{context}, qp, batch.size(), build, {peer, false}, &status) == efa_refused) return;
  }
}

// Nothing of it will be read any more. Under the pair's lock.
void rank_nic::give_up(int32_t peer, host_pair& pair) {
  if (!pair.entries.empty()) endpoints_->cut_host(peer);
  pair.entries.clear();
  pair.cells.clear();
  pair.landed = pair.posted = pair.items_posted = 0;
}

request_state rank_nic::look(int32_t peer, uint64_t number) {
  ep_efa_qp& qp = endpoints_->host_qp(peer);
  host_pair& pair = *pairs_[static_cast<size_t>(peer)];
  const std::lock_guard lock(pair.mutex);
  if (pair.ended >= number) return request_state::done;
  if (pair.stopped) return request_state::failed;
  advance(peer, pair);
  if (pair.ended >= number) return request_state::done;
  if (!broken(qp)) return request_state::pending;
  give_up(peer, pair);
  return request_state::failed;
}

uint64_t rank_nic::accepted(int32_t peer) {
  host_pair& pair = *pairs_[static_cast<size_t>(peer)];
  const std::lock_guard lock(pair.mutex);
  return pair.accepted;
}

pair_failure rank_nic::failure_of(int32_t peer) {
  pair_failure found = failure_in(endpoints_->host_qp(peer));
  found.peer = peer;
  return found;
}

pair_failure rank_nic::kernel_failure() {
  const uint64_t first = std::atomic_ref<uint64_t>(endpoints_->device().broken).load(std::memory_order_acquire);
  return first == 0 ? pair_failure{} : failure_in(endpoints_->kernel_qp(static_cast<uint32_t>(first - 1)));
}

} // namespace ep::efa
