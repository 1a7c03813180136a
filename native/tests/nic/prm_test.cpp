// The commands: what they make, how they come back, and everything they refuse.
#include <cerrno>
#include <functional>

#include <sys/mman.h>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> short_command(uint32_t opcode, uint32_t object) {
  std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> in{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, opcode);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, object);
  return in;
}

soft_options still() {
  soft_options options;
  options.threaded = false;
  return options;
}

void capabilities() {
  node one(still());
  std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> in = short_command(EP_MLX5_CMD_QUERY_HCA_CAP, 0);
  std::vector<uint8_t> out(EP_MLX5_QUERY_HCA_CAP_OUT_BYTES, 0xee);
  set(in.data(), EP_MLX5_CMD_IN_OP_MOD, EP_MLX5_CAP_GENERAL << 1 | EP_MLX5_CAP_CURRENT);
  must(one.device->general_cmd(in, out));
  EP_CHECK_EQ(out[0], uint8_t{0});
  EP_CHECK_EQ(out[EP_MLX5_CAP_AT + 0x3f] & 15, 1); // cqe_version
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_CAP_AT, EP_MLX5_GENERAL_CAP_LOG_MAX_MESSAGE), uint64_t{30});
  set(in.data(), EP_MLX5_CMD_IN_OP_MOD, EP_MLX5_CAP_ATOMIC << 1 | EP_MLX5_CAP_CURRENT);
  must(one.device->general_cmd(in, out));
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_CAP_AT, EP_MLX5_ATOMIC_CAP_OPERATIONS), uint64_t{15});
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_CAP_AT, EP_MLX5_ATOMIC_CAP_SIZES), uint64_t{0xc});
  set(in.data(), EP_MLX5_CMD_IN_OP_MOD, 9 << 1);
  EP_CHECK_EQ(one.device->general_cmd(in, out).why().sys_errno, EREMOTEIO);
  EP_CHECK_EQ(out[0], EP_MLX5_CMD_STATUS_BAD_PARAM);
  EP_CHECK(wire::get(out.data(), EP_MLX5_CMD_OUT_SYNDROME) != 0);
  EP_CHECK_EQ(one.device->general_cmd(short_command(EP_MLX5_CMD_CREATE_QP, 0), out).why().sys_errno, EINVAL);
  EP_CHECK_EQ(one.device->general_cmd(short_command(0x7ff, 0), out).why().sys_errno, EREMOTEIO);
  EP_CHECK_EQ(out[0], EP_MLX5_CMD_STATUS_BAD_OP);
}

