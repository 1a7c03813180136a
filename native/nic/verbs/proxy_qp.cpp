#include "proxy_qp.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nic/mlx5/bits.hpp"
#include "wire/bits.hpp"

namespace ep::nic {
namespace {

namespace verbs = dl::verbs;
using ep::wire::get;

constexpr uint32_t max_pieces = 4;   // local segments of one request
constexpr uint32_t max_inline = 256; // bytes; more than any WQE of ours has
constexpr int polled_at_once = 16;

// What a completion needs to know of its request.
uint64_t id_of(const work_request& request) {
  return request.index | uint64_t{request.opcode} << 16 | uint64_t{request.ce} << 24 | uint64_t{static_cast<uint32_t>(request.length)} << 32;
}

uint8_t syndrome_of(uint32_t status) {
  switch (status) {
    case 1: return EP_MLX5_SYNDROME_LOCAL_LENGTH;
    case 2: return EP_MLX5_SYNDROME_LOCAL_QP_OPERATION;
    case 4: return EP_MLX5_SYNDROME_LOCAL_PROTECTION;
    case 5: return EP_MLX5_SYNDROME_FLUSHED;
    case 6: return EP_MLX5_SYNDROME_MEMORY_WINDOW_BIND;
    case 7: return EP_MLX5_SYNDROME_BAD_RESPONSE;
    case 8: return EP_MLX5_SYNDROME_LOCAL_ACCESS;
    case 9: return EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST;
    case 10: return EP_MLX5_SYNDROME_REMOTE_ACCESS;
    case 11: return EP_MLX5_SYNDROME_REMOTE_OPERATION;
    case 12: return EP_MLX5_SYNDROME_RETRY_EXCEEDED;
    case 13: return EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED;
    case 16: return EP_MLX5_SYNDROME_REMOTE_ABORTED;
    default: return EP_MLX5_SYNDROME_LOCAL_QP_OPERATION;
  }
}

} // namespace

result<std::unique_ptr<proxy_qp>> proxy_qp::create(std::shared_ptr<const dl::rc_symbols> verbs, dl::verbs_context& device, verbs::pd* pd, std::span<const uint8_t> in, uint8_t* sq, uint8_t* dbr,
                                                   completion_queue* cq) {
  const uint8_t* qpc = in.data() + EP_MLX5_QPC_AT;
  std::unique_ptr<proxy_qp> made(new proxy_qp(std::move(verbs), device));
  made->sq_ = sq;
  made->dbr_ = dbr;
  made->cq_ = cq;
  made->log_depth_ = static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_LOG_SQ_SIZE));
  made->user_index_ = static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_USER_INDEX));
  const uint32_t depth = uint32_t{1} << made->log_depth_;
  made->verbs_cq_ = made->verbs_->ibv_create_cq(device.raw(), static_cast<int>(depth), nullptr, nullptr, 0);
  if (made->verbs_cq_ == nullptr) return device.fail("ibv_create_cq", errno, std::to_string(depth) + " entries");
  verbs::qp_init_attr attributes{};
  attributes.send_cq = made->verbs_cq_;
  attributes.recv_cq = made->verbs_cq_;
  attributes.cap = {depth, 1, max_pieces, 1, max_inline};
  attributes.qp_type = verbs::qp_type_rc;
  made->qp_ = made->verbs_->ibv_create_qp(pd, &attributes);
  if (made->qp_ == nullptr) return device.fail("ibv_create_qp", errno, std::to_string(depth) + " requests; a smaller depth may fit the device");
  return made;
}

proxy_qp::~proxy_qp() {
  if (qp_ != nullptr) verbs_->ibv_destroy_qp(qp_);
  if (verbs_cq_ != nullptr) verbs_->ibv_destroy_cq(verbs_cq_);
}

