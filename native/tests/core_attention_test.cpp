#include <chrono>
#include <functional>
#include <thread>

#include <sys/resource.h>

#include "../core/attention/attention_job.hpp"
#include "check.hpp"
#include "core_attention_cases.hpp"

namespace {

using namespace ep::attention;
using namespace ep::attention::test;

void compare(const scenario& s, dtype type) {
  const double bound = type == dtype::f32 ? 1e-5 : 1e-2;
  tensors base(s, type);
  const reference want = compute_reference(s.what(type), base.q, base.k, base.v, base.d_o);
  for (const isa path : paths()) {
    std::vector<tensors> runs;
    for (int32_t threads = 1; threads <= 3; ++threads) {
      tensors& t = runs.emplace_back(s, type);
      problem w = s.what(type);
      w.path = path;
      w.threads = threads;
      std::string why;
      EP_CHECK_EQ(forward(t.forward_of(w), &why), status::ok);
      EP_CHECK_EQ(backward(t.backward_of(w), &why), status::ok);
      EP_CHECK_EQ(why, "");
    }
    const auto within = [&](const char* name, const matrix& got, const std::vector<double>& expected, const std::vector<bool>* rows,
                            double limit) {
      const double error = relative_error(got, expected, rows);
      if (!(error <= limit)) std::fprintf(stderr, "%s, %s, %s: error %g\n", s.name, isa_name(path), name, error);
      EP_CHECK(error <= limit);
      EP_CHECK(got.gaps_marked());
    };
    const tensors& first = runs[0];
    within("o", first.o, want.o, &want.owned, bound);
    within("lse", first.lse, want.lse, &want.owned, 1e-5);
    within("d_q", first.d_q, want.d_q, &want.owned, bound);
    within("d_k", first.d_k, want.d_k, nullptr, bound);
    within("d_v", first.d_v, want.d_v, nullptr, bound);
    for (int64_t row = 0; row < s.q_rows; ++row) {
      if (want.owned[static_cast<size_t>(row)]) continue;
      EP_CHECK(first.o.row_marked(row) && first.lse.row_marked(row) && first.d_q.row_marked(row));
    }
    for (size_t i = 1; i < runs.size(); ++i) {
      EP_CHECK(runs[i].o.bytes() == first.o.bytes() && runs[i].lse.bytes() == first.lse.bytes());
      EP_CHECK(runs[i].d_q.bytes() == first.d_q.bytes() && runs[i].d_k.bytes() == first.d_k.bytes() &&
               runs[i].d_v.bytes() == first.d_v.bytes());
    }
  }
}

/// The reference's gradients against differences of its own loss, sum(O dO).
void check_reference() {
  const scenario s{"", 5, 7, 2, 1, 3, {{0, 5, 0, 2}}, {{4, 3}, {0, 4}}, 0, 0.6f};
  tensors t(s, dtype::f32);
  const problem w = s.what(dtype::f32);
  const reference exact = compute_reference(w, t.q, t.k, t.v, t.d_o);
  const auto loss = [&] {
    const reference r = compute_reference(w, t.q, t.k, t.v, t.d_o);
    double sum = 0;
    for (int64_t i = 0; i < s.q_rows; ++i) {
      for (int64_t c = 0; c < 6; ++c) sum += r.o[static_cast<size_t>(i * 6 + c)] * t.d_o.at(i, c);
    }
    return sum;
  };
  const auto check = [&](matrix& x, const std::vector<double>& gradient) {
    for (int64_t r = 0; r < x.rows(); ++r) {
      for (int64_t c = 0; c < x.columns(); ++c) {
        const auto value = static_cast<float>(x.at(r, c));
        x.set(r, c, value + 0x1p-10f);
        const double high = loss(), above = x.at(r, c);
        x.set(r, c, value - 0x1p-10f);
        const double slope = (high - loss()) / (above - x.at(r, c));
        x.set(r, c, value);
        EP_CHECK(std::fabs(slope - gradient[static_cast<size_t>(r * x.columns() + c)]) < 1e-4);
      }
    }
  };
  check(t.q, exact.d_q);
  check(t.k, exact.d_k);
  check(t.v, exact.d_v);
}

void check_exp2(const kernels& table) {
  double worst = 0;
  float from[16], to[16];
  for (int64_t i = 0; i < 400000; ++i) {
    for (int64_t j = 0; j < 16; ++j) from[j] = static_cast<float>(-126.0 + 253.5 * static_cast<double>(i * 16 + j) / 6.4e6);
    table.exp2(from, to);
    for (int j = 0; j < 16; ++j) {
      const double exact = std::exp2(static_cast<double>(from[j]));
      if (exact < 0x1p127) worst = std::fmax(worst, std::fabs(static_cast<double>(to[j]) - exact) / exact);
    }
  }
  EP_CHECK(worst <= 0x1p-23);
  const float inf = std::numeric_limits<float>::infinity();
  const float odd[16] = {0, 1, -1, 3, -inf, inf, -200, 200, -126.6f, 128, std::nanf(""), -1e30f, 1e30f, -0.0f, 10, -10};
  table.exp2(odd, to);
  const float want[16] = {1, 2, 0.5f, 8, 0, inf, 0, inf, 0, inf, 0, 0, inf, 1, 1024, 0x1p-10f};
  for (int i = 0; i < 16; ++i) EP_CHECK(i == 10 ? std::isnan(to[i]) : to[i] == want[i]);
}

// Rounding of each partial sum, instead of the total, moves many elements by more than half a unit in the last place.
void check_rounded_once() {
  scenario s{"", 320, 20, 4, 1, 64, {}, {{0, 20}}};
  for (int64_t i = 0; i < 16; ++i) s.shards.push_back({i * 20, 20, 0, 1});
  for (const isa path : paths()) {
    tensors t(s, dtype::bf16);
    problem w = s.what(dtype::bf16);
    w.path = path;
    const reference want = compute_reference(w, t.q, t.k, t.v, t.d_o);
    for (int64_t r = 0; r < s.q_rows; ++r) {
      for (int64_t h = 0; h < s.q_heads; ++h) t.delta.set(r, h, static_cast<float>(want.delta[static_cast<size_t>(r * s.q_heads + h)]));
    }
    EP_CHECK_EQ(forward(t.forward_of(w), nullptr), status::ok);
    EP_CHECK_EQ(backward(t.backward_of(w, true), nullptr), status::ok);
    const auto check = [&](const matrix& got, const std::vector<double>& exact) {
      for (int64_t r = 0; r < got.rows(); ++r) {
        for (int64_t c = 0; c < got.columns(); ++c) {
          const double x = exact[static_cast<size_t>(r * got.columns() + c)];
          const double half_unit = std::exp2(std::floor(std::log2(std::fabs(x))) - 8);
          EP_CHECK(std::fabs(got.at(r, c) - x) <= half_unit + 1e-4);
        }
      }
    };
    check(t.d_k, want.d_k);
    check(t.d_v, want.d_v);
    check(t.d_q, want.d_q);
  }
}

// Two equal scores average two values; the averages are ties between bf16 neighbours.
void check_ties_to_even() {
  const scenario s{"", 1, 2, 1, 1, 20, {{0, 1, 0, 1}}, {{0, 2}}};
  for (const isa path : paths()) {
    tensors t(s, dtype::bf16);
    for (int64_t c = 0; c < 20; ++c) {
      t.q.set(0, c, 0.0f);
      t.v.set(0, c, c % 2 == 0 ? 1.0f : 1.0f + 0x1p-7f);
      t.v.set(1, c, c % 2 == 0 ? 1.0f + 0x1p-7f : 1.0f + 0x1p-6f);
    }
    problem w = s.what(dtype::bf16);
    w.path = path;
    EP_CHECK_EQ(forward(t.forward_of(w), nullptr), status::ok);
    for (int64_t c = 0; c < 20; ++c) EP_CHECK_EQ(t.o.at(0, c), c % 2 == 0 ? 1.0 : 1.0 + 0x1p-6);
  }
}

void check_not_finite() {
  const float inf = std::numeric_limits<float>::infinity();
  const scenario s{"", 90, 90, 2, 1, 64, {whole(90)}, {{0, 90}}};
  for (const dtype type : {dtype::f32, dtype::bf16}) {
    for (const isa path : paths()) {
      problem w = s.what(type);
      w.path = path;
      tensors t(s, type);
      t.q.set(11, 3, std::nanf(""));
      EP_CHECK_EQ(forward(t.forward_of(w), nullptr), status::ok);
      for (int64_t r = 0; r < 90; ++r) {
        EP_CHECK_EQ(std::isnan(t.o.at(r, 0)), r == 11);
        EP_CHECK_EQ(std::isnan(t.lse.at(r, 0)), r == 11);
        EP_CHECK(std::isfinite(t.o.at(r, 64)));
      }
      for (const float bad : {inf, -inf, std::nanf(""), 3e38f}) {
        t.k.set(70, 2, bad);
        t.v.set(40, 5, bad);
        t.d_o.set(88, 1, bad);
        EP_CHECK_EQ(forward(t.forward_of(w), nullptr), status::ok);
        EP_CHECK_EQ(backward(t.backward_of(w), nullptr), status::ok);
        EP_CHECK_EQ(std::isfinite(t.o.at(89, 5)), std::isfinite(bad));
        EP_CHECK(t.o.gaps_marked() && t.d_q.gaps_marked() && t.d_k.gaps_marked());
      }
    }
  }
}

// Keys with a score of -inf weigh nothing, also when they fill the first block and the running maximum is still -inf.
void check_minus_infinity() {
  const scenario s{"", 10, 90, 1, 1, 64, {{0, 10, 0, 1}}, {{0, 90}}};
  scenario rest = s;
  rest.pieces = {{70, 20}};
  for (const isa path : paths()) {
    tensors t(s, dtype::f32);
    for (int64_t r = 0; r < 10; ++r) t.q.set(r, 0, 1.0f);
    for (int64_t r = 0; r < 70; ++r) t.k.set(r, 0, -std::numeric_limits<float>::infinity());
    const reference want = compute_reference(rest.what(dtype::f32), t.q, t.k, t.v, t.d_o);
    problem w = s.what(dtype::f32);
    w.path = path;
    EP_CHECK_EQ(forward(t.forward_of(w), nullptr), status::ok);
    EP_CHECK(relative_error(t.o, want.o, nullptr) < 1e-6);
    EP_CHECK(relative_error(t.lse, want.lse, nullptr) < 1e-6);
  }
}

// The largest NaN plus the rounding increment is minus zero.
void check_nan_survives_rounding() {
  const scenario s{"", 20, 20, 1, 1, 20, {whole(20)}, {{0, 20}}};
  for (const isa path : paths()) {
    tensors t(s, dtype::bf16);
    problem w = s.what(dtype::bf16);
    w.path = path;
    EP_CHECK_EQ(forward(t.forward_of(w), nullptr), status::ok);
    const uint32_t bits = 0x7FFFFFFF;
    float nan;
    std::memcpy(&nan, &bits, 4);
    for (int64_t r = 0; r < 20; ++r) t.delta.set(r, 0, nan);
    EP_CHECK_EQ(backward(t.backward_of(w, true), nullptr), status::ok);
    for (int64_t c = 0; c < 20; ++c) EP_CHECK(std::isnan(t.d_q.at(3, c)) && std::isnan(t.d_k.at(3, c)) && std::isfinite(t.d_v.at(3, c)));
  }
}

void check_refusals() {
  const scenario s{"", 20, 30, 4, 2, 16, {{0, 10, 0, 1}, {10, 10, 1, 2}}, {{0, 10}, {10, 5}, {15, 15}}};
  struct refusal {
    status code;
    const char* text;  // must occur in the message
    std::function<void(forward_args&, scenario&)> spoil;
  };
  const int64_t top = std::numeric_limits<int64_t>::max();
  const std::vector<refusal> refusals = {
      {status::bad_shard, "shard 1 (q_row 11, q_length 10)", [](auto&, auto& x) { x.shards[1].q_row = 11; }},
      {status::bad_shard, "shard 0 (q_row -1", [](auto&, auto& x) { x.shards[0].q_row = -1; }},
      {status::bad_shard, "shard 1", [&](auto&, auto& x) { x.shards[1].q_length = top; }},
      {status::bad_shard, "(first_piece 1, piece_count 3) is outside the list of 3", [](auto&, auto& x) { x.shards[1].piece_count = 3; }},
      {status::bad_shard, "first_piece -1", [](auto&, auto& x) { x.shards[1].first_piece = -1; }},
      {status::bad_shard, "shard 1", [&](auto&, auto& x) { x.shards[1].piece_count = top; }},
      {status::bad_piece, "piece 2 (row 16, length 15)", [](auto&, auto& x) { x.pieces[2].row = 16; }},
      {status::bad_piece, "length -1", [](auto&, auto& x) { x.pieces[0].length = -1; }},
      {status::bad_piece, "piece 0", [&](auto&, auto& x) { x.pieces[0].length = top; }},
      {status::shards_overlap, "shards 0 and 1 both own query row 9", [](auto&, auto& x) { x.shards[1].q_row = 9; }},
      {status::bad_argument, "q_heads must be a multiple of kv_heads", [](auto& a, auto&) { a.what.kv_heads = 3; }},
      {status::bad_argument, "kv_heads must be 1 to", [](auto& a, auto&) { a.what.kv_heads = 0; }},
      {status::bad_argument, "head_dim must be 1 to 256, found 257", [](auto& a, auto&) { a.what.head_dim = 257; }},
      {status::bad_argument, "threads must be 1 to", [](auto& a, auto&) { a.what.threads = 0; }},
      {status::bad_argument, "q_rows must be", [](auto& a, auto&) { a.what.q_rows = -1; }},
      {status::bad_argument, "scale must be finite", [](auto& a, auto&) { a.what.scale = std::nanf(""); }},
      {status::bad_argument, "dtype must be", [](auto& a, auto&) { a.what.type = static_cast<dtype>(2); }},
      {status::bad_argument, "shards is null", [](auto& a, auto&) { a.what.shards = nullptr; }},
      {status::bad_argument, "k is null", [](auto& a, auto&) { a.k.data = nullptr; }},
      {status::bad_argument, "v has a row stride of 124", [](auto& a, auto&) { a.v.stride = 124; }},
      {status::bad_argument, "o has a row stride of 258", [](auto& a, auto&) { a.o.stride = 258; }},
      {status::bad_argument, "lse has a row stride of", [&](auto& a, auto&) { a.lse.stride = top / 4 * 4; }},
      {status::bad_argument, "q is not aligned", [](auto& a, auto&) { a.q.data = static_cast<const char*>(a.q.data) + 2; }},
      {status::unsupported_isa, "not available", [](auto& a, auto&) { a.what.path = static_cast<isa>(9); }},
  };
  for (const refusal& r : refusals) {
    scenario spoiled = s;
    tensors t(s, dtype::f32);
    forward_args args = t.forward_of(spoiled.what(dtype::f32));
    r.spoil(args, spoiled);
    std::string why;
    const status found = forward(args, &why);
    EP_CHECK_EQ(found, r.code);
    if (why.find(r.text) == std::string::npos) std::fprintf(stderr, "expected \"%s\" in \"%s\"\n", r.text, why.c_str());
    EP_CHECK(why.find(r.text) != std::string::npos);
    backward_args back = t.backward_of(args.what);
    back.q = args.q;
    back.k = args.k;
    back.v = args.v;
    back.lse = {args.lse.data, args.lse.stride};
    back.o = {args.o.data, args.o.stride};
    EP_CHECK_EQ(backward(back, nullptr), r.code);
    for (int64_t row = 0; row < s.q_rows; ++row) EP_CHECK(t.o.row_marked(row) && t.lse.row_marked(row) && t.d_q.row_marked(row));
    for (int64_t row = 0; row < s.kv_rows; ++row) EP_CHECK(t.d_k.row_marked(row) && t.d_v.row_marked(row));
  }
  tensors t(s, dtype::f32);
  std::string why;
  backward_args neither = t.backward_of(s.what(dtype::f32));
  neither.o.data = nullptr;
  EP_CHECK_EQ(backward(neither, &why), status::bad_argument);
  EP_CHECK_EQ(why, "give exactly one of o and delta, found neither");
  backward_args both = t.backward_of(s.what(dtype::f32));
  both.delta = t.delta.in();
  EP_CHECK_EQ(backward(both, &why), status::bad_argument);
}

// The call below would take many seconds; it must end soon after the flag, on every thread.
void check_cancel() {
  const scenario s{"", 20000, 20000, 8, 2, 64, {whole(20000)}, {{0, 20000}}};
  tensors t(s, dtype::bf16);
  std::atomic<uint32_t> cancel{1};
  problem w = s.what(dtype::bf16);
  w.cancel = &cancel;
  w.threads = 2;
  w.path = isa::portable;
  std::string why;
  EP_CHECK_EQ(forward(t.forward_of(w), &why), status::cancelled);
  EP_CHECK(t.o.row_marked(0) && t.o.row_marked(19999));
  EP_CHECK_EQ(backward(t.backward_of(w), &why), status::cancelled);
  EP_CHECK(t.d_k.row_marked(0) && t.d_q.row_marked(19999));
  for (const bool forwards : {true, false}) {
    cancel = 0;
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      cancel = 1;
    });
    const auto start = std::chrono::steady_clock::now();
    EP_CHECK_EQ(forwards ? forward(t.forward_of(w), &why) : backward(t.backward_of(w), &why), status::cancelled);
    EP_CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    later.join();
  }
}

