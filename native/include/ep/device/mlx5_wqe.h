/* WQEs of mlx5, each of one WQEBB. A writer stores whole segments, 16 bytes at a time, straight into the ring. `number` is the WQE's place since the queue
 * pair was made; `signalled` asks for a CQE. Sizes of messages are at most 2^30; EP_MLX5_* in abi/mlx5_wqe.h say what the bits mean. */
#ifndef EP_DEVICE_MLX5_WQE_H
#define EP_DEVICE_MLX5_WQE_H

#include "copy.h"
#include "ep/abi/ibgda.h"
#include "ep/abi/mlx5_wqe.h"

EP_MACHINE_BEGIN

EP_HD uint32_t be32(uint32_t value) {
#if defined(__CUDACC__)
  return __byte_perm(value, 0, 0x0123);
#else
  return __builtin_bswap32(value);
#endif
}

EP_HD uint64_t be64(uint64_t value) {
  return (static_cast<uint64_t>(be32(static_cast<uint32_t>(value))) << 32) | be32(static_cast<uint32_t>(value >> 32));
}

/* Memory that a NIC knows by a key. */
struct mlx5_place {
  uint64_t address;
  uint32_t key;
};

struct mlx5_writer {
  vector16* wqe;
  uint32_t qpn;
  uint64_t number;
  bool signalled;

  EP_HD static uint32_t high(uint64_t value) { return be32(static_cast<uint32_t>(value >> 32)); }
  EP_HD static uint32_t low(uint64_t value) { return be32(static_cast<uint32_t>(value)); }

  EP_HD void control(uint32_t opmod, uint32_t opcode, uint32_t segments, uint32_t imm) const {
    wqe[0] = {{be32(opmod << 24 | (static_cast<uint32_t>(number) & 0xffffu) << 8 | opcode), be32(qpn << 8 | segments),
               be32(signalled ? EP_MLX5_CQ_UPDATE : 0u), be32(imm)}};
  }
  EP_HD void remote(const mlx5_place& to) const { wqe[1] = {{high(to.address), low(to.address), be32(to.key), 0}}; }
  EP_HD void local(uint32_t segment, const mlx5_place& from, uint32_t bytes) const {
    wqe[segment] = {{be32(bytes), be32(from.key), high(from.address), low(from.address)}};
  }

  /* A message of no bytes has no data segment: a byte count of 0 is 2 GiB to some generations. */
  EP_HD void transfer(uint32_t opcode, const mlx5_place& to, const mlx5_place& from, uint32_t bytes, uint32_t imm) const {
    control(0, opcode, bytes != 0 ? 3 : 2, imm);
    remote(to);
    if (bytes != 0) local(2, from, bytes);
  }
  EP_HD void write(const mlx5_place& to, const mlx5_place& from, uint32_t bytes) const {
    transfer(EP_MLX5_OPCODE_RDMA_WRITE, to, from, bytes, 0);
  }
  EP_HD void write_immediate(const mlx5_place& to, const mlx5_place& from, uint32_t bytes, uint32_t imm) const {
    transfer(EP_MLX5_OPCODE_RDMA_WRITE_IMM, to, from, bytes, imm);
  }
  EP_HD void read(const mlx5_place& from, const mlx5_place& into, uint32_t bytes) const {
    transfer(EP_MLX5_OPCODE_RDMA_READ, from, into, bytes, 0);
  }

  /* 1 to EP_IBGDA_MAX_INLINE bytes; they are read here, so their memory may be reused at once. */
  EP_HD void write_inline(const mlx5_place& to, const void* from, uint32_t bytes) const {
    control(0, EP_MLX5_OPCODE_RDMA_WRITE, 2 + (4 + bytes + 15) / 16, 0);
    remote(to);
    uint32_t word[8] = {be32(EP_MLX5_INLINE | bytes)};
    const auto* source = static_cast<const uint8_t*>(from);
    for (uint32_t i = 0; i < bytes; ++i) word[1 + i / 4] |= static_cast<uint32_t>(source[i]) << (8 * (i % 4));
    wqe[2] = {{word[0], word[1], word[2], word[3]}};
    if (bytes > 12) wqe[3] = {{word[4], word[5], word[6], word[7]}};
  }

  /* The old value arrives at `old`: big-endian from the 4-byte form, in host order from the others. */
  EP_HD void fetch_add4(const mlx5_place& to, uint32_t add, const mlx5_place& old) const {
    control(EP_MLX5_OPMOD_ATOMIC_4, EP_MLX5_OPCODE_ATOMIC_MASKED_FA, 4, 0);
    remote(to);
    wqe[2] = {{be32(add), 0, 0, 0}};
    local(3, old, 4);
  }
  EP_HD void fetch_add8(const mlx5_place& to, uint64_t add, const mlx5_place& old) const {
    control(EP_MLX5_OPMOD_ATOMIC_8, EP_MLX5_OPCODE_ATOMIC_MASKED_FA, 4, 0);
    remote(to);
    wqe[2] = {{high(add), low(add), 0, 0}};
    local(3, old, 8);
  }
  EP_HD void compare_swap8(const mlx5_place& to, uint64_t compare, uint64_t swap, const mlx5_place& old) const {
    control(0, EP_MLX5_OPCODE_ATOMIC_CS, 4, 0);
    remote(to);
    wqe[2] = {{high(swap), low(swap), high(compare), low(compare)}};
    local(3, old, 8);
  }
};

EP_MACHINE_END

#endif
