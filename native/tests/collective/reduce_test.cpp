// Every reduction by every instruction set that this machine has, against an oracle that works on single numbers, bit for bit: f32 and the 16-bit floats as
// sums and products of doubles, which are exact enough to be rounded once more (53 bits are more than twice 24 and 2), integers in 128 bits.
#include "collective/reduce.hpp"

#include <cmath>
#include <cstdint>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "collective/reduce_kernels.hpp"

namespace {

using ep::element_type;
using ep::reduce_isa;
using ep::reduce_op;

const char* const op_names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
const char* const type_names[] = {"f64", "f32", "f16", "bf16", "i64", "u64", "i32", "u32", "i16", "u16", "i8", "u8", "f8e4m3", "f8e5m2", "ue8m0"};
const char* const isa_names[] = {"portable", "avx2", "avx512"};
const char* const walk_names[] = {"through the caches", "in rows", "past the caches"};
constexpr ep::reduce_walk walks[] = {ep::reduce_walk::caches, ep::reduce_walk::rows, ep::reduce_walk::past};

std::vector<reduce_isa> usable() {
  std::vector<reduce_isa> out;
  for (const reduce_isa isa : {reduce_isa::portable, reduce_isa::avx2, reduce_isa::avx512})
    if (ep::reduce_isa_usable(isa)) out.push_back(isa);
  return out;
}

struct random_bits {
  uint64_t state;
  uint64_t next() {
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

// ---- The oracle. A float format by its numbers; values as doubles, elements as their bits.

struct format {
  int bits;
  int fraction;
  int exponent_max;  // of the largest finite number, 2^exponent_max * 1.x
};

format format_of(element_type type) {
  switch (type) {
    case element_type::f64: return {64, 52, 1023};
    case element_type::f32: return {32, 23, 127};
    case element_type::f16: return {16, 10, 15};
    default: return {16, 7, 127};
  }
}

bool is_float(element_type type) { return type <= element_type::bf16; }
bool is_signed(element_type type) {
  return type == element_type::i64 || type == element_type::i32 || type == element_type::i16 || type == element_type::i8;
}

uint64_t sign_of(const format& f) { return uint64_t{1} << (f.bits - 1); }
uint64_t infinity_of(const format& f) { return (sign_of(f) - 1) - ((uint64_t{1} << f.fraction) - 1); }
uint64_t canonical_nan(const format& f) { return infinity_of(f) | (uint64_t{1} << (f.fraction - 1)); }
bool is_nan(const format& f, uint64_t bits) { return (bits & (sign_of(f) - 1)) > infinity_of(f); }

double value_of(const format& f, uint64_t bits) {
  const uint64_t magnitude = bits & (sign_of(f) - 1);
  const double sign = (bits & sign_of(f)) != 0 ? -1.0 : 1.0;
  if (magnitude > infinity_of(f)) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == infinity_of(f)) return sign * std::numeric_limits<double>::infinity();
  const int exponent = static_cast<int>(magnitude >> f.fraction);
  const double fraction = static_cast<double>(magnitude & ((uint64_t{1} << f.fraction) - 1));
  const int smallest = 1 - f.exponent_max;
  if (exponent == 0) return sign * std::ldexp(fraction, smallest - f.fraction);
  return sign * std::ldexp(fraction + std::ldexp(1.0, f.fraction), exponent - 1 + smallest - f.fraction);
}

/// Rounded to nearest even: a whole number of units in the last place that the format has at this size.
uint64_t bits_of(const format& f, double value) {
  if (std::isnan(value)) return canonical_nan(f);
  const uint64_t sign = std::signbit(value) ? sign_of(f) : 0;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity_of(f);
  if (magnitude == 0) return sign;
  const int smallest = 1 - f.exponent_max;
  int exponent = std::ilogb(magnitude);
  if (exponent < smallest) exponent = smallest;
  const double units = std::nearbyint(std::ldexp(magnitude, f.fraction - exponent));
  // A carry into the next power of two carries into the exponent as well.
  const uint64_t code = (static_cast<uint64_t>(exponent - smallest) << f.fraction) + static_cast<uint64_t>(units);
  return sign | (code > infinity_of(f) ? infinity_of(f) : code);
}

/// What arithmetic in f32 (f64: in f64) makes of an exact or sufficiently exact double.
double rounded(bool wide, double value) { return wide ? value : value_of({32, 23, 127}, bits_of({32, 23, 127}, value)); }

uint64_t oracle_float(element_type type, reduce_op op, const std::vector<uint64_t>& elements, double factor) {
  const format f = format_of(type);
  if (op == reduce_op::min || op == reduce_op::max) {
    uint64_t best = elements[0];
    for (const uint64_t next : elements) {
      if (is_nan(f, next)) return next | (uint64_t{1} << (f.fraction - 1));
      const double x = value_of(f, next);
      const double y = value_of(f, best);
      const bool less = x < y || (x == y && std::signbit(x) && !std::signbit(y));
      const bool more = x > y || (x == y && !std::signbit(x) && std::signbit(y));
      if (op == reduce_op::min ? less : more) best = next;
    }
    return best;
  }
  const bool wide = type == element_type::f64;
  const double scale = rounded(wide, factor);
  double all = 0;
  for (std::size_t s = 0; s < elements.size(); ++s) {
    double x = value_of(f, elements[s]);
    if (op == reduce_op::premul_sum) x = rounded(wide, x * scale);
    all = s == 0 ? x : rounded(wide, op == reduce_op::product ? all * x : all + x);
  }
  if (op == reduce_op::avg) all = rounded(wide, all / static_cast<double>(elements.size()));
  return bits_of(f, all);
}

uint64_t oracle_integer(element_type type, reduce_op op, const std::vector<uint64_t>& elements) {
  const int bits = static_cast<int>(ep::element_bytes(type)) * 8;
  const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  const auto number = [&](uint64_t element) {
    __int128 out = static_cast<__int128>(element);
    if (is_signed(type) && (element >> (bits - 1)) != 0) out -= static_cast<__int128>(1) << bits;
    return out;
  };
  unsigned __int128 all = elements[0];
  for (std::size_t s = 1; s < elements.size(); ++s) {
    const uint64_t x = elements[s];
    const uint64_t so_far = static_cast<uint64_t>(all);
    switch (op) {
      case reduce_op::sum: all += x; break;
      case reduce_op::product: all *= x; break;
      case reduce_op::min: all = number(x) < number(so_far) ? x : so_far; break;
      case reduce_op::max: all = number(x) > number(so_far) ? x : so_far; break;
      case reduce_op::band: all &= x; break;
      case reduce_op::bor: all |= x; break;
      default: all ^= x; break;
    }
    all &= mask;
  }
  return static_cast<uint64_t>(all);
}

uint64_t oracle(element_type type, reduce_op op, const std::vector<uint64_t>& elements, double factor) {
  return is_float(type) ? oracle_float(type, op, elements, factor) : oracle_integer(type, op, elements);
}

// ---- Elements to reduce.

/// A third are of everyday size, so that sums do not all end as infinity or one of their terms; the rest any bits, or those where formats end.
uint64_t make_element(element_type type, random_bits& random) {
  const int bits = static_cast<int>(ep::element_bytes(type)) * 8;
  const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  const uint64_t kind = random.below(6);
  if (!is_float(type)) {
    const uint64_t ends[] = {0, 1, mask, mask >> 1, (mask >> 1) + 1};
    return kind == 0 ? ends[random.below(5)] : random.next() & mask;
  }
  const format f = format_of(type);
  const uint64_t sign = random.below(2) * sign_of(f);
  if (kind < 3) {
    const double value = (static_cast<double>(random.below(1u << 20)) / (1u << 18) - 2) * std::ldexp(1.0, static_cast<int>(random.below(9)) - 4);
    return bits_of(f, value);
  }
  if (kind == 3) {
    const uint64_t infinity = infinity_of(f);
    const uint64_t one = canonical_nan(f) - (uint64_t{1} << f.fraction) * static_cast<uint64_t>(f.exponent_max + 1);
    const uint64_t ends[] = {0, 1, (uint64_t{1} << f.fraction) - 1, uint64_t{1} << f.fraction, infinity - 1, infinity, one, infinity - 2};
    return sign | ends[random.below(8)];
  }
  // Not too many NaNs: they swallow all else.
  if (kind == 4 && random.below(8) == 0) return sign | (infinity_of(f) + 1 + random.below((uint64_t{1} << f.fraction) - 1));
  const uint64_t any = random.next() & mask;
  return is_nan(f, any) ? any & ~(uint64_t{1} << f.fraction) : any;
}

uint64_t read_element(const uint8_t* from, uint32_t size) {
  uint64_t out = 0;
  std::memcpy(&out, from, size);
  return out;
}

void write_element(uint8_t* to, uint64_t element, uint32_t size) { std::memcpy(to, &element, size); }

// ---- Arrays between guards.

constexpr std::size_t guard = 192;
constexpr uint8_t guard_byte = 0xa5;

struct array {
  std::vector<uint8_t> memory;
  uint8_t* data = nullptr;
  std::size_t bytes = 0;

