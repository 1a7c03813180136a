/* Send work requests and receive descriptors of EFA queue pairs, and doorbells. Everything is little-endian; what nothing here names is reserved and
 * zero. Source: efa_io_defs.h of rdma-core. tests/abi/efa_check.c has golden bytes. */
#ifndef EP_ABI_EFA_WQE_H
#define EP_ABI_EFA_WQE_H

#include "wire.h"

/* A send queue is an array of entries of one of these sizes: the wide one where the queue pair takes more than 32 inline bytes, or inline writes. */
#define EP_EFA_WQE_BYTES 64
#define EP_EFA_WIDE_WQE_BYTES 128

#define EP_EFA_OPCODE_SEND 0
#define EP_EFA_OPCODE_RDMA_READ 1
#define EP_EFA_OPCODE_RDMA_WRITE 2

/* How every send work request begins. */
typedef struct ep_efa_meta {
  uint16_t req_id;       /* low 16 bits of the request id; comes back in the completion */
  uint8_t ctrl1;         /* opcode, has_imm, inline, meta_desc */
  uint8_t ctrl2;         /* phase, first, last, comp_req */
  uint16_t dest_qpn;
  uint16_t length;       /* number of data segments, or of inline bytes */
  uint32_t imm;          /* in the host's order */
  uint16_t ah;
  uint8_t ctrl3;         /* hints */
  uint8_t reserved0;
  uint32_t qkey;
  uint8_t reserved1[6];
  uint16_t req_id_ex[3]; /* bits 16 and up of the request id, where the device takes 64 bits of it */
} ep_efa_meta;
EP_STATIC_ASSERT(sizeof(ep_efa_meta) == 32, "payload begins behind it");

#define EP_EFA_META_BYTES 32
#define EP_EFA_META_REQ_ID EP_LE_BITS(0, 15, 0)
#define EP_EFA_META_OPCODE EP_LE_BITS(0, 19, 16) /* EP_EFA_OPCODE_* */
#define EP_EFA_META_HAS_IMM EP_LE_BITS(0, 20, 20)
#define EP_EFA_META_INLINED EP_LE_BITS(0, 21, 21)
#define EP_EFA_META_META_DESC EP_LE_BITS(0, 23, 23) /* 1 */
#define EP_EFA_META_PHASE EP_LE_BITS(0, 24, 24)     /* of slot s counted from 0: bit log2(depth) of s */
#define EP_EFA_META_FIRST EP_LE_BITS(0, 26, 26)     /* 1 */
#define EP_EFA_META_LAST EP_LE_BITS(0, 27, 27)      /* 1 */
#define EP_EFA_META_COMP_REQ EP_LE_BITS(0, 28, 28)
#define EP_EFA_META_QPN EP_LE_BITS(4, 15, 0)
#define EP_EFA_META_LENGTH EP_LE_BITS(4, 31, 16)
#define EP_EFA_META_IMM EP_LE_BITS(8, 31, 0)
#define EP_EFA_META_AH EP_LE_BITS(12, 15, 0)
#define EP_EFA_META_HINTS EP_LE_BITS(12, 17, 16) /* EP_EFA_HINT_* */
#define EP_EFA_META_QKEY EP_LE_BITS(16, 31, 0)
#define EP_EFA_META_REQ_ID_EX EP_LE_BITS(24, 63, 16)

/* The constant bytes, for whoever writes whole words. */
#define EP_EFA_CTRL1_SEND 0x80u
#define EP_EFA_CTRL1_READ 0x81u
#define EP_EFA_CTRL1_WRITE 0x82u
#define EP_EFA_CTRL1_IMM 0x10u
#define EP_EFA_CTRL1_INLINE 0x20u
#define EP_EFA_CTRL2 0x1cu /* | phase */
#define EP_EFA_HINT_BURST_PPS_SENSITIVE 1u

/* Local memory. */
typedef struct ep_efa_sge {
  uint32_t length;
  uint32_t lkey; /* 24 bits */
  uint64_t addr;
} ep_efa_sge;
EP_STATIC_ASSERT(sizeof(ep_efa_sge) == 16, "one segment");

