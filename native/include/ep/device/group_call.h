/* One collective call on tensors of a device: puts into slots of the peers, a counted signal behind each, and what the slots hold copied out or folded.
 *
 * Every block is a channel of its own: it talks to the block of the same number on each peer and takes every blocks()-th chunk, so no grid barrier is needed. A call goes
 * through one round for each of its chunks (two, where a fold's results travel on), at least one: then ranks compare what they have called. In a round a block sends to
 * every peer, perhaps nothing but the signal, and waits for all of them. That is all the flow control there is: slots have two banks, used in turn, and a peer signals a
 * round after it has read what came in the one before; so whoever has heard of round n from all may write the bank of round n - 1 again.
 *
 * The cut depends on the pair's bytes and the blocks of the layout alone, so both ends know it. Counts live on the device, and go on from call to call. */
#ifndef EP_DEVICE_GROUP_CALL_H
#define EP_DEVICE_GROUP_CALL_H

#include "endpoint.h"
#include "group_fold.h"

EP_MACHINE_BEGIN

/* Up to so many bytes a fold on all ranks goes through one round, not two (EP_GROUP_FOLD, everything to everybody): every rank then folds all of it. */
constexpr uint64_t group_flat_bytes = 16384;

/* Below this a block of its own costs more than it brings. */
constexpr uint64_t group_least_chunk = 4096;

/* ep_kernel_status.stage of a failure that this rank was told of: at EP_STAGE_ARRIVAL it saw for itself. */
constexpr uint32_t group_stage_told = 0;

