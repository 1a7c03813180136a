// What mlx5 atomics make of an old value. All are masked forms: a plain fetch-add has boundary 0, a plain compare-and-swap has full masks.
#pragma once

#include <cstdint>

namespace ep::nic {

// A set bit i of `boundary` is the top of a field: the carry out of it is dropped. Everything but the tops is added with the tops cleared, so that no carry
// leaves a field; the tops are then added without a carry.
template <class Word> Word masked_add(Word old, Word add, Word boundary) {
  const Word below = static_cast<Word>(~boundary);
  return static_cast<Word>(static_cast<Word>((old & below) + (add & below)) ^ ((old ^ add) & boundary));
}

template <class Word> Word masked_swap(Word old, Word swap, Word compare, Word swap_mask, Word compare_mask) {
  if (((old ^ compare) & compare_mask) != 0) return old;
  return static_cast<Word>((old & static_cast<Word>(~swap_mask)) | (swap & swap_mask));
}

} // namespace ep::nic
