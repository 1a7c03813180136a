#include <algorithm>
#include <cstring>

#include "engine.hpp"
#include "life.hpp"

// The part of the engine that looks whether peers live, and says goodbye to them.
namespace ep::fabric {
namespace {

constexpr int64_t farewell_ns = 500'000'000;

} // namespace

int32_t engine::witness(std::span<const ep_segment_handle> handles) {
  witnesses_.resize(static_cast<size_t>(world_size_));
  int32_t found = 0;
  for (int32_t rank = 0; rank < world_size_ && static_cast<size_t>(rank) < handles.size(); ++rank) {
    if (rank == context_->rank()) continue;
    // A segment that is opened is of this host: its nonce is nobody else's.
    auto opened = segment::open(handles[static_cast<size_t>(rank)]);
    if (!opened.ok() || opened.value()->data_bytes() != sizeof(ep_rank_control)) continue;
    if (reinterpret_cast<const ep_rank_control*>(opened.value()->data())->rank != rank) continue;
    witnesses_[static_cast<size_t>(rank)] = std::move(opened.value());
    ++found;
  }
  return found;
}

result<line_place> engine::listen() {
  auto name = port_->address();
  if (!name.ok()) return name.why();
  auto made = lifelines::listen(name.value(), context_->rank(), world_size_);
  if (!made.ok()) return made.why();
  lines_ = std::move(made.value());
  return lines_ == nullptr ? line_place{} : lines_->place();
}

void engine::set_lines(std::vector<line_place> places, std::vector<uint8_t> far) {
  line_places_ = std::move(places);
  far_ = std::move(far);
}

void engine::watch_life(int64_t now) {
  constexpr int64_t often_ns = 1'000'000;
  const bool news = lines_ != nullptr && lines_->take_news(); // this thread was woken for it, and may not be again
  if (!news && now - watched_ns_ < often_ns) return;
  // HAZARD: a process that was stopped, or got no core for that long, has heard nobody and blames nobody.
  const bool away = now - watched_ns_ > options_.silence_ns / 4;
  watched_ns_ = now;
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    link& at = *links_[static_cast<size_t>(peer)];
    if (peer == context_->rank() || at.state != link_state::up) continue;
    if (away && now > at.heard_ns) at.heard_ns = now;
    const segment* here = witnesses_[static_cast<size_t>(peer)].get();
    if (here != nullptr && life_state(&reinterpret_cast<const ep_rank_control*>(here->data())->life) == EP_LIFE_DEAD) {
      lose(peer, "its process, or the thread that opened it, has ended");
      continue;
    }
    if (lines_ != nullptr && lines_->ended(peer)) {
      lose(peer, "its process has ended, as the kernel of its host says");
      continue;
    }
    if (now - at.heard_ns > options_.silence_ns) {
      lose(peer, "nothing was heard of it for " + std::to_string((now - at.heard_ns) / 1'000'000) + " ms, where it should speak every " + std::to_string(options_.heartbeat_ns / 1'000'000) + " ms");
    } else if (now - at.spoke_ns > options_.heartbeat_ns && at.control.empty()) {
      say(peer, message_kind::alive);
    }
  }
}

// Says goodbye once; over when all have heard it, or time is up.
bool engine::farewell_over(int64_t now) {
  const bool first = leave_by_ns_ == 0;
  if (first) leave_by_ns_ = now + farewell_ns;
  bool over = true;
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    link& at = *links_[static_cast<size_t>(peer)];
    if (peer == context_->rank() || at.state == link_state::failed) continue;
    if (first && at.state == link_state::up) say(peer, message_kind::bye, stopping_.load(std::memory_order_acquire));
    over = over && at.control.empty() && (at.state == link_state::left || at.byed);
  }
  return (over && messages_under_way_ == 0) || now >= leave_by_ns_;
}

} // namespace ep::fabric