result<nothing> proxy_qp::modify(uint32_t opcode, std::span<const uint8_t> in, dl::mlx5_link link) {
  const uint8_t* qpc = in.data() + EP_MLX5_QPC_AT;
  const uint8_t* ads = qpc + EP_MLX5_ADS_AT;
  verbs::qp_attr attributes{};
  int mask = verbs::attr_state;
  uint8_t next = EP_MLX5_QP_STATE_ERR;
  switch (opcode) {
    case EP_MLX5_CMD_RST2INIT_QP:
      next = EP_MLX5_QP_STATE_INIT;
      attributes.qp_state = verbs::qps_init;
      attributes.port_num = static_cast<uint8_t>(get(ads, EP_MLX5_ADS_VHCA_PORT));
      attributes.pkey_index = static_cast<uint16_t>(get(ads, EP_MLX5_ADS_PKEY_INDEX));
      if (get(qpc, EP_MLX5_QPC_RWE) != 0) attributes.qp_access_flags |= dl::MLX5_ACCESS_REMOTE_WRITE | dl::MLX5_ACCESS_LOCAL_WRITE;
      if (get(qpc, EP_MLX5_QPC_RRE) != 0) attributes.qp_access_flags |= dl::MLX5_ACCESS_REMOTE_READ;
      if (get(qpc, EP_MLX5_QPC_RAE) != 0) attributes.qp_access_flags |= dl::MLX5_ACCESS_REMOTE_ATOMIC;
      mask |= verbs::attr_port | verbs::attr_pkey_index | verbs::attr_access;
      break;
    case EP_MLX5_CMD_INIT2RTR_QP: {
      next = EP_MLX5_QP_STATE_RTR;
      attributes.qp_state = verbs::qps_rtr;
      attributes.path_mtu = static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_MTU));
      attributes.dest_qp_num = static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_REMOTE_QPN));
      attributes.rq_psn = static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_NEXT_RCV_PSN));
      attributes.min_rnr_timer = static_cast<uint8_t>(get(qpc, EP_MLX5_QPC_MIN_RNR_NAK));
      attributes.max_dest_rd_atomic = static_cast<uint8_t>(1u << get(qpc, EP_MLX5_QPC_LOG_RRA_MAX));
      verbs::ah_attr& ah = attributes.ah;
      const bool ethernet = link == dl::mlx5_link::ethernet;
      ah.is_global = ethernet || get(ads, EP_MLX5_ADS_GRH) != 0 ? 1 : 0;
      std::memcpy(ah.grh.dgid, ads + wire::place_of(EP_MLX5_ADS_RGID_HIGH).offset, sizeof ah.grh.dgid);
      ah.grh.sgid_index = static_cast<uint8_t>(get(ads, EP_MLX5_ADS_SRC_ADDR_INDEX));
      ah.grh.hop_limit = static_cast<uint8_t>(get(ads, EP_MLX5_ADS_HOP_LIMIT));
      ah.grh.traffic_class = static_cast<uint8_t>(get(ads, EP_MLX5_ADS_TCLASS));
      ah.dlid = static_cast<uint16_t>(get(ads, EP_MLX5_ADS_RLID));
      ah.sl = static_cast<uint8_t>(get(ads, ethernet ? EP_MLX5_ADS_ETH_PRIO : EP_MLX5_ADS_SL));
      ah.port_num = static_cast<uint8_t>(get(ads, EP_MLX5_ADS_VHCA_PORT));
      max_message_ = uint64_t{1} << get(qpc, EP_MLX5_QPC_LOG_MSG_MAX);
      mask |= verbs::attr_av | verbs::attr_path_mtu | verbs::attr_dest_qpn | verbs::attr_rq_psn | verbs::attr_max_dest_rd_atomic | verbs::attr_min_rnr_timer;
      break;
    }
    case EP_MLX5_CMD_RTR2RTS_QP:
      next = EP_MLX5_QP_STATE_RTS;
      attributes.qp_state = verbs::qps_rts;
      attributes.timeout = static_cast<uint8_t>(get(ads, EP_MLX5_ADS_ACK_TIMEOUT));
      // HAZARD: the kernel's soft-RoCE takes 7 for "for ever": whoever writes to a dead peer would never be told.
      attributes.retry_cnt = static_cast<uint8_t>(std::min<uint64_t>(6, get(qpc, EP_MLX5_QPC_RETRY_COUNT)));
      attributes.rnr_retry = static_cast<uint8_t>(get(qpc, EP_MLX5_QPC_RNR_RETRY));
      attributes.sq_psn = static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_NEXT_SEND_PSN));
      attributes.max_rd_atomic = static_cast<uint8_t>(1u << get(qpc, EP_MLX5_QPC_LOG_SRA_MAX));
      mask |= verbs::attr_timeout | verbs::attr_retry_cnt | verbs::attr_rnr_retry | verbs::attr_sq_psn | verbs::attr_max_rd_atomic;
      break;
    case EP_MLX5_CMD_2ERR_QP: attributes.qp_state = verbs::qps_err; break;
    case EP_MLX5_CMD_2RST_QP:
      next = EP_MLX5_QP_STATE_RST;
      attributes.qp_state = verbs::qps_reset;
      break;
    default: return device_.fail("ibv_modify_qp", EINVAL, "command " + std::to_string(opcode) + " is no transition of the verbs backing");
  }
  if (const int error = verbs_->ibv_modify_qp(qp_, &attributes, mask); error != 0) return device_.fail("ibv_modify_qp", error, "state " + std::to_string(attributes.qp_state));
  state_ = next;
  if (opcode == EP_MLX5_CMD_2RST_QP) {
    // What has completed by now is of nobody's requests any more.
    std::array<verbs::wc, polled_at_once> done;
    while (device_.raw()->ops.poll_cq(verbs_cq_, polled_at_once, done.data()) > 0) {}
    consumer_ = 0;
  }
  return nothing{};
}

