#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention_job.hpp"

namespace ep::attention {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

status refuse(status code, std::string& why, std::string text) {
  why = std::move(text);
  return code;
}

status check_shape(const problem& what, std::string& why) {
  const auto range = [&](const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return true;
    why = std::string(name) + " must be " + number(low) + " to " + number(high) + ", found " + number(value);
    return false;
  };
  // Rows times bytes of a row must stay far from the end of int64.
  constexpr int64_t most_rows = int64_t{1} << 40;
  if (what.type != dtype::f32 && what.type != dtype::bf16) {
    return refuse(status::bad_argument, why, "dtype must be f32 (0) or bf16 (1), found " + number(static_cast<int64_t>(what.type)));
  }
  if (!range("q_rows", what.q_rows, 0, most_rows) || !range("kv_rows", what.kv_rows, 0, most_rows) ||
      !range("q_heads", what.q_heads, 1, max_heads) || !range("kv_heads", what.kv_heads, 1, max_heads) ||
      !range("head_dim", what.head_dim, 1, max_head_dim) || !range("threads", what.threads, 1, max_threads) ||
      !range("shard_count", what.shard_count, 0, most_rows) || !range("piece_count", what.piece_count, 0, most_rows)) {
    return status::bad_argument;
  }
  if (what.q_heads % what.kv_heads != 0) {
    return refuse(status::bad_argument, why,
                  "q_heads must be a multiple of kv_heads, found " + number(what.q_heads) + " and " + number(what.kv_heads));
  }
  if (!std::isfinite(what.scale)) {
    return refuse(status::bad_argument, why, "scale must be finite, found " + std::to_string(what.scale));
  }
  if ((what.shard_count > 0 && what.shards == nullptr) || (what.piece_count > 0 && what.pieces == nullptr)) {
    return refuse(status::bad_argument, why, what.shards == nullptr && what.shard_count > 0 ? "shards is null" : "pieces is null");
  }
  return status::ok;
}

status copy_lists(const problem& what, plan& out, std::string& why) {
  out.pieces.reserve(static_cast<size_t>(what.piece_count));
  for (int64_t i = 0; i < what.piece_count; ++i) {
    const piece p = what.pieces[i];
    if (p.row < 0 || p.length < 0 || p.row > what.kv_rows || p.length > what.kv_rows - p.row) {
      return refuse(status::bad_piece, why,
                    "piece " + number(i) + " (row " + number(p.row) + ", length " + number(p.length) + ") is outside the " +
                        number(what.kv_rows) + " key-value rows");
    }
    out.pieces.push_back({p.row, p.length, 0});
  }
  out.shards.reserve(static_cast<size_t>(what.shard_count));
  for (int64_t i = 0; i < what.shard_count; ++i) {
    const query_shard s = what.shards[i];
    if (s.q_row < 0 || s.q_length < 0 || s.q_row > what.q_rows || s.q_length > what.q_rows - s.q_row) {
      return refuse(status::bad_shard, why,
                    "shard " + number(i) + " (q_row " + number(s.q_row) + ", q_length " + number(s.q_length) + ") is outside the " +
                        number(what.q_rows) + " query rows");
    }
    if (s.first_piece < 0 || s.piece_count < 0 || s.first_piece > what.piece_count ||
        s.piece_count > what.piece_count - s.first_piece) {
      return refuse(status::bad_shard, why,
                    "shard " + number(i) + " (first_piece " + number(s.first_piece) + ", piece_count " + number(s.piece_count) +
                        ") is outside the list of " + number(what.piece_count) + " pieces");
    }
    int64_t context = 0;
    for (int64_t j = s.first_piece; j < s.first_piece + s.piece_count; ++j) {
      if (__builtin_add_overflow(context, out.pieces[static_cast<size_t>(j)].length, &context)) {
        return refuse(status::bad_shard, why, "shard " + number(i) + " has a context of more than 2^63 - 1 keys");
      }
    }
    out.shards.push_back({s.q_row, s.q_length, context, s.first_piece, s.piece_count});
  }
  return status::ok;
}

// Two shards that own one query row would write it from two threads.
status check_disjoint(const plan& todo, std::string& why) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < todo.shards.size(); ++i) {
    if (todo.shards[i].q_length > 0) order.push_back(static_cast<int64_t>(i));
  }
  const auto at = [&](int64_t i) -> const planned_shard& { return todo.shards[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return at(a).q_row < at(b).q_row; });
  for (size_t i = 1; i < order.size(); ++i) {
    const planned_shard& before = at(order[i - 1]);
    if (before.q_row + before.q_length > at(order[i]).q_row) {
      return refuse(status::shards_overlap, why,
                    "shards " + number(std::min(order[i - 1], order[i])) + " and " + number(std::max(order[i - 1], order[i])) +
                        " both own query row " + number(at(order[i]).q_row));
    }
  }
  return status::ok;
}

