/* Send work requests of ConnectX queue pairs (mlx5), doorbells and doorbell records. Sources: mlx5dv.h of rdma-core for the segments, the
 * public Ethernet Adapters Programming Manual for the rest. tests/abi/mlx5dv_check.c compares with the system's header. */
#ifndef EP_ABI_MLX5_WQE_H
#define EP_ABI_MLX5_WQE_H

#include "wire.h"

#define EP_MLX5_WQEBB_BYTES 64 /* a send queue is an array of these; a WQE begins at one, and may go on at the queue's start */
#define EP_MLX5_DS_BYTES 16    /* a segment; ctrl.ds counts them */

#define EP_MLX5_OPCODE_NOP 0x00
#define EP_MLX5_OPCODE_RDMA_WRITE 0x08
#define EP_MLX5_OPCODE_RDMA_WRITE_IMM 0x09
#define EP_MLX5_OPCODE_SEND 0x0a
#define EP_MLX5_OPCODE_RDMA_READ 0x10
#define EP_MLX5_OPCODE_ATOMIC_CS 0x11
#define EP_MLX5_OPCODE_ATOMIC_FA 0x12
#define EP_MLX5_OPCODE_ATOMIC_MASKED_CS 0x14
#define EP_MLX5_OPCODE_ATOMIC_MASKED_FA 0x15
#define EP_MLX5_OPCODE_DUMP 0x23

#define EP_MLX5_OPMOD_ATOMIC_4 0x08 /* masked atomics on 4 bytes */
#define EP_MLX5_OPMOD_ATOMIC_8 0x09 /* masked atomics on 8 bytes */

/* First segment of every WQE. `dci_stream` is unaligned in hardware's layout, hence bytes. */
typedef struct ep_mlx5_ctrl_seg {
  ep_be32 opmod_idx_opcode; /* opmod, index of the first WQEBB, opcode */
  ep_be32 qpn_ds;           /* queue pair number, size in EP_MLX5_DS_BYTES */
  uint8_t signature;
  uint8_t dci_stream[2];
  uint8_t fm_ce_se; /* fence, when to write a CQE, solicited */
  ep_be32 imm;      /* immediate data of RDMA_WRITE_IMM */
} ep_mlx5_ctrl_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_ctrl_seg) == 16, "one segment");

#define EP_MLX5_CTRL_BYTES 16
#define EP_MLX5_CTRL_OPMOD EP_BITS(0, 31, 24)
#define EP_MLX5_CTRL_INDEX EP_BITS(0, 23, 8) /* free-running; modulo the queue's size it is the slot */
#define EP_MLX5_CTRL_OPCODE EP_BITS(0, 7, 0)
#define EP_MLX5_CTRL_QPN EP_BITS(4, 31, 8)
#define EP_MLX5_CTRL_DS EP_BITS(4, 5, 0)
#define EP_MLX5_CTRL_SIGNATURE EP_BITS(8, 31, 24)
#define EP_MLX5_CTRL_DCI_STREAM EP_BITS(8, 23, 8)
#define EP_MLX5_CTRL_FENCE EP_BITS(8, 7, 5)
#define EP_MLX5_CTRL_CE EP_BITS(8, 3, 2) /* EP_MLX5_CE_* */
#define EP_MLX5_CTRL_SOLICITED EP_BITS(8, 1, 1)
#define EP_MLX5_CTRL_IMM EP_BITS(12, 31, 0)

#define EP_MLX5_CE_ON_ERROR 0u       /* a CQE only if it fails */
#define EP_MLX5_CE_ON_FIRST_ERROR 1u /* a CQE only if it is the first that fails */
#define EP_MLX5_CE_ALWAYS 2u
#define EP_MLX5_CQ_UPDATE 0x08 /* fm_ce_se with EP_MLX5_CE_ALWAYS */

/* Second segment of RDMA and atomic requests. */
typedef struct ep_mlx5_raddr_seg {
  ep_be64 raddr; /* address in the responder's process */
  ep_be32 rkey;
  ep_be32 reserved;
} ep_mlx5_raddr_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_raddr_seg) == 16, "one segment");

