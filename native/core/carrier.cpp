#include "carrier.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include <sched.h>

#include "carrier_words.hpp"
#include "host_fold.hpp"

namespace ep {
namespace {

// Whoever has found nothing to do for so long sleeps until somebody wakes it: peers that are about to come have come.
constexpr int64_t patience_ns = 1'000'000;
constexpr int64_t apart_ns = 1'000'000; // between looks, at most
constexpr int64_t longest_sleep_ns = 1'000'000;

uint64_t load(const uint64_t& word) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire); }

} // namespace

result<std::unique_ptr<carrier>> carrier::open(std::shared_ptr<symmetric_memory> memory, std::unique_ptr<round_way> way, round_place place, std::span<const ep_segment_handle> mates) {
  const auto wrong = [](const char* what) { return failure{EP_STATUS_INVALID, 0, std::string("carrier: ") + what}; };
  const rank_context& context = memory->context();
  std::unique_ptr<carrier> made(new carrier);
  made->layout_ = {static_cast<uint32_t>(context.world_size())};
  const uint64_t members = place.ranks.size();
  if (members < 2 || members > std::min<uint64_t>(made->layout_.world, static_cast<uint64_t>(round_layout::most_members))) return wrong("too few or too many members");
  if (place.self >= members || place.ranks[place.self] != context.rank()) return wrong("this rank is not the member that it says it is");
  for (const int32_t rank : place.ranks) if (rank < 0 || rank >= context.world_size()) return wrong("a rank that is not in this world");
  const auto hosts = static_cast<uint32_t>(place.hosts.size());
  if (hosts < 2) return wrong("there are not several hosts");
  if (place.hosts[0] != 0) return wrong("hosts begin with the first member");
  for (uint32_t host = 1; host < hosts; ++host) if (place.hosts[host] <= place.hosts[host - 1] || place.hosts[host] >= members) return wrong("hosts are not in order");
  if (way == nullptr) return wrong("there is no way to other hosts");
  if (memory->byte_length() < carrier_layout::memory_bytes(1)) return wrong("the memory is too small");
  // HAZARD: by quotients, so that no product can wrap.
  if (place.group >= (memory->byte_length() - carrier_layout::head_bytes) / carrier_layout::group_bytes() || place.group >= memory->signal_slots() / made->layout_.group_slots()) return wrong("a group that does not fit the memory");
  made->place_ = std::move(place);
  made->lay();
  if (mates.size() != made->members_of(made->host_)) return wrong("there is not one memory for each member of the host");
  const auto ahead = static_cast<uint64_t>(memory->own_data() - reinterpret_cast<uint8_t*>(memory->own_signals()));
  for (uint32_t mate = 0; mate < mates.size(); ++mate) {
    if (mate == made->local_) {
      made->parts_.push_back(memory->own_data());
      continue;
    }
    auto mapped = segment::open(mates[mate]);
    if (!mapped.ok()) return mapped.why();
    if (mapped.value()->data_bytes() < ahead + memory->byte_length()) return wrong("a member of the host has another memory");
    made->parts_.push_back(mapped.value()->data() + ahead);
    made->mapped_.push_back(std::move(mapped.value()));
  }
  made->memory_ = std::move(memory);
  made->way_ = std::move(way);
  return made;
}

void carrier::lay() {
  for (uint32_t host = 0; host < hosts(); ++host) host_of_.insert(host_of_.end(), members_of(host), host);
  host_ = host_of(place_.self);
  local_ = local_of(place_.self);
  columns_ = members();
  for (uint32_t on = 0; on < hosts(); ++on) {
    columns_ = std::min(columns_, members_of(on));
    uint32_t row = 0;
    for (uint32_t host = 0; host < hosts(); ++host) {
      rows_.push_back(row);
      row += (members_of(host) + members_of(on) - 1) / members_of(on);
    }
    most_rows_ = std::max(most_rows_, row);
  }
}

