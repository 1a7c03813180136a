#include "rank_nic.hpp"

#include <algorithm>

#include "device/fast.hpp"
#include "ep/device/ibgda_endpoint.h"

namespace ep::ibgda {
namespace {

constexpr uint32_t everything = dl::MLX5_ACCESS_LOCAL_WRITE | dl::MLX5_ACCESS_REMOTE_WRITE | dl::MLX5_ACCESS_REMOTE_READ | dl::MLX5_ACCESS_REMOTE_ATOMIC;

pair_failure failure_in(const ep_ibgda_qp& qp) {
  pair_failure found;
  if (std::atomic_ref<uint64_t>(const_cast<uint64_t&>(qp.broken)).load(std::memory_order_acquire) != EP_IBGDA_BROKEN) return found;
  found.status = qp.status;
  found.syndrome = qp.syndrome;
  found.vendor_syndrome = qp.vendor_syndrome;
  found.qpn = qp.qpn;
  found.opcode = qp.opcode;
  found.index = static_cast<uint32_t>(qp.wqe & 0xffff);
  found.rkey = qp.rkey;
  found.remote_address = qp.remote_address;
  return found;
}

bool broken(const ep_ibgda_qp& qp) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(qp.broken)).load(std::memory_order_acquire) != EP_IBGDA_SOUND;
}

} // namespace

result<std::shared_ptr<rank_nic>> rank_nic::create(std::shared_ptr<rank_context> context, std::unique_ptr<dl::mlx5_driver> driver, open_port port,
                                                   queue_options options, emulator_hooks hooks, control_places places) {
  std::shared_ptr<rank_nic> made(new rank_nic);
  made->context_ = std::move(context);
  made->driver_ = std::move(driver);
  made->places_ = std::move(places);
  made->hooks_ = std::move(hooks);
  if (options.active_qps == 0) options.active_qps = options.qps_per_peer;
  options.qps_per_peer += 1;
  options.host_qps = 1;
  options.rank = made->context_->rank();
  options.world_size = made->context_->world_size();
  options.nic_wake = made->hooks_.doorbell_wake;
  std::vector<control_memory*> sources;
  for (const auto& source : made->places_.sources) sources.push_back(source.get());
  auto queues = rank_queues::create(std::move(port), options, sources);
  if (!queues.ok()) return queues.why();
  made->queues_ = std::move(queues.value());
  made->own_route_.header = {EP_MAGIC_IBGDA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof(ep_ibgda_memory)};
  made->own_route_.device = made->queues_->host_device_address();
  made->own_handle_.rank = options.rank;
  made->own_handle_.world_size = options.world_size;
  made->own_handle_.proxy = reinterpret_cast<uint64_t>(&made->own_route_);
  for (int32_t rank = 0; rank < options.world_size; ++rank) made->pairs_.push_back(std::make_unique<host_pair>());
  return made;
}

// Queues before the driver, whatever still waits included: the NIC reads no source after it.
rank_nic::~rank_nic() { queues_.reset(); }

void rank_nic::stop() {
  for (size_t peer = 0; peer < pairs_.size(); ++peer) {
    host_pair& pair = *pairs_[peer];
    const std::lock_guard lock(pair.mutex);
    pair.stopped = true;
    pair.waiting.clear();
    pair.waiting_keep.clear();
    // In the error state it reads no source.
    if (!pair.posted.empty()) (void)end_way(static_cast<int32_t>(peer));
    pair.posted.clear();
  }
}

bool rank_nic::end_way(int32_t rank) {
  const std::lock_guard lock(aside_);
  return queues_->cut(rank).ok();
}

