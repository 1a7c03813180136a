// The control path's own behaviour over a scripted table: what it asks for, in which order, what it hands to kernels, what it gives back.
#include "core/ibgda/queues.hpp"

#include <cstring>

#include "check.hpp"
#include "ep/abi/mlx5_cqe.h"
#include "scripted_nic.hpp"

namespace {

using namespace ep::ibgda;
using namespace ep::test;

bool says(const std::string& message, const std::string& part) {
  const bool found = message.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "  '%s' does not say '%s'\n", message.c_str(), part.c_str());
  return found;
}

ep::failure fine() { return {EP_STATUS_OK, 0, ""}; }

// Memory that pretends to lie elsewhere; it can be told not to be had.
class pretended_memory final : public control_memory {
 public:
  pretended_memory(placement where, ep::failure refuses = fine()) : where_(where), refuses_(std::move(refuses)) {}
  placement where() const override { return where_; }
  ep::result<control_block> allocate(uint64_t bytes) override {
    if (refuses_.status != EP_STATUS_OK) return refuses_;
    auto block = host_->allocate(bytes);
    if (block.ok() && where_ == placement::gpu_dmabuf) {
      block.value().dmabuf_fd = 42;
      block.value().dmabuf_offset = 0x10000;
    }
    return block;
  }
  ep::result<ep::nothing> write(const control_block& block, uint64_t offset, const void* bytes, uint64_t length) override { return host_->write(block, offset, bytes, length); }
  ep::result<ep::nothing> fill(const control_block& block, uint64_t offset, uint8_t value, uint64_t length) override { return host_->fill(block, offset, value, length); }
  ep::result<ep::nothing> publish(const control_block& block, uint64_t offset, uint64_t value) override { return host_->publish(block, offset, value); }
  ep::result<ep::nothing> read(const control_block& block, uint64_t offset, void* into, uint64_t length) override { return host_->read(block, offset, into, length); }
  ep::result<uint64_t> map_doorbell(uint64_t address, uint64_t) override {
    ++mapped;
    return address + (uint64_t{1} << 40);
  }
  void unmap_doorbell(uint64_t) override { --mapped; }
  int mapped = 0;

 private:
  placement where_;
  ep::failure refuses_;
  std::unique_ptr<control_memory> host_ = host_control_memory();
};

ep::result<std::unique_ptr<rank_queues>> create(nic_script& script, const queue_options& options, std::vector<control_memory*> sources) {
  scripted_driver driver(script);
  auto port = device_open(driver, {});
  EP_CHECK(port.ok());
  return rank_queues::create(std::move(port.value()), options, sources);
}

queue_options two_ranks(int32_t rank) {
  queue_options options;
  options.rank = rank;
  options.world_size = 2;
  options.qps_per_peer = 2;
  options.depth = 128;
  return options;
}

const ep_ibgda_device& device_of(const rank_queues& queues) { return *reinterpret_cast<const ep_ibgda_device*>(queues.device_address()); }
const ep_ibgda_qp& qp_of(const rank_queues& queues, uint32_t index) { return reinterpret_cast<const ep_ibgda_qp*>(device_of(queues).qps)[index]; }

uint64_t opcode(const std::vector<uint8_t>& command) { return prm_get(command, EP_MLX5_CMD_IN_OPCODE); }

