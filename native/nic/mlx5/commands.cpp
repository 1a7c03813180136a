#include "commands.hpp"

#include <array>
#include <cstring>
#include <initializer_list>

#include "qp_commands.hpp"
#include "wire/bits.hpp"

namespace ep::nic {
namespace {

using ep::wire::get;
using ep::wire::put;

constexpr uint32_t full_bytes = EP_MLX5_CREATE_QP_IN_BYTES;
static_assert(EP_MLX5_CREATE_CQ_IN_BYTES == full_bytes && EP_MLX5_MODIFY_QP_IN_BYTES == full_bytes);
using bit_mask = std::array<uint8_t, full_bytes>;

constexpr void allow(bit_mask& mask, uint32_t at, std::initializer_list<uint32_t> fields) {
  for (const uint32_t field : fields) put(mask.data() + at, field, wire::place_of(field).mask());
}

constexpr bit_mask head_mask() {
  bit_mask mask{};
  allow(mask, 0, {EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_IN_UID, EP_MLX5_CMD_IN_OP_MOD});
  return mask;
}

constexpr bit_mask cq_mask = [] {
  bit_mask mask = head_mask();
  allow(mask, EP_MLX5_CQC_AT,
        {EP_MLX5_CQC_DBR_UMEM_VALID, EP_MLX5_CQC_CQE_SIZE, EP_MLX5_CQC_COLLAPSED, EP_MLX5_CQC_OVERRUN_IGNORE, EP_MLX5_CQC_DBR_UMEM_ID,
         EP_MLX5_CQC_LOG_CQ_SIZE, EP_MLX5_CQC_UAR_PAGE, EP_MLX5_CQC_EQN, EP_MLX5_CQC_LOG_PAGE_SIZE, EP_MLX5_CQC_DBR_ADDR});
  allow(mask, 0, {EP_MLX5_CREATE_CQ_IN_UMEM_OFFSET, EP_MLX5_CREATE_CQ_IN_UMEM_ID, EP_MLX5_CREATE_CQ_IN_UMEM_VALID});
  return mask;
}();

constexpr bit_mask qp_mask = [] {
  bit_mask mask = head_mask();
  allow(mask, 0, {EP_MLX5_CMD_IN_OBJECT, EP_MLX5_CREATE_QP_IN_OPT_PARAM_MASK});
  allow(mask, EP_MLX5_QPC_AT,
        {EP_MLX5_QPC_STATE,        EP_MLX5_QPC_ST,           EP_MLX5_QPC_PM_STATE,     EP_MLX5_QPC_PD,           EP_MLX5_QPC_MTU,
         EP_MLX5_QPC_LOG_MSG_MAX,  EP_MLX5_QPC_LOG_RQ_SIZE,  EP_MLX5_QPC_LOG_RQ_STRIDE, EP_MLX5_QPC_LOG_SQ_SIZE,  EP_MLX5_QPC_UAR_PAGE,
         EP_MLX5_QPC_USER_INDEX,   EP_MLX5_QPC_LOG_PAGE_SIZE, EP_MLX5_QPC_REMOTE_QPN,   EP_MLX5_QPC_LOG_ACK_REQ_FREQ, EP_MLX5_QPC_LOG_SRA_MAX,
         EP_MLX5_QPC_RETRY_COUNT,  EP_MLX5_QPC_RNR_RETRY,    EP_MLX5_QPC_NEXT_SEND_PSN, EP_MLX5_QPC_CQN_SND,      EP_MLX5_QPC_LOG_RRA_MAX,
         EP_MLX5_QPC_ATOMIC_MODE,  EP_MLX5_QPC_RRE,          EP_MLX5_QPC_RWE,          EP_MLX5_QPC_RAE,          EP_MLX5_QPC_PAGE_OFFSET,
         EP_MLX5_QPC_MIN_RNR_NAK,  EP_MLX5_QPC_NEXT_RCV_PSN, EP_MLX5_QPC_CQN_RCV,      EP_MLX5_QPC_DBR_ADDR,     EP_MLX5_QPC_RQ_TYPE,
         EP_MLX5_QPC_DBR_UMEM_VALID, EP_MLX5_QPC_DBR_UMEM_ID});
  allow(mask, EP_MLX5_QPC_AT + EP_MLX5_ADS_AT,
        {EP_MLX5_ADS_PKEY_INDEX, EP_MLX5_ADS_GRH, EP_MLX5_ADS_MLID, EP_MLX5_ADS_RLID, EP_MLX5_ADS_ACK_TIMEOUT, EP_MLX5_ADS_SRC_ADDR_INDEX,
         EP_MLX5_ADS_STAT_RATE, EP_MLX5_ADS_HOP_LIMIT, EP_MLX5_ADS_TCLASS, EP_MLX5_ADS_FLOW_LABEL, EP_MLX5_ADS_RGID_HIGH, EP_MLX5_ADS_RGID_LOW,
         EP_MLX5_ADS_ECN, EP_MLX5_ADS_DSCP, EP_MLX5_ADS_UDP_SPORT, EP_MLX5_ADS_ETH_PRIO, EP_MLX5_ADS_SL, EP_MLX5_ADS_VHCA_PORT,
         EP_MLX5_ADS_RMAC_HIGH, EP_MLX5_ADS_RMAC_LOW});
  allow(mask, 0, {EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET, EP_MLX5_CREATE_QP_IN_WQ_UMEM_ID, EP_MLX5_CREATE_QP_IN_WQ_UMEM_VALID});
  return mask;
}();

bool within(std::span<const uint8_t> in, const bit_mask& mask) {
  for (size_t i = 0; i < in.size(); ++i) {
    if ((in[i] & ~mask[i]) != 0) return false;
  }
  return true;
}

command_answer query_caps(engine& nic, std::span<const uint8_t> in, std::span<uint8_t> out) {
  const auto mode = static_cast<uint32_t>(get(in.data(), EP_MLX5_CMD_IN_OP_MOD));
  if (out.size() != EP_MLX5_QUERY_HCA_CAP_OUT_BYTES) return refuse(EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH, "QUERY_HCA_CAP answers with 4112 bytes");
  uint8_t* caps = out.data() + EP_MLX5_CAP_AT;
  const bool current = (mode & 1) == EP_MLX5_CAP_CURRENT;
  switch (mode >> 1) {
    case EP_MLX5_CAP_GENERAL:
      put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP_SIZE, command_max_log_sq);
      put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP, 10);
      put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_CQ_SIZE, command_max_log_cq);
      put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_CQ, 12);
      put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_MESSAGE, 30);
      put(caps, EP_MLX5_GENERAL_CAP_CQE_VERSION, 1);
      return {};
    case EP_MLX5_CAP_ATOMIC:
      put(caps, EP_MLX5_ATOMIC_CAP_ENDIANNESS_MODE, current && nic.options().host_order_atomics ? 1 : 0);
      put(caps, EP_MLX5_ATOMIC_CAP_HOST_ORDER_SUPPORTED, 1);
      put(caps, EP_MLX5_ATOMIC_CAP_OPERATIONS,
          EP_MLX5_ATOMIC_COMPARE_SWAP | EP_MLX5_ATOMIC_FETCH_ADD | EP_MLX5_ATOMIC_MASKED_COMPARE_SWAP | EP_MLX5_ATOMIC_MASKED_FETCH_ADD);
      put(caps, EP_MLX5_ATOMIC_CAP_SIZES, 1u << 2 | 1u << 3);
      return {};
    default: return bad("QUERY_HCA_CAP knows the general and the atomic capabilities only");
  }
}