EP_HD uint64_t group_up(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

EP_HD uint64_t group_payload(const ep_group_args& args) { return args.slot_bytes - sizeof(ep_group_head); }

/* Bytes of the chunks that `bytes` are cut into; `parts` of them go through one slot each. */
EP_HD uint64_t group_chunk(const ep_group_args& args, uint64_t bytes, uint64_t parts) {
  const uint64_t most = group_payload(args) / 16 * 16 * parts;
  const uint64_t even = group_up(group_up(bytes, args.blocks) / args.blocks, 16 * parts);
  const uint64_t least = group_up(group_least_chunk, 16 * parts);
  const uint64_t wanted = even < least ? least : even;
  return wanted < most ? wanted : most;
}

EP_HD uint64_t group_chunks(const ep_group_args& args, uint64_t bytes, uint64_t parts) {
  if (bytes == 0) return 0;
  const uint64_t chunk = group_chunk(args, bytes, parts);
  return (bytes + chunk - 1) / chunk;
}

template <class Ctx> struct group_block {
  Ctx& ctx;
  const load_store_endpoint& endpoint;
  const ep_group_args& args;

  EP_HD uint32_t size() const { return static_cast<uint32_t>(args.memory.world_size); }
  EP_HD uint32_t self() const { return static_cast<uint32_t>(args.memory.rank); }
  EP_HD ep_kernel_status* status() const { return reinterpret_cast<ep_kernel_status*>(args.status); }
  EP_HD block_coop<Ctx> coop() const { return {ctx}; }
  EP_HD bool all() const { return args.mode == EP_GROUP_FOLD_ALL; }
  /* `source` signals here that its message of a round has come. A rank's word of itself is not 0 once anybody has given up: see EP_GROUP_GIVEN_UP. */
  EP_HD uint64_t word(uint32_t source) const { return static_cast<uint64_t>(ctx.block()) * size() + source; }
  /* Where `source` writes in round `round`, in anybody's part. */
  EP_HD uint64_t slot(uint64_t round, uint32_t source) const {
    return (((round & 1) * args.blocks + ctx.block()) * size() + source) * args.slot_bytes;
  }
  EP_HD const uint8_t* payload(uint64_t round, uint32_t source) const { return endpoint.data(args.memory.rank, slot(round, source)) + sizeof(ep_group_head); }

  /* Of this block, in step i of a call with two steps for each chunk where a fold travels on. */
  EP_HD uint64_t chunk_of(uint64_t step) const { return (all() ? step / 2 : step) * ctx.blocks() + ctx.block(); }

  /* The part of `piece` that travels in this step. */
  EP_HD ep_group_piece cut(const ep_group_piece& piece, uint64_t step) const {
    if (piece.bytes == 0) return {0, 0};
    const uint64_t chunk = group_chunk(args, piece.bytes, 1);
    const uint64_t begin = chunk_of(step) * chunk;
    if (begin >= piece.bytes) return {0, 0};
    const uint64_t left = piece.bytes - begin;
    return {piece.address + begin, left < chunk ? left : chunk};
  }

  /* Of a fold on all ranks: the part that rank `owner` folds, as an offset and its bytes. */
  EP_HD ep_group_piece part(uint32_t owner, uint64_t step) const {
    const uint64_t chunk = group_chunk(args, args.out.bytes, size());
    const uint64_t base = chunk_of(step) * chunk;
    if (base >= args.out.bytes) return {0, 0};
    const uint64_t length = args.out.bytes - base < chunk ? args.out.bytes - base : chunk;
    const uint64_t each = group_up((length + size() - 1) / size(), 16);
    const uint64_t begin = owner * each < length ? owner * each : length;
    return {base + begin, length - begin < each ? length - begin : each};
  }

  EP_HD ep_group_piece outgoing(uint32_t peer, uint64_t step) const {
    if (!all()) return cut(args.sends[peer], step);
    if (step % 2 == 0) {
      const ep_group_piece own = part(peer, step);
      return {args.sends[0].address + own.address, own.bytes};
    }
    const ep_group_piece own = part(self(), step);
    return {args.out.address + own.address, own.bytes};
  }

  EP_HD uint64_t own_chunks() const {
    if (all()) return group_chunks(args, args.out.bytes, size());
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < size(); ++rank) {
      const uint64_t sent = group_chunks(args, args.sends[rank].bytes, 1);
      const uint64_t taken = group_chunks(args, args.takes[rank].bytes, 1);
      most = most < sent ? sent : most;
      most = most < taken ? taken : most;
    }
    return most;
  }

  EP_HD uint64_t pair_bytes(const ep_group_piece& piece) const { return all() ? args.out.bytes : piece.bytes; }

  /* Steps of this block where the longest pair has so many chunks. One at least: ranks meet in it. */
  EP_HD uint64_t steps_of(uint64_t chunks) const {
    const uint64_t mine = chunks > ctx.block() ? (chunks - ctx.block() + ctx.blocks() - 1) / ctx.blocks() : 0;
    return mine == 0 ? 1 : all() ? 2 * mine : mine;
  }

  EP_HD void send(uint64_t round, uint64_t step, uint64_t chunks) const {
    const auto lanes = coop();
    for (uint32_t i = 1; i < size(); ++i) {
      const uint32_t peer = (self() + i) % size();
      uint8_t* to = endpoint.data(static_cast<int32_t>(peer), slot(round, self()));
      if (step == 0 && lanes.lane() == i % lanes.lanes()) {
        auto& head = *reinterpret_cast<ep_group_head*>(to);
        head.signature = args.signature;
        head.bytes = pair_bytes(args.sends[peer]);
        head.chunks = chunks;
      }
      const ep_group_piece piece = outgoing(peer, step);
      copy_rows(lanes, to + sizeof(ep_group_head), reinterpret_cast<const void*>(piece.address), piece.bytes, piece.bytes, 1, false);
    }
    copy_rows_done(lanes, false);
    const thread_coop<Ctx> alone{ctx};
    for (uint32_t peer = lanes.lane(); peer < size(); peer += lanes.lanes()) {
      if (peer != self()) endpoint.signal(ctx, alone, static_cast<int32_t>(peer), word(self()), 1, nullptr);
    }
  }

  EP_HD uint64_t look(uint32_t source) const {
    no_point none;
    return load_acquire(none, endpoint.local_signal(word(source)));
  }

  /* Who found that calls differ had heard from all, and has sent its own: its peers need only wait to see for themselves, and then can say more. */
  EP_HD static bool differs(uint64_t found, uint64_t round) {
    return ((found >> EP_GROUP_GIVEN_UP_STATUS) & 0x3f) == EP_STATUS_MISMATCH && (found & (EP_GROUP_COUNT_END - 1)) >= round + 1;
  }

  /* A rank that has given up, so that nobody should wait in this round; size() if there is none. */
  EP_HD uint32_t teller(uint64_t round) const {
    uint32_t source = 0;
    for (; source < size(); ++source) {
      const uint64_t found = source == self() ? 0 : look(source);
      if (found >= EP_GROUP_GIVEN_UP && !differs(found, round)) break;
    }
    return source;
  }

  EP_HD bool told(uint64_t round) const {
    const uint64_t notes = look(self());
    return notes >= EP_GROUP_OWN_NOTE || (notes != 0 && teller(round) < size());
  }

  /* As `source` failed, whose word is `found`. Where it blames this rank, it is the one to name; and time that was up there is not this rank's. */
  EP_HD void fail_as(uint32_t source, uint64_t found, uint64_t round) const {
    const auto blamed = static_cast<int32_t>((found >> EP_GROUP_GIVEN_UP_RANK) & 0xff) - 1;
    const auto how = static_cast<uint32_t>((found >> EP_GROUP_GIVEN_UP_STATUS) & 0x3f);
    const bool itself = blamed == args.memory.rank;
    ctx.fail(status(), itself && how == EP_STATUS_TIMEOUT ? EP_STATUS_ABORTED : how, blamed < 0 || itself ? static_cast<int32_t>(source) : blamed, group_stage_told, round + 1, 0);
  }

  /* Until all have sent their message of this round. */
  EP_HD bool arrive(uint64_t round) const {
    const auto lanes = coop();
    bool ok = true;
    for (uint32_t source = lanes.lane(); source < size() && ok; source += lanes.lanes()) {
      if (source == self()) continue;
      /* HAZARD: who waits for a rank that does not come must hear of another that has given up, and of another block that has. A look goes by memory alone: of one that
       * takes turns among the words, nobody could tell that looking again would help. */
      const auto came = [&](uint64_t* found) {
        *found = look(source);
        return *found >= round + 1 || told(round);
      };
      if (!ctx.wait_for(came, round + 1, static_cast<int32_t>(source), EP_STAGE_ARRIVAL, status())) {
        ok = false;
        break;
      }
      ctx.point();
      uint32_t whose = source;
      uint64_t found = look(source);
      if (found < round + 1) {
        ok = false;
        whose = teller(round);
        if (whose == size()) {
          /* Another block of this rank, in this call, whose status stands already; or in an earlier one: nobody else will say why this one failed. */
          ctx.fail(status(), EP_STATUS_ABORTED, args.memory.rank, group_stage_told, round + 1, 0);
          break;
        }
        found = look(whose);
      }
      if (ok && (found < EP_GROUP_GIVEN_UP || differs(found, round))) continue;
      ok = false;
      fail_as(whose, found, round);
    }
    return lanes.sync_and(ok);
  }

  /* Whether all have made the same call; `chunks` becomes the most that any of them has. */
  EP_HD bool agree(uint64_t round, uint64_t* chunks) const {
    bool ok = true;
    for (uint32_t source = 0; source < size(); ++source) {
      if (source == self()) continue;
      const auto& head = *reinterpret_cast<const ep_group_head*>(endpoint.data(args.memory.rank, slot(round, source)));
      const uint64_t bytes = pair_bytes(args.takes[source]);
      const bool same = head.signature == args.signature;
      if (!same || head.bytes != bytes) {
        ok = false;
        if (ctx.lane() == 0) {
          /* Of different calls, `found` is where this block's messages begin: other blocks' may not have come yet. */
          ctx.fail(status(), EP_STATUS_MISMATCH, static_cast<int32_t>(source), same ? EP_STAGE_RANGE : EP_STAGE_ARRIVAL, same ? bytes : args.signature, same ? head.bytes : slot(round, 0));
        }
      }
      *chunks = *chunks < head.chunks ? head.chunks : *chunks;
    }
    return ok; /* the same on all lanes: all have read the same words */
  }

  /* Of what came in this round, and of what lies at `own`. */
  EP_HD void fold(uint64_t round, uint64_t own, uint64_t out, uint64_t bytes) const {
    const uint64_t slots = reinterpret_cast<uint64_t>(payload(round, 0));
    const uint32_t me = self();
    const uint64_t stride = args.slot_bytes;
    const auto source = [=](uint32_t s) { return reinterpret_cast<const void*>(s == me ? own : slots + s * stride); };
    fold_any(coop(), args.element, {args.fold, size(), detail::of_bits(args.factor_bits), sign_bit(args.element)}, reinterpret_cast<void*>(out), bytes, source);
  }

  EP_HD void take(uint64_t round, uint64_t step) const {
    const auto lanes = coop();
    if (args.mode == EP_GROUP_FOLD || (all() && step % 2 == 0)) {
      const ep_group_piece mine = all() ? part(self(), step) : cut(args.out, step);
      const uint64_t own = all() ? args.sends[0].address + mine.address : cut(args.sends[self()], step).address;
      fold(round, own, all() ? args.out.address + mine.address : mine.address, mine.bytes);
    } else {
      for (uint32_t source = 0; source < size(); ++source) {
        ep_group_piece into = all() ? part(source, step) : cut(args.takes[source], step);
        if (all()) into.address += args.out.address;
        const void* from = payload(round, source);
        if (source == self()) {
          /* A fold's own part lies there already. */
          if (all() || args.sends[source].bytes == 0) continue;
          from = reinterpret_cast<const void*>(cut(args.sends[source], step).address);
          if (reinterpret_cast<uint64_t>(from) == into.address) continue;
        }
        copy_rows(lanes, reinterpret_cast<void*>(into.address), from, into.bytes, into.bytes, 1, false);
      }
    }
    lanes.sync(); /* what was folded may be sent in the next step, by other lanes */
  }

  /* HAZARD: after this the group's words are of no use: peers' waits end with them, now and for ever. */
  EP_HD void give_up(uint64_t round) const {
    const auto lanes = coop();
    lanes.sync();
    ep_kernel_status* how = status();
    const thread_coop<Ctx> alone{ctx};
    /* Of whichever block failed first, which may still be writing the rest of it: it has begun, so that does not take long.
     * HAZARD: who says less than it knows is blamed for it. A peer that hears of this rank before it hears of the one that began would name this one. */
    uint32_t found = detail::half_ref(how->status).load(detail::acquire);
    for (; found == EP_STATUS_PENDING; found = detail::half_ref(how->status).load(detail::acquire)) ctx.point();
    const bool known = found != EP_STATUS_OK;
    const uint64_t why = known ? found : EP_STATUS_ABORTED;
    /* A rank that was itself told to stop has nobody to blame: what its status names is whom it awaited. */
    const bool own = why == EP_STATUS_ABORTED && (!known || how->stage != group_stage_told);
    const uint64_t whom = own ? 0 : static_cast<uint64_t>(how->rank + 1) & 0xff;
    const uint64_t mark = EP_GROUP_GIVEN_UP | (why << EP_GROUP_GIVEN_UP_STATUS) | (whom << EP_GROUP_GIVEN_UP_RANK);
    if (lanes.lane() == 0 && known && (why == EP_STATUS_TIMEOUT || why == EP_STATUS_ABORTED)) {
      /* Who has not come, for the host: one bit each. */
      uint64_t missing = 0;
      for (uint32_t source = 0; source < size(); ++source) {
        if (source != self() && look(source) < round + 1) missing |= uint64_t{1} << source;
      }
      detail::word_ref(how->found).store(missing, detail::relaxed);
    }
    for (uint32_t block = lanes.lane(); block < args.blocks; block += lanes.lanes()) {
      endpoint.signal(ctx, alone, args.memory.rank, uint64_t{block} * size() + self(), EP_GROUP_OWN_NOTE, nullptr);
    }
    for (uint32_t peer = lanes.lane(); peer < size(); peer += lanes.lanes()) {
      if (peer == self()) continue;
      endpoint.signal(ctx, alone, static_cast<int32_t>(peer), word(self()), mark, nullptr);
      endpoint.signal(ctx, alone, static_cast<int32_t>(peer), word(peer), 1, nullptr); /* behind the mark: who sees this one finds it */
    }
  }

  EP_HD bool run() const {
    auto* count = reinterpret_cast<uint64_t*>(args.rounds) + ctx.block();
    const uint64_t first = *count;
    uint64_t chunks = own_chunks();
    uint64_t steps = 1;
    for (uint64_t step = 0; step < steps; ++step) {
      const uint64_t round = first + step;
      send(round, step, chunks);
      bool ok = arrive(round);
      if (ok && step == 0) {
        ok = agree(round, &chunks);
        steps = steps_of(chunks);
      }
      if (!ok) {
        give_up(round);
        return false;
      }
      take(round, step);
    }
    if (ctx.lane() == 0) *count = first + steps;
    return true;
  }
};

/* False if the call failed: args.status says how, and the group is of no further use. Blocks of all ranks must run at once; blocks() is at most args.blocks, and the
 * same on all ranks. */
template <class Ctx> EP_HD bool group_call(Ctx& ctx, const load_store_endpoint& endpoint, const ep_group_args& args) {
  return group_block<Ctx>{ctx, endpoint, args}.run();
}

EP_MACHINE_END

#endif