result<nothing> rank_nic::reset_peer(int32_t rank) {
  if (rank < 0 || static_cast<size_t>(rank) >= pairs_.size()) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(pairs_.size())};
  host_pair& pair = *pairs_[static_cast<size_t>(rank)];
  const std::lock_guard lock(pair.mutex);
  {
    const std::lock_guard aside(aside_);
    if (auto reset = queues_->reset(rank); !reset.ok()) return reset;
    take_events();
    const uint32_t pairs = queues_->options().qps_per_peer;
    for (uint32_t k = 0; k < pairs; ++k) told_.erase(queues_->qpn(static_cast<uint32_t>(rank) * pairs + k));
  }
  if (pair.ended != pair.accepted) pair.lost.emplace_back(pair.ended, pair.accepted);
  pair.ended = pair.accepted;
  pair.posted.clear();
  pair.waiting.clear();
  pair.waiting_keep.clear();
  return nothing{};
}

result<nothing> rank_nic::connect_peer(int32_t rank, const std::vector<uint8_t>& connection) {
  if (rank < 0 || static_cast<size_t>(rank) >= pairs_.size()) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(pairs_.size())};
  const std::lock_guard lock(pairs_[static_cast<size_t>(rank)]->mutex);
  const std::lock_guard aside(aside_);
  return queues_->connect(rank, connection);
}

bool rank_nic::own_fault(uint64_t found) {
  const open_port& own = queues_->port();
  {
    const std::lock_guard lock(aside_);
    auto facts = own.device->query_port(own.port);
    if (!facts.ok() || (facts.value().state != dl::mlx5_port_state::active && facts.value().state != dl::mlx5_port_state::active_defer)) return true;
  }
  pair_failure broken_by;
  broken_by.syndrome = static_cast<uint32_t>(found >> EP_NIC_FOUND_SYNDROME) & 0xffu;
  broken_by.qpn = static_cast<uint32_t>(found >> EP_NIC_FOUND_QPN) & 0xffffffu;
  const pair_failure why = explained(broken_by);
  return mlx5_is_local(why.first_syndrome != 0 ? why.first_syndrome : why.syndrome);
}

ep_ibgda_qp& rank_nic::pair_of(int32_t peer) const {
  const ep_ibgda_device& all = device();
  return reinterpret_cast<ep_ibgda_qp*>(all.qps)[peer];
}

// ---- memory

rank_nic::routed_memory* rank_nic::find(uint64_t memory_id) {
  const auto at = std::find_if(memories_.begin(), memories_.end(), [&](const routed_memory& one) { return one.memory_id == memory_id; });
  return at == memories_.end() ? nullptr : &*at;
}

result<ep_ibgda_remote> rank_nic::add_memory(const symmetric_memory& memory) {
  sweep_sources();
  ep_ibgda_remote own{};
  own.signals = reinterpret_cast<uint64_t>(memory.own_signals());
  own.data = reinterpret_cast<uint64_t>(memory.own_data());
  routed_memory made;
  made.memory_id = memory.device_handle().memory_id;
  const uint64_t bytes = own.data - own.signals + memory.byte_length();
  if (bytes != 0) {
    auto registered = queues_->register_memory({.address = own.signals, .byte_length = bytes}, everything);
    if (!registered.ok()) return registered.why();
    made.memory = registered.value();
    own.data_rkey = own.signals_rkey = registered.value().mr.rkey;
    if (hooks_.region_wake) {
      auto woken = hooks_.region_wake(registered.value().mr, memory.context().wake());
      if (!woken.ok()) {
        (void)queues_->release_memory(registered.value());
        return woken.why();
      }
    }
  }
  if (memory.is_over() && memory.signal_slots() != 0 && !hooks_.adds_as_processors) {
    if (auto apart = set_apart(made, memory); !apart.ok()) {
      release(made);
      return apart.why();
    }
    own.signals = made.signals->memory.address;
    own.signals_rkey = made.signals->mr.rkey;
  }
  memories_.push_back(std::move(made));
  return own;
}

result<nothing> rank_nic::set_apart(routed_memory& made, const symmetric_memory& memory) {
  auto apart = apart_words::create(memory);
  if (!apart.ok()) return apart.why();
  const dl::mlx5_memory words = apart.value()->memory();
  auto registered = queues_->register_memory(words, dl::MLX5_ACCESS_LOCAL_WRITE | dl::MLX5_ACCESS_REMOTE_ATOMIC);
  if (!registered.ok()) return registered.why();
  made.apart = std::move(apart.value());
  made.signals = registered.value();
  return hooks_.region_wake ? hooks_.region_wake(made.signals->mr, memory.context().wake()) : nothing{};
}

