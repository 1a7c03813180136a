/* Completions of mlx5 queue pairs. Source: mlx5dv.h of rdma-core. */
#ifndef EP_ABI_MLX5_CQE_H
#define EP_ABI_MLX5_CQE_H

#include "wire.h"

#define EP_MLX5_CQE_SIZE 64

/* A completion. An ordinary ring's entry i & (n - 1) is valid once its opcode is not EP_MLX5_CQE_INVALID and its owner bit equals bit log2(n) of
 * i. In a collapsed queue every completion overwrites entry 0, the owner bit means nothing, and all requests up to wqe_counter are done. */
typedef struct ep_mlx5_cqe {
  uint8_t reserved0[2];
  ep_be16 wqe_id;
  uint8_t reserved1[28];
  ep_be32 srqn_uidx; /* user index of the queue pair */
  ep_be32 imm_inval_pkey;
  uint8_t reserved2[4];
  ep_be32 byte_cnt;
  ep_be64 timestamp;
  ep_be32 sop_drop_qpn; /* opcode of the WQE, queue pair number */
  ep_be16 wqe_counter;  /* index of the WQE's first WQEBB */
  uint8_t signature;
  uint8_t op_own; /* written last */
} ep_mlx5_cqe;
EP_STATIC_ASSERT(sizeof(ep_mlx5_cqe) == EP_MLX5_CQE_SIZE, "one entry");

/* A completion with opcode EP_MLX5_CQE_REQ_ERR or EP_MLX5_CQE_RESP_ERR. */
typedef struct ep_mlx5_err_cqe {
  uint8_t reserved0[32];
  ep_be32 srqn_uidx;
  uint8_t reserved1[18];
  uint8_t vendor_syndrome;
  uint8_t syndrome; /* EP_MLX5_SYNDROME_* */
  ep_be32 sop_drop_qpn;
  ep_be16 wqe_counter;
  uint8_t signature;
  uint8_t op_own;
} ep_mlx5_err_cqe;
EP_STATIC_ASSERT(sizeof(ep_mlx5_err_cqe) == EP_MLX5_CQE_SIZE, "one entry");

/* What the last 8 bytes of either say. */
#define EP_MLX5_CQE_TAIL_BYTES 64
#define EP_MLX5_CQE_TAIL_WQE_OPCODE EP_BITS(56, 31, 24)
#define EP_MLX5_CQE_TAIL_QPN EP_BITS(56, 23, 0)
#define EP_MLX5_CQE_TAIL_WQE_COUNTER EP_BITS(60, 31, 16)
#define EP_MLX5_CQE_TAIL_SIGNATURE EP_BITS(60, 15, 8)
#define EP_MLX5_CQE_TAIL_OPCODE EP_BITS(60, 7, 4) /* EP_MLX5_CQE_REQ and the like */
#define EP_MLX5_CQE_TAIL_FORMAT EP_BITS(60, 3, 2)
#define EP_MLX5_CQE_TAIL_SOLICITED EP_BITS(60, 1, 1)
#define EP_MLX5_CQE_TAIL_OWNER EP_BITS(60, 0, 0)

#define EP_MLX5_CQE_REQ 0x0
#define EP_MLX5_CQE_RESP_WR_IMM 0x1
#define EP_MLX5_CQE_RESP_SEND 0x2
#define EP_MLX5_CQE_RESP_SEND_IMM 0x3
#define EP_MLX5_CQE_RESP_SEND_INV 0x4
#define EP_MLX5_CQE_REQ_ERR 0xd
#define EP_MLX5_CQE_RESP_ERR 0xe
#define EP_MLX5_CQE_INVALID 0xf /* never written: queues are filled with 0xff before use */

#define EP_MLX5_SYNDROME_LOCAL_LENGTH 0x01
#define EP_MLX5_SYNDROME_LOCAL_QP_OPERATION 0x02
#define EP_MLX5_SYNDROME_LOCAL_PROTECTION 0x04
#define EP_MLX5_SYNDROME_FLUSHED 0x05 /* an earlier request of this queue pair failed */
#define EP_MLX5_SYNDROME_MEMORY_WINDOW_BIND 0x06
#define EP_MLX5_SYNDROME_BAD_RESPONSE 0x10
#define EP_MLX5_SYNDROME_LOCAL_ACCESS 0x11
#define EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST 0x12
#define EP_MLX5_SYNDROME_REMOTE_ACCESS 0x13
#define EP_MLX5_SYNDROME_REMOTE_OPERATION 0x14
#define EP_MLX5_SYNDROME_RETRY_EXCEEDED 0x15
#define EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED 0x16
#define EP_MLX5_SYNDROME_REMOTE_ABORTED 0x22

/* Doorbell record of a completion queue: entries ever taken, low 24 bits. */
typedef struct ep_mlx5_cq_dbr {
  ep_be32 consumer;
  ep_be32 arm;
} ep_mlx5_cq_dbr;
EP_STATIC_ASSERT(sizeof(ep_mlx5_cq_dbr) == 8, "one record");

#define EP_MLX5_CQ_DBR_COUNTER_MASK 0xffffffu

#endif
