/* Which WQEs of a send queue are written, where its posters wait for no turn: one bit of each slot, which changes with each round of the ring, so nobody clears any.
 * `Sharing` is that of the posters (posters.h). */
#ifndef EP_DEVICE_MARKS_H
#define EP_DEVICE_MARKS_H

#include "posters.h"

EP_MACHINE_BEGIN

/* Of a word that is not 0. */
EP_HD_SMALL uint32_t lowest_bit(uint64_t word) {
#if defined(__CUDACC__)
  return static_cast<uint32_t>(__ffsll(static_cast<long long>(word)) - 1);
#else
  return static_cast<uint32_t>(__builtin_ctzll(word));
#endif
}

struct slot_marks {
  uint64_t* words;
  uint32_t depth; /* power of two */

  EP_HD uint64_t* word_of(uint64_t number) const { return words + (number & (depth - 1)) / 64; }
  EP_HD static uint32_t bit_of(uint64_t number, uint32_t depth) { return static_cast<uint32_t>(number & (depth - 1)) % 64; }

  /* Of `count` WQEs from number `first` on, which are written.
   * `Fenced`: see poster_words::flip_fenced.
   * HAZARD: a post is rung for as a whole (mlx5_wqe.h says why), so its first number is marked last. */
  template <uint32_t Sharing, bool Fenced = false, class Ctx> EP_HD_SMALL void mark(Ctx& ctx, uint64_t first, uint32_t count) const {
    for (uint64_t end = first + count; end != first;) {
      const uint32_t below = bit_of(end - 1, depth) + 1; /* bits of the word up to that one */
      const uint32_t bits = end - first < below ? static_cast<uint32_t>(end - first) : below;
      const uint64_t changed = ~uint64_t{0} >> (64 - bits) << (below - bits);
      if constexpr (Fenced) {
        poster_words<Sharing>::flip_fenced(ctx, word_of(end - 1), changed);
      } else {
        poster_words<Sharing>::flip(ctx, word_of(end - 1), changed);
      }
      end -= bits;
    }
  }

  /* The first number from `from` on that is not marked, where all below `from` have been rung for. HAZARD: marks of the next round would look like none; nobody
   * has room for that one before this number has completed. */
  template <uint32_t Sharing, class Ctx> EP_HD_SMALL uint64_t first_unmarked(Ctx& ctx, uint64_t from) const {
    for (;;) {
      const uint32_t bit = bit_of(from, depth);
      const uint64_t missing = (poster_words<Sharing>::load(ctx, word_of(from)) ^ marked(from)) >> bit;
      const uint32_t slots = (depth < 64 ? depth : 64) - bit;
      const uint32_t found = missing == 0 ? slots : lowest_bit(missing);
      if (found < slots) return from + found;
      from += slots;
    }
  }

  /* Whether a number seems to be marked, for whoever looks again. Orders nothing. */
  template <class Ctx> EP_HD_SMALL bool seems_marked(Ctx& ctx, uint64_t number) const {
    return ((load_relaxed(ctx, word_of(number)) ^ marked(number)) >> bit_of(number, depth) & 1) == 0;
  }

  /* Whether a number is marked. Where it is not, whoever marks it sees all that this lane has stored before. */
  template <uint32_t Sharing, class Ctx> EP_HD_SMALL bool is_marked(Ctx& ctx, uint64_t number) const {
    return ((poster_words<Sharing>::set(ctx, word_of(number), 0) ^ marked(number)) >> bit_of(number, depth) & 1) == 0;
  }

 private:
  /* A word of which all slots are marked in the number's round. */
  EP_HD uint64_t marked(uint64_t number) const { return (number & depth) != 0 ? 0 : ~uint64_t{0}; }
};

EP_MACHINE_END

#endif