void fills_the_structs(bool collapsed) {
  nic_script script;
  const auto host = host_control_memory();
  queue_options options = two_ranks(1);
  options.collapsed = collapsed;
  options.nic_wake = 0x5555;
  options.sharing = EP_IBGDA_SHARE_THREAD;
  auto made = create(script, options, {host.get()});
  EP_CHECK(made.ok());
  rank_queues& queues = *made.value();
  const ep_ibgda_device& device = device_of(queues);
  EP_CHECK_EQ(device.header.magic, EP_MAGIC_IBGDA);
  EP_CHECK_EQ(device.header.byte_length, uint32_t{sizeof device});
  EP_CHECK_EQ(device.rank, 1);
  EP_CHECK_EQ(device.world_size, 2);
  EP_CHECK_EQ(device.qps_per_peer, 2u);
  EP_CHECK_EQ(device.active_qps, 2u);
  EP_CHECK_EQ(device.sharing, EP_IBGDA_SHARE_THREAD);
  EP_CHECK_EQ(device.max_message, uint64_t{1} << 30);
  EP_CHECK(device.ranges != 0);
  const ep::dl::mlx5_memory umem = script.umems.at(0);
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for (uint32_t index = 0; index < 4; ++index) {
    const ep_ibgda_qp& qp = qp_of(queues, index);
    EP_CHECK_EQ(qp.header.magic, EP_MAGIC_IBGDA_QP);
    EP_CHECK_EQ(qp.index, index);
    EP_CHECK_EQ(qp.peer, static_cast<int32_t>(index / 2));
    EP_CHECK_EQ(qp.depth, 128u);
    EP_CHECK_EQ(qp.cq_depth, collapsed ? 1u : 128u);
    EP_CHECK_EQ(qp.flags, collapsed ? EP_IBGDA_CQ_COLLAPSED : 0u);
    EP_CHECK_EQ(qp.cq_dbr != 0, !collapsed);
    EP_CHECK_EQ(qp.qpn, queues.qpn(index));
    EP_CHECK_EQ(qp.nic_wake, uint64_t{0x5555});
    EP_CHECK_EQ(qp.bf % 4096, uint64_t{0x800});
    EP_CHECK(qp.response_lkey != 0);
    EP_CHECK_EQ(qp.sq % 4096, uint64_t{0});
    // "Nothing done yet": the counter 0xffff and the opcode 0xf.
    for (uint64_t at = 0; at < 64; ++at) EP_CHECK_EQ(int{reinterpret_cast<const uint8_t*>(qp.cq)[at]}, 0xff);
    EP_CHECK_EQ(*reinterpret_cast<const uint64_t*>(qp.dbr), uint64_t{0});
    for (const auto& [begin, bytes] : {std::pair{qp.sq, uint64_t{128 * 64}}, {qp.cq, uint64_t{collapsed ? 64u : 128u * 64u}}, {qp.dbr, uint64_t{64}}, {qp.response, uint64_t{64}}}) {
      EP_CHECK(begin >= umem.address && begin + bytes <= umem.address + umem.byte_length);
      for (const auto& [other, length] : parts) EP_CHECK(begin + bytes <= other || other + length <= begin);
      parts.emplace_back(begin, bytes);
    }
  }
  // The commands name the same places, as offsets into the umem.
  uint32_t index = 0;
  for (const auto& command : script.commands) {
    if (opcode(command) != EP_MLX5_CMD_CREATE_QP) continue;
    const auto qpc = std::span(command).subspan(EP_MLX5_QPC_AT);
    EP_CHECK_EQ(umem.address + prm_get(command, EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET), qp_of(queues, index).sq);
    EP_CHECK_EQ(umem.address + prm_get(qpc, EP_MLX5_QPC_DBR_ADDR), qp_of(queues, index).dbr);
    EP_CHECK_EQ(prm_get(qpc, EP_MLX5_QPC_LOG_SQ_SIZE), uint64_t{7});
    EP_CHECK_EQ(prm_get(qpc, EP_MLX5_QPC_USER_INDEX), uint64_t{index});
    ++index;
  }
  EP_CHECK_EQ(index, 4u);
  EP_CHECK(queues.close().ok());
  EP_CHECK(script.alive.empty());
}

// Of the numbers behind ep_ibgda_peer: those of queue pairs, then those of packets.
uint32_t number_in(const std::vector<uint8_t>& connection, uint64_t at) {
  uint32_t found = 0;
  std::memcpy(&found, connection.data() + sizeof(ep_ibgda_peer) + at * sizeof found, sizeof found);
  return found;
}