/// 2^51 bytes of gradient sums exceed any address space, so the call must end before it touches a row.
void check_out_of_memory() {
  const int64_t rows = int64_t{1} << 40;
  const scenario small{"", 1, 1, 1, 1, 256, {{0, 1, 0, 1}}, {{0, 1}}};
  tensors t(small, dtype::f32);
  scenario s = small;
  s.kv_rows = rows;
  s.pieces[0].length = rows;
  std::string why;
  EP_CHECK_EQ(backward(t.backward_of(s.what(dtype::f32)), &why), status::out_of_memory);
  EP_CHECK(why.find("no memory for worker 0 of 1") != std::string::npos);
  EP_CHECK(t.d_q.row_marked(0) && t.d_k.row_marked(0));
}

// Sanitizers abort by themselves when a thread or its shadow cannot be mapped.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void check_no_threads() {
  scenario s{"", 64, 1, 1, 1, 1, {}, {{0, 1}}};
  for (int64_t i = 0; i < 64; ++i) s.shards.push_back({i, 1, 0, 1});
  tensors t(s, dtype::f32);
  problem w = s.what(dtype::f32);
  w.threads = 64;
  std::FILE* sizes = std::fopen("/proc/self/statm", "r");
  unsigned long pages = 0;
  EP_CHECK(sizes != nullptr && std::fscanf(sizes, "%lu", &pages) == 1);
  if (sizes != nullptr) std::fclose(sizes);
  rlimit before;
  EP_CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const rlimit tight{pages * 4096 + (rlim_t{24} << 20), before.rlim_max};
  EP_CHECK_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  std::string why;
  const status found = forward(t.forward_of(w), &why);
  EP_CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EP_CHECK_EQ(found, status::no_threads);
  EP_CHECK(why.find("could not start thread") != std::string::npos);
  for (int64_t row = 0; row < 64; ++row) EP_CHECK(t.o.row_marked(row));
  EP_CHECK_EQ(forward(t.forward_of(w), &why), status::ok);
}
#endif

}  // namespace

// So that the address sanitizer answers an impossible request as malloc does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

int main() {
  std::printf("instruction sets:");
  for (const isa path : {isa::portable, isa::avx2, isa::avx512}) {
    std::printf(" %s%s", isa_name(path), isa_available(path) ? "" : " (SKIPPED: not on this cpu)");
  }
  std::printf("; best is %s\n", isa_name(isa_best()));
  check_reference();
  check_exp2(portable_kernels());
#if defined(__x86_64__)
  if (isa_available(isa::avx2)) check_exp2(avx2_kernels());
  if (isa_available(isa::avx512)) check_exp2(avx512_kernels());
#endif
  for (const scenario& s : scenarios()) {
    compare(s, dtype::f32);
    compare(s, dtype::bf16);
  }
  check_rounded_once();
  check_ties_to_even();
  check_not_finite();
  check_minus_infinity();
  check_nan_survives_rounding();
  check_refusals();
  check_cancel();
  check_out_of_memory();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  check_no_threads();
#else
  std::printf("SKIPPED under this sanitizer: a refused thread\n");
#endif
  return ep::check::finish();
}
