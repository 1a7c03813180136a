// Golden bytes of the commands. The expectations are written from the tables of the device specification, dword by dword, and not with the names of
// abi/mlx5_prm.h, whose offsets they check as well.
#include "core/ibgda/commands.hpp"

#include <cstdio>
#include <map>

#include "check.hpp"

namespace {

using namespace ep::ibgda;

// Offset -> dword; everything else is zero.
template <class Command> void expect(const char* name, const Command& command, const std::map<uint32_t, uint32_t>& dwords) {
  for (uint32_t at = 0; at < command.size(); at += 4) {
    const uint32_t found = uint32_t{command[at]} << 24 | uint32_t{command[at + 1]} << 16 | uint32_t{command[at + 2]} << 8 | command[at + 3];
    const auto wanted = dwords.find(at);
    const uint32_t expected = wanted == dwords.end() ? 0 : wanted->second;
    char text[96];
    std::snprintf(text, sizeof text, "%s at 0x%x: %08x, expected %08x", name, at, found, expected);
    ep::check::report(found == expected, __FILE__, __LINE__, text);
  }
}

void capabilities() {
  expect("QUERY_HCA_CAP general", hca_cap_command(EP_MLX5_CAP_GENERAL), {{0, 0x01000000}, {4, 0x00000001}});
  expect("QUERY_HCA_CAP atomic", hca_cap_command(EP_MLX5_CAP_ATOMIC), {{0, 0x01000000}, {4, 0x00000007}});
}

void completion_queues() {
  cq_spec spec;
  spec.ring = {0x77, 0x123456000};
  spec.doorbell_record = {0x78, 0x1c0};
  spec.log_size = 6;
  spec.uar_page = 0xabcde;
  spec.eqn = 0x21;
  std::map<uint32_t, uint32_t> dwords{
      {0x00, 0x04000000}, {0x10, 0x02120000}, {0x14, 0x00000078}, {0x1c, 0x060abcde}, {0x24, 0x00000021},
      {0x4c, 0x000001c0}, {0x50, 0x00000001}, {0x54, 0x23456000}, {0x58, 0x00000077}, {0x5c, 0x80000000},
  };
  expect("CREATE_CQ collapsed", cq_create_command(spec), dwords);
  spec.collapsed = false;
  spec.log_size = 14;
  dwords[0x10] = 0x02000000;
  dwords[0x1c] = 0x0e0abcde;
  expect("CREATE_CQ ring", cq_create_command(spec), dwords);
}

void queue_pairs() {
  qp_spec spec;
  spec.ring = {0x77, 0x200000000};
  spec.doorbell_record = {0x77, 0x40};
  spec.log_depth = 14;
  spec.pdn = 0x123456;
  spec.uar_page = 0xabcde;
  spec.cqn = 0x654321;
  spec.user_index = 5;
  expect("CREATE_QP", qp_create_command(spec),
         {
             {0x00, 0x05000000}, {0x18, 0x00001800}, {0x1c, 0x00123456}, {0x20, 0x00007000}, {0x24, 0x000abcde}, {0x28, 0x00000005}, {0x94, 0x00654321},
             {0xb4, 0x00654321}, {0xbc, 0x00000040}, {0xc4, 0x03000000}, {0xe8, 0x10000000}, {0xfc, 0x00000077}, {0x100, 0x00000002}, {0x108, 0x00000077}, {0x10c, 0x80000000},
         });
}

connection_spec connection() {
  connection_spec spec;
  spec.qpn = 0x001234;
  spec.port = 2;
  spec.mtu = EP_MLX5_MTU_2048;
  spec.remote_qpn = 0x00cafe;
  spec.send_psn = 0x111111;
  spec.recv_psn = 0x222222;
  spec.route = {2, 3, true, 5, 0x68, 255, 0x21, {}};
  for (uint8_t i = 0; i < 16; ++i) spec.route.dgid[i] = static_cast<uint8_t>(0xf0 + i);
  spec.path.gid = spec.route.dgid;
  spec.path.mac = {0x02, 0x11, 0x22, 0x33, 0x44, 0x55};
  spec.udp_sport = 0xd234;
  spec.ack_timeout = 20;
  return spec;
}

void transitions() {
  const connection_spec spec = connection();
  expect("RST2INIT", qp_init_command(spec), {{0x00, 0x05020000}, {0x08, 0x00001234}, {0x18, 0x00001800}, {0x54, 0x00020000}, {0xa8, 0x0003e000}});
  expect("INIT2RTR on Ethernet", qp_rtr_command(spec, ep::dl::mlx5_link::ethernet),
         {
             {0x00, 0x05030000}, {0x08, 0x00001234}, {0x18, 0x00001800}, {0x20, 0x9e000000}, {0x2c, 0x0000cafe}, {0x38, 0x000300ff}, {0x3c, 0x06800000},
             {0x40, 0xf0f1f2f3}, {0x44, 0xf4f5f6f7}, {0x48, 0xf8f9fafb}, {0x4c, 0xfcfdfeff}, {0x50, 0x001ad234}, {0x54, 0x50020211}, {0x58, 0x22334455},
             {0xa8, 0x00800000}, {0xac, 0x0c222222},
         });
  expect("INIT2RTR on InfiniBand", qp_rtr_command(spec, ep::dl::mlx5_link::infiniband),
         {
             {0x00, 0x05030000}, {0x08, 0x00001234}, {0x18, 0x00001800}, {0x20, 0x9e000000}, {0x2c, 0x0000cafe}, {0x34, 0x00800021}, {0x38, 0x000300ff}, {0x3c, 0x06800000},
             {0x40, 0xf0f1f2f3}, {0x44, 0xf4f5f6f7}, {0x48, 0xf8f9fafb}, {0x4c, 0xfcfdfeff}, {0x54, 0x05020000}, {0xa8, 0x00800000}, {0xac, 0x0c222222},
         });
  expect("RTR2RTS", qp_rts_command(spec), {{0x00, 0x05040000}, {0x08, 0x00001234}, {0x18, 0x00001800}, {0x38, 0xa0000000}, {0x88, 0x0087e000}, {0x90, 0x00111111}});
  expect("2ERR", object_command(EP_MLX5_CMD_2ERR_QP, 0x1234), {{0x00, 0x05070000}, {0x08, 0x00001234}});
  expect("QUERY_QP", object_command(EP_MLX5_CMD_QUERY_QP, 0x1234), {{0x00, 0x050b0000}, {0x08, 0x00001234}});
}

void answers() {
  const std::array<uint8_t, 16> out{0x03, 0, 0, 0, 0x00, 0x12, 0xab, 0x34};
  EP_CHECK_EQ(command_answer_text(out), "status 0x3 (bad parameter), syndrome 0x0012ab34");
}

} // namespace

int main() {
  capabilities();
  completion_queues();
  queue_pairs();
  transitions();
  answers();
  return ep::check::finish();
}
