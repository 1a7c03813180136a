/* Completions of EFA queue pairs, little-endian. How large an entry is belongs to its queue: 8 or 16 bytes for sends, 16 or 32 for receives. An entry is
 * valid once its phase bit is that of its round; the first round has 1. Source: efa_io_defs.h of rdma-core. */
#ifndef EP_ABI_EFA_CQE_H
#define EP_ABI_EFA_CQE_H

#include "wire.h"

/* How every completion begins. Older devices write two more reserved bytes and nothing else for a send. */
typedef struct ep_efa_cqe_head {
  uint16_t req_id;
  uint8_t status; /* EP_EFA_STATUS_* */
  uint8_t flags;  /* phase, queue, has_imm, opcode, unsolicited */
  uint16_t qpn;   /* of this side */
} ep_efa_cqe_head;
EP_STATIC_ASSERT(sizeof(ep_efa_cqe_head) == 6, "what follows differs");

#define EP_EFA_CQE_BYTES 8
#define EP_EFA_CQE_REQ_ID EP_LE_BITS(0, 15, 0)
#define EP_EFA_CQE_STATUS EP_LE_BITS(0, 23, 16)
#define EP_EFA_CQE_PHASE EP_LE_BITS(0, 24, 24)
#define EP_EFA_CQE_QUEUE EP_LE_BITS(0, 26, 25) /* EP_EFA_QUEUE_* */
#define EP_EFA_CQE_HAS_IMM EP_LE_BITS(0, 27, 27)
#define EP_EFA_CQE_OPCODE EP_LE_BITS(0, 30, 28) /* EP_EFA_OPCODE_* */
#define EP_EFA_CQE_UNSOLICITED EP_LE_BITS(0, 31, 31)
#define EP_EFA_CQE_QPN EP_LE_BITS(4, 15, 0)

#define EP_EFA_QUEUE_SEND 1
#define EP_EFA_QUEUE_RECEIVE 2

typedef struct ep_efa_tx_cqe {
  ep_efa_cqe_head head;
  uint16_t req_id_ex[3]; /* bits 16 and up of the request id */
  uint32_t reserved;
} ep_efa_tx_cqe;
EP_STATIC_ASSERT(sizeof(ep_efa_tx_cqe) == 16, "one entry");

typedef struct ep_efa_rx_cqe {
  ep_efa_cqe_head head;
  uint16_t length;
  uint16_t ah;      /* EP_EFA_UNKNOWN_AH: the sender is in no address vector */
  uint16_t src_qpn;
  uint32_t imm;
} ep_efa_rx_cqe;
EP_STATIC_ASSERT(sizeof(ep_efa_rx_cqe) == 16, "one entry");

#define EP_EFA_UNKNOWN_AH 0xffffu

typedef struct ep_efa_wide_rx_cqe {
  ep_efa_rx_cqe rx;
  uint8_t tail[16]; /* a write with immediate data: bits 16 and up of the length, 2 bytes; else the sender's address */
} ep_efa_wide_rx_cqe;
EP_STATIC_ASSERT(sizeof(ep_efa_wide_rx_cqe) == 32, "one entry");

#define EP_EFA_STATUS_OK 0
#define EP_EFA_STATUS_FLUSHED 1
#define EP_EFA_STATUS_LOCAL_QP_INTERNAL 2
#define EP_EFA_STATUS_LOCAL_UNSUPPORTED_OP 3
#define EP_EFA_STATUS_LOCAL_INVALID_AH 4
#define EP_EFA_STATUS_LOCAL_INVALID_LKEY 5
#define EP_EFA_STATUS_LOCAL_BAD_LENGTH 6
#define EP_EFA_STATUS_REMOTE_BAD_ADDRESS 7
#define EP_EFA_STATUS_REMOTE_ABORT 8
#define EP_EFA_STATUS_REMOTE_BAD_DEST_QPN 9
#define EP_EFA_STATUS_REMOTE_RNR 10
#define EP_EFA_STATUS_REMOTE_BAD_LENGTH 11
#define EP_EFA_STATUS_REMOTE_BAD_STATUS 12
#define EP_EFA_STATUS_UNRESPONSIVE 13
#define EP_EFA_STATUS_UNKNOWN_PEER 14 /* the target of a read or a write has no address handle for whoever began it */
#define EP_EFA_STATUS_UNREACHABLE 15
#define EP_EFA_STATUS_FEATURE_MISMATCH 18

/* A counter that the NIC keeps in memory, 8 bytes: its own value, stored absolutely; in practice it wraps at 2^31. HAZARD: a zero stored by anyone else
 * is lost with the next completion, and what the counter holds in between is undefined; a reset is an offset that the reader keeps. */
#define EP_EFA_COUNTER_MASK 0x7fffffffu

#endif