// Both ends' commands mirror each other.
void connects() {
  nic_script scripts[2];
  const auto host = host_control_memory();
  std::unique_ptr<rank_queues> queues[2];
  std::vector<std::vector<uint8_t>> said;
  for (int32_t rank = 0; rank < 2; ++rank) {
    scripts[rank].devices["mlx5_0"][0].gids[3].raw[15] = static_cast<uint8_t>(rank + 1);
    scripts[rank].devices["mlx5_0"][0].facts.active_mtu = rank == 0 ? 5 : 3;
    scripts[rank].next = rank == 0 ? 0x100 : 0x900;
    auto made = create(scripts[rank], two_ranks(rank), {host.get()});
    EP_CHECK(made.ok());
    queues[rank] = std::move(made.value());
    said.push_back(queues[rank]->connection());
  }
  for (int rank = 0; rank < 2; ++rank) {
    EP_CHECK_EQ(said[static_cast<size_t>(rank)].size(), sizeof(ep_ibgda_peer) + 8 * sizeof(uint32_t));
    scripts[rank].commands.clear();
    EP_CHECK(queues[rank]->connect(said).ok());
  }
  for (int rank = 0; rank < 2; ++rank) {
    EP_CHECK_EQ(scripts[rank].commands.size(), size_t{12});
    EP_CHECK_EQ(scripts[rank].routes.size(), size_t{2});
    EP_CHECK(scripts[rank].routes[0].global);
    EP_CHECK_EQ(int{scripts[rank].routes[0].sgid_index}, 3);
    for (uint32_t index = 0; index < 4; ++index) {
      const int peer = static_cast<int>(index / 2);
      const auto& init = scripts[rank].commands[index * 3];
      const auto& rtr = scripts[rank].commands[index * 3 + 1];
      const auto& rts = scripts[rank].commands[index * 3 + 2];
      EP_CHECK_EQ(opcode(init), uint64_t{EP_MLX5_CMD_RST2INIT_QP});
      EP_CHECK_EQ(opcode(rtr), uint64_t{EP_MLX5_CMD_INIT2RTR_QP});
      EP_CHECK_EQ(opcode(rts), uint64_t{EP_MLX5_CMD_RTR2RTS_QP});
      const auto qpc = std::span(rtr).subspan(EP_MLX5_QPC_AT);
      const auto ads = qpc.subspan(EP_MLX5_ADS_AT);
      EP_CHECK_EQ(prm_get(rtr, EP_MLX5_CMD_IN_OBJECT), uint64_t{queues[rank]->qpn(index)});
      // Queue pair k to the peer meets the peer's queue pair k to this rank.
      EP_CHECK_EQ(prm_get(qpc, EP_MLX5_QPC_REMOTE_QPN), uint64_t{queues[peer]->qpn(static_cast<uint32_t>(rank) * 2 + index % 2)});
      // Who receives says with which number the first packet comes.
      const uint32_t there = static_cast<uint32_t>(rank) * 2 + index % 2;
      EP_CHECK_EQ(prm_get(qpc, EP_MLX5_QPC_NEXT_RCV_PSN), uint64_t{number_in(said[static_cast<size_t>(rank)], 4 + index)});
      EP_CHECK_EQ(prm_get(std::span(rts).subspan(EP_MLX5_QPC_AT), EP_MLX5_QPC_NEXT_SEND_PSN), uint64_t{number_in(said[static_cast<size_t>(peer)], 4 + there)});
      // The smaller mtu, on both.
      EP_CHECK_EQ(prm_get(qpc, EP_MLX5_QPC_MTU), uint64_t{rank == 0 && peer == 0 ? 5u : 3u});
      EP_CHECK_EQ(prm_get(ads, EP_MLX5_ADS_RGID_LOW) & 0xff, uint64_t{static_cast<uint64_t>(peer) + 1});
      EP_CHECK_EQ(prm_get(ads, EP_MLX5_ADS_RMAC_LOW) & 0xff, uint64_t{static_cast<uint64_t>(peer) + 1});
      EP_CHECK(prm_get(ads, EP_MLX5_ADS_UDP_SPORT) >= 0xc000);
    }
  }
  EP_CHECK_EQ(queues[0]->state(0).value(), uint32_t{EP_MLX5_QP_STATE_RTS});
  scripts[0].commands.clear();
  EP_CHECK(queues[0]->cut(1).ok());
  EP_CHECK_EQ(scripts[0].commands.size(), size_t{2});
  EP_CHECK_EQ(opcode(scripts[0].commands[0]), uint64_t{EP_MLX5_CMD_2ERR_QP});
  EP_CHECK_EQ(prm_get(scripts[0].commands[0], EP_MLX5_CMD_IN_OBJECT), uint64_t{queues[0]->qpn(2)});
  EP_CHECK(!queues[0]->cut(2).ok());
}

