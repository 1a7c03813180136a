/* WQEs of mlx5. A writer stores whole segments, 16 bytes at a time, straight into the ring. `number` is the WQE's place since the queue
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

/* WQEBBs of a WRITE with so many bytes inline. */
EP_HD uint32_t mlx5_inline_blocks(uint32_t bytes) { return (36 + bytes + EP_MLX5_WQEBB_BYTES - 1) / EP_MLX5_WQEBB_BYTES; }
constexpr uint32_t mlx5_masked_swap_blocks = 2;

/* HAZARD: a WQE of several WQEBBs is written by as many writers, one for each number. The last block has no control segment that could ask for a CQE, and a CQE
 * for the first names that: whoever counts WQEBBs would wait for the rest for ever. So it asks for none, and what ends its post is a WQE of one block: a signal,
 * or a NOP, whose completion comes behind its own. All blocks go with one doorbell: a NIC that saw some of them would take what lies in the ring for the rest. */
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

  EP_HD void nop() const { control(0, EP_MLX5_OPCODE_NOP, 1, 0); }

  /* Block `block` of a WRITE of EP_IBGDA_MAX_INLINE + 1 to EP_IBGDA_MAX_LONG_INLINE bytes, of mlx5_inline_blocks(bytes). */
  EP_HD void write_long_inline(uint32_t block, const mlx5_place& to, const void* from, uint32_t bytes) const {
    const auto* source = static_cast<const uint8_t*>(from);
    uint32_t word[16] = {};
    const uint32_t head = block == 0 ? 9 : 0; /* words before the bytes */
    const uint32_t first = block == 0 ? 0 : EP_MLX5_WQEBB_BYTES * block - 36;
    for (uint32_t i = 0; i < (16 - head) * 4 && first + i < bytes; ++i) word[head + i / 4] |= static_cast<uint32_t>(source[first + i]) << (8 * (i % 4));
    if (block == 0) {
      control(0, EP_MLX5_OPCODE_RDMA_WRITE, 2 + (4 + bytes + 15) / 16, 0);
      remote(to);
      word[8] = be32(EP_MLX5_INLINE | bytes);
    }
    for (uint32_t i = block == 0 ? 2 : 0; i < 4; ++i) wqe[i] = {{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]}};
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
  /* Block `block` of mlx5_masked_swap_blocks: where the word and `compare` are equal in the bits of `compare_mask`, the bits of `swap_mask` become those of `swap`. */
  EP_HD void masked_swap8(uint32_t block, const mlx5_place& to, uint64_t compare, uint64_t compare_mask, uint64_t swap, uint64_t swap_mask, const mlx5_place& old) const {
    if (block != 0) return local(0, old, 8);
    control(EP_MLX5_OPMOD_ATOMIC_8, EP_MLX5_OPCODE_ATOMIC_MASKED_CS, 5, 0);
    remote(to);
    wqe[2] = {{high(swap), low(swap), high(compare), low(compare)}};
    wqe[3] = {{high(swap_mask), low(swap_mask), high(compare_mask), low(compare_mask)}};
  }
};

EP_MACHINE_END

#endif