command_answer create_cq(engine& nic, std::span<const uint8_t> in) {
  if (!within(in, cq_mask)) return bad(reserved_text);
  const uint8_t* context = in.data() + EP_MLX5_CQC_AT;
  auto cq = std::make_unique<completion_queue>();
  cq->log_size = static_cast<uint32_t>(get(context, EP_MLX5_CQC_LOG_CQ_SIZE));
  cq->collapsed = get(context, EP_MLX5_CQC_COLLAPSED) != 0;
  cq->ignore_overrun = get(context, EP_MLX5_CQC_OVERRUN_IGNORE) != 0;
  cq->cq_umem = static_cast<uint32_t>(get(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_ID));
  cq->dbr_umem = static_cast<uint32_t>(get(context, EP_MLX5_CQC_DBR_UMEM_ID));
  cq->uar_page = static_cast<uint32_t>(get(context, EP_MLX5_CQC_UAR_PAGE));
  if (get(context, EP_MLX5_CQC_CQE_SIZE) != 0) return bad("completions have 64 bytes (cqe_sz 0)");
  if (cq->log_size > command_max_log_cq) return bad("log_cq_size is larger than the capabilities say");
  if (get(context, EP_MLX5_CQC_EQN) != command_eqn) return missing("there is no such event queue (c_eqn)");
  if (get(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_VALID) == 0) return bad("the queue lies in no umem (cq_umem_valid)");
  if (get(context, EP_MLX5_CQC_DBR_UMEM_VALID) == 0) return bad("the doorbell record lies in no umem (dbr_umem_valid)");
  const auto page = nic.pages.find(cq->uar_page);
  if (page == nic.pages.end()) return missing("there is no such UAR (uar_page)");
  const uint64_t offset = get(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_OFFSET);
  cq->ring = nic.memory.umem(cq->cq_umem, offset, uint64_t{EP_MLX5_CQE_SIZE} << cq->log_size, true);
  if (cq->ring == nullptr) return bad("the queue is not inside of its umem, or the umem is not writable");
  if (reinterpret_cast<uintptr_t>(cq->ring) % EP_MLX5_CQE_SIZE != 0) return bad("the queue is not aligned to 64 bytes");
  cq->dbr = nic.memory.umem(cq->dbr_umem, get(context, EP_MLX5_CQC_DBR_ADDR), sizeof(ep_mlx5_cq_dbr), false);
  if (cq->dbr == nullptr) return bad("the doorbell record is not inside of its umem");
  if (reinterpret_cast<uintptr_t>(cq->dbr) % sizeof(ep_mlx5_cq_dbr) != 0) return bad("the doorbell record is not aligned to 8 bytes");
  uint32_t cqn = 1;
  while (nic.cqs.count(cqn) != 0) ++cqn;
  cq->cqn = cqn;
  std::memcpy(cq->context.data(), context, cq->context.size());
  nic.memory.umem_use(cq->cq_umem, 1);
  nic.memory.umem_use(cq->dbr_umem, 1);
  ++page->second->users;
  nic.cqs[cqn] = std::move(cq);
  return {0, nullptr, cqn};
}

