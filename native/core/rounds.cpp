#include "rounds.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include <sched.h>

namespace ep {
namespace {

constexpr uint64_t line = 64;
constexpr uint64_t up(uint64_t bytes) { return (bytes + line - 1) / line * line; }

std::atomic_ref<uint64_t> word(uint64_t* at) { return std::atomic_ref<uint64_t>(*at); }
std::atomic_ref<uint32_t> half(uint32_t* at) { return std::atomic_ref<uint32_t>(*at); }

} // namespace

struct rounds::row {
  uint64_t key;
  uint32_t bytes;
  uint32_t row_bytes; // of what lands: from one member to the next
};

namespace {

constexpr uint64_t row_header = 16;
constexpr uint64_t row_stride = up(row_header + round_layout::most_bytes);
// Of a group: two words of what the leader has put, each in a line of its own, wake words of members, then rows and landings of either round.
constexpr uint64_t posted_bytes = 2 * line;

} // namespace

uint64_t round_layout::group_bytes() const { return posted_bytes + world * line + 4 * world * row_stride; }

uint64_t* rounds::posted_at(uint64_t round) const { return reinterpret_cast<uint64_t*>(places() + round % 2 * line); }
ep_wake_word* rounds::wake_at(uint32_t member) const { return reinterpret_cast<ep_wake_word*>(places() + posted_bytes + member * line); }
uint64_t rounds::rows_at(uint64_t round, uint32_t member) const {
  return round_layout::head_bytes + place_.group * layout_.group_bytes() + posted_bytes + layout_.world * line + (round % 2 * layout_.world + member) * row_stride;
}
uint64_t rounds::landing_at(uint64_t round, uint32_t member) const { return rows_at(round, member) + 2 * layout_.world * row_stride; }
uint64_t rounds::slot_of(uint64_t round, uint32_t host) const { return place_.group * layout_.group_slots() + round % 2 * layout_.world + host; }

result<std::unique_ptr<rounds>> rounds::open(std::shared_ptr<symmetric_memory> memory, std::unique_ptr<round_way> way, round_place place, const ep_segment_handle& leader) {
  static_assert(sizeof(row) == row_header);
  const auto wrong = [](const char* what) { return failure{EP_STATUS_INVALID, 0, std::string("rounds: ") + what}; };
  const rank_context& context = memory->context();
  const auto world = static_cast<uint32_t>(context.world_size());
  std::unique_ptr<rounds> made(new rounds);
  made->layout_ = {world};
  const uint64_t members = place.ranks.size();
  if (members == 0 || members > std::min<uint64_t>(world, static_cast<uint64_t>(round_layout::most_members))) return wrong("too few or too many members");
  if (place.self >= members || place.ranks[place.self] != context.rank()) return wrong("this rank is not the member that it says it is");
  for (const int32_t rank : place.ranks) if (rank < 0 || rank >= context.world_size()) return wrong("a rank that is not in this world");
  if (place.hosts.empty() || place.hosts[0] != 0) return wrong("hosts begin with the first member");
  for (size_t host = 1; host < place.hosts.size(); ++host) if (place.hosts[host] <= place.hosts[host - 1] || place.hosts[host] >= members) return wrong("hosts are not in order");
  if (place.hosts.size() > 1 && way == nullptr) return wrong("there is no way to other hosts");
  // HAZARD: by quotients, so that no product can wrap.
  if (memory->byte_length() < round_layout::head_bytes || place.group >= (memory->byte_length() - round_layout::head_bytes) / made->layout_.group_bytes() || place.group >= memory->signal_slots() / made->layout_.group_slots()) return wrong("a group that does not fit the memory");
  made->host_ = static_cast<uint32_t>(std::upper_bound(place.hosts.begin(), place.hosts.end(), place.self) - place.hosts.begin()) - 1;
  made->leads_ = place.hosts[made->host_] == place.self;
  made->place_ = std::move(place);
  if (made->leads_) {
    made->signals_ = memory->own_signals();
    made->data_ = memory->own_data();
    // Who sleeps on the rank's own word, as waits of JS do all the time, is not woken by every round.
    memory->wake_instead(made->leader_wake());
  } else {
    auto mapped = segment::open(leader);
    if (!mapped.ok()) return mapped.why();
    made->leader_memory_ = std::move(mapped.value());
    const auto ahead = static_cast<uint64_t>(memory->own_data() - reinterpret_cast<uint8_t*>(memory->own_signals()));
    if (made->leader_memory_->data_bytes() < ahead + memory->byte_length()) return wrong("the leader has another memory");
    made->signals_ = reinterpret_cast<uint64_t*>(made->leader_memory_->data());
    made->data_ = made->leader_memory_->data() + ahead;
  }
  made->memory_ = std::move(memory);
  made->way_ = std::move(way);
  return made;
}

void rounds::enter(uint64_t round, std::span<const uint8_t> said, std::span<const uint8_t> more) {
  row* mine = row_at(rows_at(round, place_.self));
  auto* to = reinterpret_cast<uint8_t*>(mine + 1);
  // Never UINT32_MAX: callers are checked where they say how much it is.
  const uint64_t first = std::min<uint64_t>(said.size(), round_layout::most_bytes);
  const uint64_t rest = std::min<uint64_t>(more.size(), round_layout::most_bytes - first);
  mine->bytes = static_cast<uint32_t>(first + rest);
  if (first > 0) std::memcpy(to, said.data(), first);
  if (rest > 0) std::memcpy(to + first, more.data(), rest);
  // Before the looks at the others' rows: of two who write at one time, one sees both, and wakes who waits for that.
  word(&mine->key).store(key(round), std::memory_order_seq_cst);
  if (!all_said(round)) return;
  if (leads_) {
    drive(round);
    return;
  }
  wake_notify(leader_wake());
}

bool rounds::all_said(uint64_t round) const {
  for (uint32_t member = place_.hosts[host_]; member < host_end(host_); ++member) {
    if (word(&row_at(rows_at(round, member))->key).load(std::memory_order_seq_cst) != key(round)) return false;
  }
  return true;
}

bool rounds::landed(uint64_t round) const {
  for (uint32_t host = 0; host < place_.hosts.size(); ++host) {
    if (host != host_ && word(&signals_[slot_of(round, host)]).load(std::memory_order_acquire) != key(round)) return false;
  }
  return true;
}

void rounds::wake_mates() const {
  for (uint32_t member = place_.hosts[host_] + 1; member < host_end(host_); ++member) wake_notify(wake_at(member));
}

// Of a leader. True: what its host said has gone to all others.
bool rounds::drive(uint64_t round) {
  if (word(posted_at(round)).load(std::memory_order_relaxed) == key(round)) return true;
  if (broken_ || !all_said(round)) return false;
  const uint32_t first = place_.hosts[host_];
  const uint32_t count = host_end(host_) - first;
  uint64_t bytes = 0;
  for (uint32_t member = first; member < first + count; ++member) bytes = std::max<uint64_t>(bytes, std::min<uint64_t>(half(&row_at(rows_at(round, member))->bytes).load(std::memory_order_relaxed), round_layout::most_bytes));
  const uint64_t row_bytes = (row_header + bytes + 15) / 16 * 16;
  const uint64_t slot = slot_of(round, host_);
  const auto leader_of = [&](uint32_t host) { return place_.ranks[place_.hosts[host]]; };
  // To all or to none: a member of one host has the round only if those of all others get it.
  for (uint32_t host = 0; host < place_.hosts.size(); ++host) if (host != host_ && !way_->clear(leader_of(host), slot)) return false;
  // In its own row alone, which nobody else writes; and only now, as what was put from here before may still have been read.
  row_at(rows_at(round, first))->row_bytes = static_cast<uint32_t>(row_bytes);
  for (uint32_t host = 0; host < place_.hosts.size(); ++host) {
    const uint64_t local = reinterpret_cast<uint64_t>(data_ + rows_at(round, first));
    if (host == host_ || way_->put(leader_of(host), local, row_stride, row_bytes, count, landing_at(round, first), slot, key(round)).ok()) continue;
    broken_ = true;
    return false;
  }
  word(posted_at(round)).store(key(round), std::memory_order_release);
  return true;
}

// HAZARD: what the host has said goes out before the look at what has come, which asks the kernel. While mates have yet to say theirs, nothing that comes ends the round: then it
// asks seldom, for the sake of others.
bool rounds::look(uint64_t round) {
  if (leads_) {
    if (!drive(round) && !all_said(round) && clock_now_ns() - looked_ns_ < asks_apart_ns) return false;
    if (!landed(round) || !drive(round)) {
      memory_->context().progress().run();
      looked_ns_ = clock_now_ns();
      if (!drive(round) || !landed(round)) return false;
    }
    wake_mates();
    return true;
  }
  return word(posted_at(round)).load(std::memory_order_acquire) == key(round) && all_said(round) && landed(round);
}

bool rounds::hold(uint64_t round, int64_t most_ns, const std::function<bool()>& meanwhile) {
  if (most_ns <= 0) {
    if (meanwhile) meanwhile();
    return look(round);
  }
  rank_context& context = memory_->context();
  wait_policy policy = context.policy();
  // Whoever has the core between two looks may keep it for long.
  const rare_looks rare(policy.spin_ns == 0 ? 1'000'000 : 0);
  // Where ranks outnumber cores. What comes through a network takes several switches, and to sleep and be woken takes as many: nobody does so at once only because no other rank wants this core.
  constexpr int64_t network_ns = 300'000;
  const int64_t begin_ns = clock_now_ns();
  for (int64_t now = begin_ns; policy.spin_ns == 0 && now - begin_ns < std::min(network_ns, most_ns); now = clock_now_ns()) {
    if (look(round)) return true;
    if (!meanwhile || !meanwhile()) sched_yield();
  }
  policy.inline_ns = std::min(policy.inline_ns, most_ns);
  policy.inline_sleep_ns = most_ns - policy.inline_ns;
  const auto there = [&] {
    if (look(round)) return true;
    return meanwhile && meanwhile() && look(round);
  };
  if (leads_) {
    const bool came = wait_inline(policy, leader_wake(), there, &context.progress());
    // Nobody may look for long now.
    if (!came) context.progress().rest();
    return came;
  }
  return wait_inline(policy, wake_at(place_.self), there);
}

uint32_t rounds::read(uint64_t round, uint32_t member, uint8_t* into) const {
  const auto host = static_cast<uint32_t>(std::upper_bound(place_.hosts.begin(), place_.hosts.end(), member) - place_.hosts.begin()) - 1;
  const uint32_t first = place_.hosts[host];
  uint64_t at = rows_at(round, member);
  if (host != host_) {
    // What another rank wrote is looked at before it is used, and read once: it could be another number the next time.
    const uint64_t row_bytes = half(&row_at(landing_at(round, first))->row_bytes).load(std::memory_order_relaxed);
    if (row_bytes < row_header || row_bytes > row_stride || row_bytes % row_header != 0) return UINT32_MAX;
    at = landing_at(round, first) + (member - first) * row_bytes;
  }
  row* found = row_at(at);
  const uint32_t bytes = half(&found->bytes).load(std::memory_order_relaxed);
  if (bytes > round_layout::most_bytes || word(&found->key).load(std::memory_order_acquire) != key(round)) return UINT32_MAX;
  std::memcpy(into, found + 1, bytes);
  return bytes;
}

} // namespace ep