// Another process comes in the place of rank 1, when its queue pairs here were used, and one is broken.
void resets(bool collapsed) {
  nic_script script;
  const auto host = host_control_memory();
  queue_options options = two_ranks(0);
  options.qps_per_peer = 3;
  options.host_qps = 1;
  options.collapsed = collapsed;
  options.depth = 4;
  std::vector<std::optional<uint32_t>> before;
  options.starting_psn = [&](std::optional<uint32_t> one) {
    before.push_back(one);
    return one.value_or(77) + 1000;
  };
  auto made = create(script, options, {host.get()});
  EP_CHECK(made.ok());
  rank_queues& queues = *made.value();
  EP_CHECK_EQ(before.size(), size_t{6});
  const auto mine = queues.connection();
  // The other half of it: what rank 1 would say.
  auto other = mine;
  reinterpret_cast<ep_ibgda_peer*>(other.data())->rank = 1;
  // A rank that is not here: its queue pairs are not touched, and whoever posts to them learns it.
  script.commands.clear();
  EP_CHECK(queues.connect(std::vector{mine, std::vector<uint8_t>()}).ok());
  EP_CHECK_EQ(script.commands.size(), size_t{9});
  const auto host_qp = [&]() -> ep_ibgda_qp& { return reinterpret_cast<ep_ibgda_qp*>(reinterpret_cast<ep_ibgda_device*>(queues.host_device_address())->qps)[1]; };
  const auto kernel_qp = [&](uint32_t index) -> ep_ibgda_qp& { return const_cast<ep_ibgda_qp&>(qp_of(queues, index)); };
  EP_CHECK_EQ(kernel_qp(1).broken, uint64_t{EP_IBGDA_SOUND});
  for (ep_ibgda_qp* qp : {&kernel_qp(2), &kernel_qp(3), &host_qp()}) {
    EP_CHECK_EQ(qp->broken, uint64_t{EP_IBGDA_BROKEN});
    EP_CHECK_EQ(qp->status, uint32_t{EP_STATUS_PEER_LOST});
  }
  EP_CHECK(queues.connect(1, other).ok());
  for (ep_ibgda_qp* qp : {&kernel_qp(2), &kernel_qp(3), &host_qp()}) EP_CHECK_EQ(qp->broken, uint64_t{EP_IBGDA_SOUND});

  // Used up to somewhere.
  auto& device = const_cast<ep_ibgda_device&>(device_of(queues));
  device.broken = 1 + 3;
  for (uint32_t index : {1u, 2u, 3u}) {
    ep_ibgda_qp& qp = kernel_qp(index);
    qp.taken = qp.ready = qp.ringer = qp.done = 7;
    *reinterpret_cast<uint64_t*>(qp.marks) = 0x7f;
    qp.polled = 6;
    qp.status = EP_STATUS_SYSTEM;
    qp.syndrome = 0x15;
    qp.broken = EP_IBGDA_BROKEN;
    std::memset(reinterpret_cast<void*>(qp.sq), 0xab, qp.depth * 64);
    std::memset(reinterpret_cast<void*>(qp.dbr), 0xab, 8);
    // Rings: the second round is full, and nobody has taken the last two entries out.
    for (uint64_t at = 0; at < qp.cq_depth; ++at) {
      uint8_t* op_own = reinterpret_cast<uint8_t*>(qp.cq) + at * 64 + 63;
      *op_own = EP_MLX5_CQE_REQ << 4 | 1;
    }
  }
  script.commands.clear();
  before.clear();
  EP_CHECK(!queues.reset(0).ok());
  EP_CHECK(!queues.reset(2).ok());
  EP_CHECK_EQ(script.commands.size(), size_t{0});
  EP_CHECK(queues.reset(1).ok());
  EP_CHECK_EQ(script.commands.size(), size_t{6});
  for (uint32_t k = 0; k < 3; ++k) {
    EP_CHECK_EQ(opcode(script.commands[k * 2]), uint64_t{EP_MLX5_CMD_QUERY_QP});
    EP_CHECK_EQ(opcode(script.commands[k * 2 + 1]), uint64_t{EP_MLX5_CMD_2RST_QP});
    EP_CHECK_EQ(prm_get(script.commands[k * 2 + 1], EP_MLX5_CMD_IN_OBJECT), uint64_t{queues.qpn(3 + k)});
    EP_CHECK_EQ(before.at(k).value(), uint32_t{script.next_receive_psn});
    EP_CHECK_EQ(number_in(queues.connection(), 6 + 3 + k), uint32_t{script.next_receive_psn} + 1000);
    EP_CHECK_EQ(number_in(queues.connection(), 6 + k), uint32_t{1077});
  }
  EP_CHECK_EQ(device.broken, uint64_t{1 + 1}); // the other one that is broken
  EP_CHECK_EQ(kernel_qp(1).taken, uint64_t{7});
  for (uint32_t index : {2u, 3u}) {
    const ep_ibgda_qp& qp = kernel_qp(index);
    EP_CHECK_EQ(qp.broken, uint64_t{EP_IBGDA_BROKEN});
    EP_CHECK_EQ(qp.status, uint32_t{EP_STATUS_PEER_LOST});
    EP_CHECK_EQ(qp.taken | qp.ready | qp.ringer | qp.done | qp.syndrome, uint64_t{0});
    EP_CHECK_EQ(*reinterpret_cast<const uint64_t*>(qp.marks), uint64_t{0});
    EP_CHECK_EQ(*reinterpret_cast<const uint64_t*>(qp.dbr), uint64_t{0});
    EP_CHECK_EQ(*reinterpret_cast<const uint64_t*>(qp.sq), uint64_t{0});
    if (collapsed) {
      for (uint64_t at = 0; at < 64; ++at) EP_CHECK_EQ(int{reinterpret_cast<const uint8_t*>(qp.cq)[at]}, 0xff);
    } else {
      EP_CHECK_EQ(qp.polled, uint64_t{8});
      EP_CHECK_EQ(*reinterpret_cast<const uint32_t*>(qp.cq_dbr), uint32_t{8} << 24);
    }
  }
  script.commands.clear();
  EP_CHECK(queues.connect(1, other).ok());
  EP_CHECK_EQ(script.commands.size(), size_t{9});
  for (ep_ibgda_qp* qp : {&kernel_qp(2), &kernel_qp(3), &host_qp()}) EP_CHECK_EQ(qp->broken, uint64_t{EP_IBGDA_SOUND});
  EP_CHECK_EQ(prm_get(std::span(script.commands[1]).subspan(EP_MLX5_QPC_AT), EP_MLX5_QPC_NEXT_RCV_PSN), uint64_t{script.next_receive_psn + 1000u});

  // What the NIC does not do is told, and which queue pair it was.
  script.fails = [](const std::string& call, int) { return call == "obj_modify" ? ep::failure{EP_STATUS_SYSTEM, EREMOTEIO, "command refused"} : fine(); };
  auto failed = queues.reset(1);
  EP_CHECK(!failed.ok());
  EP_CHECK(says(failed.why().message, "reset of queue pair 0 to rank 1"));
}