// What was written comes back.
void contexts_come_back() {
  queue_options options;
  options.send_psn = 0x123456;
  options.receive_psn = 0x654321;
  options.retry_count = 5;
  options.rnr_retry = 6;
  options.mtu = EP_MLX5_MTU_1024;
  options.log_msg_max = 20;
  node a_node(still());
  node b_node(still());
  queue a(a_node, options);
  std::vector<uint8_t> out(EP_MLX5_QUERY_QP_OUT_BYTES);
  const auto query = [&](uint32_t field) {
    must(a_node.device->obj_query(a.qp_object, short_command(EP_MLX5_CMD_QUERY_QP, a.qpn), out));
    return wire::get(out.data() + EP_MLX5_QPC_AT, field);
  };
  EP_CHECK_EQ(query(EP_MLX5_QPC_STATE), uint64_t{EP_MLX5_QP_STATE_RST});
  EP_CHECK_EQ(query(EP_MLX5_QPC_PD), uint64_t{a_node.pd.pdn});
  EP_CHECK_EQ(query(EP_MLX5_QPC_USER_INDEX), uint64_t{0x1234});
  EP_CHECK_EQ(query(EP_MLX5_QPC_CQN_SND), uint64_t{a.cqn});
  answer_bytes answer{};
  must(a_node.device->obj_modify(a.qp_object, init_command(a), answer));
  EP_CHECK_EQ(query(EP_MLX5_QPC_STATE), uint64_t{EP_MLX5_QP_STATE_INIT});
  EP_CHECK_EQ(query(EP_MLX5_QPC_RAE), uint64_t{1});
  const uint32_t port = b_node.device->port_number();
  must(a_node.device->obj_modify(a.qp_object, receive_command(a, port, 0x777), answer));
  EP_CHECK_EQ(query(EP_MLX5_QPC_STATE), uint64_t{EP_MLX5_QP_STATE_RTR});
  EP_CHECK_EQ(query(EP_MLX5_QPC_REMOTE_QPN), uint64_t{0x777});
  EP_CHECK_EQ(query(EP_MLX5_QPC_NEXT_RCV_PSN), uint64_t{0x654321});
  EP_CHECK_EQ(query(EP_MLX5_QPC_MTU), uint64_t{EP_MLX5_MTU_1024});
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_QPC_AT + EP_MLX5_ADS_AT, EP_MLX5_ADS_RLID), uint64_t{port});
  must(a_node.device->obj_modify(a.qp_object, send_command(a), answer));
  EP_CHECK_EQ(query(EP_MLX5_QPC_STATE), uint64_t{EP_MLX5_QP_STATE_RTS});
  EP_CHECK_EQ(query(EP_MLX5_QPC_NEXT_SEND_PSN), uint64_t{0x123456});
  EP_CHECK_EQ(query(EP_MLX5_QPC_RETRY_COUNT), uint64_t{5});
  EP_CHECK_EQ(query(EP_MLX5_QPC_RNR_RETRY), uint64_t{6});
  must(a_node.device->obj_modify(a.qp_object, short_command(EP_MLX5_CMD_2ERR_QP, a.qpn), answer));
  EP_CHECK_EQ(query(EP_MLX5_QPC_STATE), uint64_t{EP_MLX5_QP_STATE_ERR});
  must(a_node.device->obj_modify(a.qp_object, short_command(EP_MLX5_CMD_2RST_QP, a.qpn), answer));
  EP_CHECK_EQ(query(EP_MLX5_QPC_STATE), uint64_t{EP_MLX5_QP_STATE_RST});
  a.connect(port, 0x777); // and once more around
  must(a_node.device->obj_query(a.cq_object, short_command(EP_MLX5_CMD_QUERY_CQ, a.cqn), out));
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_CQC_AT, EP_MLX5_CQC_LOG_CQ_SIZE), uint64_t{6});
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_CQC_AT, EP_MLX5_CQC_COLLAPSED), uint64_t{1});
}

struct refusal {
  const char* what;
  uint8_t status;
  std::function<void(command_bytes&)> harm;
};

void check_refused(node& of, const char* what, uint8_t status, const result<nothing>& got, const answer_bytes& out) {
  (void)of;
  const bool refused = !got.ok() && got.why().sys_errno == EREMOTEIO && out[0] == status;
  if (!refused) std::fprintf(stderr, "%s: status %02x, expected %02x\n", what, out[0], status);
  EP_CHECK(refused);
}