result<uint32_t> proxy_qp::next_psn() const {
  verbs::qp_attr attributes{};
  verbs::qp_init_attr initial{};
  if (const int error = verbs_->ibv_query_qp(qp_, &attributes, verbs::attr_rq_psn, &initial); error != 0) return device_.fail("ibv_query_qp", error, "the packet number that is awaited");
  return attributes.rq_psn & 0xffffff;
}

bool proxy_qp::progress() {
  bool did = false;
  if (state_ == EP_MLX5_QP_STATE_RTS || state_ == EP_MLX5_QP_STATE_ERR) {
    // The record is written before the register is, so it alone tells: nothing stands behind the doorbell page.
    const auto producer = static_cast<uint16_t>(be32(load_acquire(*reinterpret_cast<const uint32_t*>(dbr_ + 4))));
    while (consumer_ != producer && post_next(producer)) did = true;
  }
  return complete() || did;
}

bool proxy_qp::post_next(uint16_t producer) {
  const uint32_t mask = (uint32_t{1} << log_depth_) - 1;
  const uint32_t posted = static_cast<uint16_t>(producer - consumer_);
  alignas(16) std::array<uint8_t, wqe_max_bytes> wqe{};
  const uint8_t* head = sq_ + uint64_t{consumer_ & mask} * EP_MLX5_WQEBB_BYTES;
  const uint32_t blocks = std::min<uint32_t>(wqe_wqebbs(head), wqe_max_bytes / EP_MLX5_WQEBB_BYTES);
  for (uint32_t i = 0; i < blocks; ++i) {
    std::memcpy(wqe.data() + i * EP_MLX5_WQEBB_BYTES, sq_ + uint64_t{(consumer_ + i) & mask} * EP_MLX5_WQEBB_BYTES, EP_MLX5_WQEBB_BYTES);
  }
  work_request request;
  violation wrong;
  const bool sound = posted <= mask + 1 && wqe_read(wqe.data(), consumer_, qpn(), posted, request, wrong);
  if (!sound) {
    request.index = consumer_;
    refuse(request, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
    consumer_ = producer;
    return true;
  }
  if (!post(request, wqe.data())) return false;
  consumer_ = static_cast<uint16_t>(consumer_ + request.wqebbs);
  return true;
}

// False: the device has no room now.
bool proxy_qp::post(const work_request& request, const uint8_t* wqe) {
  std::array<verbs::sge, max_pieces> pieces{};
  verbs::send_wr wr{};
  wr.wr_id = id_of(request);
  wr.sg_list = pieces.data();
  if (request.ce == EP_MLX5_CE_ALWAYS) wr.send_flags |= verbs::send_signaled;
  if (request.solicited) wr.send_flags |= verbs::send_solicited;
  if (request.fence != 0) wr.send_flags |= verbs::send_fence;
  if (request.length > max_message_) {
    refuse(request, EP_MLX5_SYNDROME_LOCAL_LENGTH);
    return true;
  }
  bool possible = request.has_remote && request.data_count <= max_pieces;
  if (request.inlined) {
    possible = possible && request.length <= max_inline;
    pieces[0] = {reinterpret_cast<uint64_t>(wqe + request.inline_at), static_cast<uint32_t>(request.length), 0};
    wr.num_sge = 1;
    wr.send_flags |= verbs::send_inline;
  } else {
    for (uint32_t i = 0; i < request.data_count && i < max_pieces; ++i) pieces[i] = {request.data[i].address, request.data[i].bytes, request.data[i].lkey};
    wr.num_sge = static_cast<int>(request.data_count);
  }
  switch (request.operation) {
    case wire_operation::write:
      wr.opcode = request.opcode == EP_MLX5_OPCODE_RDMA_WRITE_IMM ? verbs::wr_write_imm : verbs::wr_write;
      wr.imm_data = request.immediate;
      wr.wr.rdma = {request.address, request.rkey};
      break;
    case wire_operation::read:
      wr.opcode = verbs::wr_read;
      wr.wr.rdma = {request.address, request.rkey};
      break;
    case wire_operation::add:
      possible = possible && request.atomic_bytes == 8 && request.operand[1] == 0;
      wr.opcode = verbs::wr_fetch_add;
      wr.wr.atomic = {request.address, request.operand[0], 0, request.rkey};
      break;
    case wire_operation::swap:
      possible = possible && request.atomic_bytes == 8 && request.operand[2] == ~uint64_t{0} && request.operand[3] == ~uint64_t{0};
      wr.opcode = verbs::wr_compare_swap;
      wr.wr.atomic = {request.address, request.operand[1], request.operand[0], request.rkey};
      break;
  }
  if (!possible) {
    refuse(request, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
    return true;
  }
  verbs::send_wr* bad = nullptr;
  const int error = device_.raw()->ops.post_send(qp_, &wr, &bad);
  if (error == ENOMEM || error == EAGAIN) return false;
  if (error != 0) refuse(request, EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
  return true;
}

void proxy_qp::fail() {
  if (state_ == EP_MLX5_QP_STATE_ERR) return;
  state_ = EP_MLX5_QP_STATE_ERR;
  verbs::qp_attr attributes{};
  attributes.qp_state = verbs::qps_err;
  verbs_->ibv_modify_qp(qp_, &attributes, verbs::attr_state);
}

// An error that the device never saw.
void proxy_qp::refuse(const work_request& request, uint8_t syndrome) {
  completion what;
  what.opcode = EP_MLX5_CQE_REQ_ERR;
  what.syndrome = state_ == EP_MLX5_QP_STATE_ERR ? uint8_t{EP_MLX5_SYNDROME_FLUSHED} : syndrome;
  what.wqe_opcode = request.opcode;
  what.wqe_counter = request.index;
  what.qpn = qpn();
  what.user_index = user_index_;
  completion_write(*cq_, what);
  fail();
}

bool proxy_qp::complete() {
  std::array<verbs::wc, polled_at_once> done;
  const int count = device_.raw()->ops.poll_cq(verbs_cq_, polled_at_once, done.data());
  for (int i = 0; i < count; ++i) {
    const verbs::wc& one = done[static_cast<size_t>(i)];
    const bool failed = one.status != 0;
    if (!failed && (one.wr_id >> 24 & 0xff) != EP_MLX5_CE_ALWAYS) continue;
    completion what;
    what.opcode = failed ? EP_MLX5_CQE_REQ_ERR : EP_MLX5_CQE_REQ;
    what.syndrome = failed ? syndrome_of(one.status) : uint8_t{0};
    what.wqe_opcode = static_cast<uint8_t>(one.wr_id >> 16);
    what.wqe_counter = static_cast<uint16_t>(one.wr_id);
    what.byte_count = static_cast<uint32_t>(one.wr_id >> 32);
    what.qpn = qpn();
    what.user_index = user_index_;
    if (!completion_write(*cq_, what) || failed) fail();
  }
  return count > 0;
}

} // namespace ep::nic
