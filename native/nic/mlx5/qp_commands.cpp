#include "qp_commands.hpp"

#include <algorithm>
#include <cstring>

#include "bits.hpp"
#include "wire/bits.hpp"

namespace ep::nic {
namespace {

using ep::wire::get;
using ep::wire::put;

uint32_t get32(const uint8_t* layout, uint32_t field) { return static_cast<uint32_t>(get(layout, field)); }

constexpr const char* no_qp = "there is no such queue pair";

// 0: the address path names no port of a software NIC; `why` says so.
uint32_t port_of(const engine& nic, const uint8_t* path, const char** why) {
  gid_bytes gid{};
  std::memcpy(gid.data(), path + (EP_MLX5_ADS_RGID_HIGH >> 16), gid.size());
  const uint32_t by_gid = nic.number_of(gid);
  const uint32_t lid = get32(path, EP_MLX5_ADS_RLID);
  const bool has_gid = gid != gid_bytes{};
  *why = "the address path's GID is not one of a software NIC, or of one on a network that this NIC was not told of";
  if (has_gid && by_gid == 0) return 0;
  if (nic.options().ethernet) {
    *why = "the address path has no GID";
    if (!has_gid) return 0;
    const auto mac = mac_of(by_gid);
    uint8_t found[8];
    store_be64(found, get(path, EP_MLX5_ADS_RMAC_HIGH) << 32 | get(path, EP_MLX5_ADS_RMAC_LOW));
    *why = "the address path's MAC is not the one of its GID";
    return std::memcmp(found + 2, mac.data(), mac.size()) == 0 ? by_gid : 0;
  }
  *why = "the address path has neither a LID nor a GID";
  if (!has_gid) return lid;
  // A port's own number stands at the end of its GID, whichever form that has; the number by which it is known here may be another one.
  *why = "the address path's LID is not the one of its GID";
  return lid == (uint32_t{gid[14]} << 8 | gid[15]) ? by_gid : 0;
}

command_answer to_init(engine& nic, queue_pair& qp, const uint8_t* context) {
  const uint8_t* path = context + EP_MLX5_ADS_AT;
  if (qp.state != EP_MLX5_QP_STATE_RST) return refuse(EP_MLX5_CMD_STATUS_BAD_QP_STATE, "RST2INIT needs a queue pair in reset");
  if (get(path, EP_MLX5_ADS_VHCA_PORT) != 1) return bad("the NIC has port 1 only (vhca_port_num)");
  if (get(path, EP_MLX5_ADS_PKEY_INDEX) != 0) return bad("the table of partition keys has entry 0 only (pkey_index)");
  const uint64_t mode = get(context, EP_MLX5_QPC_ATOMIC_MODE);
  if (mode > EP_MLX5_ATOMIC_MODE_UP_TO_8) return bad("atomics have at most 8 bytes (atomic_mode)");
  if (get(context, EP_MLX5_QPC_RAE) != 0 && mode == 0) return bad("remote atomics are allowed, but atomic_mode says none");
  port_qp& shared = nic.port().qp(qp.index);
  shared.rights = (get(context, EP_MLX5_QPC_RWE) != 0 ? qp_right_write : 0) | (get(context, EP_MLX5_QPC_RRE) != 0 ? qp_right_read : 0) |
                  (get(context, EP_MLX5_QPC_RAE) != 0 ? qp_right_atomic : 0);
  for (const uint32_t field : {EP_MLX5_QPC_RWE, EP_MLX5_QPC_RRE, EP_MLX5_QPC_RAE, EP_MLX5_QPC_ATOMIC_MODE}) put(qp.context.data(), field, get(context, field));
  qp.state = EP_MLX5_QP_STATE_INIT;
  store_ordered(shared.state, static_cast<uint32_t>(qp_state::init));
  return {0, nullptr, qp.qpn};
}

command_answer to_receive(engine& nic, queue_pair& qp, const uint8_t* context) {
  const uint8_t* path = context + EP_MLX5_ADS_AT;
  if (qp.state != EP_MLX5_QP_STATE_INIT) return refuse(EP_MLX5_CMD_STATUS_BAD_QP_STATE, "INIT2RTR needs an initialised queue pair");
  const uint32_t mtu = get32(context, EP_MLX5_QPC_MTU);
  if (mtu < EP_MLX5_MTU_256 || mtu > EP_MLX5_MTU_4096) return bad("mtu is none of 1 to 5");
  const uint32_t log_msg_max = get32(context, EP_MLX5_QPC_LOG_MSG_MAX);
  if (log_msg_max > 30) return bad("log_msg_max is larger than 30");
  const uint32_t remote_qpn = get32(context, EP_MLX5_QPC_REMOTE_QPN);
  if (remote_qpn == 0) return bad("remote_qpn is 0");
  const char* why = nullptr;
  const uint32_t remote_port = port_of(nic, path, &why);
  if (remote_port == 0) return bad(why);
  if (get(path, EP_MLX5_ADS_SRC_ADDR_INDEX) >= command_gids) return bad("there is no such entry in the GID table (src_addr_index)");
  qp.mtu_bytes = 128u << mtu;
  qp.log_msg_max = static_cast<uint8_t>(log_msg_max);
  qp.remote_qpn = remote_qpn;
  qp.remote_port = remote_port;
  port_qp& shared = nic.port().qp(qp.index);
  shared.remote_qpn = remote_qpn;
  shared.remote_port = remote_port;
  shared.pdn = qp.pdn;
  shared.mtu_bytes = qp.mtu_bytes;
  shared.expected_psn = get32(context, EP_MLX5_QPC_NEXT_RCV_PSN);
  shared.has_receive_queue = qp.has_rq ? 1 : 0;
  shared.received_packets = 0;
  shared.atomics_kept = 0;
  for (port_atomic& kept : shared.atomics) kept = {0, UINT32_MAX, 0};
  shared.rnr_timer = get32(context, EP_MLX5_QPC_MIN_RNR_NAK);
  shared.receive_posted = shared.receive_taken = shared.receive_done = 0;
  for (const uint32_t field : {EP_MLX5_QPC_MTU, EP_MLX5_QPC_LOG_MSG_MAX, EP_MLX5_QPC_REMOTE_QPN, EP_MLX5_QPC_MIN_RNR_NAK, EP_MLX5_QPC_NEXT_RCV_PSN,
                               EP_MLX5_QPC_LOG_RRA_MAX}) {
    put(qp.context.data(), field, get(context, field));
  }
  std::memcpy(qp.context.data() + EP_MLX5_ADS_AT, path, EP_MLX5_ADS_BYTES);
  qp.state = EP_MLX5_QP_STATE_RTR;
  store_ordered(shared.state, static_cast<uint32_t>(qp_state::rtr));
  return {0, nullptr, qp.qpn};
}

command_answer to_send(engine& nic, queue_pair& qp, const uint8_t* context) {
  const uint8_t* path = context + EP_MLX5_ADS_AT;
  if (qp.state != EP_MLX5_QP_STATE_RTR) return refuse(EP_MLX5_CMD_STATUS_BAD_QP_STATE, "RTR2RTS needs a queue pair that is ready to receive");
  qp.retry_count = static_cast<uint8_t>(get(context, EP_MLX5_QPC_RETRY_COUNT));
  qp.rnr_retry = static_cast<uint8_t>(get(context, EP_MLX5_QPC_RNR_RETRY));
  qp.ack_timeout = static_cast<uint8_t>(get(path, EP_MLX5_ADS_ACK_TIMEOUT));
  qp.send_psn = get32(context, EP_MLX5_QPC_NEXT_SEND_PSN);
  qp.most_fetches = std::min(1u << get32(context, EP_MLX5_QPC_LOG_SRA_MAX), port_kept_atomics);
  for (const uint32_t field : {EP_MLX5_QPC_LOG_ACK_REQ_FREQ, EP_MLX5_QPC_LOG_SRA_MAX, EP_MLX5_QPC_RETRY_COUNT, EP_MLX5_QPC_RNR_RETRY,
                               EP_MLX5_QPC_NEXT_SEND_PSN}) {
    put(qp.context.data(), field, get(context, field));
  }
  put(qp.context.data() + EP_MLX5_ADS_AT, EP_MLX5_ADS_ACK_TIMEOUT, qp.ack_timeout);
  qp.state = EP_MLX5_QP_STATE_RTS;
  store_ordered(nic.port().qp(qp.index).state, static_cast<uint32_t>(qp_state::rts));
  // At this moment, and not at the first request, the peer mostly lives.
  nic.connect(qp);
  return {0, nullptr, qp.qpn};
}

} // namespace

command_answer create_qp(engine& nic, std::span<const uint8_t> in) {
  if (!command_qp_bits_known(in)) return bad(reserved_text);
  const uint8_t* context = in.data() + EP_MLX5_QPC_AT;
  if (get(in.data(), EP_MLX5_CMD_IN_OBJECT) != 0) return bad("CREATE_QP with a number: the NIC chooses it");
  if (get(context, EP_MLX5_QPC_STATE) != EP_MLX5_QP_STATE_RST) return bad("a queue pair begins in reset (state)");
  if (get(context, EP_MLX5_QPC_ST) != EP_MLX5_ST_RC) return bad("the service is not RC (st)");
  if (get(context, EP_MLX5_QPC_PM_STATE) != EP_MLX5_PM_STATE_MIGRATED) return bad("pm_state is not MIGRATED");
  const uint32_t pdn = get32(context, EP_MLX5_QPC_PD);
  if (!nic.memory.pd_known(pdn)) return missing("there is no such protection domain (pd)");
  const auto page = nic.pages.find(get32(context, EP_MLX5_QPC_UAR_PAGE));
  if (page == nic.pages.end()) return missing("there is no such UAR (uar_page)");
  const auto send_cq = nic.cqs.find(get32(context, EP_MLX5_QPC_CQN_SND));
  const auto receive_cq = nic.cqs.find(get32(context, EP_MLX5_QPC_CQN_RCV));
  if (send_cq == nic.cqs.end()) return missing("there is no such completion queue (cqn_snd)");
  if (receive_cq == nic.cqs.end()) return missing("there is no such completion queue (cqn_rcv)");
  const uint64_t rq_type = get(context, EP_MLX5_QPC_RQ_TYPE);
  const uint32_t log_rq = get32(context, EP_MLX5_QPC_LOG_RQ_SIZE);
  const uint32_t log_stride = get32(context, EP_MLX5_QPC_LOG_RQ_STRIDE);
  if (rq_type != EP_MLX5_RQ_TYPE_REGULAR && rq_type != EP_MLX5_RQ_TYPE_ZERO_SIZE) return bad("rq_type is neither regular nor of size zero");
  if (rq_type == EP_MLX5_RQ_TYPE_ZERO_SIZE && (log_rq != 0 || log_stride != 0)) return bad("a receive queue of size zero has a size");
  const uint32_t log_sq = get32(context, EP_MLX5_QPC_LOG_SQ_SIZE);
  if (log_sq > command_max_log_sq) return bad("log_sq_size is larger than the capabilities say");
  if (get(context, EP_MLX5_QPC_PAGE_OFFSET) != 0) return bad("page_offset is not 0");
  if (get(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_VALID) == 0) return bad("the work queues lie in no umem (wq_umem_valid)");
  if (get(context, EP_MLX5_QPC_DBR_UMEM_VALID) == 0) return bad("the doorbell record lies in no umem (dbr_umem_valid)");
  const uint32_t wq_umem = get32(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_ID);
  const uint32_t dbr_umem = get32(context, EP_MLX5_QPC_DBR_UMEM_ID);
  // The receive queue lies before the send queue.
  const bool has_rq = rq_type == EP_MLX5_RQ_TYPE_REGULAR;
  const uint64_t rq_bytes = has_rq ? uint64_t{16} << (log_rq + log_stride) : 0;
  uint8_t* queues = nic.memory.umem(wq_umem, get(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET), rq_bytes + (uint64_t{EP_MLX5_WQEBB_BYTES} << log_sq), false);
  if (queues == nullptr) return bad("the work queues are not inside of their umem");
  if (reinterpret_cast<uintptr_t>(queues + rq_bytes) % EP_MLX5_WQEBB_BYTES != 0) return bad("the send queue is not aligned to 64 bytes");
  uint8_t* dbr = nic.memory.umem(dbr_umem, get(context, EP_MLX5_QPC_DBR_ADDR), sizeof(ep_mlx5_dbr), false);
  if (dbr == nullptr) return bad("the doorbell record is not inside of its umem");
  if (reinterpret_cast<uintptr_t>(dbr) % sizeof(ep_mlx5_dbr) != 0) return bad("the doorbell record is not aligned to 8 bytes");
  queue_pair* qp = nic.add_qp();
  if (qp == nullptr) return refuse(EP_MLX5_CMD_STATUS_NO_RESOURCES, "all queue pairs are taken");
  qp->sq = queues + rq_bytes;
  qp->log_sq = log_sq;
  qp->dbr = dbr;
  qp->has_rq = has_rq;
  qp->log_rq = log_rq;
  qp->uar = page->second.get();
  qp->send_cq = send_cq->second.get();
  qp->receive_cq = receive_cq->second.get();
  qp->pdn = pdn;
  qp->user_index = get32(context, EP_MLX5_QPC_USER_INDEX);
  qp->wq_umem = wq_umem;
  qp->dbr_umem = dbr_umem;
  std::memcpy(qp->context.data(), context, qp->context.size());
  nic.memory.umem_use(wq_umem, 1);
  nic.memory.umem_use(dbr_umem, 1);
  ++qp->send_cq->users;
  ++qp->receive_cq->users;
  ++qp->uar->users;
  qp->uar->qps.push_back(qp);
  if (has_rq) nic.add_receiver(*qp);
  store_ordered(nic.port().qp(qp->index).state, static_cast<uint32_t>(qp_state::reset));
  return {0, nullptr, qp->qpn};
}

command_answer modify_qp(engine& nic, uint32_t opcode, std::span<const uint8_t> in) {
  queue_pair* qp = nic.find_qp(get32(in.data(), EP_MLX5_CMD_IN_OBJECT));
  if (qp == nullptr) return missing(no_qp);
  if (opcode == EP_MLX5_CMD_2ERR_QP) {
    if (qp->state == EP_MLX5_QP_STATE_RST) return refuse(EP_MLX5_CMD_STATUS_BAD_QP_STATE, "2ERR needs a queue pair that has left reset");
    nic.stop_qp(*qp, EP_MLX5_QP_STATE_ERR);
    // Nothing lands by it any more once the command has ended.
    if (nic.in_use(0, qp)) return refuse(EP_MLX5_CMD_STATUS_RESOURCE_BUSY, "a peer is inside of an access through this queue pair");
    return {0, nullptr, qp->qpn};
  }
  if (opcode == EP_MLX5_CMD_2RST_QP) {
    nic.stop_qp(*qp, EP_MLX5_QP_STATE_RST);
    nic.drop_doorbells(*qp);
    if (nic.in_use(0, qp)) return refuse(EP_MLX5_CMD_STATUS_RESOURCE_BUSY, "a peer is inside of an access through this queue pair");
    return {0, nullptr, qp->qpn};
  }
  if (!command_qp_bits_known(in)) return bad(reserved_text);
  const uint8_t* context = in.data() + EP_MLX5_QPC_AT;
  switch (opcode) {
    case EP_MLX5_CMD_RST2INIT_QP: return to_init(nic, *qp, context);
    case EP_MLX5_CMD_INIT2RTR_QP: return to_receive(nic, *qp, context);
    default: return to_send(nic, *qp, context);
  }
}

command_answer destroy_qp(engine& nic, uint32_t qpn) {
  queue_pair* qp = nic.find_qp(qpn);
  if (qp == nullptr) return missing(no_qp);
  nic.stop_qp(*qp, EP_MLX5_QP_STATE_RST);
  if (nic.in_use(0, qp)) return refuse(EP_MLX5_CMD_STATUS_RESOURCE_BUSY, "a peer is inside of an access through this queue pair");
  nic.memory.umem_use(qp->wq_umem, -1);
  nic.memory.umem_use(qp->dbr_umem, -1);
  --qp->send_cq->users;
  --qp->receive_cq->users;
  --qp->uar->users;
  store_ordered(nic.port().qp(qp->index).state, static_cast<uint32_t>(qp_state::none));
  nic.remove_qp(*qp);
  return {0, nullptr, qpn};
}

command_answer query_qp(engine& nic, uint32_t qpn, std::span<uint8_t> out) {
  queue_pair* qp = nic.find_qp(qpn);
  if (qp == nullptr) return missing(no_qp);
  if (out.size() != EP_MLX5_QUERY_QP_OUT_BYTES) return refuse(EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH, "QUERY_QP answers with 272 bytes");
  uint8_t* context = out.data() + EP_MLX5_QPC_AT;
  std::memcpy(context, qp->context.data(), qp->context.size());
  put(context, EP_MLX5_QPC_STATE, qp->state);
  put(context, EP_MLX5_QPC_NEXT_SEND_PSN, qp->send_psn);
  put(context, EP_MLX5_QPC_LAST_ACKED_PSN, (qp->send_psn - 1) & 0xffffff);
  put(context, EP_MLX5_QPC_NEXT_RCV_PSN, load_acquire(nic.port().qp(qp->index).expected_psn) & 0xffffff);
  put(context, EP_MLX5_QPC_HW_SQ_WQEBB_COUNTER, qp->consumer);
  put(context, EP_MLX5_QPC_SW_SQ_WQEBB_COUNTER, qp->producer);
  return {0, nullptr, qpn};
}

} // namespace ep::nic