void refusals() {
  constexpr uint8_t param = EP_MLX5_CMD_STATUS_BAD_PARAM;
  constexpr uint8_t resource = EP_MLX5_CMD_STATUS_BAD_RESOURCE;
  node one(still());
  queue q(one, {});
  const uint64_t sq_at = static_cast<uint64_t>(q.sq - q.memory->data);
  const uint64_t cq_at = static_cast<uint64_t>(q.cq - q.memory->data);
  const uint64_t dbr_at = static_cast<uint64_t>(q.dbr - q.memory->data);
  const auto cqc = [](command_bytes& in) { return in.data() + EP_MLX5_CQC_AT; };
  answer_bytes out{};
  const auto create = [&](const command_bytes& in) {
    auto made = one.device->obj_create(in, out);
    if (made.ok()) return result<nothing>(nothing{});
    return result<nothing>(made.why());
  };
  for (const refusal& test : std::vector<refusal>{
           {"cqe size", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_CQE_SIZE, 1); }},
           {"cq too large", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_LOG_CQ_SIZE, 23); }},
           {"cq outside of its umem", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_LOG_CQ_SIZE, 20); }},
           {"cq unaligned", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_OFFSET, cq_at - 32); }},
           {"event queue", resource, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_EQN, 3); }},
           {"uar", resource, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_UAR_PAGE, 0xffffff); }},
           {"umem not valid", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_VALID, 0); }},
           {"dbr umem not valid", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_DBR_UMEM_VALID, 0); }},
           {"no such umem", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_ID, 99); }},
           {"dbr outside", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_DBR_ADDR, q.memory->bytes - 4); }},
           {"dbr unaligned", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_DBR_ADDR, dbr_at + 4); }},
           {"dbr far outside", param, [&](command_bytes& in) { set(cqc(in), EP_MLX5_CQC_DBR_ADDR, UINT64_MAX - 7); }},
           {"reserved bit", param, [&](command_bytes& in) { in[0x40] = 1; }},
           {"op_mod", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CMD_IN_OP_MOD, 1); }},
       }) {
    command_bytes in = create_cq_command(q, cq_at, dbr_at + 64);
    test.harm(in);
    check_refused(one, test.what, test.status, create(in), out);
  }
  for (const refusal& test : std::vector<refusal>{
           {"service", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_ST, 3); }},
           {"path migration", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_PM_STATE, 0); }},
           {"state", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_STATE, 3); }},
           {"pd", resource, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_PD, 77); }},
           {"uar", resource, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_UAR_PAGE, 77); }},
           {"send cq", resource, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_CQN_SND, 77); }},
           {"receive cq", resource, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_CQN_RCV, 77); }},
           {"shared receive queue", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_RQ_TYPE, EP_MLX5_RQ_TYPE_SHARED); }},
           {"size of no receive queue", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_LOG_RQ_SIZE, 2); }},
           {"ring outside of its umem", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_LOG_SQ_SIZE, 15); }},
           {"ring unaligned", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET, sq_at + 8); }},
           {"ring umem not valid", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_VALID, 0); }},
           {"dbr unaligned", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_DBR_ADDR, dbr_at + 4); }},
           {"page offset", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_PAGE_OFFSET, 1); }},
           {"a number", param, [&](command_bytes& in) { set(in.data(), EP_MLX5_CMD_IN_OBJECT, 0x101); }},
           {"reserved bit", param, [&](command_bytes& in) { in[0x10c] |= 1; }},
       }) {
    command_bytes in = create_qp_command(q, one.pd.pdn, sq_at, dbr_at);
    test.harm(in);
    check_refused(one, test.what, test.status, create(in), out);
  }
  const uint32_t port = one.device->port_number();
  const auto modify = [&](const command_bytes& in) { return one.device->obj_modify(q.qp_object, in, out); };
  check_refused(one, "RTR from reset", EP_MLX5_CMD_STATUS_BAD_QP_STATE, modify(receive_command(q, port, q.qpn)), out);
  check_refused(one, "RTS from reset", EP_MLX5_CMD_STATUS_BAD_QP_STATE, modify(send_command(q)), out);
  for (const refusal& test : std::vector<refusal>{
           {"port 2", param, [&](command_bytes& in) { set(ads(in), EP_MLX5_ADS_VHCA_PORT, 2); }},
           {"pkey", param, [&](command_bytes& in) { set(ads(in), EP_MLX5_ADS_PKEY_INDEX, 1); }},
           {"atomic mode", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_ATOMIC_MODE, 5); }},
           {"atomics of no mode", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_ATOMIC_MODE, 0); }},
           {"reserved bit", param, [&](command_bytes& in) { in[0x14] = 1; }},
       }) {
    command_bytes in = init_command(q);
    test.harm(in);
    check_refused(one, test.what, test.status, modify(in), out);
  }
  must(modify(init_command(q)));
  check_refused(one, "INIT twice", EP_MLX5_CMD_STATUS_BAD_QP_STATE, modify(init_command(q)), out);
  for (const refusal& test : std::vector<refusal>{
           {"mtu 0", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_MTU, 0); }},
           {"mtu 6", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_MTU, 6); }},
           {"log_msg_max", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_LOG_MSG_MAX, 31); }},
           {"no remote queue pair", param, [&](command_bytes& in) { set(qpc(in), EP_MLX5_QPC_REMOTE_QPN, 0); }},
           {"a GID of nobody", param, [&](command_bytes& in) { set(ads(in), EP_MLX5_ADS_RGID_LOW, 5); }},
           {"LID and GID apart", param, [&](command_bytes& in) { set(ads(in), EP_MLX5_ADS_RLID, port ^ 1); }},
           {"source GID", param, [&](command_bytes& in) { set(ads(in), EP_MLX5_ADS_SRC_ADDR_INDEX, 4); }},
       }) {
    command_bytes in = receive_command(q, port, q.qpn);
    test.harm(in);
    check_refused(one, test.what, test.status, modify(in), out);
  }
  // Another object's number, another kind of command, another length.
  EP_CHECK_EQ(one.device->obj_modify(q.cq_object, receive_command(q, port, q.qpn), out).why().sys_errno, EINVAL);
  EP_CHECK_EQ(one.device->obj_query(q.qp_object, short_command(EP_MLX5_CMD_QUERY_QP, q.qpn ^ 1), out).why().sys_errno, EINVAL);
  EP_CHECK_EQ(one.device->obj_create(receive_command(q, port, q.qpn), out).why().sys_errno, EINVAL);
  EP_CHECK_EQ(one.device->obj_query(q.qp_object, short_command(EP_MLX5_CMD_QUERY_QP, q.qpn), out).why().sys_errno, EREMOTEIO);
  EP_CHECK_EQ(out[0], EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH);
  const command_bytes whole = receive_command(q, port, q.qpn);
  EP_CHECK(!one.device->obj_modify(q.qp_object, std::span(whole).first(200), out).ok());
  EP_CHECK_EQ(out[0], EP_MLX5_CMD_STATUS_BAD_INPUT_LENGTH);
  EP_CHECK(!one.device->obj_modify(q.qp_object, std::span(whole).first(7), out).ok());
  // After all of that it is still as good as new: to itself.
  must(modify(receive_command(q, port, q.qpn)));
  must(modify(send_command(q)));
  q.post(rdma_wqe(q, EP_MLX5_OPCODE_RDMA_WRITE, one.address(8), one.mr.rkey, {{one.address(), one.mr.lkey, 8}}));
  nic::stepper steps(1);
  steps.add(*one.device);
  EP_CHECK(steps.run());
  EP_CHECK_EQ(q.completed().opcode, EP_MLX5_CQE_REQ);
}

