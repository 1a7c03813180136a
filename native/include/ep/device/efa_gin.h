/* The GIN device API over EFA: what one context (ep_efa_device) offers to kernels.
 *
 * Every put is one WRITE, or several where it is longer than the device takes. A signal is the number of writes that have arrived at the peer's queue pair of
 * that signal, a counter the number of one's own that a queue pair has completed: so data and signal are one request, and neither order nor atomics are asked
 * of the NIC, which has none. Signals are weak: a visible one means that the put it came with has landed, nothing about others.
 * What EFA cannot do has no form here: strong order, signals at an address of the caller's, setting a signal.
 *
 * All lanes of `coop` call with equal arguments (but for put_lanes); its first lane does the work between two synchronisations, which every return path passes.
 * A call returns false when it failed, on every lane; *status says how, once. */
#ifndef EP_DEVICE_EFA_GIN_H
#define EP_DEVICE_EFA_GIN_H

#include "coop.h"
#include "efa_count.h"
#include "efa_put.h"

EP_MACHINE_BEGIN

/* `Sharing` (EP_EFA_SHARE_*) is of the instance: several of one context may differ, if their uses never meet. */
template <uint32_t Sharing = EP_EFA_SHARE_DEVICE> struct efa_gin {
  ep_efa_device& device;

  /* False where the context was made by another version of this code. Once, before anything else. */
  template <class Ctx> EP_HD bool check(Ctx& ctx, ep_kernel_status* status) const {
    const ep_handle_header& header = device.header;
    if (header.magic == EP_MAGIC_EFA && header.abi_major == EP_ABI_MAJOR && header.abi_minor <= EP_ABI_MINOR) return true;
    ctx.fail(status, header.magic == EP_MAGIC_EFA ? EP_STATUS_ABI_MISMATCH : EP_STATUS_INVALID, -1, EP_STAGE_RANGE,
             static_cast<uint64_t>(EP_ABI_MAJOR) << 16 | EP_ABI_MINOR, static_cast<uint64_t>(header.abi_major) << 16 | header.abi_minor);
    return false;
  }

  template <class Ctx, class Coop, class Remote, class Local>
  EP_HD bool put(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, const ep_efa_memory& to, uint64_t to_offset, const ep_efa_memory& from,
                 uint64_t from_offset, uint64_t bytes, Remote remote, Local local, const gin_options& options, ep_kernel_status* status) const {
    return once(coop, [&]() EP_SMALL_LAMBDA {
      efa_put request;
      request.act(remote);
      request.act(local);
      return request.at(ctx, device, team, peer, to, to_offset, from, from_offset, bytes, status) &&
             efa_put_one<Sharing>(ctx, device, request, options, status);
    });
  }

  /* A put of no bytes. */
  template <class Ctx, class Coop, class Remote>
  EP_HD bool signal(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, Remote remote, const gin_options& options, ep_kernel_status* status) const {
    return once(coop, [&]() EP_SMALL_LAMBDA {
      efa_put request;
      request.act(remote);
      return request.to(ctx, device, team, peer, status) && efa_put_one<Sharing>(ctx, device, request, options, status);
    });
  }

  /* `value` of 1, 2, 4 or 8 bytes; the caller may reuse its memory at once. */
  template <class Ctx, class Coop, class T, class Remote>
  EP_HD bool put_value(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, const ep_efa_memory& to, uint64_t to_offset, T value, Remote remote,
                       const gin_options& options, ep_kernel_status* status) const {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a value has 1, 2, 4 or 8 bytes");
    return once(coop, [&]() EP_SMALL_LAMBDA {
      efa_put request;
      request.act(remote);
      uint64_t bits = 0;
      __builtin_memcpy(&bits, &value, sizeof(T));
      return request.at(ctx, device, team, peer, to, to_offset, to, 0, sizeof(T), status) &&
             efa_put_value_one<Sharing>(ctx, device, request, bits, options, status);
    });
  }

  /* Reads from the peer's part; complete after a flush. */
  template <class Ctx, class Coop>
  EP_HD bool get(Ctx& ctx, const Coop& coop, const gin_team& team, int32_t peer, const ep_efa_memory& from, uint64_t from_offset, const ep_efa_memory& into,
                 uint64_t into_offset, uint64_t bytes, const gin_options& options, ep_kernel_status* status) const {
    return once(coop, [&]() EP_SMALL_LAMBDA {
      efa_put request;
      return request.at(ctx, device, team, peer, from, from_offset, into, into_offset, bytes, status) &&
             efa_get_one<Sharing>(ctx, device, request, options, status);
    });
  }

  /* Every lane of the warp its own put; all lanes call, those with `wanted` false for company. Lanes whose puts take one queue pair post together: n WQEs, one
   * doorbell. */
  template <class Ctx, class Remote, class Local>
  EP_HD bool put_lanes(Ctx& ctx, bool wanted, const gin_team& team, int32_t peer, const ep_efa_memory& to, uint64_t to_offset, const ep_efa_memory& from,
                       uint64_t from_offset, uint64_t bytes, Remote remote, Local local, const gin_options& options, ep_kernel_status* status) const {
    efa_put request;
    request.act(remote);
    request.act(local);
    const bool found = !wanted || request.at(ctx, device, team, peer, to, to_offset, from, from_offset, bytes, status);
    return efa_put_lanes<Sharing>(ctx, device, wanted && found, request, options, status) && found;
  }

  /* Until all that was put before has been read from its source, and what was got has come. Rings what aggregated calls left. */
  template <class Ctx, class Coop> EP_HD bool flush(Ctx& ctx, const Coop& coop, ep_kernel_status* status) const {
    coop.sync();
    bool ok = true;
    const bool alone = poster_words<Sharing>::alone; /* one lane's words */
    const uint32_t step = alone ? 1 : coop.lanes();
    for (uint32_t i = coop.lane(); i < device.qp_count && ok && (!alone || coop.lane() == 0); i += step) {
      ok = efa_quiet<Sharing>(ctx, qp(i), status);
      if (!ok) efa_note_broken(ctx, device, qp(i));
    }
    return coop.sync_and(ok);
  }

  /* An id that the context does not have: reads give 0, and pointers are null, besides what *status says. */
  template <class Ctx> EP_HD uint64_t read_signal(Ctx& ctx, uint32_t id, ep_kernel_status* status = nullptr) const { return read(ctx, signal_at(ctx, id, status)); }
  template <class Ctx> EP_HD uint64_t read_counter(Ctx& ctx, uint32_t id, ep_kernel_status* status = nullptr) const { return read(ctx, counter_at(ctx, id, status)); }
  template <class Ctx> EP_HD efa_count_pointer signal_pointer(Ctx& ctx, uint32_t id, ep_kernel_status* status = nullptr) const {
    return pointer(ctx, signal_at(ctx, id, status));
  }
  template <class Ctx> EP_HD efa_count_pointer counter_pointer(Ctx& ctx, uint32_t id, ep_kernel_status* status = nullptr) const {
    return pointer(ctx, counter_at(ctx, id, status));
  }
  template <class Ctx, class Coop> EP_HD bool reset_signal(Ctx& ctx, const Coop& coop, uint32_t id, ep_kernel_status* status = nullptr) const {
    return once(coop, [&] { return reset(ctx, signal_at(ctx, id, status)); });
  }
  template <class Ctx, class Coop> EP_HD bool reset_counter(Ctx& ctx, const Coop& coop, uint32_t id, ep_kernel_status* status = nullptr) const {
    return once(coop, [&] { return reset(ctx, counter_at(ctx, id, status)); });
  }

  /* Until the signal has reached `wanted`, compared as numbers of `bits` bits that wrap. */
  template <class Ctx, class Coop>
  EP_HD bool wait_signal(Ctx& ctx, const Coop& coop, uint32_t id, uint64_t wanted, ep_kernel_status* status, uint32_t bits = 64) const {
    return once(coop, [&] {
      ep_efa_count* count = signal_at(ctx, id, status);
      return count != nullptr && wait_one(ctx, *count, nullptr, wanted, bits, EP_STAGE_ARRIVAL, status);
    });
  }
  template <class Ctx, class Coop>
  EP_HD bool wait_counter(Ctx& ctx, const Coop& coop, uint32_t id, uint64_t wanted, ep_kernel_status* status, uint32_t bits = 56) const {
    return once(coop, [&] {
      ep_efa_count* count = counter_at(ctx, id, status);
      return count != nullptr && wait_one(ctx, *count, &qp(1 + id), wanted, bits, EP_STAGE_COMPLETION, status);
    });
  }

  EP_HD ep_efa_qp& qp(uint32_t index) const { return reinterpret_cast<ep_efa_qp*>(device.qps)[index]; }

 private:
  /* HAZARD: whoever gave up goes through the same last synchronisation as who did not, or the other lanes would wait there for ever. */
  template <class Coop, class Call> EP_HD bool once(const Coop& coop, const Call& call) const {
    coop.sync();
    const bool ok = coop.lane() != 0 || call();
    return coop.sync_and(ok);
  }

  /* Null: the context has fewer. Both arrays are indexed with ids of the caller's, so nobody comes to them but here. */
  template <class Ctx> EP_HD ep_efa_count* signal_at(Ctx& ctx, uint32_t id, ep_kernel_status* status) const {
    return efa_put::in_range(ctx, efa_slot_of(id), device.signal_count, -1, status) ? reinterpret_cast<ep_efa_count*>(device.signals) + id : nullptr;
  }
  template <class Ctx> EP_HD ep_efa_count* counter_at(Ctx& ctx, uint32_t id, ep_kernel_status* status) const {
    return efa_put::in_range(ctx, efa_slot_of(id), device.counter_count, -1, status) ? reinterpret_cast<ep_efa_count*>(device.counters) + id : nullptr;
  }
  template <class Ctx> EP_HD static uint64_t read(Ctx& ctx, ep_efa_count* count) { return count != nullptr ? efa_count_read(ctx, *count) : 0; }
  template <class Ctx> EP_HD static efa_count_pointer pointer(Ctx& ctx, const ep_efa_count* count) {
    return count != nullptr ? efa_pointer_of(ctx, *count) : efa_count_pointer{nullptr, 0};
  }
  template <class Ctx> EP_HD static bool reset(Ctx& ctx, ep_efa_count* count) {
    if (count != nullptr) efa_count_reset(ctx, *count);
    return count != nullptr;
  }

  template <class Ctx>
  EP_HD bool wait_one(Ctx& ctx, ep_efa_count& count, ep_efa_qp* own, uint64_t wanted, uint32_t bits, uint32_t stage, ep_kernel_status* status) const {
    for (;;) {
      if (efa_reached(efa_count_read(ctx, count), wanted, bits)) return true;
      if (own != nullptr) {
        efa_poll<Sharing>(ctx, *own);
        efa_note_broken(ctx, device, *own);
      }
      const uint64_t broken = load_acquire(ctx, &device.broken);
      if (broken != 0) return efa_report(ctx, qp(static_cast<uint32_t>(broken - 1)), status);
      const uint64_t failed = own != nullptr ? 0 : load_acquire(ctx, reinterpret_cast<const uint64_t*>(count.failed));
      if (failed != 0) {
        ctx.fail(status, EP_STATUS_SYSTEM, -1, stage, wanted, failed);
        return false;
      }
      if (!ctx.wait_for(efa_count_wait_look{count, own, &device.broken, wanted, bits}, wanted, -1, stage, status)) return false;
    }
  }
};

EP_MACHINE_END

#endif