void carrier::clear(const symmetric_memory& memory, uint64_t group) {
  const carrier_layout layout{static_cast<uint32_t>(memory.context().world_size())};
  std::memset(memory.own_data() + carrier_layout::begin_of(group, 0), 0, carrier_layout::head_bytes);
  std::memset(memory.own_signals() + group * layout.group_slots(), 0, layout.group_slots() * sizeof(uint64_t));
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// ---- where things lie

carrier::progress_words& carrier::words(uint32_t mate) const { return *reinterpret_cast<progress_words*>(parts_[mate] + carrier_layout::begin_of(place_.group, 0)); }

uint8_t* carrier::staging(uint32_t mate, uint64_t step) const {
  return parts_[mate] + carrier_layout::begin_of(place_.group, 1) + step % places_ * piece_;
}

// Where its mates' shares are staged, that of a member itself has room for what the host has come to, unless that is wide: then it is behind them.
uint8_t* carrier::partial(uint32_t mate, uint64_t step) const { return staging(mate, step) + (wide() == 1 ? mate : columns_) * share_bytes(); }

uint64_t carrier::landing_at(uint64_t step) const { return carrier_layout::begin_of(place_.group, whole() ? 3 : 2) + step % places_ * piece_; }

// Of two hosts, in the place of what has landed.
uint64_t carrier::results_at(uint64_t step) const { return landing_at(step) + (hosts() == 2 ? 0 : piece_ / 2); }

uint8_t* carrier::results(uint32_t mate, uint64_t step) const { return parts_[mate] + results_at(step); }

// So much, of all calls together.
bool carrier::landed(uint64_t slot, uint64_t least) const {
  if (load(memory_->own_signals()[place_.group * layout_.group_slots() + slot]) >= least) return true;
  awaits_hosts_ = true;
  return false;
}

bool carrier::counterparts_say(uint64_t (carrier_layout::*slot)(uint32_t) const, uint64_t least) const {
  for (uint32_t host = 0; host < hosts(); ++host) if (host != host_ && !landed((layout_.*slot)(counterpart(host)), least)) return false;
  return true;
}

// Of a mate that has not begun this call: nothing of it, and all of those before.
uint64_t carrier::said(uint64_t progress_words::* word, uint32_t mate) const { return std::max(load(words(mate).*word), before_); }

// Steps, or calls, that all of this host, or the first ones, have come to.
uint64_t carrier::least(uint64_t progress_words::* word, uint32_t count) const {
  uint64_t found = UINT64_MAX;
  for (uint32_t mate = 0; mate < count; ++mate) found = std::min(found, said(word, mate));
  return found;
}

void carrier::publish(uint64_t progress_words::* word, uint64_t value) {
  std::atomic_ref<uint64_t>(words(local_).*word).store(value, std::memory_order_seq_cst);
  for (uint32_t mate = 0; mate < mates(); ++mate) if (mate != local_) wake_notify(reinterpret_cast<ep_wake_word*>(parts_[mate]));
}

bool carrier::put(uint32_t member, const uint8_t* from, uint64_t bytes, uint64_t to, uint64_t slot, uint64_t value) {
  const uint64_t local = bytes == 0 ? 0 : reinterpret_cast<uint64_t>(from);
  auto posted = way_->put(place_.ranks[member], local, bytes, bytes, bytes == 0 ? 0 : 1, to, place_.group * layout_.group_slots() + slot, value);
  if (!posted.ok()) {
    refused_ = posted.why();
    return false;
  }
  sent_ += bytes;
  return true;
}

// ---- a call

carrier::plan carrier::plan_of(const carried_call& call) const {
  plan made;
  for (const uint64_t places : {uint64_t{1}, carrier_layout::most_places}) {
    made.places = places;
    made.piece = carrier_layout::area_bytes / places;
    const uint64_t step = call.kind == carried_kind::all_reduce || call.kind == carried_kind::reduce ? share_bytes(call, made.piece) * columns_ : block_bytes(call, made.piece);
    made.steps = call.longest / step + (call.longest % step == 0 ? 0 : 1);
    if (made.steps <= places) break;
  }
  return made;
}

result<nothing> carrier::check(const carried_call& call, uint64_t number) const {
  if (number <= number_ || number >= carrier_layout::most_calls) return failure{EP_STATUS_INVALID, 0, "carrier: the number of a call is above that of every call before it, and below 2^40"};
  if (folds(call.kind) && !reduces(call.op, call.type)) return failure{EP_STATUS_INVALID, 0, "carrier: it does not carry this reduction"};
  const bool rooted = call.kind == carried_kind::broadcast || call.kind == carried_kind::reduce || call.kind == carried_kind::gather || call.kind == carried_kind::scatter;
  if (rooted && call.root >= members()) return failure{EP_STATUS_INVALID, 0, "carrier: the root is no member"};
  if (plan_of(call).steps >> carrier_layout::step_bits != 0) return failure{EP_STATUS_INVALID, 0, "carrier: the call is too long"};
  return nothing{};
}

void carrier::follow(const plan& of) {
  places_ = of.places;
  piece_ = of.piece;
  steps_ = of.steps;
  window_ = std::max<uint64_t>(1, places_ / 2);
}

result<nothing> carrier::begin(const carried_call& call, uint64_t number, bool sure) {
  if (busy_ && sure_) return failure{EP_STATUS_BUSY, 0, "carrier: a call before this one has not come to its end"};
  if (auto sound = check(call, number); !sound.ok()) return sound;
  memory_->wake_instead(reinterpret_cast<ep_wake_word*>(memory_->own_data()));
  loose_ = loose_ || busy_;
  number_ = number;
  before_ = number << carrier_layout::step_bits;
  call_ = call;
  busy_ = true;
  sure_ = sure;
  told_ = passed_on_ = false;
  staged_ = read_ = folded_ = ready_ = taken_ = taken_blocks_ = answered_ = sent_ = 0;
  follow(plan_of(call));
  return nothing{};
}

// HAZARD: where what was prepared lies otherwise in the places of the longer call it was in vain, and is prepared anew.
void carrier::lengthen(uint64_t longest) {
  call_.longest = longest;
  const plan of = plan_of(call_);
  if (of.places != places_) {
    loose_ = true;
    staged_ = 0;
  }
  follow(of);
}

// Nothing that was prepared in vain is under way any more: its places, here and where it lands, may be used again.
bool carrier::settled() {
  if (!loose_) return true;
  const uint64_t slot = place_.group * layout_.group_slots() + layout_.whole_slot(place_.self);
  for (uint32_t member = 0; member < members(); ++member) {
    if (is_mate(member) || way_->clear(place_.ranks[member], slot)) continue;
    awaits_hosts_ = true;
    return false;
  }
  loose_ = false;
  return true;
}

bool carrier::fits(const carried_call& call, std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs) const {
  const auto all = [&call](std::span<const carried_bytes> arrays, size_t count, bool exact) {
    return arrays.size() == count && std::all_of(arrays.begin(), arrays.end(), [&](const carried_bytes& one) { return exact ? one.bytes == call.longest : one.bytes <= call.longest; });
  };
  switch (call.kind) {
    case carried_kind::all_reduce: return all(inputs, 1, true) && all(outputs, 1, true);
    case carried_kind::all_to_all: return all(inputs, members(), false) && all(outputs, members(), false) && inputs[place_.self].bytes == outputs[place_.self].bytes;
    case carried_kind::all_gather: return all(inputs, 1, true) && all(outputs, members(), true);
    case carried_kind::broadcast: return all(inputs, is_root(call) ? 1 : 0, true) && all(outputs, is_root(call) ? 0 : 1, true);
    case carried_kind::reduce_scatter: return all(inputs, members(), true) && all(outputs, 1, true);
    case carried_kind::reduce: return all(inputs, 1, true) && all(outputs, is_root(call) ? 1 : 0, true);
    case carried_kind::gather: return all(inputs, 1, true) && all(outputs, is_root(call) ? members() : 0, true);
    case carried_kind::scatter: return all(inputs, is_root(call) ? members() : 0, true) && all(outputs, 1, true);
  }
  return false;
}

bool carrier::steps(const arrays& of) {
  if (!settled()) return false;
  switch (call_.kind) {
    case carried_kind::all_reduce: return reduce_steps(of);
    case carried_kind::all_to_all: return block_steps(of);
    case carried_kind::all_gather:
    case carried_kind::broadcast: return gather_steps(of);
    case carried_kind::reduce_scatter: return scatter_steps(of);
    case carried_kind::reduce: return root_steps(of);
    case carried_kind::gather: return collect_steps(of);
    case carried_kind::scatter: return deal_steps(of);
  }
  return false;
}

bool carrier::prepare_steps(const arrays& of) {
  if (!settled()) return false;
  switch (call_.kind) {
    case carried_kind::all_reduce: {
      const bool staged = stage_shares(of);
      return (has_share() && fold_host(of)) || staged;
    }
    case carried_kind::all_to_all: return stage_blocks(of);
    case carried_kind::all_gather:
    case carried_kind::broadcast: return stage_source(of);
    case carried_kind::reduce_scatter: {
      const bool staged = stage_columns(of);
      return fold_column(of) || staged;
    }
    // What a root gives or takes goes behind its members' words.
    case carried_kind::reduce:
    case carried_kind::gather:
    case carried_kind::scatter: return false;
  }
  return false;
}

bool carrier::prepare(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs) {
  const arrays of{inputs, outputs};
  bool moved = false;
  while (busy_ && !sure_ && !broken() && prepare_steps(of)) moved = true;
  // What it has put goes out, and what others have put comes in, while they say that they make this call.
  const int64_t now = clock_now_ns();
  if (moved || now - looked_ns_ >= asks_apart_ns) {
    memory_->context().progress().run();
    looked_ns_ = now;
  }
  return moved;
}

carrier::state carrier::advance(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs, int64_t end_ns) {
  if (!busy_) return state::over;
  sure_ = true;
  const arrays of{inputs, outputs};
  bool moved = go(of, end_ns);
  // To ask what has landed takes system calls, on a core that mates may want: where it is they who are awaited, that is done for the sake of others alone.
  if (busy_ && !moved && (awaits_hosts_ || clock_now_ns() - looked_ns_ >= asks_apart_ns)) {
    memory_->context().progress().run();
    looked_ns_ = clock_now_ns();
    moved = go(of, end_ns);
  }
  return !busy_ ? state::over : moved ? state::moved : state::stuck;
}

// As far as what has landed allows. False: nothing has moved.
bool carrier::go(const arrays& of, int64_t end_ns) {
  awaits_hosts_ = false;
  bool moved = false;
  while (!broken() && steps(of)) {
    moved = true;
    if (clock_now_ns() >= end_ns) break;
  }
  if (taken_ == steps_ && !broken()) moved = close_call() || moved;
  return moved;
}

carrier::state carrier::hold(std::span<const carried_bytes> inputs, std::span<const carried_bytes> outputs, int64_t most_ns) {
  const rank_context& context = memory_->context();
  auto* wake = reinterpret_cast<ep_wake_word*>(memory_->own_data());
  const rare_looks rare(apart_ns);
  // Whoever looks but once wants to know what is there now.
  if (most_ns <= 0) context.progress().run();
  const int64_t end_ns = clock_now_ns() + most_ns;
  int64_t moved_ns = end_ns - most_ns;
  bool moved = false;
  for (int64_t now = moved_ns;; now = clock_now_ns()) {
    state found = advance(inputs, outputs, end_ns);
    if (found == state::stuck && now - moved_ns > patience_ns && now < end_ns) {
      const uint32_t epoch = wake_prepare(wake);
      looked_ns_ = 0;
      found = advance(inputs, outputs, end_ns);
      if (found == state::stuck) {
        context.progress().rest();
        wake_commit(wake, epoch, std::min(end_ns - now, longest_sleep_ns));
      } else {
        wake_cancel(wake);
      }
    }
    if (found == state::over) return found;
    if (found == state::moved) {
      moved = true;
      moved_ns = now;
    }
    if (broken() || clock_now_ns() >= end_ns) {
      // Nobody may look for long now.
      context.progress().rest();
      return moved ? state::moved : state::stuck;
    }
    if (found == state::stuck) sched_yield();
  }
}

} // namespace ep
