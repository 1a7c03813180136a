/* A kernel that carries out a list of calls to the GIN facade (efa_gin.h), for hosts that drive contexts without a kernel of their own. */
#ifndef EP_DEVICE_GIN_PROGRAM_H
#define EP_DEVICE_GIN_PROGRAM_H

#include "efa_gin.h"
#include "ep/abi/gin_program.h"

EP_MACHINE_BEGIN

template <class Ctx, class Coop, class Gin> struct gin_program_run {
  Ctx& ctx;
  const Coop& coop;
  const Gin& gin;
  const ep_efa_memory& memory;
  ep_kernel_status* status;

  EP_HD gin_team team() const { return {nullptr, gin.device.world_size}; }
  EP_HD static gin_options options(const ep_gin_step& step) {
    gin_options made;
    made.aggregate = (step.flags & EP_GIN_AGGREGATE) != 0;
    return made;
  }
  EP_HD static gin_signal_add remote(const ep_gin_step& step) { return {step.signal, step.add}; }

  template <class Local> EP_HD bool put(const ep_gin_step& step, Local local) const {
    return gin.put(ctx, coop, team(), step.peer, memory, step.to, memory, step.from, step.bytes, remote(step), local, options(step), status);
  }
  template <class T> EP_HD bool put_value(const ep_gin_step& step) const {
    return gin.put_value(ctx, coop, team(), step.peer, memory, step.to, static_cast<T>(step.value), remote(step), options(step), status);
  }
  EP_HD bool put_value(const ep_gin_step& step) const {
    switch (step.bytes) {
      case 1: return put_value<uint8_t>(step);
      case 2: return put_value<uint16_t>(step);
      case 4: return put_value<uint32_t>(step);
      case 8: return put_value<uint64_t>(step);
      default: return refuse(step.bytes);
    }
  }
  EP_HD bool refuse(uint64_t found) const {
    if (coop.lane() == 0) ctx.fail(status, EP_STATUS_INVALID, -1, EP_STAGE_RANGE, 0, found);
    return false;
  }

  /* HAZARD: a read of an id that there is not gives 0 as well: only its address says that there is none. */
  template <class Read> EP_HD bool read(ep_gin_step& step, const Read& value) const {
    bool ok = true;
    if (coop.lane() == 0) ok = value(step);
    return coop.sync_and(ok);
  }
  EP_HD bool look(ep_gin_step& step, bool counter, bool through) const {
    return read(step, [&](ep_gin_step& into) {
      const efa_count_pointer at = counter ? gin.counter_pointer(ctx, into.counter, status) : gin.signal_pointer(ctx, into.signal, status);
      if (at.pointer == nullptr) return false;
      if (through) {
        into.found = (load_acquire(ctx, at.pointer) - at.offset) & EP_EFA_COUNTER_MASK;
      } else {
        into.found = counter ? gin.read_counter(ctx, into.counter) : gin.read_signal(ctx, into.signal);
      }
      return true;
    });
  }

  EP_HD bool carry_out(ep_gin_step& step) const {
    switch (step.op) {
      case EP_GIN_PUT: return (step.flags & EP_GIN_COUNTED) != 0 ? put(step, gin_counter_inc{step.counter}) : put(step, gin_no_action{});
      case EP_GIN_PUT_VALUE: return put_value(step);
      case EP_GIN_GET: return gin.get(ctx, coop, team(), step.peer, memory, step.from, memory, step.to, step.bytes, options(step), status);
      case EP_GIN_SIGNAL: return gin.signal(ctx, coop, team(), step.peer, remote(step), options(step), status);
      case EP_GIN_FLUSH: return gin.flush(ctx, coop, status);
      case EP_GIN_WAIT_SIGNAL: return gin.wait_signal(ctx, coop, step.signal, step.value, status);
      case EP_GIN_WAIT_COUNTER: return gin.wait_counter(ctx, coop, step.counter, step.value, status);
      case EP_GIN_READ_SIGNAL: return look(step, false, false);
      case EP_GIN_READ_COUNTER: return look(step, true, false);
      case EP_GIN_LOOK_SIGNAL: return look(step, false, true);
      case EP_GIN_LOOK_COUNTER: return look(step, true, true);
      case EP_GIN_RESET_SIGNAL: return gin.reset_signal(ctx, coop, step.signal, status);
      case EP_GIN_RESET_COUNTER: return gin.reset_counter(ctx, coop, step.counter, status);
      default: return refuse(step.op);
    }
  }
};

/* By all lanes of `coop`. Ends with the first step that fails: it is the first that is not marked EP_GIN_ENDED, and *status says why. Puts that no later step
 * flushed or counted may still read their sources when it returns. */
template <class Ctx, class Coop, class Gin>
EP_HD bool gin_program(Ctx& ctx, const Coop& coop, const Gin& gin, const ep_efa_memory& memory, ep_gin_step* steps, uint64_t count, ep_kernel_status* status) {
  const gin_program_run<Ctx, Coop, Gin> run{ctx, coop, gin, memory, status};
  for (uint64_t i = 0; i < count; ++i) {
    if (!run.carry_out(steps[i])) return false;
    if (coop.lane() == 0) steps[i].flags |= EP_GIN_ENDED;
  }
  return true;
}

EP_MACHINE_END

#endif
