#include "commands.hpp"

#include <cstdio>

namespace ep::ibgda {
namespace {

template <class Command> Command begun(uint16_t opcode) {
  Command command{};
  prm_set(command, EP_MLX5_CMD_IN_OPCODE, opcode);
  return command;
}

std::span<uint8_t> cqc_of(queue_command& command) { return prm_part(std::span<uint8_t>(command), EP_MLX5_CQC_AT, EP_MLX5_CQC_BYTES); }
std::span<uint8_t> qpc_of(queue_command& command) { return prm_part(std::span<uint8_t>(command), EP_MLX5_QPC_AT, EP_MLX5_QPC_BYTES); }

uint64_t big_endian(std::span<const uint8_t> bytes) { return wire::load_big(bytes.data(), static_cast<uint32_t>(bytes.size())); }

// Hazard: the transitions say a part of the context only, but the state fields in front are read by all of them: migration state "migrated" belongs to
// each, or automatic path migration is armed.
queue_command transition(uint16_t opcode, uint32_t qpn) {
  auto command = begun<queue_command>(opcode);
  prm_set(command, EP_MLX5_CMD_IN_OBJECT, qpn);
  prm_set(qpc_of(command), EP_MLX5_QPC_ST, EP_MLX5_ST_RC);
  prm_set(qpc_of(command), EP_MLX5_QPC_PM_STATE, EP_MLX5_PM_STATE_MIGRATED);
  return command;
}

const char* status_name(uint64_t status) {
  switch (status) {
    case EP_MLX5_CMD_STATUS_OK: return "ok";
    case EP_MLX5_CMD_STATUS_INTERNAL: return "internal error";
    case EP_MLX5_CMD_STATUS_BAD_OP: return "unknown command";
    case EP_MLX5_CMD_STATUS_BAD_PARAM: return "bad parameter";
    case EP_MLX5_CMD_STATUS_BAD_SYS_STATE: return "bad system state";
    case EP_MLX5_CMD_STATUS_BAD_RESOURCE: return "bad resource";
    case EP_MLX5_CMD_STATUS_RESOURCE_BUSY: return "resource busy";
    case EP_MLX5_CMD_STATUS_EXCEEDS_LIMIT: return "exceeds a limit";
    case EP_MLX5_CMD_STATUS_BAD_RESOURCE_STATE: return "bad resource state";
    case EP_MLX5_CMD_STATUS_BAD_INDEX: return "bad index";
    case EP_MLX5_CMD_STATUS_NO_RESOURCES: return "no resources";
    case EP_MLX5_CMD_STATUS_BAD_INPUT_LENGTH: return "bad input length";
    case EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH: return "bad output length";
    case EP_MLX5_CMD_STATUS_BAD_QP_STATE: return "bad queue pair state";
    case EP_MLX5_CMD_STATUS_BAD_SIZE: return "bad size";
  }
  return "unknown status";
}

} // namespace

query_command hca_cap_command(uint16_t capability) {
  auto command = begun<query_command>(EP_MLX5_CMD_QUERY_HCA_CAP);
  prm_set(command, EP_MLX5_CMD_IN_OP_MOD, static_cast<uint64_t>(capability) << 1 | EP_MLX5_CAP_CURRENT);
  return command;
}

query_command object_command(uint16_t opcode, uint32_t number) {
  auto command = begun<query_command>(opcode);
  prm_set(command, EP_MLX5_CMD_IN_OBJECT, number);
  return command;
}

queue_command cq_create_command(const cq_spec& spec) {
  auto command = begun<queue_command>(EP_MLX5_CMD_CREATE_CQ);
  const std::span<uint8_t> cqc = cqc_of(command);
  prm_set(cqc, EP_MLX5_CQC_DBR_UMEM_VALID, 1);
  prm_set(cqc, EP_MLX5_CQC_COLLAPSED, spec.collapsed ? 1 : 0);
  prm_set(cqc, EP_MLX5_CQC_OVERRUN_IGNORE, spec.collapsed ? 1 : 0);
  prm_set(cqc, EP_MLX5_CQC_DBR_UMEM_ID, spec.doorbell_record.umem_id);
  prm_set(cqc, EP_MLX5_CQC_LOG_CQ_SIZE, spec.log_size);
  prm_set(cqc, EP_MLX5_CQC_UAR_PAGE, spec.uar_page);
  prm_set(cqc, EP_MLX5_CQC_EQN, spec.eqn);
  prm_set(cqc, EP_MLX5_CQC_DBR_ADDR, spec.doorbell_record.offset);
  prm_set(command, EP_MLX5_CREATE_CQ_IN_UMEM_OFFSET, spec.ring.offset);
  prm_set(command, EP_MLX5_CREATE_CQ_IN_UMEM_ID, spec.ring.umem_id);
  prm_set(command, EP_MLX5_CREATE_CQ_IN_UMEM_VALID, 1);
  return command;
}

queue_command qp_create_command(const qp_spec& spec) {
  auto command = begun<queue_command>(EP_MLX5_CMD_CREATE_QP);
  const std::span<uint8_t> qpc = qpc_of(command);
  prm_set(qpc, EP_MLX5_QPC_ST, EP_MLX5_ST_RC);
  prm_set(qpc, EP_MLX5_QPC_PM_STATE, EP_MLX5_PM_STATE_MIGRATED);
  prm_set(qpc, EP_MLX5_QPC_PD, spec.pdn);
  prm_set(qpc, EP_MLX5_QPC_LOG_SQ_SIZE, spec.log_depth);
  prm_set(qpc, EP_MLX5_QPC_UAR_PAGE, spec.uar_page);
  prm_set(qpc, EP_MLX5_QPC_USER_INDEX, spec.user_index);
  prm_set(qpc, EP_MLX5_QPC_CQN_SND, spec.cqn);
  prm_set(qpc, EP_MLX5_QPC_CQN_RCV, spec.cqn);
  prm_set(qpc, EP_MLX5_QPC_RQ_TYPE, EP_MLX5_RQ_TYPE_ZERO_SIZE);
  prm_set(qpc, EP_MLX5_QPC_DBR_ADDR, spec.doorbell_record.offset);
  prm_set(qpc, EP_MLX5_QPC_DBR_UMEM_VALID, 1);
  prm_set(qpc, EP_MLX5_QPC_DBR_UMEM_ID, spec.doorbell_record.umem_id);
  prm_set(command, EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET, spec.ring.offset);
  prm_set(command, EP_MLX5_CREATE_QP_IN_WQ_UMEM_ID, spec.ring.umem_id);
  prm_set(command, EP_MLX5_CREATE_QP_IN_WQ_UMEM_VALID, 1);
  return command;
}

queue_command qp_init_command(const connection_spec& spec) {
  queue_command command = transition(EP_MLX5_CMD_RST2INIT_QP, spec.qpn);
  const std::span<uint8_t> qpc = qpc_of(command);
  prm_set(qpc, EP_MLX5_QPC_RRE, 1);
  prm_set(qpc, EP_MLX5_QPC_RWE, 1);
  prm_set(qpc, EP_MLX5_QPC_RAE, 1);
  prm_set(qpc, EP_MLX5_QPC_ATOMIC_MODE, EP_MLX5_ATOMIC_MODE_UP_TO_8);
  const std::span<uint8_t> ads = prm_part(qpc, EP_MLX5_ADS_AT, EP_MLX5_ADS_BYTES);
  prm_set(ads, EP_MLX5_ADS_VHCA_PORT, spec.port);
  prm_set(ads, EP_MLX5_ADS_PKEY_INDEX, 0);
  return command;
}

queue_command qp_rtr_command(const connection_spec& spec, dl::mlx5_link link) {
  queue_command command = transition(EP_MLX5_CMD_INIT2RTR_QP, spec.qpn);
  const std::span<uint8_t> qpc = qpc_of(command);
  prm_set(qpc, EP_MLX5_QPC_MTU, spec.mtu);
  prm_set(qpc, EP_MLX5_QPC_LOG_MSG_MAX, spec.log_max_message);
  prm_set(qpc, EP_MLX5_QPC_REMOTE_QPN, spec.remote_qpn);
  prm_set(qpc, EP_MLX5_QPC_MIN_RNR_NAK, 12);
  prm_set(qpc, EP_MLX5_QPC_NEXT_RCV_PSN, spec.recv_psn);
  prm_set(qpc, EP_MLX5_QPC_LOG_RRA_MAX, spec.log_outstanding);
  const std::span<uint8_t> ads = prm_part(qpc, EP_MLX5_ADS_AT, EP_MLX5_ADS_BYTES);
  prm_set(ads, EP_MLX5_ADS_VHCA_PORT, spec.port);
  prm_set(ads, EP_MLX5_ADS_TCLASS, spec.route.traffic_class);
  prm_set(ads, EP_MLX5_ADS_SL, spec.route.sl);
  prm_set(ads, EP_MLX5_ADS_RGID_HIGH, big_endian(std::span(spec.path.gid).first<8>()));
  prm_set(ads, EP_MLX5_ADS_RGID_LOW, big_endian(std::span(spec.path.gid).last<8>()));
  prm_set(ads, EP_MLX5_ADS_SRC_ADDR_INDEX, spec.route.sgid_index);
  prm_set(ads, EP_MLX5_ADS_HOP_LIMIT, spec.route.hop_limit);
  if (link == dl::mlx5_link::ethernet) {
    // RoCE always has a global header: the flag is InfiniBand's. The priority of the Ethernet frame is the service level.
    prm_set(ads, EP_MLX5_ADS_SL, 0);
    prm_set(ads, EP_MLX5_ADS_ETH_PRIO, spec.route.sl & 7u);
    prm_set(ads, EP_MLX5_ADS_DSCP, spec.route.traffic_class >> 2);
    prm_set(ads, EP_MLX5_ADS_UDP_SPORT, spec.udp_sport);
    prm_set(ads, EP_MLX5_ADS_RMAC_HIGH, big_endian(std::span(spec.path.mac).first<2>()));
    prm_set(ads, EP_MLX5_ADS_RMAC_LOW, big_endian(std::span(spec.path.mac).last<4>()));
  } else {
    prm_set(ads, EP_MLX5_ADS_RLID, spec.route.dlid);
    prm_set(ads, EP_MLX5_ADS_GRH, spec.route.global ? 1 : 0);
  }
  return command;
}

queue_command qp_rts_command(const connection_spec& spec) {
  queue_command command = transition(EP_MLX5_CMD_RTR2RTS_QP, spec.qpn);
  const std::span<uint8_t> qpc = qpc_of(command);
  prm_set(qpc, EP_MLX5_QPC_LOG_ACK_REQ_FREQ, 0);
  prm_set(qpc, EP_MLX5_QPC_LOG_SRA_MAX, spec.log_outstanding);
  prm_set(qpc, EP_MLX5_QPC_RETRY_COUNT, spec.retry_count);
  prm_set(qpc, EP_MLX5_QPC_RNR_RETRY, spec.rnr_retry);
  prm_set(qpc, EP_MLX5_QPC_NEXT_SEND_PSN, spec.send_psn);
  const std::span<uint8_t> ads = prm_part(qpc, EP_MLX5_ADS_AT, EP_MLX5_ADS_BYTES);
  prm_set(ads, EP_MLX5_ADS_ACK_TIMEOUT, spec.ack_timeout);
  return command;
}

std::string command_answer_text(std::span<const uint8_t> out) {
  char text[96];
  const uint64_t status = prm_get(out, EP_MLX5_CMD_OUT_STATUS);
  std::snprintf(text, sizeof text, "status 0x%x (%s), syndrome 0x%08x", static_cast<unsigned>(status), status_name(status),
                static_cast<unsigned>(prm_get(out, EP_MLX5_CMD_OUT_SYNDROME)));
  return text;
}

} // namespace ep::ibgda
