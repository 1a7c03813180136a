/* WQEs of EFA. A writer stores whole words of 8 bytes, ascending, straight into the ring (registers.h); EP_EFA_* in abi/efa_wqe.h say what the bits mean.
 * Every WQE asks for a completion. */
#ifndef EP_DEVICE_EFA_WQE_H
#define EP_DEVICE_EFA_WQE_H

#include "ep/abi/efa_gda.h"
#include "registers.h"

EP_MACHINE_BEGIN

/* Memory that a NIC knows by a key. */
struct efa_place {
  uint64_t address;
  uint32_t key;
};

template <class Ctx> struct efa_writer {
  Ctx& ctx;
  uint64_t wqe;      /* address of the slot */
  uint64_t number;   /* of the WQE, from 0 since the queue pair was made */
  uint32_t wqe_bytes;
  uint32_t phase;    /* bit log2(depth) of the number */
  bool wide_id;

  EP_HD_SMALL void word(uint32_t index, uint64_t value) const { register_store(ctx, wqe + index * 8u, value); }

  /* `length`: 1 data segment, or inline bytes. */
  EP_HD_SMALL void meta(uint32_t ctrl1, ep_efa_target to, uint32_t length) const {
    const uint64_t id = number & 0xffffu;
    const uint64_t same = static_cast<uint64_t>(ctrl1) << 16 | static_cast<uint64_t>(EP_EFA_CTRL2) << 24 | static_cast<uint64_t>(length) << 48;
    word(0, same | id | static_cast<uint64_t>(phase) << 24 | static_cast<uint64_t>(to.qpn) << 32);
    word(1, static_cast<uint64_t>(to.ah) << 32);
    word(2, to.qkey);
    word(3, wide_id ? number & ~uint64_t{0xffff} : 0);
  }
  EP_HD_SMALL void remote(efa_place at, uint32_t bytes) const {
    word(4, static_cast<uint64_t>(at.key) << 32 | bytes);
    word(5, at.address);
  }
  /* 24 bits of a key: EP_EFA_LKEY_MASK. */
  EP_HD_SMALL void local(efa_place at, uint32_t bytes) const {
    word(6, static_cast<uint64_t>(at.key) << 40 >> 8 | bytes);
    word(7, at.address);
  }
  /* What a wide slot has behind the segments: the NIC takes all of it. */
  EP_HD_SMALL void rest() const {
    if (wqe_bytes == EP_EFA_WQE_BYTES) [[likely]] return;
    for (uint32_t i = EP_EFA_WQE_BYTES / 8; i < EP_EFA_WIDE_WQE_BYTES / 8; ++i) word(i, 0);
  }

  EP_HD_SMALL void write(ep_efa_target target, efa_place to, efa_place from, uint32_t bytes) const {
    meta(EP_EFA_CTRL1_WRITE, target, 1);
    remote(to, bytes);
    local(from, bytes);
    rest();
  }
  EP_HD void read(ep_efa_target target, efa_place from, efa_place into, uint32_t bytes) const {
    meta(EP_EFA_CTRL1_READ, target, 1);
    remote(from, bytes);
    local(into, bytes);
    rest();
  }
  /* 1 to 8 bytes, in a wide slot. */
  EP_HD_SMALL void write_value(ep_efa_target target, efa_place to, uint64_t value, uint32_t bytes) const {
    meta(EP_EFA_CTRL1_WRITE | EP_EFA_CTRL1_INLINE, target, bytes);
    remote(to, bytes);
    word(6, value);
    word(7, 0);
    rest();
  }
};

EP_MACHINE_END

#endif
