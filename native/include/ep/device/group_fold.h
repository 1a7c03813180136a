/* Folds of the collectives, element by element in the order of the ranks: to the bit what core/collective/reduce.hpp says, whose text is the definition. */
#ifndef EP_DEVICE_GROUP_FOLD_H
#define EP_DEVICE_GROUP_FOLD_H

#include "coop.h"
#include "copy.h"
#include "ep/abi/group.h"
#include "number.h"

EP_MACHINE_BEGIN

namespace detail {

/* HAZARD: nvcc, and g++ on Arm, fuse a product and a sum into one rounding unless told not to. */
#if defined(__CUDACC__)
EP_HD float rounded_product(float a, float b) { return __fmul_rn(a, b); }
EP_HD double rounded_product(double a, double b) { return __dmul_rn(a, b); }
#else
template <class F> EP_HD F rounded_product(F a, F b) {
  const volatile F product = a * b;
  return product;
}
#endif

EP_HD uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  return bits;
}
EP_HD uint32_t bits_of(float value) { return float_bits(value); }
EP_HD double of_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
EP_HD float of_bits(uint32_t bits) { return bits_float(bits); }

EP_HD uint64_t quiet_bits(double) { return 0x0008000000000000ull; }
EP_HD uint32_t quiet_bits(float) { return 0x00400000u; }
EP_HD double canonical_nan(double) { return of_bits(static_cast<uint64_t>(0x7ff8000000000000ull)); }
EP_HD float canonical_nan(float) { return of_bits(static_cast<uint32_t>(0x7fc00000u)); }

template <class F> EP_HD bool is_nan(F value) { return value != value; }

/* -0 is less than +0; neither is NaN. */
template <class F> EP_HD bool less(F a, F b) {
  constexpr uint32_t sign = 8 * sizeof(F) - 1;
  return a < b || (a == b && (bits_of(a) >> sign) > (bits_of(b) >> sign));
}

template <class F> EP_HD F fold_step(uint32_t fold, F folded, F next, F factor) {
  switch (fold) {
    case EP_FOLD_PRODUCT: return folded * next;
    /* The first NaN stays. */
    case EP_FOLD_MIN: return is_nan(folded) ? folded : is_nan(next) || less(next, folded) ? next : folded;
    case EP_FOLD_MAX: return is_nan(folded) ? folded : is_nan(next) || less(folded, next) ? next : folded;
    case EP_FOLD_PREMUL_SUM: return folded + rounded_product(next, factor);
    default: return folded + next;
  }
}

template <class F> EP_HD F fold_end(uint32_t fold, F folded, F count) {
  if (fold == EP_FOLD_AVG) folded = folded / count;
  if (!is_nan(folded)) return folded;
  return fold == EP_FOLD_MIN || fold == EP_FOLD_MAX ? of_bits(bits_of(folded) | quiet_bits(folded)) : canonical_nan(folded);
}

} // namespace detail

struct fold_rule {
  uint32_t fold;
  uint32_t count; /* of sources */
  double factor;
  uint64_t flip; /* the sign bit of signed integers, or 0 */
};

/* How elements are folded: `start` with that of the first source, `step` with each of the others, `end`. */
template <class F> struct float_fold {
  using carrier = F;
  using wide = F;
  EP_HD static wide start(const fold_rule& rule, carrier first) {
    return rule.fold == EP_FOLD_PREMUL_SUM ? detail::rounded_product(first, static_cast<F>(rule.factor)) : first;
  }
  EP_HD static wide step(const fold_rule& rule, wide folded, carrier next) { return detail::fold_step(rule.fold, folded, next, static_cast<F>(rule.factor)); }
  EP_HD static carrier end(const fold_rule& rule, wide folded) { return detail::fold_end(rule.fold, folded, static_cast<F>(rule.count)); }
};
template <class Number> struct half_fold {
  using carrier = uint16_t;
  using wide = float;
  EP_HD static wide start(const fold_rule& rule, carrier first) { return float_fold<float>::start(rule, Number::load(first)); }
  EP_HD static wide step(const fold_rule& rule, wide folded, carrier next) { return float_fold<float>::step(rule, folded, Number::load(next)); }
  EP_HD static carrier end(const fold_rule& rule, wide folded) { return Number::store(float_fold<float>::end(rule, folded)); }
};
/* Of unsigned T: sums and products of signed integers wrap as theirs do, and their order is that of T with the sign bit turned over (`flip`). */
template <class T> struct integer_fold {
  using carrier = T;
  using wide = T;
  EP_HD static wide start(const fold_rule&, carrier first) { return first; }
  EP_HD static wide step(const fold_rule& rule, wide folded, carrier next) {
    const auto flip = static_cast<T>(rule.flip);
    const bool below = static_cast<T>(next ^ flip) < static_cast<T>(folded ^ flip);
    switch (rule.fold) {
      /* Not of 16 bits: those would become signed, and their product too large. */
      case EP_FOLD_PRODUCT: return static_cast<T>(static_cast<uint64_t>(folded) * next);
      case EP_FOLD_MIN: return below ? next : folded;
      case EP_FOLD_MAX: return below ? folded : next;
      case EP_FOLD_BAND: return static_cast<T>(folded & next);
      case EP_FOLD_BOR: return static_cast<T>(folded | next);
      case EP_FOLD_BXOR: return static_cast<T>(folded ^ next);
      default: return static_cast<T>(folded + next);
    }
  }
  EP_HD static carrier end(const fold_rule&, wide folded) { return folded; }
};