command_answer destroy_cq(engine& nic, uint32_t cqn) {
  const auto found = nic.cqs.find(cqn);
  if (found == nic.cqs.end()) return missing("there is no such completion queue");
  if (found->second->users != 0) return refuse(EP_MLX5_CMD_STATUS_RESOURCE_BUSY, "queue pairs still complete into this queue");
  nic.memory.umem_use(found->second->cq_umem, -1);
  nic.memory.umem_use(found->second->dbr_umem, -1);
  --nic.pages.at(found->second->uar_page)->users;
  nic.cqs.erase(found);
  return {0, nullptr, cqn};
}

command_answer query_cq(engine& nic, uint32_t cqn, std::span<uint8_t> out) {
  const auto found = nic.cqs.find(cqn);
  if (found == nic.cqs.end()) return missing("there is no such completion queue");
  if (out.size() != EP_MLX5_QUERY_CQ_OUT_BYTES) return refuse(EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH, "QUERY_CQ answers with 272 bytes");
  const completion_queue& cq = *found->second;
  uint8_t* context = out.data() + EP_MLX5_CQC_AT;
  std::memcpy(context, cq.context.data(), cq.context.size());
  put(context, EP_MLX5_CQC_STATUS, cq.overrun ? EP_MLX5_CQ_STATUS_OVERFLOW : EP_MLX5_CQ_STATUS_OK);
  const uint32_t producer = static_cast<uint32_t>(cq.produced) & EP_MLX5_CQ_DBR_COUNTER_MASK;
  put(context, EP_MLX5_CQC_PRODUCER_COUNTER, producer);
  put(context, EP_MLX5_CQC_CONSUMER_COUNTER, (producer - completion_backlog(cq)) & EP_MLX5_CQ_DBR_COUNTER_MASK);
  return {0, nullptr, cqn};
}

} // namespace

bool command_qp_bits_known(std::span<const uint8_t> in) { return within(in, qp_mask); }

