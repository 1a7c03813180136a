// Connections, memory and events of the queue pairs in queues.cpp.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "queues.hpp"

namespace ep::ibgda {
namespace {

failure mismatch(int32_t rank, const std::string& text) {
  return {EP_STATUS_MISMATCH, 0, "connection data of rank " + std::to_string(rank) + " " + text};
}

const char* link_name(uint32_t link) { return link == EP_IBGDA_LINK_ETHERNET ? "Ethernet" : link == EP_IBGDA_LINK_INFINIBAND ? "InfiniBand" : "an unknown link"; }

uint8_t link_of(dl::mlx5_link link) { return link == dl::mlx5_link::ethernet ? EP_IBGDA_LINK_ETHERNET : EP_IBGDA_LINK_INFINIBAND; }

// Routers spread flows by the UDP source port, so each queue pair gets one that looks random; the same two numbers give the same one.
uint16_t udp_sport_of(uint32_t qpn, uint32_t remote_qpn) {
  const uint32_t mixed = (qpn * 0x9e3779b1u) ^ (remote_qpn * 0x85ebca6bu);
  return static_cast<uint16_t>(0xc000u | (mixed >> 18));
}

std::string hexadecimal(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", value);
  return text;
}

std::span<const uint8_t> bytes_of(const void* begin, uint64_t bytes) { return {static_cast<const uint8_t*>(begin), bytes}; }

uint64_t connection_bytes(uint32_t pairs) { return sizeof(ep_ibgda_peer) + uint64_t{pairs} * 2 * sizeof(uint32_t); }

constexpr uint8_t log_outstanding_default = 4; // 16 atomics and reads: what every mlx5 device can do

} // namespace

std::vector<uint8_t> rank_queues::connection() const {
  const uint64_t bytes = connection_bytes(pair_count());
  ep_ibgda_peer peer{};
  peer.header = {EP_MAGIC_IBGDA_PEER, EP_ABI_MAJOR, EP_ABI_MINOR, 0, static_cast<uint32_t>(bytes)};
  peer.rank = options_.rank;
  peer.world_size = options_.world_size;
  peer.qps_per_peer = options_.qps_per_peer;
  std::memcpy(peer.gid, port_.gid.gid.raw.data(), sizeof peer.gid);
  peer.lid = port_.facts.lid;
  peer.link = link_of(port_.facts.link);
  peer.mtu = options_.mtu == 0 ? port_.facts.active_mtu : std::min(options_.mtu, port_.facts.active_mtu);
  peer.log_max_message = log_max_message_;
  peer.log_outstanding = log_outstanding_default;
  peer.roce_version = port_.gid.gid.type == dl::mlx5_gid_type::roce_v2 ? 2 : port_.gid.gid.type == dl::mlx5_gid_type::roce_v1 ? 1 : 0;
  std::vector<uint8_t> out(bytes);
  std::memcpy(out.data(), &peer, sizeof peer);
  uint8_t* qpn = out.data() + sizeof peer;
  uint8_t* starting_psn = qpn + pair_count() * sizeof(uint32_t);
  for (const pair& one : pairs_) {
    std::memcpy(std::exchange(qpn, qpn + sizeof(uint32_t)), &one.qpn, sizeof(uint32_t));
    std::memcpy(std::exchange(starting_psn, starting_psn + sizeof(uint32_t)), &one.starting_psn, sizeof(uint32_t));
  }
  return out;
}

result<rank_queues::remote_end> rank_queues::read_peer(int32_t rank, const std::vector<uint8_t>& bytes) const {
  remote_end end;
  ep_ibgda_peer& peer = end.peer;
  const uint64_t expected = connection_bytes(pair_count());
  if (bytes.size() < sizeof peer) return mismatch(rank, "has " + std::to_string(bytes.size()) + " bytes, at least " + std::to_string(sizeof peer) + " were expected");
  std::memcpy(&peer, bytes.data(), sizeof peer);
  if (peer.header.magic != EP_MAGIC_IBGDA_PEER) return mismatch(rank, "is something else: magic " + hexadecimal(peer.header.magic));
  if (peer.header.abi_major != EP_ABI_MAJOR) {
    failure why = mismatch(rank, "has ABI " + std::to_string(peer.header.abi_major) + "." + std::to_string(peer.header.abi_minor) + ", here it is " + std::to_string(EP_ABI_MAJOR) + "." + std::to_string(EP_ABI_MINOR));
    why.status = EP_STATUS_ABI_MISMATCH;
    return why;
  }
  if (peer.rank != rank) return mismatch(rank, "is of rank " + std::to_string(peer.rank));
  if (peer.world_size != options_.world_size) return mismatch(rank, "is of a world of " + std::to_string(peer.world_size) + ", here it is " + std::to_string(options_.world_size));
  if (peer.qps_per_peer != options_.qps_per_peer) {
    return mismatch(rank, "has " + std::to_string(peer.qps_per_peer) + " queue pairs of each peer, here it is " + std::to_string(options_.qps_per_peer) + ": set the same number on all ranks");
  }
  if (bytes.size() != expected || peer.header.byte_length != expected) return mismatch(rank, "has " + std::to_string(bytes.size()) + " bytes, " + std::to_string(expected) + " were expected");
  const uint8_t link = link_of(port_.facts.link);
  if (peer.link != link) {
    return mismatch(rank, std::string("says that its port is ") + link_name(peer.link) + ", the port of " + port_.device->name() + " here is " + link_name(link) + ": choose devices of one network with the device filter");
  }
  const bool second_version = port_.gid.gid.type == dl::mlx5_gid_type::roce_v2;
  if (link == EP_IBGDA_LINK_ETHERNET && (peer.roce_version == 2) != second_version) {
    return mismatch(rank, "says RoCE v" + std::to_string(peer.roce_version) + ", here it is v" + (second_version ? "2" : "1") + ": name gid indices of one type");
  }
  if (peer.mtu < EP_MLX5_MTU_256 || peer.mtu > EP_MLX5_MTU_4096) return mismatch(rank, "has an impossible mtu");
  const uint8_t* numbers = bytes.data() + sizeof peer + uint64_t{static_cast<uint32_t>(options_.rank)} * options_.qps_per_peer * sizeof(uint32_t);
  const auto read = [&](std::vector<uint32_t>& into, const uint8_t* from, const char* what) -> result<nothing> {
    into.resize(options_.qps_per_peer);
    std::memcpy(into.data(), from, into.size() * sizeof(uint32_t));
    for (const uint32_t one : into) {
      if (one > 0xffffff) return mismatch(rank, std::string("has a ") + what + " of more than 24 bits: " + hexadecimal(one));
    }
    return nothing{};
  };
  if (auto done = read(end.qpn, numbers, "queue pair number"); !done.ok()) return done.why();
  if (auto done = read(end.starting_psn, numbers + pair_count() * sizeof(uint32_t), "packet number"); !done.ok()) return done.why();
  return end;
}

result<nothing> rank_queues::connect(std::span<const std::vector<uint8_t>> of_ranks) {
  if (of_ranks.size() != static_cast<size_t>(options_.world_size)) {
    return failure{EP_STATUS_INVALID, 0, "connection data of " + std::to_string(of_ranks.size()) + " ranks was given, the world has " + std::to_string(options_.world_size)};
  }
  // All of it is read before the first queue pair moves: a world that does not fit together leaves them in RST.
  std::vector<std::optional<remote_end>> remotes;
  for (int32_t rank = 0; rank < options_.world_size; ++rank) {
    remotes.emplace_back();
    if (of_ranks[static_cast<size_t>(rank)].empty() && rank != options_.rank) continue;
    auto remote = read_peer(rank, of_ranks[static_cast<size_t>(rank)]);
    if (!remote.ok()) return remote.why();
    remotes.back() = std::move(remote.value());
  }
  for (int32_t rank = 0; rank < options_.world_size; ++rank) {
    const auto& remote = remotes[static_cast<size_t>(rank)];
    auto done = remote.has_value() ? connect_peer(rank, *remote) : mark(rank, false);
    if (!done.ok()) return done;
  }
  return nothing{};
}

result<nothing> rank_queues::connect_peer(int32_t rank, const remote_end& remote) {
  const bool ethernet = port_.facts.link == dl::mlx5_link::ethernet;
  connection_spec spec;
  spec.port = port_.port;
  spec.mtu = std::min({remote.peer.mtu, port_.facts.active_mtu, options_.mtu == 0 ? uint8_t{EP_MLX5_MTU_4096} : options_.mtu});
  spec.ack_timeout = options_.ack_timeout;
  spec.retry_count = options_.retry_count;
  spec.log_max_message = std::min(log_max_message_, remote.peer.log_max_message);
  spec.log_outstanding = std::min(log_outstanding_default, remote.peer.log_outstanding);
  dl::mlx5_route& route = spec.route;
  route.port = port_.port;
  route.sgid_index = static_cast<uint8_t>(port_.gid.index);
  std::memcpy(route.dgid.data(), remote.peer.gid, route.dgid.size());
  // The first half of a GID is the subnet: across subnets InfiniBand needs a global header, too.
  route.global = ethernet || std::memcmp(remote.peer.gid, port_.gid.gid.raw.data(), 8) != 0;
  route.hop_limit = route.global ? 255 : 0;
  route.dlid = remote.peer.lid;
  route.sl = options_.service_level;
  route.traffic_class = options_.traffic_class;
  auto path = device().resolve_ah(pd_, route);
  if (!path.ok()) {
    failure why = path.why();
    why.message = "the way to rank " + std::to_string(rank) + " (" + gid_text(route.dgid) + "): " + why.message;
    return why;
  }
  spec.path = path.value();
  spec.path.gid = route.dgid;
  for (uint32_t k = 0; k < options_.qps_per_peer; ++k) {
    const uint32_t index = static_cast<uint32_t>(rank) * options_.qps_per_peer + k;
    spec.qpn = pairs_[index].qpn;
    spec.remote_qpn = remote.qpn[k];
    spec.send_psn = remote.starting_psn[k];
    spec.recv_psn = pairs_[index].starting_psn;
    spec.udp_sport = ethernet && port_.gid.gid.type == dl::mlx5_gid_type::roce_v2 ? udp_sport_of(spec.qpn, spec.remote_qpn) : 0;
    if (auto moved = modify(index, qp_init_command(spec), "RST2INIT"); !moved.ok()) return moved;
    if (auto moved = modify(index, qp_rtr_command(spec, port_.facts.link), "INIT2RTR"); !moved.ok()) return moved;
    if (auto moved = modify(index, qp_rts_command(spec), "RTR2RTS"); !moved.ok()) return moved;
  }
  return nothing{};
}

result<nothing> rank_queues::modify(uint32_t index, std::span<const uint8_t> command, const char* step) {
  std::array<uint8_t, EP_MLX5_CMD_OUT_BYTES> out{};
  auto moved = device().obj_modify(pairs_[index].qp, command, out);
  if (moved.ok()) return moved;
  failure why = moved.why();
  why.message = std::string(step) + " of queue pair " + hexadecimal(pairs_[index].qpn) + " to rank " + std::to_string(index / options_.qps_per_peer) + ": " + why.message;
  if (why.sys_errno == EREMOTEIO) why.message += " (the NIC answered " + command_answer_text(out) + ")";
  return why;
}

result<nothing> rank_queues::cut(int32_t peer) {
  if (peer < 0 || peer >= options_.world_size) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(peer) + " is not in a world of " + std::to_string(options_.world_size)};
  for (uint32_t k = 0; k < options_.qps_per_peer; ++k) {
    const uint32_t index = static_cast<uint32_t>(peer) * options_.qps_per_peer + k;
    if (auto moved = modify(index, object_command(EP_MLX5_CMD_2ERR_QP, pairs_[index].qpn), "2ERR"); !moved.ok()) {
      // One that was reset, and not connected since, takes nothing either.
      auto found = state(index);
      if (!found.ok() || found.value() != EP_MLX5_QP_STATE_RST) return moved;
    }
  }
  return nothing{};
}