void memory_and_addresses() {
  node one(still());
  soft_device& nic = *one.device;
  control_block memory(4096);
  const auto base = reinterpret_cast<uint64_t>(memory.data);
  EP_CHECK_EQ(nic.reg_mr(one.pd, {base, 0}, 0).why().sys_errno, EINVAL);
  EP_CHECK_EQ(nic.reg_mr(one.pd, {base, 64, 3}, 0).why().sys_errno, EOPNOTSUPP);
  EP_CHECK_EQ(nic.reg_mr(one.pd, {0x1000, 64}, 0).why().sys_errno, EFAULT);
  EP_CHECK_EQ(nic.reg_mr(one.pd, {base, UINT64_MAX - 5}, 0).why().sys_errno, EFAULT);
  EP_CHECK_EQ(nic.reg_mr(one.pd, {base, 64}, dl::MLX5_ACCESS_REMOTE_WRITE).why().sys_errno, EINVAL);
  EP_CHECK_EQ(nic.reg_mr({nullptr, 99}, {base, 64}, 0).why().sys_errno, EINVAL);
  EP_CHECK_EQ(nic.dereg_mr({nullptr, 0x55, 0x55}).why().sys_errno, EINVAL);
  EP_CHECK_EQ(nic.umem_reg({0x1000, 64}, 0).why().sys_errno, EFAULT);
  // Mapped, but not to be read: what the addresses of a GPU's memory are to a processor.
  void* guarded = mmap(nullptr, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EP_CHECK_EQ(nic.reg_mr(one.pd, {reinterpret_cast<uint64_t>(guarded), 8192}, 0).why().sys_errno, EFAULT);
  munmap(guarded, 8192);
  EP_CHECK_EQ(nic.query_port(2).why().sys_errno, EINVAL);
  EP_CHECK_EQ(nic.query_gid(1, 4).why().sys_errno, EINVAL);
  EP_CHECK_EQ(nic.query_eqn(1).why().sys_errno, EINVAL);
  // Keys run out, all of them can be given back, and numbers change.
  std::vector<dl::mlx5_mr> all;
  for (;;) {
    auto mr = nic.reg_mr(one.pd, {base, 64}, 0);
    if (!mr.ok()) {
      EP_CHECK_EQ(mr.why().sys_errno, ENOMEM);
      break;
    }
    all.push_back(mr.value());
  }
  EP_CHECK_EQ(all.size(), size_t{nic::port_max_keys - 2});
  for (const auto& mr : all) must(nic.dereg_mr(mr));
  EP_CHECK(must(nic.reg_mr(one.pd, {base, 64}, 0)).lkey != all[0].lkey);
  // Both link layers.
  EP_CHECK(must(nic.query_port(1)).link == dl::mlx5_link::infiniband);
  EP_CHECK_EQ(must(nic.query_port(1)).lid, nic.port_number());
  EP_CHECK(must(nic.query_gid(1, 0)).type == dl::mlx5_gid_type::infiniband);
  EP_CHECK(must(nic.query_gid(1, 1)).type == dl::mlx5_gid_type::empty);
  soft_options options = still();
  options.engine.ethernet = true;
  node ethernet(options);
  EP_CHECK_EQ(must(ethernet.device->query_port(1)).lid, 0);
  const auto gid = must(ethernet.device->query_gid(1, 3));
  EP_CHECK(gid.type == dl::mlx5_gid_type::roce_v2);
  EP_CHECK_EQ(nic::number_of_gid(gid.raw), ethernet.device->port_number());
  EP_CHECK_EQ(nic::number_of_gid(must(ethernet.device->query_gid(1, 0)).raw), ethernet.device->port_number());
  dl::mlx5_route route;
  route.global = true;
  route.dgid = gid.raw;
  EP_CHECK(must(ethernet.device->resolve_ah(ethernet.pd, route)).mac == nic::mac_of(ethernet.device->port_number()));
  route.dgid[15] ^= 0x5a;
  EP_CHECK_EQ(ethernet.device->resolve_ah(ethernet.pd, route).why().sys_errno, EHOSTUNREACH);
  queue a(ethernet, {});
  answer_bytes out{};
  must(ethernet.device->obj_modify(a.qp_object, init_command(a), out));
  command_bytes wrong = receive_command(a, ethernet.device->port_number(), a.qpn, true);
  set(ads(wrong), EP_MLX5_ADS_RMAC_LOW, 1);
  EP_CHECK(!ethernet.device->obj_modify(a.qp_object, wrong, out).ok());
  must(ethernet.device->obj_modify(a.qp_object, receive_command(a, ethernet.device->port_number(), a.qpn, true), out));
}

void drivers_and_close() {
  nic::soft_driver driver(soft_options{});
  EP_CHECK_EQ(std::string(driver.backing()), std::string("soft"));
  EP_CHECK_EQ(must(driver.list_devices()).at(0).name, std::string(nic::soft_device_name));
  EP_CHECK_EQ(driver.open("mlx5_0").why().sys_errno, ENODEV);
  auto device = must(driver.open(nic::soft_device_name));
  const auto pd = must(device->alloc_pd());
  EP_CHECK_EQ(device->close().why().sys_errno, EBUSY);
  must(device->dealloc_pd(pd));
  EP_CHECK_EQ(device->dealloc_pd(pd).why().sys_errno, EINVAL);
  must(device->close());
}

} // namespace

int main() {
  capabilities();
  contexts_come_back();
  refusals();
  memory_and_addresses();
  drivers_and_close();
  EP_CHECK_EQ(segment_count(), uint64_t{0});
  return ep::check::finish();
}