// Where nobody says otherwise, new numbers begin a good way behind the old ones, and never where those still come.
void draws_packet_numbers_apart() {
  nic_script script;
  const auto host = host_control_memory();
  auto made = create(script, two_ranks(0), {host.get()});
  EP_CHECK(made.ok());
  rank_queues& queues = *made.value();
  auto other = queues.connection();
  reinterpret_cast<ep_ibgda_peer*>(other.data())->rank = 1;
  EP_CHECK(queues.connect(std::vector{queues.connection(), other}).ok());
  for (const uint32_t awaited : {0u, 0xfffffeu, 0x7fffffu}) {
    script.next_receive_psn = awaited;
    for (int round = 0; round < 20; ++round) {
      EP_CHECK(queues.reset(1).ok());
      for (const uint64_t at : {6u, 7u}) {
        const uint32_t gap = (number_in(queues.connection(), at) - awaited) & 0xffffff;
        EP_CHECK(gap >= 1u << 22 && gap < 1u << 23);
      }
    }
  }
}

void connects_on_infiniband() {
  nic_script script;
  script.devices = {{"mlx5_0", {infiniband_port()}}};
  const auto host = host_control_memory();
  auto made = create(script, two_ranks(0), {host.get()});
  EP_CHECK(made.ok());
  auto mine = made.value()->connection();
  auto other = mine;
  ep_ibgda_peer peer;
  std::memcpy(&peer, other.data(), sizeof peer);
  peer.rank = 1;
  peer.lid = 0x99;
  peer.gid[15] = 8;
  std::memcpy(other.data(), &peer, sizeof peer);
  EP_CHECK(made.value()->connect(std::vector{mine, other}).ok());
  EP_CHECK(!script.routes.at(1).global);
  EP_CHECK_EQ(int{script.routes.at(1).dlid}, 0x99);
  const auto& rtr = script.commands.at(script.commands.size() - 2);
  const auto ads = std::span(rtr).subspan(EP_MLX5_QPC_AT + EP_MLX5_ADS_AT);
  EP_CHECK_EQ(prm_get(ads, EP_MLX5_ADS_RLID), uint64_t{0x99});
  EP_CHECK_EQ(prm_get(ads, EP_MLX5_ADS_UDP_SPORT), uint64_t{0});
  // Another subnet prefix: only a global header leads there.
  peer.gid[7] = 1;
  std::memcpy(other.data(), &peer, sizeof peer);
  EP_CHECK(made.value()->connect(std::vector{mine, other}).ok());
  EP_CHECK(script.routes.back().global);
}