result<uint32_t> rank_queues::state(uint32_t index) {
  std::array<uint8_t, EP_MLX5_QUERY_QP_OUT_BYTES> out{};
  auto asked = device().obj_query(pairs_[index].qp, object_command(EP_MLX5_CMD_QUERY_QP, pairs_[index].qpn), out);
  if (!asked.ok()) return asked.why();
  return static_cast<uint32_t>(prm_get(std::span<uint8_t>(out).subspan(EP_MLX5_QPC_AT), EP_MLX5_QPC_STATE));
}

result<registered_memory> rank_queues::register_memory(const dl::mlx5_memory& memory, uint32_t access) {
  const uint64_t end = memory.address + memory.byte_length;
  if (memory.byte_length == 0 || end < memory.address) return failure{EP_STATUS_INVALID, 0, "memory of " + std::to_string(memory.byte_length) + " bytes cannot be registered"};
  for (const registered_memory& other : memories_) {
    if (memory.address < other.memory.address + other.memory.byte_length && other.memory.address < end) {
      return failure{EP_STATUS_INVALID, 0, "memory of " + std::to_string(memory.byte_length) + " bytes overlaps a registered one of " + std::to_string(other.memory.byte_length) + ": a kernel could not tell which key to use"};
    }
  }
  auto mr = device().reg_mr(pd_, memory, access);
  if (!mr.ok()) return mr.why();
  const registered_memory made{mr.value(), memory};
  memories_.push_back(made);
  if (auto published = publish_ranges(); !published.ok()) {
    memories_.pop_back();
    (void)publish_ranges(); // of those who have heard of it
    (void)device().dereg_mr(made.mr);
    return published.why();
  }
  return made;
}