#define EP_EFA_LKEY_MASK 0xffffffu
#define EP_EFA_MAX_SEND_SEGMENTS 2
#define EP_EFA_MAX_RDMA_SEGMENTS 1

/* Memory of the peer, of a read or a write. */
typedef struct ep_efa_remote_seg {
  uint32_t length; /* bytes that travel, inline or not */
  uint32_t rkey;
  uint64_t addr;   /* in the peer's address space */
} ep_efa_remote_seg;
EP_STATIC_ASSERT(sizeof(ep_efa_remote_seg) == 16, "one segment");

typedef struct ep_efa_send_wqe {
  ep_efa_meta meta;
  ep_efa_sge segments[EP_EFA_MAX_SEND_SEGMENTS]; /* or inline bytes, from here on */
} ep_efa_send_wqe;
EP_STATIC_ASSERT(sizeof(ep_efa_send_wqe) == EP_EFA_WQE_BYTES, "one entry");

/* A read or a write. One without bytes has a segment of length 0. */
typedef struct ep_efa_rdma_wqe {
  ep_efa_meta meta;
  ep_efa_remote_seg remote;
  ep_efa_sge local;
} ep_efa_rdma_wqe;
EP_STATIC_ASSERT(sizeof(ep_efa_rdma_wqe) == EP_EFA_WQE_BYTES, "one entry");

#define EP_EFA_MAX_INLINE_SEND 32      /* in an entry of 64 bytes */
#define EP_EFA_MAX_WIDE_INLINE_SEND 80 /* in one of 128 */
#define EP_EFA_MAX_INLINE_WRITE 80     /* in one of 128; there are none in one of 64 */

/* A write whose bytes travel within the request. */
typedef struct ep_efa_inline_write_wqe {
  ep_efa_meta meta;
  ep_efa_remote_seg remote;
  uint8_t data[EP_EFA_MAX_INLINE_WRITE];
} ep_efa_inline_write_wqe;
EP_STATIC_ASSERT(sizeof(ep_efa_inline_write_wqe) == EP_EFA_WIDE_WQE_BYTES, "one entry");

/* A buffer of a receive queue. */
typedef struct ep_efa_receive_desc {
  uint64_t addr;
  uint16_t req_id;
  uint16_t length;
  uint32_t lkey_ctrl;
} ep_efa_receive_desc;
EP_STATIC_ASSERT(sizeof(ep_efa_receive_desc) == 16, "one entry");

#define EP_EFA_RECEIVE_BYTES 16
#define EP_EFA_RECEIVE_ADDR EP_LE_BITS(0, 63, 0)
#define EP_EFA_RECEIVE_REQ_ID EP_LE_BITS(8, 15, 0)
#define EP_EFA_RECEIVE_LENGTH EP_LE_BITS(8, 31, 16)
#define EP_EFA_RECEIVE_LKEY EP_LE_BITS(12, 23, 0)
#define EP_EFA_RECEIVE_FIRST EP_LE_BITS(12, 30, 30)
#define EP_EFA_RECEIVE_LAST EP_LE_BITS(12, 31, 31)

/* Doorbell of a send or a receive queue: a 4-byte store of how many entries have ever been posted, wide ones counting once. The host's driver stores
 * the low 16 bits, GPU code all 32: only the low 16 can matter. */
#define EP_EFA_DOORBELL_COUNTER_MASK 0xffffu

/* Doorbell of a completion queue: a 4-byte store. */
#define EP_EFA_CQ_DOORBELL_BYTES 4
#define EP_EFA_CQ_DOORBELL_CONSUMER EP_LE_BITS(0, 15, 0)
#define EP_EFA_CQ_DOORBELL_SEQUENCE EP_LE_BITS(0, 30, 29)
#define EP_EFA_CQ_DOORBELL_ARM EP_LE_BITS(0, 31, 31)

#endif