// Keys first: what has landed by then is added to the words, and nothing after it.
void rank_nic::release(routed_memory& memory) {
  if (memory.memory) (void)queues_->release_memory(*memory.memory);
  if (memory.signals) (void)queues_->release_memory(*memory.signals);
  memory.apart.reset();
}

remote_place rank_nic::signal_place(const symmetric_memory& memory, const ep_ibgda_remote& part, uint64_t slot, signal_op op) {
  const uint64_t at = slot * sizeof(uint64_t);
  if (op != signal_op::set) return {part.signals + at, part.signals_rkey};
  // The words themselves, which lie before the bytes alike on all ranks.
  const auto signal_bytes = static_cast<uint64_t>(memory.own_data() - reinterpret_cast<const uint8_t*>(memory.own_signals()));
  return {part.data - signal_bytes + at, part.data_rkey};
}

result<rank_nic::kernel_route> rank_nic::route_part(uint64_t memory_id, std::span<const ep_ibgda_remote> remotes) {
  routed_memory* known = find(memory_id);
  if (known == nullptr) return failure{EP_STATUS_INVALID, 0, "the memory was not registered with this NIC"};
  auto routed = queues_->route_memory(remotes);
  if (!routed.ok()) return routed.why();
  // Kernels hold the memory, which holds the route, which holds the NIC: nothing that they read goes away under them.
  struct held_route final : memory_route {
    std::shared_ptr<rank_nic> nic;
    std::shared_ptr<void> block;
    result<nothing> prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) override {
      return nic->prepare_source(address, bytes, keep);
    }
    bool serves_host_kernels() const override { return !nic->for_gpu(); }
    bool end_way(int32_t rank) override { return nic->end_way(rank); }
    bool own_fault(uint64_t found) override { return nic->own_fault(found); }
  };
  auto held = std::make_shared<held_route>();
  held->nic = shared_from_this();
  held->block = routed.value().keep;
  known->remotes.assign(remotes.begin(), remotes.end());
  known->route = routed.value();
  return kernel_route{std::move(held), routed.value().address};
}

result<nothing> rank_nic::route(symmetric_memory& memory, std::span<const ep_ibgda_remote> remotes) {
  auto routed = route_part(memory.device_handle().memory_id, remotes);
  if (!routed.ok()) return routed.why();
  return memory.connect_by_nic(std::move(routed.value().route), EP_MEMORY_IBGDA, routed.value().address);
}

result<ep_ibgda_remote> rank_nic::add_part(uint64_t memory_id, const control_block& block, uint64_t signal_bytes, uint64_t byte_length) {
  sweep_sources();
  auto registered = queues_->register_memory(block.part(0, signal_bytes + byte_length), everything);
  if (!registered.ok()) return registered.why();
  routed_memory made;
  made.memory_id = memory_id;
  made.memory = registered.value();
  memories_.push_back(std::move(made));
  const uint32_t key = registered.value().mr.rkey;
  return ep_ibgda_remote{block.address + signal_bytes, block.address, key, key};
}

void rank_nic::remove_part(uint64_t memory_id) {
  routed_memory* known = find(memory_id);
  if (known == nullptr) return;
  release(*known);
  memories_.erase(memories_.begin() + (known - memories_.data()));
}

result<nothing> rank_nic::replace_remote(const symmetric_memory& memory, int32_t rank, const ep_ibgda_remote& remote) {
  routed_memory* known = find(memory);
  if (known == nullptr || known->remotes.empty()) return failure{EP_STATUS_INVALID, 0, "the memory was not routed by this NIC"};
  if (rank == context_->rank()) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is this rank, which nobody replaces"};
  if (auto done = queues_->reroute_memory(known->route, rank, remote); !done.ok()) return done;
  known->remotes[static_cast<size_t>(rank)] = remote;
  return nothing{};
}