void refuses_worlds_that_do_not_fit() {
  nic_script script;
  const auto host = host_control_memory();
  auto made = create(script, two_ranks(0), {host.get()});
  EP_CHECK(made.ok());
  const auto mine = made.value()->connection();
  const auto refused = [&](const char* part, uint32_t status, auto change) {
    auto other = mine;
    ep_ibgda_peer peer;
    std::memcpy(&peer, other.data(), sizeof peer);
    peer.rank = 1;
    change(peer, other);
    if (other.size() >= sizeof peer) std::memcpy(other.data(), &peer, sizeof peer);
    const size_t before = script.commands.size();
    auto connected = made.value()->connect(std::vector{mine, other});
    EP_CHECK(!connected.ok());
    if (connected.ok()) return;
    EP_CHECK_EQ(connected.why().status, status);
    EP_CHECK(says(connected.why().message, "rank 1"));
    EP_CHECK(says(connected.why().message, part));
    EP_CHECK_EQ(script.commands.size(), before); // nothing has moved
  };
  using bytes = std::vector<uint8_t>;
  refused("at least 64 were expected", EP_STATUS_MISMATCH, [](ep_ibgda_peer&, bytes& all) { all.resize(12); });
  refused("is something else", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.header.magic = 7; });
  refused("has ABI 9.", EP_STATUS_ABI_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.header.abi_major = 9; });
  refused("is of rank 0", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.rank = 0; });
  refused("of a world of 3", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.world_size = 3; });
  refused("has 4 queue pairs", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.qps_per_peer = 4; });
  refused("bytes", EP_STATUS_MISMATCH, [](ep_ibgda_peer&, bytes& all) { all.pop_back(); });
  refused("its port is InfiniBand", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.link = EP_IBGDA_LINK_INFINIBAND; });
  refused("says RoCE v1", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.roce_version = 1; });
  refused("impossible mtu", EP_STATUS_MISMATCH, [](ep_ibgda_peer& peer, bytes&) { peer.mtu = 6; });
  refused("queue pair number of more than 24 bits", EP_STATUS_MISMATCH, [](ep_ibgda_peer&, bytes& all) { all[sizeof(ep_ibgda_peer) + 3] = 1; });
  refused("packet number of more than 24 bits", EP_STATUS_MISMATCH, [](ep_ibgda_peer&, bytes& all) { all[sizeof(ep_ibgda_peer) + 4 * sizeof(uint32_t) + 3] = 1; });
  auto few = made.value()->connect(std::vector<bytes>{mine});
  EP_CHECK(!few.ok() && few.why().status == EP_STATUS_INVALID);
  script.fails = [](const std::string& call, int) { return call == "obj_modify" ? ep::failure{EP_STATUS_SYSTEM, EREMOTEIO, "command refused"} : fine(); };
  auto bad_state = made.value()->connect(std::vector{mine, [&] {
    auto other = mine;
    reinterpret_cast<ep_ibgda_peer*>(other.data())->rank = 1;
    return other;
  }()});
  EP_CHECK(!bad_state.ok());
  EP_CHECK(says(bad_state.why().message, "RST2INIT of queue pair"));
  EP_CHECK(says(bad_state.why().message, "status 0x10 (bad queue pair state)"));
}

// The order is the caller's; what is passed over is told, and nothing of it stays behind.
void falls_back_and_says_so() {
  nic_script script;
  pretended_memory dmabuf(placement::gpu_dmabuf, {EP_STATUS_SYSTEM, EOPNOTSUPP, "this GPU exports no DMA-BUF"});
  pretended_memory address(placement::gpu_address);
  const auto host = host_control_memory();
  // Memory of a GPU is refused when the first queue pair is made in it.
  script.fails = [](const std::string& call, int count) {
    return call == "CREATE_QP" && count == 1 ? ep::failure{EP_STATUS_SYSTEM, EREMOTEIO, "command refused"} : fine();
  };
  auto made = create(script, two_ranks(0), {&dmabuf, &address, host.get()});
  EP_CHECK(made.ok());
  EP_CHECK_EQ(made.value()->where(), placement::host);
  const auto& fallbacks = made.value()->fallbacks();
  EP_CHECK_EQ(fallbacks.size(), size_t{2});
  EP_CHECK_EQ(fallbacks.at(0).wished, placement::gpu_dmabuf);
  EP_CHECK(says(fallbacks.at(0).why, "this GPU exports no DMA-BUF"));
  EP_CHECK_EQ(fallbacks.at(1).wished, placement::gpu_address);
  EP_CHECK(says(fallbacks.at(1).why, "CREATE_QP of queue pair 0 to rank 0"));
  EP_CHECK(says(fallbacks.at(1).why, "status 0x3 (bad parameter), syndrome 0x0012ab34"));
  EP_CHECK_EQ(address.mapped, 0);
  EP_CHECK(made.value()->close().ok());
  EP_CHECK(script.alive.empty());
}