/// Pairs (query, key) of a shard: each query t sees context - q_length + t + 1 keys, or none.
double attended_pairs(const planned_shard& s) {
  const double last = static_cast<double>(s.context);
  const double first = std::max(0.0, last - static_cast<double>(s.q_length));
  return (last - first) * (last + first + 1) / 2;
}

int64_t find_root(std::vector<int64_t>& parent, int64_t i) {
  while (parent[static_cast<size_t>(i)] != i) {
    int64_t& up = parent[static_cast<size_t>(i)];
    up = parent[static_cast<size_t>(up)];
    i = up;
  }
  return i;
}

// Pieces that overlap melt into intervals; a shard joins the intervals it reads; what is joined is a part.
void make_parts(int64_t kv_rows, plan& todo) {
  struct interval {
    int64_t row;
    int64_t end;
    int64_t sum_row;
    int64_t part;
  };
  std::vector<int64_t> used;
  for (const planned_shard& s : todo.shards) {
    if (s.q_length == 0) continue;
    for (int64_t j = s.first_piece; j < s.first_piece + s.piece_count; ++j) {
      if (todo.pieces[static_cast<size_t>(j)].length > 0) used.push_back(j);
    }
  }
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  const auto piece_at = [&](int64_t j) -> planned_piece& { return todo.pieces[static_cast<size_t>(j)]; };
  std::stable_sort(used.begin(), used.end(), [&](int64_t a, int64_t b) { return piece_at(a).row < piece_at(b).row; });

  std::vector<interval> intervals;
  std::vector<int64_t> interval_of(todo.pieces.size(), -1);
  int64_t covered = 0;
  for (const int64_t j : used) {
    const planned_piece& p = piece_at(j);
    if (intervals.empty() || p.row >= intervals.back().end) {
      if (p.row > covered) todo.unread.push_back({covered, p.row - covered});
      intervals.push_back({p.row, p.row + p.length, 0, -1});
    } else {
      intervals.back().end = std::max(intervals.back().end, p.row + p.length);
    }
    covered = intervals.back().end;
    interval_of[static_cast<size_t>(j)] = static_cast<int64_t>(intervals.size()) - 1;
  }
  if (covered < kv_rows) todo.unread.push_back({covered, kv_rows - covered});

  std::vector<int64_t> parent(intervals.size());
  std::iota(parent.begin(), parent.end(), int64_t{0});
  std::vector<int64_t> any_interval(todo.shards.size(), -1);
  for (size_t i = 0; i < todo.shards.size(); ++i) {
    const planned_shard& s = todo.shards[i];
    if (s.q_length == 0) continue;
    for (int64_t j = s.first_piece; j < s.first_piece + s.piece_count; ++j) {
      const int64_t at = interval_of[static_cast<size_t>(j)];
      if (at < 0) continue;
      if (any_interval[i] < 0) any_interval[i] = at;
      const int64_t a = find_root(parent, any_interval[i]);
      const int64_t b = find_root(parent, at);
      parent[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
    }
  }

  const auto new_part = [&] {
    todo.parts.emplace_back();
    return static_cast<int64_t>(todo.parts.size()) - 1;
  };
  // The root of a set is its smallest index, so it has its part before any other member asks for it.
  for (size_t i = 0; i < intervals.size(); ++i) {
    interval& own = intervals[i];
    const int64_t root = find_root(parent, static_cast<int64_t>(i));
    own.part = root == static_cast<int64_t>(i) ? new_part() : intervals[static_cast<size_t>(root)].part;
    plan_part& part = todo.parts[static_cast<size_t>(own.part)];
    own.sum_row = part.sum_rows;
    part.sum_rows += own.end - own.row;
    part.intervals.push_back({own.row, own.end - own.row});
  }
  for (const int64_t j : used) {
    const interval& own = intervals[static_cast<size_t>(interval_of[static_cast<size_t>(j)])];
    piece_at(j).sum_row = own.sum_row + (piece_at(j).row - own.row);
  }
  for (size_t i = 0; i < todo.shards.size(); ++i) {
    if (todo.shards[i].q_length == 0) continue;
    const int64_t at = any_interval[i];
    plan_part& part = todo.parts[static_cast<size_t>(at < 0 ? new_part() : intervals[static_cast<size_t>(at)].part)];
    part.shards.push_back(static_cast<int64_t>(i));
    part.cost += attended_pairs(todo.shards[i]);
  }
  std::stable_sort(todo.parts.begin(), todo.parts.end(), [](const plan_part& a, const plan_part& b) { return a.cost > b.cost; });
}

}  // namespace

status make_plan(const problem& what, bool for_backward, plan& out, std::string& why) {
  status found = check_shape(what, why);
  if (found == status::ok) found = copy_lists(what, out, why);
  if (found == status::ok) found = check_disjoint(out, why);
  if (found == status::ok && for_backward) make_parts(what.kv_rows, out);
  return found;
}

}  // namespace ep::attention