const ep_ibgda_remote* rank_nic::remote(const symmetric_memory& memory, int32_t rank) const {
  const routed_memory* known = const_cast<rank_nic*>(this)->find(memory);
  return known == nullptr || known->remotes.empty() ? nullptr : &known->remotes[static_cast<size_t>(rank)];
}

// Whose memory has gone: its addresses may be another one's by now.
void rank_nic::sweep_sources() {
  std::erase_if(sources_, [this](const registered_source& one) {
    if (!one.keep.expired()) return false;
    (void)queues_->release_memory(one.memory);
    return true;
  });
}

result<nothing> rank_nic::prepare_source(uint64_t address, uint64_t bytes, const std::shared_ptr<const void>& keep) {
  const uint64_t end = address + bytes;
  if (bytes == 0) return nothing{};
  for (const routed_memory& one : memories_) {
    if (!one.memory) continue;
    const dl::mlx5_memory& known = one.memory->memory;
    if (known.address <= address && end <= known.address + known.byte_length) return nothing{};
  }
  for (const registered_source& one : sources_) {
    if (one.begin <= address && end <= one.end && !one.keep.expired()) return nothing{};
  }
  // HAZARD: its owner alone knows until when kernels send from it, and with it goes the key.
  if (!keep) return failure{EP_STATUS_INVALID, 0, "the NIC does not know these " + std::to_string(bytes) + " bytes, whose owner it cannot hold: adopt() them first"};
  sweep_sources();
  auto registered = queues_->register_memory({.address = address, .byte_length = bytes}, dl::MLX5_ACCESS_LOCAL_WRITE);
  if (!registered.ok()) return registered.why();
  sources_.push_back({address, end, keep, registered.value()});
  return nothing{};
}

// ---- requests of the host

bool rank_nic::has_masked_swap() const { return has_atomics() && queues_->has_masked_swap() && ibgda_endpoint::holds(pair_of(0), mlx5_masked_swap_blocks); }

uint32_t rank_nic::work_item::blocks() const { return what == host_request::kind::masked_swap ? mlx5_masked_swap_blocks + 1 : 1; }

result<uint64_t> rank_nic::post(const host_request& request) {
  ep_ibgda_qp& qp = pair_of(request.peer);
  host_pair& pair = *pairs_[static_cast<size_t>(request.peer)];
  const kernel_environment environment{context_->waits(nullptr, no_deadline)};
  fast_context context{environment, 0, 1, nullptr};
  std::vector<work_item> items;
  // Nobody has such a key: that of a rank whose part is not known yet (replace_remote).
  const bool lost = (request.what != host_request::kind::none && request.remote.rkey == 0) || (request.signal != signal_op::none && request.slot.rkey == 0);
  if (lost) {
    // As what is stored to memory that stands in for another's.
  } else if (request.what == host_request::kind::word) {
    items.push_back({host_request::kind::word, false, request.remote, 0, 0, static_cast<uint32_t>(request.bytes), request.word, false});
  } else if (request.what != host_request::kind::none && request.bytes != 0) {
    uint32_t lkey = 0;
    if (!ibgda_endpoint{own_handle_}.local_key(context, request.local, request.bytes, &lkey)) {
      return failure{EP_STATUS_INVALID, 0, "the local bytes lie in no registered memory"};
    }
    const bool atomic = request.what == host_request::kind::fetch_add || request.what == host_request::kind::compare_swap || request.what == host_request::kind::masked_swap;
    if (atomic) {
      if (request.bytes != 8 || request.remote.address % 8 != 0) return failure{EP_STATUS_INVALID, 0, "an atomic is of 8 bytes at a multiple of 8"};
      if (!has_atomics()) return failure{EP_STATUS_INVALID, 0, queues_->port().device->name() + " lacks atomics of 8 bytes in the host's byte order"};
      if (request.what == host_request::kind::masked_swap && !has_masked_swap()) {
        return failure{EP_STATUS_INVALID, 0, queues_->port().device->name() + " has no masked compare-and-swap, or its queue pairs of " + std::to_string(qp.depth) + " are too short for one (8)"};
      }
      items.push_back({request.what, false, request.remote, request.local, lkey, 8, request.word, false, request.compare, request.compare_mask, request.swap_mask});
    }
    const uint64_t longest = device().max_message;
    for (uint64_t at = 0; !atomic && at < request.bytes; at += longest) {
      const auto bytes = static_cast<uint32_t>(std::min(longest, request.bytes - at));
      items.push_back({request.what, false, {request.remote.address + at, request.remote.rkey}, request.local + at, lkey, bytes, 0, false});
    }
  }
  // One store of the whole word sets a signal: in the order of the queue pair, like everything else.
  if (!lost && request.signal == signal_op::set) items.push_back({host_request::kind::word, false, request.slot, 0, 0, 8, request.value, false});
  if (!lost && request.signal == signal_op::add) items.push_back({host_request::kind::none, true, request.slot, 0, 0, 8, request.value, false});

  const std::lock_guard lock(pair.mutex);
  if (pair.stopped) return failure{EP_STATUS_CLOSED, 0, "the NIC was closed"};
  if (broken(qp)) {
    advance(pair, qp);
    const pair_failure found = failure_in(qp);
    return failure{found.status == EP_STATUS_OK ? EP_STATUS_CLOSED : found.status, 0, "the queue pair to rank " + std::to_string(request.peer) + " is broken"};
  }
  if (items.empty()) {
    // Ends with what was taken over before it.
    if (pair.accepted == pair.ended) return pair.ended = ++pair.accepted;
    items.push_back({host_request::kind::none, false, {}, 0, 0, 0, 0, false});
  }
  items.back().last = true;
  pair.waiting.insert(pair.waiting.end(), items.begin(), items.end());
  pair.waiting_keep.push_back(request.keep);
  ++pair.accepted;
  advance(pair, qp);
  return pair.accepted;
}

