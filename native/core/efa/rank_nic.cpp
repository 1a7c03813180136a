#include "rank_nic.hpp"

#include <algorithm>
#include <cstring>

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

} // namespace

// Kernels hold the memory, which holds this, which holds the NIC: nothing that they read goes away under them.
struct rank_nic::kernel_route final : memory_route {
  std::shared_ptr<rank_nic> nic;
  ep_efa_memory memory{};
  std::vector<ep_efa_remote> remotes;
  std::vector<ep_efa_target> targets;
  result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) override {
    return nic->prepare_source(address, bytes, keep);
  }
};

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
  if (slots > endpoints_->signal_slots_left()) {
    const bool endpoints = endpoints_->endpoints_left() < endpoints_->counters_left();
    return failure{EP_STATUS_BUSY, 0,
                   std::to_string(slots) + " signal slots need as many " + (endpoints ? "endpoints, and " : "completion counters, and ") + endpoints_->nic().name() + " has " +
                       std::to_string(endpoints_->signal_slots_left()) + " left"};
  }
  routed_memory made;
  made.memory_id = memory.device_handle().memory_id;
  if (auto offered = offer(made, memory); !offered.ok()) {
    (void)take_down(made);
    return offered.why();
  }
  memories_.push_back(std::move(made));
  return memories_.back().part;
}

result<nothing> rank_nic::offer(routed_memory& made, const symmetric_memory& memory) {
  const uint64_t slots = memory.signal_slots();
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
  if (auto signals = make_signals(made, memory); !signals.ok()) return signals;
  if (slots != 0) {
    head.cells = reinterpret_cast<uint64_t>(made.control->data()) + slots * sizeof(counter_words);
    head.cells_rkey = made.cells.rkey;
  }
  made.part.assign(part_bytes(slots), 0);
  std::memcpy(made.part.data(), &head, sizeof head);
  for (size_t slot = 0; slot < slots; ++slot) {
    std::memcpy(made.part.data() + sizeof head + slot * sizeof(dl::efa_address), &made.signals[slot].address, sizeof(dl::efa_address));
  }
  return nothing{};
}

result<std::vector<uint8_t>> rank_nic::part(const symmetric_memory& memory) const {
  const routed_memory* known = find(memory);
  if (known == nullptr || known->part.empty()) return failure{EP_STATUS_INVALID, 0, "the memory was not registered with this NIC"};
  return known->part;
}

result<nothing> rank_nic::renew() {
  sweep_sources();
  std::vector<std::unique_lock<std::mutex>> held; // whoever looks for the end of a request finds all of it before, or after
  for (const auto& pair : pairs_) held.emplace_back(pair->mutex);
  for (const auto& pair : pairs_) {
    if (pair->stopped) return failure{EP_STATUS_CLOSED, 0, "the NIC was closed"};
  }
  for (const auto& pair : pairs_) {
    if (pair->accepted != pair->ended) pair->lost.emplace_back(pair->ended, pair->accepted);
    pair->ended = pair->accepted;
  }
  for (const routed_memory& one : memories_) {
    if (one.board && symmetric_memory::find(one.memory_id)) one.board->fold(); // its counters go
  }
  // Their sources are read no more once their endpoints are gone.
  auto renewed = endpoints_->renew();
  for (const auto& pair : pairs_) {
    pair->entries.clear();
    pair->cells.clear();
    pair->gone.clear();
    pair->landed = pair->posted = pair->items_posted = 0;
  }
  if (!renewed.ok()) return renewed;
  for (routed_memory& one : memories_) {
    if (auto ended = take_down(one); !ended.ok()) return ended;
  }
  for (routed_memory& one : memories_) {
    const auto memory = symmetric_memory::find(one.memory_id);
    if (!memory) continue;
    if (auto offered = offer(one, *memory); !offered.ok()) return offered;
  }
  return nothing{};
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
    if (auto woken = hooks.region_wake(made.cells, memory.context().wake()); !woken.ok()) return woken;
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
      if (auto woken = hooks.counter_wake(counter.value(), memory.context().wake()); !woken.ok()) return woken;
    }
    dl::efa_endpoint_spec spec;
    spec.depth = 2;
    spec.cq = made.cq;
    spec.arrived = counter.value();
    auto endpoint = nic.create_endpoint(spec);
    if (!endpoint.ok()) return endpoint.why();
    made.signals.push_back(endpoint.value());
    endpoints_->endpoints_taken(-1);
  }
  made.board = std::make_shared<signal_board>(std::span<uint64_t>(memory.own_signals(), slots), std::span<const counter_words>(counts, slots), std::span<const uint64_t>(cells, cell_count));
  made.waits = memory.shared_context();
  made.waits->progress().add(made.board.get(), [board = made.board] {
    board->fold();
    return false;
  });
  return nothing{};
}