namespace {

uint32_t in_bytes_of(uint32_t opcode) {
  switch (opcode) {
    case EP_MLX5_CMD_CREATE_CQ:
    case EP_MLX5_CMD_CREATE_QP:
    case EP_MLX5_CMD_RST2INIT_QP:
    case EP_MLX5_CMD_INIT2RTR_QP:
    case EP_MLX5_CMD_RTR2RTS_QP: return full_bytes;
    default: return EP_MLX5_CMD_IN_BYTES;
  }
}

command_answer run(engine& nic, uint32_t opcode, std::span<const uint8_t> in, std::span<uint8_t> out) {
  if (in.size() != in_bytes_of(opcode)) return refuse(EP_MLX5_CMD_STATUS_BAD_INPUT_LENGTH, "the command has another length");
  const auto object = static_cast<uint32_t>(get(in.data(), EP_MLX5_CMD_IN_OBJECT));
  static constexpr bit_mask plain = [] {
    bit_mask mask = head_mask();
    allow(mask, 0, {EP_MLX5_CMD_IN_OBJECT});
    return mask;
  }();
  if (in.size() == EP_MLX5_CMD_IN_BYTES && !within(in, plain)) return bad(reserved_text);
  if (opcode != EP_MLX5_CMD_QUERY_HCA_CAP && get(in.data(), EP_MLX5_CMD_IN_OP_MOD) != 0) return bad("this command has no op_mod");
  switch (opcode) {
    case EP_MLX5_CMD_QUERY_HCA_CAP: return query_caps(nic, in, out);
    case EP_MLX5_CMD_CREATE_CQ: return create_cq(nic, in);
    case EP_MLX5_CMD_DESTROY_CQ: return destroy_cq(nic, object);
    case EP_MLX5_CMD_QUERY_CQ: return query_cq(nic, object, out);
    case EP_MLX5_CMD_CREATE_QP: return create_qp(nic, in);
    case EP_MLX5_CMD_DESTROY_QP: return destroy_qp(nic, object);
    case EP_MLX5_CMD_QUERY_QP: return query_qp(nic, object, out);
    case EP_MLX5_CMD_RST2INIT_QP:
    case EP_MLX5_CMD_INIT2RTR_QP:
    case EP_MLX5_CMD_RTR2RTS_QP:
    case EP_MLX5_CMD_2ERR_QP:
    case EP_MLX5_CMD_2RST_QP: return modify_qp(nic, opcode, in);
    default: return refuse(EP_MLX5_CMD_STATUS_BAD_OP, "the software NIC does not know this command");
  }
}

// FNV-1a: a number for each text, that stays the same as long as the text does.
uint32_t syndrome_of(const char* text) {
  uint32_t hash = 0x811c9dc5;
  for (; text != nullptr && *text != 0; ++text) hash = (hash ^ static_cast<uint8_t>(*text)) * 0x01000193;
  return hash;
}

} // namespace

command_answer command_run(engine& nic, std::span<const uint8_t> in, std::span<uint8_t> out) {
  if (in.size() < EP_MLX5_CMD_IN_BYTES) return refuse(EP_MLX5_CMD_STATUS_BAD_INPUT_LENGTH, "a command has at least 16 bytes");
  if (out.size() < EP_MLX5_CMD_OUT_BYTES) return refuse(EP_MLX5_CMD_STATUS_BAD_OUTPUT_LENGTH, "an answer has at least 16 bytes");
  std::memset(out.data(), 0, out.size());
  const auto opcode = static_cast<uint32_t>(get(in.data(), EP_MLX5_CMD_IN_OPCODE));
  const command_answer answer = run(nic, opcode, in, out);
  if (answer.status != 0) std::memset(out.data(), 0, out.size());
  put(out.data(), EP_MLX5_CMD_OUT_STATUS, answer.status);
  put(out.data(), EP_MLX5_CMD_OUT_SYNDROME, answer.status == 0 ? 0 : syndrome_of(answer.why));
  const bool makes = opcode == EP_MLX5_CMD_CREATE_CQ || opcode == EP_MLX5_CMD_CREATE_QP;
  if (makes && answer.status == 0) put(out.data(), EP_MLX5_CMD_OUT_OBJECT, answer.object);
  if (nic.trace().enabled()) {
    trace_event event;
    event.kind = trace_kind::command;
    event.command = static_cast<uint16_t>(opcode);
    event.qpn = answer.object;
    event.syndrome = answer.status;
    event.begin_ns = event.end_ns = nic.now_ns();
    event.note = answer.why;
    nic.trace().add(event);
  }
  return answer;
}

} // namespace ep::nic
