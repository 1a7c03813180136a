/* The pull request's test of values, as a kernel of two ranks: rank 0 puts, rank 1 looks. Each round has three phases:
 *   1  a value without a signal; the receiver looks at the memory
 *   2  a value with a signal; the receiver waits for the signal, and the value must be there
 *   3  eight values, the first seven aggregated; the receiver looks at every one of them
 * As it was first written, the third phase took the eighth value for a sign of the other seven. Writes pass each other, so it is none: `behind` counts the rounds
 * in which somebody who took it for one would have been wrong. */
#ifndef EP_DEVICE_GIN_PUTVALUE_H
#define EP_DEVICE_GIN_PUTVALUE_H

#include "efa_gin.h"

EP_MACHINE_BEGIN

constexpr uint64_t gin_putvalue_words = 10; /* of every rank's part, zero before: one for each of phases 1 and 2, then the burst's */
constexpr uint64_t gin_putvalue_burst = 8;
constexpr uint64_t gin_putvalue_alone = 0x42424242;
constexpr uint64_t gin_putvalue_signalled = 0x43434343;
constexpr uint64_t gin_putvalue_sentinel = 0x44440000;

/* What a round puts: no value comes twice, so a later round's is not taken for an earlier one's. */
EP_HD uint64_t gin_putvalue_of(uint64_t round, uint64_t value) { return round << 32 | value; }

template <class Ctx, class Coop, class Gin>
EP_HD bool gin_putvalue_send(Ctx& ctx, const Coop& coop, const Gin& gin, const ep_efa_memory& memory, uint64_t round, ep_kernel_status* status) {
  const gin_team team{nullptr, 2};
  gin_options aggregated;
  aggregated.aggregate = true;
  if (!gin.put_value(ctx, coop, team, 1, memory, 0, gin_putvalue_of(round, gin_putvalue_alone), gin_no_action{}, {}, status)) return false;
  if (!gin.put_value(ctx, coop, team, 1, memory, 8, gin_putvalue_of(round, gin_putvalue_signalled), gin_signal_inc{0}, {}, status)) return false;
  for (uint64_t i = 0; i < gin_putvalue_burst; ++i) {
    const bool last = i + 1 == gin_putvalue_burst;
    const uint64_t value = gin_putvalue_of(round, gin_putvalue_sentinel + i);
    if (!gin.put_value(ctx, coop, team, 1, memory, 16 + i * 8, value, gin_no_action{}, last ? gin_options{} : aggregated, status)) return false;
  }
  return gin.flush(ctx, coop, status) && gin.wait_signal(ctx, coop, 0, round, status);
}

/* By one lane. */
template <class Ctx>
EP_HD bool gin_putvalue_look(Ctx& ctx, const uint64_t* words, uint64_t round, uint64_t* behind, ep_kernel_status* status) {
  const uint64_t signalled = gin_putvalue_of(round, gin_putvalue_signalled);
  const uint64_t found = load_acquire(ctx, words + 1);
  if (found != signalled) {
    ctx.fail(status, EP_STATUS_MISMATCH, 0, EP_STAGE_ARRIVAL, signalled, found);
    return false;
  }
  const uint64_t* burst = words + 2;
  constexpr uint64_t last = gin_putvalue_burst - 1;
  if (!ctx.wait(burst + last, gin_putvalue_of(round, gin_putvalue_sentinel + last), 0, EP_STAGE_ARRIVAL, status)) return false;
  bool others = true;
  for (uint64_t i = 0; i < last; ++i) others = load_acquire(ctx, burst + i) == gin_putvalue_of(round, gin_putvalue_sentinel + i) && others;
  if (!others) ++*behind;
  for (uint64_t i = 0; i < last; ++i) {
    if (!ctx.wait(burst + i, gin_putvalue_of(round, gin_putvalue_sentinel + i), 0, EP_STAGE_ARRIVAL, status)) return false;
  }
  return true;
}

template <class Ctx, class Coop, class Gin>
EP_HD bool gin_putvalue_receive(Ctx& ctx, const Coop& coop, const Gin& gin, const ep_efa_memory& memory, uint64_t round, uint64_t* behind,
                                ep_kernel_status* status) {
  const auto* words = reinterpret_cast<const uint64_t*>(memory.address);
  const bool alone = coop.lane() != 0 || ctx.wait(words, gin_putvalue_of(round, gin_putvalue_alone), 0, EP_STAGE_ARRIVAL, status);
  if (!coop.sync_and(alone) || !gin.wait_signal(ctx, coop, 0, round, status)) return false;
  const bool ok = coop.lane() != 0 || gin_putvalue_look(ctx, words, round, behind, status);
  return coop.sync_and(ok) && gin.signal(ctx, coop, gin_team{nullptr, 2}, 0, gin_signal_inc{0}, {}, status);
}

/* By one block of each rank of a world of two, in a context with a signal that nothing has ticked. `rounds` is below 2^31; `behind` counts up on rank 1. */
template <class Ctx, class Coop, class Gin>
EP_HD bool gin_putvalue(Ctx& ctx, const Coop& coop, const Gin& gin, const ep_efa_memory& memory, int32_t rank, uint64_t rounds, uint64_t* behind,
                        ep_kernel_status* status) {
  for (uint64_t round = 1; round <= rounds; ++round) {
    const bool ok = rank == 0 ? gin_putvalue_send(ctx, coop, gin, memory, round, status) : gin_putvalue_receive(ctx, coop, gin, memory, round, behind, status);
    if (!ok) return false;
  }
  return gin.flush(ctx, coop, status);
}

EP_MACHINE_END

#endif