#if defined(__CUDACC__)
#define EP_UNROLL _Pragma("unroll")
#else
#define EP_UNROLL
#endif

/* Sources whose loads are in flight at once. */
constexpr uint32_t fold_in_flight = 4;

/* Item i, of Item::count elements. */
template <class Fold, class Item, class Source> EP_HD void fold_item(const fold_rule& rule, Item* out, uint64_t i, const Source& source) {
  typename Fold::wide folded[Item::count]{};
  for (uint32_t s = 0; s < rule.count; s += fold_in_flight) {
    Item held[fold_in_flight];
EP_UNROLL
    for (uint32_t k = 0; k < fold_in_flight; ++k) {
      /* Beyond the last: that one again, and not folded. A load that is left out would make the array one in memory. */
      held[k] = static_cast<const Item*>(source(s + k < rule.count ? s + k : rule.count - 1))[i];
    }
EP_UNROLL
    for (uint32_t k = 0; k < fold_in_flight; ++k) {
      if (s + k < rule.count) {
EP_UNROLL
        for (uint32_t e = 0; e < Item::count; ++e) {
          folded[e] = s + k == 0 ? Fold::start(rule, held[k].value[e]) : Fold::step(rule, folded[e], held[k].value[e]);
        }
      }
    }
  }
  Item result;
EP_UNROLL
  for (uint32_t e = 0; e < Item::count; ++e) result.value[e] = Fold::end(rule, folded[e]);
  out[i] = result;
}

/* Not more than 8 elements: they are folded in registers. */
template <class T> struct alignas(sizeof(T) == 1 ? 8 : 16) fold_vector {
  static constexpr uint32_t count = sizeof(T) == 1 ? 8 : 16 / sizeof(T);
  T value[count];
};
template <class T> struct fold_single {
  static constexpr uint32_t count = 1;
  T value[1];
};

/* out[i] = fold of source(0)[i], source(1)[i], … . A source may be `out` itself: every element is read, by the lane that writes it, before it is written. */
template <class Fold, class Coop, class Source> EP_HD void fold_elements(const Coop& coop, const fold_rule& rule, void* out, uint64_t bytes, const Source& source) {
  using carrier = typename Fold::carrier;
  uint64_t done = 0;
  uint64_t addresses = reinterpret_cast<uint64_t>(out);
  for (uint32_t s = 0; s < rule.count; ++s) addresses |= reinterpret_cast<uint64_t>(source(s));
  if ((addresses & 15u) == 0) {
    const uint64_t vectors = bytes / sizeof(fold_vector<carrier>);
    for (uint64_t i = coop.lane(); i < vectors; i += coop.lanes()) fold_item<Fold>(rule, static_cast<fold_vector<carrier>*>(out), i, source);
    done = vectors * sizeof(fold_vector<carrier>);
  }
  for (uint64_t i = done / sizeof(carrier) + coop.lane(); i < bytes / sizeof(carrier); i += coop.lanes()) {
    fold_item<Fold>(rule, static_cast<fold_single<carrier>*>(out), i, source);
  }
}

EP_HD uint64_t sign_bit(uint32_t element) {
  switch (element) {
    case EP_ELEMENT_I64: return uint64_t{1} << 63;
    case EP_ELEMENT_I32: return uint64_t{1} << 31;
    case EP_ELEMENT_I16: return uint64_t{1} << 15;
    case EP_ELEMENT_I8: return uint64_t{1} << 7;
    default: return 0;
  }
}

template <class Coop, class Source>
EP_HD void fold_any(const Coop& coop, uint32_t element, const fold_rule& rule, void* out, uint64_t bytes, const Source& source) {
  switch (element) {
    case EP_ELEMENT_F64: return fold_elements<float_fold<double>>(coop, rule, out, bytes, source);
    case EP_ELEMENT_F32: return fold_elements<float_fold<float>>(coop, rule, out, bytes, source);
    case EP_ELEMENT_F16: return fold_elements<half_fold<number_f16>>(coop, rule, out, bytes, source);
    case EP_ELEMENT_BF16: return fold_elements<half_fold<number_bf16>>(coop, rule, out, bytes, source);
    case EP_ELEMENT_I64:
    case EP_ELEMENT_U64: return fold_elements<integer_fold<uint64_t>>(coop, rule, out, bytes, source);
    case EP_ELEMENT_I32:
    case EP_ELEMENT_U32: return fold_elements<integer_fold<uint32_t>>(coop, rule, out, bytes, source);
    case EP_ELEMENT_I16:
    case EP_ELEMENT_U16: return fold_elements<integer_fold<uint16_t>>(coop, rule, out, bytes, source);
    default: return fold_elements<integer_fold<uint8_t>>(coop, rule, out, bytes, source);
  }
}

EP_MACHINE_END

#endif
