#include "rank_nic.hpp"

#include <algorithm>

#include "device/fast.hpp"
#include "ep/device/efa_post.h"
#include "ep/device/ranges.h"

// The half of rank_nic that posts requests of the host.
namespace ep::efa {
namespace {

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

} // namespace

result<uint64_t> rank_nic::post(const symmetric_memory& memory, const host_request& request) {
  const routed_memory* known = find(memory);
  if (known == nullptr || known->remotes.empty()) return failure{EP_STATUS_INVALID, 0, "the memory belongs to another transport"};
  const auto rank = static_cast<size_t>(request.peer);
  const remote_part& part = known->remotes[rank];
  if (!part.here) return failure{EP_STATUS_PEER_LOST, 0, "nobody is in the place of rank " + std::to_string(request.peer)};
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

request_state rank_nic::host_pair::end_of(uint64_t number) const {
  const auto is_in = [&](const std::pair<uint64_t, uint64_t>& run) { return run.first < number && number <= run.second; };
  return std::any_of(lost.begin(), lost.end(), is_in) ? request_state::renewed : request_state::done;
}

request_state rank_nic::look(int32_t peer, uint64_t number) {
  host_pair& pair = *pairs_[static_cast<size_t>(peer)];
  const std::lock_guard lock(pair.mutex);
  if (pair.ended >= number) return pair.end_of(number);
  if (pair.stopped) return request_state::failed;
  const ep_efa_qp& qp = endpoints_->host_qp(peer); // renew() makes another one
  advance(peer, pair);
  if (pair.ended >= number) return pair.end_of(number);
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