result<rank_nic::remote_part> rank_nic::read_part(size_t rank, uint64_t slots, const std::vector<uint8_t>& bytes) {
  part_head head{};
  if (bytes.size() == part_bytes(slots)) std::memcpy(&head, bytes.data(), sizeof head);
  if (head.made != 1 || head.slots != slots) return failure{EP_STATUS_MISMATCH, 0, "rank " + std::to_string(rank) + " describes a memory with other signal slots"};
  remote_part part;
  part.here = true;
  part.data = head.data;
  part.data_rkey = head.data_rkey;
  part.cells = head.cells + static_cast<uint64_t>(context_->rank()) * slots * 8;
  part.cells_rkey = head.cells_rkey;
  for (size_t slot = 0; slot < slots; ++slot) {
    dl::efa_address address;
    std::memcpy(&address, bytes.data() + sizeof head + slot * sizeof address, sizeof address);
    auto peer = endpoints_->nic().insert_address(endpoints_->first(), address);
    if (!peer.ok()) {
      forget_part(part);
      return peer.why();
    }
    part.signals.push_back(peer.value());
  }
  return part;
}

void rank_nic::forget_part(remote_part& part) {
  for (const dl::efa_peer& peer : part.signals) (void)endpoints_->nic().remove_address(peer);
  part = {};
}

// Zeroes of a rank that is not reached.
void rank_nic::tell_kernels_part(kernel_route& kernels, size_t rank, const remote_part& part) const {
  const auto world = static_cast<size_t>(context_->world_size());
  kernels.remotes[rank] = {part.data, part.data_rkey, 0};
  kernels.targets[rank] = part.here ? endpoints_->data_target(static_cast<int32_t>(rank)) : ep_efa_target{};
  const size_t slots = kernels.targets.size() / world - 1;
  for (size_t slot = 0; slot < slots; ++slot) {
    ep_efa_target& target = kernels.targets[(1 + slot) * world + rank];
    target = part.here ? ep_efa_target{part.signals[slot].ah, part.signals[slot].qpn, part.signals[slot].qkey} : ep_efa_target{};
  }
}

void rank_nic::tell_kernels(kernel_route& held, const routed_memory& known, const symmetric_memory& memory) const {
  ep_efa_memory& kernels = held.memory;
  kernels.header = {EP_MAGIC_EFA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof kernels};
  kernels.device = reinterpret_cast<uint64_t>(&endpoints_->device());
  kernels.remotes = reinterpret_cast<uint64_t>(held.remotes.data());
  kernels.address = reinterpret_cast<uint64_t>(memory.own_data());
  kernels.byte_length = memory.byte_length();
  kernels.targets = reinterpret_cast<uint64_t>(held.targets.data());
  kernels.lkey = known.data ? known.data->mr.lkey : 0;
  for (size_t rank = 0; rank < known.remotes.size(); ++rank) tell_kernels_part(held, rank, known.remotes[rank]);
}