  /// `offset` from a 64-byte line.
  void make(std::size_t size, std::size_t offset) {
    bytes = size;
    memory.assign(size + 2 * guard + 128, guard_byte);
    const uintptr_t first = reinterpret_cast<uintptr_t>(memory.data()) + guard;
    data = memory.data() + guard + ((64 - first % 64) % 64 + offset);
  }

  bool guards_stand() const {
    for (const uint8_t* at = memory.data(); at != memory.data() + memory.size(); ++at)
      if ((at < data || at >= data + bytes) && *at != guard_byte) return false;
    return true;
  }
};

struct shape {
  element_type type;
  reduce_op op;
  int count;
  int dst_count;
  uint64_t elements;
  ep::reduce_walk walk;
  bool element_offsets;  // else whole sixteens, so that every way to stream is taken
  double factor;
};

bool has(int alias, const std::vector<int>& aliases) {
  for (const int a : aliases)
    if (a == alias) return true;
  return false;
}

/// One call on every instruction set; the arrays' places and which destination is which source are drawn from `random`.
void check_call(const shape& what, random_bits& random, const std::vector<reduce_isa>& isas) {
  const uint32_t size = ep::element_bytes(what.type);
  const std::size_t bytes = what.elements * size;
  const auto offset = [&] { return what.element_offsets ? random.below(64 / size) * size : random.below(4) * 16; };

  std::vector<std::vector<uint64_t>> columns(what.elements, std::vector<uint64_t>(static_cast<std::size_t>(what.count)));
  for (auto& column : columns)
    for (uint64_t& element : column) element = make_element(what.type, random);
  std::vector<uint64_t> expected(what.elements);
  for (std::size_t i = 0; i < what.elements; ++i) expected[i] = oracle(what.type, what.op, columns[i], what.factor);

  std::vector<array> sources(static_cast<std::size_t>(what.count));
  std::vector<std::size_t> source_offsets(sources.size());
  for (std::size_t& at : source_offsets) at = offset();
  // -1: memory of its own.
  std::vector<int> aliases;
  std::vector<array> own(static_cast<std::size_t>(what.dst_count));
  std::vector<std::size_t> own_offsets(own.size());
  for (std::size_t d = 0; d < own.size(); ++d) {
    own_offsets[d] = offset();
    int alias = static_cast<int>(random.below(static_cast<uint64_t>(what.count) + 1)) - 1;
    if (has(alias, aliases)) alias = -1;
    aliases.push_back(alias);
  }

  for (const reduce_isa isa : isas) {
    std::vector<const void*> srcs;
    for (std::size_t s = 0; s < sources.size(); ++s) {
      sources[s].make(bytes, source_offsets[s]);
      for (std::size_t i = 0; i < what.elements; ++i) write_element(sources[s].data + i * size, columns[i][s], size);
      srcs.push_back(sources[s].data);
    }
    std::vector<void*> dsts;
    for (std::size_t d = 0; d < own.size(); ++d) {
      own[d].make(bytes, own_offsets[d]);
      dsts.push_back(aliases[d] >= 0 ? sources[static_cast<std::size_t>(aliases[d])].data : own[d].data);
    }
    ep::reduce_push_with(isa, what.walk, dsts.data(), what.dst_count, srcs.data(), what.count, what.elements, what.type, what.op, what.factor);

    const auto where = [&] {
      return std::string(isa_names[static_cast<int>(isa)]) + " " + op_names[static_cast<int>(what.op)] + " " + type_names[static_cast<int>(what.type)] + ", " +
             std::to_string(what.count) + " sources, " + std::to_string(what.dst_count) + " destinations, " + std::to_string(what.elements) + " elements" +
             ", " + walk_names[static_cast<int>(what.walk)];
    };
    std::string wrong;
    for (std::size_t d = 0; d < dsts.size() && wrong.empty(); ++d) {
      for (std::size_t i = 0; i < what.elements && wrong.empty(); ++i) {
        const uint64_t found = read_element(static_cast<const uint8_t*>(dsts[d]) + i * size, size);
        if (found == expected[i]) continue;
        char text[128];
        std::snprintf(text, sizeof text, ": element %zu of destination %zu is %llx, not %llx; of", i, d, static_cast<unsigned long long>(found),
                      static_cast<unsigned long long>(expected[i]));
        wrong = where() + text;
        for (const uint64_t element : columns[i]) {
          std::snprintf(text, sizeof text, " %llx", static_cast<unsigned long long>(element));
          wrong += text;
        }
      }
      if (!own[d].guards_stand()) wrong = where() + ": wrote beside destination " + std::to_string(d);
    }
    for (std::size_t s = 0; s < sources.size() && wrong.empty(); ++s) {
      if (!sources[s].guards_stand()) wrong = where() + ": wrote beside source " + std::to_string(s);
      if (has(static_cast<int>(s), aliases)) continue;
      for (std::size_t i = 0; i < what.elements; ++i)
        if (read_element(sources[s].data + i * size, size) != columns[i][s]) wrong = where() + ": changed source " + std::to_string(s);
    }
    ep::check::report(wrong.empty(), __FILE__, __LINE__, wrong);
  }
}

const double factors[] = {0.1, -1.5, 1.0 / 3, 65536.0, -0.0, 1e-40, 1e300};

template <typename Body>
void each_reduction(const Body& body) {
  for (uint32_t op = 0; op < ep::reduce_op_count; ++op)
    for (uint32_t type = 0; type < ep::element_type_count; ++type)
      if (ep::reduces(static_cast<reduce_op>(op), static_cast<element_type>(type))) body(static_cast<reduce_op>(op), static_cast<element_type>(type));
}

// Sanitizers make all of this ten times slower: they see every length, but fewer of the repetitions.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t length_step = 3;
#else
constexpr uint64_t length_step = 1;
#endif

void short_lengths() {
  const std::vector<reduce_isa> isas = usable();
  random_bits random{1};
  each_reduction([&](reduce_op op, element_type type) {
    uint64_t first = 0;
    for (const int count : {1, 2, 3, 4, 5, 8, 16}) {
      for (uint64_t elements = first++ % length_step; elements <= 70; elements += length_step) {
        const int dst_count = 1 + static_cast<int>(random.below(3));
        check_call({type, op, count, dst_count, elements, walks[random.below(3)], true, factors[random.below(7)]}, random, isas);
      }
    }
  });
}

/// Long enough for blocks, pages and all the ways to store, and for ragged ends of each size.
void longer_lengths() {
  const std::vector<reduce_isa> isas = usable();
  random_bits random{2};
  each_reduction([&](reduce_op op, element_type type) {
    for (const int count : {1, 2, 3, 4, 5, 8, 16}) {
      for (const ep::reduce_walk walk : {ep::reduce_walk::caches, ep::reduce_walk::past}) {
        for (const bool element_offsets : {false, true}) {
          const uint64_t elements = (900 + random.below(3000)) / ep::element_bytes(type);
          check_call({type, op, count, 1 + static_cast<int>(random.below(3)), elements, walk, element_offsets, factors[random.below(7)]}, random, isas);
        }
      }
    }
  });
  for (const element_type type : {element_type::f32, element_type::bf16, element_type::f16, element_type::u8}) {
    for (const int count : {2, 4, 7}) {
      for (const int dst_count : {1, 2, 4}) {
        const uint64_t elements = (3 * 4096 + random.below(4096)) / ep::element_bytes(type);
        check_call({type, reduce_op::sum, count, dst_count, elements, ep::reduce_walk::past, false, 1}, random, isas);
      }
    }
  }
}

/// Longer than the rows of two rounds, with ragged ends.
void in_rows() {
  const std::vector<reduce_isa> isas = usable();
  random_bits random{4};
  for (const element_type type : {element_type::f32, element_type::bf16, element_type::u8}) {
    for (const int dst_count : {1, 2, 3}) {
      for (const bool element_offsets : {false, true}) {
        const uint64_t elements = (2 * 65536 + random.below(4096)) / ep::element_bytes(type);
        check_call({type, reduce_op::sum, 3, dst_count, elements, ep::reduce_walk::rows, element_offsets, 1}, random, isas);
      }
    }
  }
}

/// Every place of one destination and of its sources relative to a line, streaming and not.
void alignments() {
  const std::vector<reduce_isa> isas = usable();
  for (const element_type type : {element_type::f64, element_type::f32, element_type::bf16, element_type::u8}) {
    const uint32_t size = ep::element_bytes(type);
    const std::size_t elements = 2200 / size;
    const reduce_op op = type == element_type::u8 ? reduce_op::bxor : reduce_op::sum;
    random_bits random{3};
    for (const reduce_isa isa : isas) {
      for (std::size_t to = 0; to < 64; to += size) {
        for (std::size_t from = 0; from < 64; from += 7 * size) {
          array sources[2];
          array dst;
          sources[0].make(elements * size, from);
          sources[1].make(elements * size, (from * 7 + to) % 64);
          dst.make(elements * size, to);
          std::vector<uint64_t> expected(elements);
          for (std::size_t i = 0; i < elements; ++i) {
            const std::vector<uint64_t> column{make_element(type, random), make_element(type, random)};
            for (std::size_t s = 0; s < 2; ++s) write_element(sources[s].data + i * size, column[s], size);
            expected[i] = oracle(type, op, column, 1);
          }
          const void* srcs[] = {sources[0].data, sources[1].data};
          void* out = dst.data;
          for (const ep::reduce_walk walk : walks) {
            ep::reduce_push_with(isa, walk, &out, 1, srcs, 2, elements, type, op, 1);
            bool same = dst.guards_stand();
            for (std::size_t i = 0; i < elements; ++i) same = same && read_element(dst.data + i * size, size) == expected[i];
            EP_CHECK(same);
            std::memset(dst.data, 0, dst.bytes);
          }
        }
      }
    }
  }
}

/// All codes of the 16-bit floats: alone, and multiplied with numbers that bring every one of them to where it is rounded.
void all_codes() {
  for (const element_type type : {element_type::f16, element_type::bf16}) {
    const format f = format_of(type);
    std::vector<uint16_t> codes(65536);
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
    std::vector<uint16_t> out(codes.size());
    for (const reduce_isa isa : usable()) {
      const void* alone[] = {codes.data()};
      void* to = out.data();
      ep::reduce_push_with(isa, ep::reduce_walk::caches, &to, 1, alone, 1, codes.size(), type, reduce_op::sum, 1);
      long wrong = 0;
      for (std::size_t i = 0; i < codes.size(); ++i) wrong += out[i] != (is_nan(f, i) ? canonical_nan(f) : i);
      EP_CHECK_EQ(wrong, 0);

      for (const double factor : {0.333251953125, 1.0009765625, 3e-5, 6.1e-5, 1024.5, -0x1.004p0, 0x1.ffcp0}) {
        ep::reduce_push_with(isa, ep::reduce_walk::caches, &to, 1, alone, 1, codes.size(), type, reduce_op::premul_sum, factor);
        wrong = 0;
        for (std::size_t i = 0; i < codes.size(); ++i) wrong += out[i] != oracle(type, reduce_op::premul_sum, {i}, factor);
        EP_CHECK_EQ(wrong, 0);
      }
    }
  }
}

/// Results spelled out: what the oracle and the kernels could get wrong alike.
void spelled_out() {
  struct row {
    element_type type;
    reduce_op op;
    std::vector<uint64_t> elements;
    uint64_t expected;
  };
  const std::vector<row> rows = {
      {element_type::f32, reduce_op::sum, {0x7f800000, 0xff800000}, 0x7fc00000},              // inf - inf
      {element_type::f32, reduce_op::sum, {0xffa00001, 0x3f800000}, 0x7fc00000},              // a signalling NaN
      {element_type::f32, reduce_op::sum, {0x80000000, 0x80000000}, 0x80000000},              // -0 - 0
      {element_type::f32, reduce_op::sum, {0x80000000}, 0x80000000},                          // -0 alone
      {element_type::f32, reduce_op::sum, {0x7f7fffff, 0x7f7fffff}, 0x7f800000},              // overflow
      {element_type::f32, reduce_op::sum, {0x00000001, 0x00000001}, 0x00000002},              // subnormals are not flushed
      {element_type::f32, reduce_op::product, {0x20000000, 0x1f800000}, 0x00400000},          // 2^-63 * 2^-64 = 2^-127
      {element_type::f32, reduce_op::avg, {0x3f800000, 0x3f800000, 0x40000000}, 0x3faaaaab},  // 4 / 3
      {element_type::f32, reduce_op::min, {0x00000000, 0x80000000}, 0x80000000},
      {element_type::f32, reduce_op::max, {0x80000000, 0x00000000}, 0x00000000},
      {element_type::f32, reduce_op::min, {0x3f800000, 0xff800001, 0x7fc12345}, 0xffc00001},  // the first NaN, made quiet
      {element_type::f32, reduce_op::max, {0x7fa00000}, 0x7fe00000},
      {element_type::f64, reduce_op::sum, {0x7ff0000000000000, 0xfff0000000000000}, 0x7ff8000000000000},
      {element_type::f64, reduce_op::sum, {0x3ff0000000000000, 0x3ca0000000000000}, 0x3ff0000000000000},  // 1 + 2^-53 ties to even
      {element_type::f64, reduce_op::max, {0xfff0000000000000, 0xbff0000000000000}, 0xbff0000000000000},
      {element_type::f16, reduce_op::sum, {0x7bff, 0x4c00}, 0x7c00},          // 65504 + 16 ties to 2^16, which is infinity
      {element_type::f16, reduce_op::sum, {0x7bff, 0x4bff}, 0x7bff},          // 65504 + 15.99 does not
      {element_type::f16, reduce_op::sum, {0x7bff, 0x7bff, 0xfbff}, 0x7bff},  // too much for f16 on the way, not for f32
      {element_type::f16, reduce_op::product, {0x0001, 0x3800}, 0x0000},      // half of the smallest ties to 0
      {element_type::f16, reduce_op::product, {0x0003, 0x3800}, 0x0002},
      {element_type::f16, reduce_op::sum, {0x7c01, 0x0000}, 0x7e00},
      {element_type::bf16, reduce_op::sum, {0x3f80, 0x3b80}, 0x3f80},          // 1 + 2^-8 ties to even
      {element_type::bf16, reduce_op::sum, {0x3f81, 0x3b80}, 0x3f82},          // 1 + 2^-7 + 2^-8, too
      {element_type::bf16, reduce_op::sum, {0x3f80, 0x3b80, 0x3780}, 0x3f81},  // rounded once: above the tie
      {element_type::bf16, reduce_op::sum, {0x7f7f, 0x7b00}, 0x7f80},
      {element_type::bf16, reduce_op::sum, {0xff81}, 0x7fc0},
      {element_type::bf16, reduce_op::min, {0xff81}, 0xffc1},
      {element_type::i32, reduce_op::sum, {0x7fffffff, 1}, 0x80000000},
      {element_type::i32, reduce_op::min, {0x7fffffff, 0x80000000}, 0x80000000},
      {element_type::u32, reduce_op::min, {0x7fffffff, 0x80000000}, 0x7fffffff},
      {element_type::i64, reduce_op::product, {0x8000000000000001, 3}, 0x8000000000000003},
      {element_type::i8, reduce_op::product, {0x80, 0xff}, 0x80},
      {element_type::u8, reduce_op::sum, {200, 100}, 44},
      {element_type::u16, reduce_op::bxor, {0xff00, 0x0ff0}, 0xf0f0},
  };
  for (const row& r : rows) {
    EP_CHECK_EQ(oracle(r.type, r.op, r.elements, 1), r.expected);
    const uint32_t size = ep::element_bytes(r.type);
    for (const reduce_isa isa : usable()) {
      for (const std::size_t elements : {1u, 97u}) {
        std::vector<std::vector<uint8_t>> sources;
        std::vector<const void*> srcs;
        for (const uint64_t element : r.elements) {
          sources.emplace_back(elements * size);
          for (std::size_t i = 0; i < elements; ++i) write_element(sources.back().data() + i * size, element, size);
        }
        for (const auto& source : sources) srcs.push_back(source.data());
        std::vector<uint8_t> out(elements * size);
        void* to = out.data();
        ep::reduce_push_with(isa, ep::reduce_walk::caches, &to, 1, srcs.data(), static_cast<int>(srcs.size()), elements, r.type, r.op, 1);
        for (std::size_t i = 0; i < elements; ++i) EP_CHECK_EQ(read_element(out.data() + i * size, size), r.expected);
      }
    }
  }
}

/// premul_sum rounds the product before it is added: 1 + 2^-12 squared has a term 2^-24, which a fused multiply-add would keep.
void not_fused() {
  const float x = 1 + 0x1p-12f;
  std::vector<float> left(40, -(1 + 0x1p-11f));
  std::vector<float> right(40, x);
  std::vector<float> out(40, 7);
  for (const reduce_isa isa : usable()) {
    const void* srcs[] = {left.data(), right.data()};
    void* to = out.data();
    ep::reduce_push_with(isa, ep::reduce_walk::caches, &to, 1, srcs, 2, out.size(), element_type::f32, reduce_op::premul_sum, x);
    const double first = rounded(false, static_cast<double>(left[0]) * x);
    for (const float value : out) EP_CHECK_EQ(value, static_cast<float>(first + (1 + 0x1p-11)));
  }
}

void public_functions() {
  const std::vector<uint32_t> sizes = {8, 4, 2, 2, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1, 1};
  for (std::size_t type = 0; type < sizes.size(); ++type) EP_CHECK_EQ(ep::element_bytes(static_cast<element_type>(type)), sizes[type]);
  long takes = 0;
  each_reduction([&](reduce_op, element_type) { ++takes; });
  EP_CHECK_EQ(takes, 12 * 4 + 4 * 2 + 8 * 3);
  EP_CHECK(!ep::reduces(reduce_op::avg, element_type::i32));
  EP_CHECK(!ep::reduces(reduce_op::bxor, element_type::bf16));
  EP_CHECK(!ep::reduces(reduce_op::sum, element_type::f8e4m3));
  EP_CHECK(!ep::reduces(static_cast<reduce_op>(9), element_type::f32));
  EP_CHECK(!ep::reduces(reduce_op::sum, static_cast<element_type>(15)));
  EP_CHECK(ep::reduce_isa_usable(ep::reduce_isa_best()));

  std::vector<float> a(777);
  std::vector<float> b(777);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(i);
    b[i] = 0.5f;
  }
  const void* srcs[] = {a.data(), b.data()};
  ep::reduce_elements(a.data(), srcs, 2, a.size(), element_type::f32, reduce_op::sum, 1, true);
  std::vector<float> c(777);
  void* dsts[] = {b.data(), c.data()};
  ep::reduce_push(dsts, 2, srcs, 2, a.size(), element_type::f32, reduce_op::premul_sum, 2, false);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EP_CHECK_EQ(a[i], static_cast<float>(i) + 0.5f);
    EP_CHECK_EQ(b[i], 2 * a[i] + 1);
    EP_CHECK_EQ(c[i], b[i]);
  }

  // What does not fit the caches, in place and not.
  std::vector<float> ones(100'003, 1);
  std::vector<float> twos(ones.size(), 2);
  std::vector<float> apart(ones.size());
  const void* both[] = {ones.data(), twos.data()};
  ep::reduce_elements(apart.data(), both, 2, ones.size(), element_type::f32, reduce_op::sum, 1, true);
  void* own[] = {twos.data(), ones.data()};
  ep::reduce_push(own, 2, both, 2, ones.size(), element_type::f32, reduce_op::sum, 1, true);
  for (const std::vector<float>* sums : {&apart, &ones, &twos}) EP_CHECK(std::all_of(sums->begin(), sums->end(), [](float sum) { return sum == 3; }));
}

}  // namespace

int main() {
  for (const reduce_isa isa : usable()) std::printf("reduces with %s\n", isa_names[static_cast<int>(isa)]);
  public_functions();
  spelled_out();
  not_fused();
  all_codes();
  alignments();
  short_lengths();
  longer_lengths();
  in_rows();
  return ep::check::finish();
}