void uses_gpu_memory_where_it_can() {
  nic_script script;
  pretended_memory dmabuf(placement::gpu_dmabuf);
  script.fails = [](const std::string& call, int) { return call == "alloc_uar noncached" ? ep::failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "old kernel"} : fine(); };
  auto made = create(script, two_ranks(0), {&dmabuf});
  EP_CHECK(made.ok());
  EP_CHECK_EQ(made.value()->where(), placement::gpu_dmabuf);
  EP_CHECK_EQ(dmabuf.mapped, 4);
  EP_CHECK_EQ(script.umems.at(0).dmabuf_fd, 42);
  EP_CHECK_EQ(script.umems.at(0).dmabuf_offset, uint64_t{0x10000});
  EP_CHECK(qp_of(*made.value(), 0).bf >= uint64_t{1} << 40); // the posters' address, not this process's
  EP_CHECK_EQ(script.calls["alloc_uar noncached"], 4);
  EP_CHECK_EQ(script.calls["alloc_uar"], 4);
  EP_CHECK(made.value()->close().ok());
  EP_CHECK_EQ(dmabuf.mapped, 0);
}

// Doorbells of a CPU must not wait in a write buffer.
void refuses_combining_pages_for_cpus() {
  nic_script script;
  const auto host = host_control_memory();
  script.fails = [](const std::string& call, int) { return call == "alloc_uar noncached" ? ep::failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "no such page on this kernel"} : fine(); };
  auto made = create(script, two_ranks(0), {host.get()});
  EP_CHECK(!made.ok() && made.why().sys_errno == EOPNOTSUPP);
  if (!made.ok()) EP_CHECK(says(made.why().message, "doorbell page of queue pair 0 to rank 0: no such page on this kernel"));
  EP_CHECK_EQ(script.calls["alloc_uar"], 0);
}

// Every call may fail: nothing is left behind, and the text names the step.
void gives_everything_back() {
  const auto host = host_control_memory();
  for (const char* call : {"general_cmd", "alloc_pd", "umem_reg", "reg_mr", "query_eqn", "alloc_uar noncached", "CREATE_CQ", "CREATE_QP"}) {
    for (const int at : {1, 2, 4}) {
      nic_script script;
      bool reached = false;
      script.fails = [&](const std::string& name, int count) {
        if (name != call || count != at) return fine();
        reached = true;
        return ep::failure{EP_STATUS_SYSTEM, ENOMEM, "scripted"};
      };
      {
        auto made = create(script, two_ranks(0), {host.get()});
        EP_CHECK_EQ(made.ok(), !reached);
        if (!made.ok()) EP_CHECK(says(made.why().message, ": scripted"));
        if (!made.ok()) EP_CHECK_EQ(made.why().sys_errno, ENOMEM);
      }
      EP_CHECK(script.alive.empty());
    }
  }
}

void refuses_devices_that_cannot() {
  const auto host = host_control_memory();
  const auto refused = [&](auto change, queue_options options, uint32_t status, const char* part) {
    nic_script script;
    change(script);
    auto made = create(script, options, {host.get()});
    EP_CHECK(!made.ok());
    if (made.ok()) return;
    EP_CHECK_EQ(made.why().status, status);
    EP_CHECK(says(made.why().message, part));
  };
  const auto as_is = [](nic_script&) {};
  refused([](nic_script& script) { script.cqe_version = 0; }, two_ranks(0), EP_STATUS_SYSTEM, "completions of version 0");
  refused([](nic_script& script) { script.atomic_operations = 3; }, two_ranks(0), EP_STATUS_SYSTEM, "no masked fetch-add of 8 bytes");
  refused([](nic_script& script) { script.atomic_sizes = 4; }, two_ranks(0), EP_STATUS_SYSTEM, "no masked fetch-add of 8 bytes");
  queue_options options = two_ranks(0);
  for (const uint32_t depth : {0u, 1u, 100u, 65536u}) {
    options.depth = depth;
    refused(as_is, options, EP_STATUS_INVALID, "no power of two");
  }
  options = two_ranks(2);
  refused(as_is, options, EP_STATUS_INVALID, "rank 2 is not in a world of 2");
  options = two_ranks(0);
  options.active_qps = 3;
  refused(as_is, options, EP_STATUS_INVALID, "3 active queue pairs");
  options = two_ranks(0);
  options.qps_per_peer = 129;
  refused(as_is, options, EP_STATUS_INVALID, "258 queue pairs exceed what mlx5_0 has: 256");
  options = two_ranks(0);
  options.ack_timeout = 32;
  refused(as_is, options, EP_STATUS_INVALID, "ack timeout 32");
}