/* Local memory: source of a write, target of a read or of an atomic's old value. A zero-length request has none: byte_count 0 means 2 GiB to
 * some generations. */
typedef struct ep_mlx5_data_seg {
  ep_be32 byte_count; /* 31 bits */
  ep_be32 lkey;
  ep_be64 addr;
} ep_mlx5_data_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_data_seg) == 16, "one segment");

/* Head of inline data; the bytes follow, padded to a whole segment. */
typedef struct ep_mlx5_inline_seg {
  ep_be32 byte_count; /* EP_MLX5_INLINE | length */
} ep_mlx5_inline_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_inline_seg) == 4, "data begins behind it");

#define EP_MLX5_INLINE 0x80000000u
#define EP_MLX5_INVALID_LKEY 0x100u
#define EP_MLX5_MAX_MESSAGE_BYTES 0x40000000u /* largest request of a queue pair whose log_msg_max is 30 */

/* Third segment of ATOMIC_CS and ATOMIC_FA, on 8 bytes. */
typedef struct ep_mlx5_atomic_seg {
  ep_be64 swap_add;
  ep_be64 compare; /* 0 for a fetch-add */
} ep_mlx5_atomic_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_atomic_seg) == 16, "one segment");

/* Masked fetch-add. A set bit i of `boundary` stops the carry out of bit i: 0 is a plain addition. The word at the responder is in its host's
 * order. The old value comes back big-endian from the 4-byte form, in host order from the 8-byte form. */
typedef struct ep_mlx5_masked_fa4_seg {
  ep_be32 add;
  ep_be32 boundary;
  ep_be64 reserved;
} ep_mlx5_masked_fa4_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_masked_fa4_seg) == 16, "one segment");

typedef struct ep_mlx5_masked_fa8_seg {
  ep_be64 add;
  ep_be64 boundary;
} ep_mlx5_masked_fa8_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_masked_fa8_seg) == 16, "one segment");

/* Masked compare-and-swap: if (old & compare_mask) == (compare & compare_mask), the bits of swap_mask are replaced. */
typedef struct ep_mlx5_masked_cas4_seg {
  ep_be32 swap;
  ep_be32 compare;
  ep_be32 swap_mask;
  ep_be32 compare_mask;
} ep_mlx5_masked_cas4_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_masked_cas4_seg) == 16, "one segment");

/* Two segments, so the WQE has ds 5 and takes two WQEBBs. */
typedef struct ep_mlx5_masked_cas8_seg {
  ep_be64 swap;
  ep_be64 compare;
  ep_be64 swap_mask;
  ep_be64 compare_mask;
} ep_mlx5_masked_cas8_seg;
EP_STATIC_ASSERT(sizeof(ep_mlx5_masked_cas8_seg) == 32, "two segments");

/* Doorbell record of a queue pair: how many WQEBBs have ever been posted, low 16 bits. */
typedef struct ep_mlx5_dbr {
  ep_be32 receive;
  ep_be32 send;
} ep_mlx5_dbr;
EP_STATIC_ASSERT(sizeof(ep_mlx5_dbr) == 8, "one record");

#define EP_MLX5_DBR_COUNTER_MASK 0xffffu

/* A page of the NIC's registers. A doorbell is one 8-byte store to either half of the BlueFlame register. The NIC takes the queue pair's number
 * from bytes 4..7 (qpn << 8) and the producer from the doorbell record; so the first 8 bytes of the last WQE do, and so does
 * { producer << 8, qpn << 8 }. */
#define EP_MLX5_UAR_BYTES 4096
#define EP_MLX5_BF_OFFSET 0x800 /* of the BlueFlame register in the page */
#define EP_MLX5_BF_BYTES 512    /* both halves */
#define EP_MLX5_BF_HALF_BYTES 256

#define EP_MLX5_DOORBELL_BYTES 8
#define EP_MLX5_DOORBELL_QPN EP_BITS(4, 31, 8)

#endif