result<nothing> rank_queues::release_memory(const registered_memory& memory) {
  const auto at = std::find_if(memories_.begin(), memories_.end(), [&](const registered_memory& one) { return one.mr.handle == memory.mr.handle; });
  if (at == memories_.end()) return failure{EP_STATUS_INVALID, 0, "memory is not registered here, or was released before"};
  memories_.erase(at);
  // Kernels stop finding the range before its key dies.
  if (auto published = publish_ranges(); !published.ok()) return published;
  return device().dereg_mr(memory.mr);
}

// A block of its own for these parts, one behind the other.
result<control_block> rank_queues::placed(control_memory& source, std::initializer_list<std::span<const uint8_t>> parts) {
  uint64_t bytes = 0;
  for (const auto& part : parts) bytes += part.size();
  auto block = source.allocate((bytes + 4095) / 4096 * 4096);
  if (!block.ok()) return block;
  uint64_t at = 0;
  for (const auto& part : parts) {
    if (part.empty()) continue;
    if (auto written = source.write(block.value(), at, part.data(), part.size()); !written.ok()) return written.why();
    at += part.size();
  }
  return block;
}

result<nothing> rank_queues::publish_ranges() {
  for (bank* of : {&host_, &kernels_}) {
    if (of->count == 0) continue;
    if (auto published = publish_ranges(*of); !published.ok()) return published;
  }
  return nothing{};
}