result<nothing> rank_nic::replace_part(symmetric_memory& memory, int32_t rank, const std::vector<uint8_t>& part) {
  auto* known = const_cast<routed_memory*>(find(memory));
  const auto held = known == nullptr ? nullptr : known->kernels.lock();
  if (held == nullptr) return failure{EP_STATUS_INVALID, 0, "the memory was not routed by this NIC"};
  if (!endpoints_->connected()) return failure{EP_STATUS_INVALID, 0, "the NIC does not know the addresses of the other ranks yet: connect() comes first"};
  const auto world = static_cast<size_t>(context_->world_size());
  const auto at = static_cast<size_t>(rank);
  if (rank < 0 || at >= world) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not of the world"};
  if (known->remotes.empty()) { // since renew()
    known->remotes.resize(world);
    tell_kernels(*held, *known, memory);
  }
  // HAZARD: before the others come in: addresses that are alike have one name.
  forget_part(known->remotes[at]);
  auto read = read_part(at, memory.signal_slots(), part);
  if (read.ok()) known->remotes[at] = std::move(read.value());
  tell_kernels_part(*held, at, known->remotes[at]);
  if (!read.ok()) return read.why();
  return nothing{};
}

result<nothing> rank_nic::route(symmetric_memory& memory, std::span<const std::vector<uint8_t>> parts) {
  auto* known = const_cast<routed_memory*>(find(memory));
  if (known == nullptr) return failure{EP_STATUS_INVALID, 0, "the memory was not registered with this NIC"};
  if (!endpoints_->connected()) return failure{EP_STATUS_INVALID, 0, "the NIC does not know the addresses of the other ranks yet: connect() comes first"};
  if (!known->remotes.empty()) return failure{EP_STATUS_INVALID, 0, "the memory was routed before"};
  const auto world = static_cast<size_t>(context_->world_size());
  const uint64_t slots = memory.signal_slots();
  if (parts.size() != world) return failure{EP_STATUS_INVALID, 0, "parts of " + std::to_string(parts.size()) + " ranks were given, the world has " + std::to_string(world)};
  // All ranks, or none: posts find a rank's part by its number.
  std::vector<remote_part> remotes(world);
  for (size_t rank = 0; rank < world; ++rank) {
    if (parts[rank].empty()) continue;
    auto part = read_part(rank, slots, parts[rank]);
    if (!part.ok()) {
      for (remote_part& one : remotes) forget_part(one);
      return part.why();
    }
    remotes[rank] = std::move(part.value());
  }
  // HAZARD: kernels have the addresses of these arrays from the first time on.
  auto held = known->kernels.lock();
  const bool known_to_kernels = held != nullptr;
  if (!known_to_kernels) {
    held = std::make_shared<kernel_route>();
    held->nic = shared_from_this();
    held->remotes.resize(world);
    held->targets.resize((1 + slots) * world);
  }
  known->remotes = std::move(remotes);
  tell_kernels(*held, *known, memory);
  if (known_to_kernels) return nothing{};
  known->kernels = held;
  const auto address = reinterpret_cast<uint64_t>(&held->memory);
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

// Queue pairs before what they write to. What it has given back it does not name any more.
result<nothing> rank_nic::take_down(routed_memory& memory) {
  dl::efa_device& nic = endpoints_->nic();
  result<nothing> ended = nothing{};
  const auto keep = [&ended](const result<nothing>& done) {
    if (ended.ok() && !done.ok()) ended = done.why();
  };
  if (memory.board) memory.waits->progress().remove(memory.board.get());
  memory.board.reset();
  for (const remote_part& part : std::exchange(memory.remotes, {})) {
    for (const dl::efa_peer& peer : part.signals) keep(nic.remove_address(peer));
  }
  for (const dl::efa_endpoint& endpoint : std::exchange(memory.signals, {})) {
    keep(nic.destroy_endpoint(endpoint));
    endpoints_->endpoints_taken(1);
  }
  for (const dl::efa_counter& counter : std::exchange(memory.counters, {})) {
    keep(nic.close_counter(counter));
    endpoints_->counters_taken(1);
  }
  const dl::efa_cq cq = std::exchange(memory.cq, {});
  if (cq.handle != nullptr) keep(nic.destroy_cq(cq));
  const dl::efa_mr cells = std::exchange(memory.cells, {});
  if (cells.handle != nullptr) keep(nic.dereg_mr(cells));
  const auto data = std::exchange(memory.data, std::nullopt);
  if (data) keep(endpoints_->release_memory(*data));
  memory.part.clear();
  return ended;
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

} // namespace ep::efa