void keeps_the_range_table_sorted() {
  nic_script script;
  const auto host = host_control_memory();
  auto made = create(script, two_ranks(0), {host.get()});
  EP_CHECK(made.ok());
  rank_queues& queues = *made.value();
  const auto table = [&] { return reinterpret_cast<const ep_ibgda_range_table*>(device_of(queues).ranges); };
  const ep_ibgda_range_table* before = table();
  EP_CHECK_EQ(before->count, uint64_t{0});
  auto high = queues.register_memory({0x9000, 0x1000}, ep::dl::MLX5_ACCESS_LOCAL_WRITE);
  auto low = queues.register_memory({0x1000, 0x800}, ep::dl::MLX5_ACCESS_LOCAL_WRITE);
  EP_CHECK(high.ok() && low.ok());
  EP_CHECK_EQ(table()->count, uint64_t{2});
  const auto* ranges = reinterpret_cast<const ep_ibgda_range*>(table() + 1);
  EP_CHECK_EQ(ranges[0].begin, uint64_t{0x1000});
  EP_CHECK_EQ(ranges[0].end, uint64_t{0x1800});
  EP_CHECK_EQ(ranges[0].lkey, low.value().mr.lkey);
  EP_CHECK_EQ(ranges[1].begin, uint64_t{0x9000});
  EP_CHECK_EQ(before->count, uint64_t{0}); // a kernel may still read the old one
  for (const ep::dl::mlx5_memory& overlap : {ep::dl::mlx5_memory{0x9fff, 1}, {0x8000, 0x1001}, {0x9400, 0x100}, {0x100, 0x20000}}) {
    auto refused = queues.register_memory(overlap, 0);
    EP_CHECK(!refused.ok() && refused.why().status == EP_STATUS_INVALID);
  }
  EP_CHECK(queues.register_memory({0xa000, 1}, 0).ok());
  EP_CHECK(!queues.register_memory({0, 0}, 0).ok());
  EP_CHECK(!queues.register_memory({UINT64_MAX, 2}, 0).ok());
  EP_CHECK(queues.release_memory(low.value()).ok());
  EP_CHECK(!queues.release_memory(low.value()).ok());
  EP_CHECK_EQ(table()->count, uint64_t{2});
  EP_CHECK_EQ(reinterpret_cast<const ep_ibgda_range*>(table() + 1)[0].begin, uint64_t{0x9000});

  const std::vector<ep_ibgda_remote> remotes{{1, 2, 3, 4}, {5, 6, 7, 8}};
  auto route = queues.route_memory(remotes);
  EP_CHECK(route.ok());
  const auto& memory = *reinterpret_cast<const ep_ibgda_memory*>(route.value().address);
  EP_CHECK_EQ(memory.header.magic, EP_MAGIC_IBGDA_MEMORY);
  EP_CHECK_EQ(memory.device, queues.device_address());
  EP_CHECK_EQ(reinterpret_cast<const ep_ibgda_remote*>(memory.remotes)[1].signals_rkey, 8u);
  EP_CHECK(!queues.route_memory(std::span(remotes).first(1)).ok());
  EP_CHECK(queues.close().ok());
  EP_CHECK(script.alive.empty());
}

void tells_events() {
  nic_script script;
  const auto host = host_control_memory();
  auto made = create(script, two_ranks(0), {host.get()});
  EP_CHECK(made.ok());
  EP_CHECK(!made.value()->next_event().value().has_value());
  using enum ep::dl::mlx5_event_kind;
  script.events = {{qp_error, 0, made.value()->qpn(3), 0x13}, {port_down, 1, 0, 0}};
  const auto first = made.value()->next_event().value();
  EP_CHECK_EQ(first->peer, 1);
  EP_CHECK(says(first->text, "to rank 1 has failed, syndrome 0x13"));
  EP_CHECK(says(made.value()->next_event().value()->text, "mlx5_0 port 1 is down"));
}

} // namespace

int main() {
  fills_the_structs(true);
  fills_the_structs(false);
  connects();
  resets(true);
  resets(false);
  draws_packet_numbers_apart();
  connects_on_infiniband();
  refuses_worlds_that_do_not_fit();
  falls_back_and_says_so();
  uses_gpu_memory_where_it_can();
  refuses_combining_pages_for_cpus();
  gives_everything_back();
  refuses_devices_that_cannot();
  keeps_the_range_table_sorted();
  tells_events();
  return ep::check::finish();
}