result<nothing> rank_queues::publish_ranges(bank& of) {
  std::vector<ep_ibgda_range> ranges;
  for (const registered_memory& one : memories_) ranges.push_back({one.memory.address, one.memory.address + one.memory.byte_length, one.mr.lkey, 0});
  std::sort(ranges.begin(), ranges.end(), [](const ep_ibgda_range& a, const ep_ibgda_range& b) { return a.begin < b.begin; });
  const ep_ibgda_range_table table{ranges.size(), 0};
  auto block = placed(*of.source, {bytes_of(&table, sizeof table), bytes_of(ranges.data(), ranges.size() * sizeof(ep_ibgda_range))});
  if (!block.ok()) return block.why();
  of.range_tables.push_back(block.value());
  return of.source->publish(of.structs, of.device_offset + offsetof(ep_ibgda_device, ranges), block.value().address);
}

result<nothing> rank_queues::reroute_memory(const memory_route& route, int32_t rank, const ep_ibgda_remote& remote) {
  if (rank < 0 || rank >= options_.world_size) return failure{EP_STATUS_INVALID, 0, "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(options_.world_size)};
  const uint64_t at = sizeof(ep_ibgda_memory) + static_cast<uint64_t>(rank) * sizeof remote;
  return kernels_.source->write(route.block, at, &remote, sizeof remote);
}

result<rank_queues::memory_route> rank_queues::route_memory(std::span<const ep_ibgda_remote> remotes) {
  if (remotes.size() != static_cast<size_t>(options_.world_size)) {
    return failure{EP_STATUS_INVALID, 0, "places of " + std::to_string(remotes.size()) + " ranks were given, the world has " + std::to_string(options_.world_size)};
  }
  ep_ibgda_memory memory{};
  memory.header = {EP_MAGIC_IBGDA_MEMORY, EP_ABI_MAJOR, EP_ABI_MINOR, 0, sizeof memory};
  memory.device = device_address();
  auto block = placed(*kernels_.source, {bytes_of(&memory, sizeof memory), bytes_of(remotes.data(), remotes.size_bytes())});
  if (!block.ok()) return block.why();
  memory.remotes = block.value().address + sizeof memory;
  if (auto written = kernels_.source->write(block.value(), 0, &memory, sizeof memory); !written.ok()) return written.why();
  return memory_route{block.value().address, block.value().keep, block.value()};
}

result<std::optional<queue_event>> rank_queues::next_event() {
  dl::mlx5_event event;
  auto taken = device().poll_async(event);
  if (!taken.ok()) return taken.why();
  if (!taken.value()) return std::optional<queue_event>();
  queue_event told{event, "", -1};
  const std::string port = port_.device->name() + " port " + std::to_string(event.port);
  switch (event.kind) {
    case dl::mlx5_event_kind::port_up: told.text = port + " is up"; break;
    case dl::mlx5_event_kind::port_down: told.text = port + " is down"; break;
    case dl::mlx5_event_kind::gid_change: told.text = "the GIDs of " + port + " have changed: connections by the old ones fail"; break;
    case dl::mlx5_event_kind::device_fatal: told.text = port_.device->name() + " has failed"; break;
    case dl::mlx5_event_kind::qp_error:
    case dl::mlx5_event_kind::cq_error: {
      const bool qp = event.kind == dl::mlx5_event_kind::qp_error;
      const auto at = std::find_if(pairs_.begin(), pairs_.end(), [&](const pair& one) { return (qp ? one.qpn : one.cqn) == event.number; });
      told.text = (qp ? "queue pair " : "completion queue ") + hexadecimal(event.number);
      if (at != pairs_.end()) {
        told.peer = static_cast<int32_t>(static_cast<uint32_t>(at - pairs_.begin()) / options_.qps_per_peer);
        told.text += " to rank " + std::to_string(told.peer);
      }
      told.text += " has failed" + (event.syndrome == 0 ? std::string() : ", syndrome " + hexadecimal(event.syndrome));
      break;
    }
  }
  return std::optional<queue_event>(std::move(told));
}

} // namespace ep::ibgda