// Notes what has completed, then posts what there is room for. Under the pair's lock.
void rank_nic::advance(host_pair& pair, ep_ibgda_qp& qp) {
  const kernel_environment environment{context_->waits(nullptr, no_deadline)};
  fast_context context{environment, 0, 1, nullptr};
  const ibgda_endpoint endpoint{own_handle_};
  for (;;) {
    const uint64_t done = mlx5_poll<EP_IBGDA_SHARE_DEVICE>(context, qp);
    while (!pair.posted.empty() && pair.posted.front().wqe <= done) {
      pair.posted.pop_front();
      ++pair.ended;
    }
    if (pair.waiting.empty() || broken(qp)) return;
    const uint64_t taken = qp.ready;
    const uint64_t room = qp.depth - (taken - done);
    if (room == 0) return;
    // The endpoint posts half of the ring at once.
    const uint64_t count = std::min<uint64_t>(room, ibgda_endpoint::most_at_once(qp));
    if (pair.waiting.front().blocks() > count) return;
    uint64_t wqes = 0;
    std::vector<std::pair<work_item, uint32_t>> batch; // what each WQEBB is of, and which block of it
    // HAZARD: the blocks of one WQE go with one doorbell.
    while (!pair.waiting.empty() && wqes + pair.waiting.front().blocks() <= count) {
      const work_item item = pair.waiting.front();
      pair.waiting.pop_front();
      if (item.what != host_request::kind::none || item.add) {
        for (uint32_t block = 0; block < item.blocks(); ++block) batch.emplace_back(item, block);
        wqes += item.blocks();
      }
      if (item.last) {
        pair.posted.push_back({taken + wqes, std::move(pair.waiting_keep.front())});
        pair.waiting_keep.pop_front();
      }
    }
    const auto build = [&](uint64_t i, const mlx5_writer& writer) {
      const auto& [item, block] = batch[i];
      const mlx5_place remote{item.remote.address, item.remote.rkey};
      if (item.add) return writer.fetch_add8(remote, item.word, {qp.response, qp.response_lkey});
      if (item.what == host_request::kind::fetch_add) return writer.fetch_add8(remote, item.word, {item.local, item.lkey});
      if (item.what == host_request::kind::compare_swap) return writer.compare_swap8(remote, item.compare, item.word, {item.local, item.lkey});
      if (item.what == host_request::kind::masked_swap) {
        if (block == mlx5_masked_swap_blocks) return writer.nop();
        return writer.masked_swap8(block, remote, item.compare, item.compare_mask, item.word, item.swap_mask, {item.local, item.lkey});
      }
      if (item.what == host_request::kind::word) return writer.write_inline(remote, &item.word, item.bytes);
      if (item.what == host_request::kind::write) return writer.write(remote, {item.local, item.lkey}, item.bytes);
      writer.read(remote, {item.local, item.lkey}, item.bytes);
    };
    ep_kernel_status status{};
    if (wqes != 0 && !endpoint.post(context, lone_poster<fast_context>{context}, qp, wqes, build, &status)) return;
  }
}

