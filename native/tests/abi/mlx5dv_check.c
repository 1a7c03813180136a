/* Our layouts of WQEs and CQEs against those of the system's mlx5dv.h; compiled, linked and run by tests/compile/run.mjs where that header is
 * installed. The DevX commands are in no public header: packages/ibgda/test has golden bytes of them. */
#include <infiniband/mlx5dv.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "ep/abi/mlx5_cqe.h"
#include "ep/abi/mlx5_wqe.h"

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(struct theirs), #theirs)
#define SAME_FIELD(ours, field, theirs, their_field)                                                              \
  _Static_assert(offsetof(ours, field) == offsetof(struct theirs, their_field), #theirs "." #their_field);        \
  _Static_assert(sizeof(((ours*)0)->field) == sizeof(((struct theirs*)0)->their_field), #theirs "." #their_field)
#define SAME_VALUE(ours, theirs) _Static_assert((ours) == (theirs), #theirs)

SAME_SIZE(ep_mlx5_ctrl_seg, mlx5_wqe_ctrl_seg);
SAME_FIELD(ep_mlx5_ctrl_seg, opmod_idx_opcode, mlx5_wqe_ctrl_seg, opmod_idx_opcode);
SAME_FIELD(ep_mlx5_ctrl_seg, qpn_ds, mlx5_wqe_ctrl_seg, qpn_ds);
SAME_FIELD(ep_mlx5_ctrl_seg, signature, mlx5_wqe_ctrl_seg, signature);
SAME_FIELD(ep_mlx5_ctrl_seg, dci_stream, mlx5_wqe_ctrl_seg, dci_stream_channel_id);
SAME_FIELD(ep_mlx5_ctrl_seg, fm_ce_se, mlx5_wqe_ctrl_seg, fm_ce_se);
SAME_FIELD(ep_mlx5_ctrl_seg, imm, mlx5_wqe_ctrl_seg, imm);
SAME_SIZE(ep_mlx5_raddr_seg, mlx5_wqe_raddr_seg);
SAME_FIELD(ep_mlx5_raddr_seg, raddr, mlx5_wqe_raddr_seg, raddr);
SAME_FIELD(ep_mlx5_raddr_seg, rkey, mlx5_wqe_raddr_seg, rkey);
SAME_SIZE(ep_mlx5_data_seg, mlx5_wqe_data_seg);
SAME_FIELD(ep_mlx5_data_seg, byte_count, mlx5_wqe_data_seg, byte_count);
SAME_FIELD(ep_mlx5_data_seg, lkey, mlx5_wqe_data_seg, lkey);
SAME_FIELD(ep_mlx5_data_seg, addr, mlx5_wqe_data_seg, addr);
SAME_SIZE(ep_mlx5_inline_seg, mlx5_wqe_inl_data_seg);
SAME_SIZE(ep_mlx5_atomic_seg, mlx5_wqe_atomic_seg);
SAME_FIELD(ep_mlx5_atomic_seg, swap_add, mlx5_wqe_atomic_seg, swap_add);
SAME_FIELD(ep_mlx5_atomic_seg, compare, mlx5_wqe_atomic_seg, compare);

SAME_SIZE(ep_mlx5_cqe, mlx5_cqe64);
SAME_FIELD(ep_mlx5_cqe, wqe_id, mlx5_cqe64, wqe_id);
SAME_FIELD(ep_mlx5_cqe, srqn_uidx, mlx5_cqe64, srqn_uidx);
SAME_FIELD(ep_mlx5_cqe, imm_inval_pkey, mlx5_cqe64, imm_inval_pkey);
SAME_FIELD(ep_mlx5_cqe, byte_cnt, mlx5_cqe64, byte_cnt);
SAME_FIELD(ep_mlx5_cqe, timestamp, mlx5_cqe64, timestamp);
SAME_FIELD(ep_mlx5_cqe, sop_drop_qpn, mlx5_cqe64, sop_drop_qpn);
SAME_FIELD(ep_mlx5_cqe, wqe_counter, mlx5_cqe64, wqe_counter);
SAME_FIELD(ep_mlx5_cqe, signature, mlx5_cqe64, signature);
SAME_FIELD(ep_mlx5_cqe, op_own, mlx5_cqe64, op_own);
SAME_SIZE(ep_mlx5_err_cqe, mlx5_err_cqe);
SAME_FIELD(ep_mlx5_err_cqe, srqn_uidx, mlx5_err_cqe, srqn);
SAME_FIELD(ep_mlx5_err_cqe, vendor_syndrome, mlx5_err_cqe, vendor_err_synd);
SAME_FIELD(ep_mlx5_err_cqe, syndrome, mlx5_err_cqe, syndrome);
SAME_FIELD(ep_mlx5_err_cqe, sop_drop_qpn, mlx5_err_cqe, s_wqe_opcode_qpn);
SAME_FIELD(ep_mlx5_err_cqe, wqe_counter, mlx5_err_cqe, wqe_counter);
SAME_FIELD(ep_mlx5_err_cqe, op_own, mlx5_err_cqe, op_own);

SAME_VALUE(EP_MLX5_OPCODE_NOP, MLX5_OPCODE_NOP);
SAME_VALUE(EP_MLX5_OPCODE_RDMA_WRITE, MLX5_OPCODE_RDMA_WRITE);
SAME_VALUE(EP_MLX5_OPCODE_RDMA_WRITE_IMM, MLX5_OPCODE_RDMA_WRITE_IMM);
SAME_VALUE(EP_MLX5_OPCODE_SEND, MLX5_OPCODE_SEND);
SAME_VALUE(EP_MLX5_OPCODE_RDMA_READ, MLX5_OPCODE_RDMA_READ);
SAME_VALUE(EP_MLX5_OPCODE_ATOMIC_CS, MLX5_OPCODE_ATOMIC_CS);
SAME_VALUE(EP_MLX5_OPCODE_ATOMIC_FA, MLX5_OPCODE_ATOMIC_FA);
SAME_VALUE(EP_MLX5_OPCODE_ATOMIC_MASKED_CS, MLX5_OPCODE_ATOMIC_MASKED_CS);
SAME_VALUE(EP_MLX5_OPCODE_ATOMIC_MASKED_FA, MLX5_OPCODE_ATOMIC_MASKED_FA);
SAME_VALUE(EP_MLX5_INVALID_LKEY, MLX5_INVALID_LKEY);
SAME_VALUE(EP_MLX5_CQ_UPDATE, MLX5_WQE_CTRL_CQ_UPDATE);
SAME_VALUE(EP_MLX5_WQEBB_BYTES, MLX5_SEND_WQE_BB);
SAME_VALUE((int)EP_MLX5_INLINE, (int)MLX5_INLINE_SEG);
SAME_VALUE(EP_MLX5_CQE_REQ, MLX5_CQE_REQ);
SAME_VALUE(EP_MLX5_CQE_RESP_WR_IMM, MLX5_CQE_RESP_WR_IMM);
SAME_VALUE(EP_MLX5_CQE_RESP_SEND, MLX5_CQE_RESP_SEND);
SAME_VALUE(EP_MLX5_CQE_RESP_SEND_IMM, MLX5_CQE_RESP_SEND_IMM);
SAME_VALUE(EP_MLX5_CQE_RESP_SEND_INV, MLX5_CQE_RESP_SEND_INV);
SAME_VALUE(EP_MLX5_CQE_REQ_ERR, MLX5_CQE_REQ_ERR);
SAME_VALUE(EP_MLX5_CQE_RESP_ERR, MLX5_CQE_RESP_ERR);
SAME_VALUE(EP_MLX5_CQE_INVALID, MLX5_CQE_INVALID);
SAME_VALUE(EP_MLX5_SYNDROME_LOCAL_LENGTH, MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_LOCAL_QP_OPERATION, MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_LOCAL_PROTECTION, MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_FLUSHED, MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_MEMORY_WINDOW_BIND, MLX5_CQE_SYNDROME_MW_BIND_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_BAD_RESPONSE, MLX5_CQE_SYNDROME_BAD_RESP_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_LOCAL_ACCESS, MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST, MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_REMOTE_ACCESS, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_REMOTE_OPERATION, MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_RETRY_EXCEEDED, MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED, MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
SAME_VALUE(EP_MLX5_SYNDROME_REMOTE_ABORTED, MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR);

/* The bits within dwords: what rdma-core's own helpers write must be found where EP_BITS says. */
static uint32_t bits(const void* segment, uint32_t field) {
  const uint8_t* at = (const uint8_t*)segment + (field >> 16);
  const uint32_t word = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
  const uint32_t high = field >> 8 & 0xff, low = field & 0xff;
  return word >> low & (0xffffffffu >> (31 - (high - low)));
}

static int wrong;
static void expect(const char* what, uint32_t found, uint32_t expected) {
  if (found == expected) return;
  printf("%s: expected 0x%x, found 0x%x\n", what, (unsigned)expected, (unsigned)found);
  wrong = 1;
}

int main(void) {
  struct mlx5_wqe_ctrl_seg ctrl;
  memset(&ctrl, 0, sizeof ctrl);
  mlx5dv_set_ctrl_seg(&ctrl, 0xfedc, MLX5_OPCODE_ATOMIC_MASKED_FA, EP_MLX5_OPMOD_ATOMIC_8, 0x123456,
                      MLX5_WQE_CTRL_CQ_UPDATE | MLX5_WQE_CTRL_SOLICITED | MLX5_WQE_CTRL_FENCE, 4, 0x5a, htobe32(0x89abcdefu));
  expect("opmod", bits(&ctrl, EP_MLX5_CTRL_OPMOD), EP_MLX5_OPMOD_ATOMIC_8);
  expect("index", bits(&ctrl, EP_MLX5_CTRL_INDEX), 0xfedc);
  expect("opcode", bits(&ctrl, EP_MLX5_CTRL_OPCODE), EP_MLX5_OPCODE_ATOMIC_MASKED_FA);
  expect("qpn", bits(&ctrl, EP_MLX5_CTRL_QPN), 0x123456);
  expect("ds", bits(&ctrl, EP_MLX5_CTRL_DS), 4);
  expect("signature", bits(&ctrl, EP_MLX5_CTRL_SIGNATURE), 0x5a);
  expect("fence", bits(&ctrl, EP_MLX5_CTRL_FENCE), 4);
  expect("ce", bits(&ctrl, EP_MLX5_CTRL_CE), EP_MLX5_CE_ALWAYS);
  expect("solicited", bits(&ctrl, EP_MLX5_CTRL_SOLICITED), 1);
  expect("imm", bits(&ctrl, EP_MLX5_CTRL_IMM), 0x89abcdefu);

  struct mlx5_cqe64 cqe;
  memset(&cqe, 0, sizeof cqe);
  cqe.op_own = MLX5_CQE_RESP_ERR << 4 | 2 << 2 | 1 << 1 | 1;
  cqe.sop_drop_qpn = htobe32(0x15abcdefu);
  cqe.wqe_counter = htobe16(0x7654);
  expect("cqe opcode", bits(&cqe, EP_MLX5_CQE_TAIL_OPCODE), mlx5dv_get_cqe_opcode(&cqe));
  expect("cqe format", bits(&cqe, EP_MLX5_CQE_TAIL_FORMAT), mlx5dv_get_cqe_format(&cqe));
  expect("cqe solicited", bits(&cqe, EP_MLX5_CQE_TAIL_SOLICITED), mlx5dv_get_cqe_se(&cqe));
  expect("cqe owner", bits(&cqe, EP_MLX5_CQE_TAIL_OWNER), mlx5dv_get_cqe_owner(&cqe));
  expect("cqe qpn", bits(&cqe, EP_MLX5_CQE_TAIL_QPN), 0xabcdef);
  expect("cqe wqe opcode", bits(&cqe, EP_MLX5_CQE_TAIL_WQE_OPCODE), 0x15);
  expect("cqe wqe counter", bits(&cqe, EP_MLX5_CQE_TAIL_WQE_COUNTER), 0x7654);
  return wrong;
}
