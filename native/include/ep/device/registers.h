/* Stores to a device's own memory: rings and doorbells that lie behind PCIe, mapped write-combining for a CPU. They are never read back.
 *
 * HAZARD: such stores sit in a buffer of whoever made them, pass each other, and are ordered by nothing but that one's own `register_fence`: neither a
 * release store nor a barrier, nor another lane's fence, brings them out.
 *
 * A context may take these calls over (register_store64, register_store32, register_fence): tests model the buffer there. */
#ifndef EP_DEVICE_REGISTERS_H
#define EP_DEVICE_REGISTERS_H

#include "order.h"

EP_MACHINE_BEGIN

template <class Ctx> EP_HD void register_store(Ctx& ctx, uint64_t address, uint64_t value) {
  if constexpr (requires { ctx.register_store64(address, value); }) {
    ctx.register_store64(address, value);
  } else {
    detail::word_ref(*reinterpret_cast<uint64_t*>(address)).store(value, detail::relaxed);
  }
}

template <class Ctx> EP_HD void register_store(Ctx& ctx, uint64_t address, uint32_t value) {
  if constexpr (requires { ctx.register_store32(address, value); }) {
    ctx.register_store32(address, value);
  } else {
#if defined(__CUDACC__)
    detail::half_ref(*reinterpret_cast<uint32_t*>(address)).store(value, detail::relaxed);
#else
    detail::half_ref(*reinterpret_cast<uint32_t*>(address)).store(value, detail::release); /* a software NIC's language knows no store fence */
#endif
  }
}

/* This lane's stores before it, to the device and to memory, come before its later ones, as the device sees them. */
template <class Ctx> EP_HD void register_fence(Ctx& ctx) {
  if constexpr (requires { ctx.register_fence(); }) {
    ctx.register_fence();
  } else {
#if defined(__CUDACC__)
    fence_system();
#else
    fence_register();
#endif
  }
}

/* Stores a word that is seen behind all that this lane has stored to the device. */
template <class Ctx> EP_HD void register_publish(Ctx& ctx, uint64_t* word, uint64_t value) {
#if !defined(__CUDACC__)
  register_fence(ctx); /* a GPU's release of system scope waits for them by itself */
#endif
  store_release(ctx, word, value);
}

EP_MACHINE_END

#endif