request_state rank_nic::host_pair::end_of(uint64_t number) const {
  const auto is_in = [&](const std::pair<uint64_t, uint64_t>& run) { return run.first < number && number <= run.second; };
  return std::any_of(lost.begin(), lost.end(), is_in) ? request_state::replaced : request_state::done;
}

request_state rank_nic::look(int32_t peer, uint64_t number) {
  ep_ibgda_qp& qp = pair_of(peer);
  host_pair& pair = *pairs_[static_cast<size_t>(peer)];
  const std::lock_guard lock(pair.mutex);
  if (pair.ended >= number) return pair.end_of(number);
  if (pair.stopped) return request_state::failed;
  advance(pair, qp);
  if (pair.ended >= number) return pair.end_of(number);
  const pair_failure found = failure_in(qp);
  if (found.status == EP_STATUS_OK) return request_state::pending;
  // A connection carries requests out in their order, so those before the one that failed are done, whose completions may not have been written. Where the
  // first failure's completion was overwritten by that of a flushed request, nobody knows which it was.
  if (found.syndrome != 0 && found.syndrome != EP_MLX5_SYNDROME_FLUSHED) {
    for (; !pair.posted.empty() && pair.posted.front().wqe <= qp.wqe; pair.posted.pop_front()) ++pair.ended;
  }
  // Nothing of the rest will be read any more.
  pair.posted.clear();
  pair.waiting.clear();
  pair.waiting_keep.clear();
  return pair.ended >= number ? request_state::done : request_state::failed;
}

uint64_t rank_nic::accepted(int32_t peer) {
  host_pair& pair = *pairs_[static_cast<size_t>(peer)];
  const std::lock_guard lock(pair.mutex);
  return pair.accepted;
}

// Under aside_.
void rank_nic::take_events() {
  for (auto next = queues_->next_event(); next.ok() && next.value().has_value(); next = queues_->next_event()) {
    const dl::mlx5_event& event = next.value()->event;
    if (event.kind == dl::mlx5_event_kind::qp_error) told_.emplace(event.number, event.syndrome);
  }
}

// In a collapsed queue completions of flushed requests overwrite that of the one that failed. The event of the failure comes apart from them.
pair_failure rank_nic::explained(pair_failure found) {
  if (found.syndrome != EP_MLX5_SYNDROME_FLUSHED) return found;
  const std::lock_guard lock(aside_);
  take_events();
  const auto at = told_.find(found.qpn);
  if (at != told_.end()) found.first_syndrome = at->second;
  return found;
}

pair_failure rank_nic::failure_of(int32_t peer) { return explained(failure_in(pair_of(peer))); }

pair_failure rank_nic::kernel_failure(int32_t* peer) {
  *peer = -1;
  auto all = queues_->device_now();
  if (!all.ok() || all.value().broken == 0) return {};
  // Twice: a copy out of a GPU says nothing of the order in which its words were read.
  const auto index = static_cast<uint32_t>(all.value().broken - 1);
  auto qp = queues_->pair_now(index);
  if (!qp.ok() || qp.value().broken != EP_IBGDA_BROKEN) return {};
  qp = queues_->pair_now(index);
  if (!qp.ok()) return {};
  *peer = qp.value().peer;
  return explained(failure_in(qp.value()));
}

} // namespace ep::ibgda
