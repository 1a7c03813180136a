#include "raw_link.hpp"

#include <cerrno>
#include <cstring>

#include <sched.h>

#include "waiting.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t most_under_way = 64;
constexpr uint64_t control_bytes = 64; // behind the memory: what is not part of a stream must not write over one that is still compared

struct link_description {
  uint64_t base;
  uint64_t key;
  uint64_t bytes;
};

// Differs from message to message and from turn to turn in every word.
uint64_t word_of(uint64_t turn, uint64_t message, uint64_t index) { return (turn * 0x9e3779b97f4a7c15) ^ (message * 0xbf58476d1ce4e5b9) ^ (index * 0x94d049bb133111eb); }

} // namespace

raw_link::raw_link(std::unique_ptr<dl::fabric_port> port, uint64_t bytes)
    : bytes_(bytes), contexts_(most_under_way), out_(bytes + control_bytes), in_(bytes + control_bytes), port_(std::move(port)) {
  for (dl::fabric_context& one : contexts_) free_.push_back(&one);
}

raw_link::~raw_link() {
  region_.reset();
  port_.reset();
}

result<std::unique_ptr<raw_link>> raw_link::open(std::unique_ptr<dl::fabric_port> port, uint64_t bytes) {
  std::unique_ptr<raw_link> made(new raw_link(std::move(port), bytes));
  auto region = made->port_->register_memory(made->in_.data(), made->in_.size());
  if (!region.ok()) return region.why();
  made->region_.reset(new region_holder{made->port_.get(), region.value()});
  return made;
}

result<std::vector<uint8_t>> raw_link::description() {
  auto address = port_->address();
  if (!address.ok()) return address;
  const link_description own{region_->region.base, region_->region.key, bytes_};
  std::vector<uint8_t> bytes(sizeof own);
  std::memcpy(bytes.data(), &own, sizeof own);
  bytes.insert(bytes.end(), address.value().begin(), address.value().end());
  return bytes;
}

result<nothing> raw_link::connect(std::span<const uint8_t> description) {
  link_description theirs{};
  if (description.size() <= sizeof theirs) return failure{EP_STATUS_INVALID, 0, "the description of a link is too short"};
  std::memcpy(&theirs, description.data(), sizeof theirs);
  if (theirs.bytes != bytes_) return failure{EP_STATUS_MISMATCH, 0, "the other's memory is of " + std::to_string(theirs.bytes) + " bytes, this one's of " + std::to_string(bytes_)};
  auto at = port_->insert(description.subspan(sizeof theirs));
  if (!at.ok()) return at.why();
  to_ = at.value();
  remote_base_ = theirs.base;
  remote_key_ = theirs.key;
  return nothing{};
}

result<nothing> raw_link::look() {
  events_.clear();
  port_->poll(events_);
  for (const dl::fabric_event& event : events_) {
    if (event.what == dl::fabric_event::kind::failed) return failure{EP_STATUS_PEER_LOST, event.error, event.text};
    if (event.what == dl::fabric_event::kind::arrived) ++arrivals_;
    else if (event.context != nullptr) free_.push_back(event.context);
  }
  return nothing{};
}

result<nothing> raw_link::wait(uint64_t arrivals, uint64_t under_way, int64_t deadline_ns) {
  constexpr int64_t alone_ns = 20'000; // then the other may need the core
  const int64_t begin = clock_now_ns();
  while (arrivals_ < arrivals || contexts_.size() - free_.size() > under_way) {
    if (auto looked = look(); !looked.ok()) return looked;
    if (!events_.empty()) continue;
    const int64_t now = clock_now_ns();
    if (now >= deadline_ns) return failure{EP_STATUS_TIMEOUT, 0, std::to_string(arrivals_) + " of " + std::to_string(arrivals) + " writes have arrived"};
    if (now - begin > alone_ns) sched_yield();
  }
  return nothing{};
}

result<nothing> raw_link::write(uint64_t at, uint64_t bytes, uint32_t data, int64_t deadline_ns) {
  if (free_.empty()) {
    if (auto room = wait(0, most_under_way - 1, deadline_ns); !room.ok()) return room;
  }
  dl::fabric_context* context = free_.back();
  for (;;) {
    const int code = port_->write(to_, out_.data() + at, bytes, nullptr, data, remote_base_ + at, remote_key_, context);
    if (code == 0) break;
    if (code != EAGAIN) return failure_errno("fi_writedata", code, port_->offer().provider);
    if (clock_now_ns() >= deadline_ns) return failure{EP_STATUS_TIMEOUT, 0, "the provider has no room for a write"};
    if (auto looked = look(); !looked.ok()) return looked;
  }
  // HAZARD: events of others may have been added behind it meanwhile.
  std::erase(free_, context);
  return nothing{};
}

result<nothing> raw_link::ping_pong(bool first, std::span<double> samples, int64_t deadline_ns) {
  for (double& sample : samples) {
    const uint64_t round = ++rounds_;
    const int64_t begin = clock_now_ns();
    for (const bool sends : {first, !first}) {
      if (sends) {
        std::memcpy(out_.data() + bytes_, &round, sizeof round);
        if (auto written = write(bytes_, sizeof round, 0, deadline_ns); !written.ok()) return written;
        continue;
      }
      if (auto came = wait(++awaited_, most_under_way, deadline_ns); !came.ok()) return came;
      uint64_t found = 0;
      std::memcpy(&found, in_.data() + bytes_, sizeof found);
      if (found != round) return failure{EP_STATUS_MISMATCH, 0, "round " + std::to_string(round) + " brought the number " + std::to_string(found)};
      // HAZARD: before the source is written again.
      if (auto ended = wait(0, 0, deadline_ns); !ended.ok()) return ended;
    }
    sample = static_cast<double>(clock_now_ns() - begin);
  }
  return wait(0, 0, deadline_ns);
}

result<double> raw_link::stream(uint64_t sends, uint64_t receives, uint64_t bytes, uint64_t window, uint64_t places, uint64_t turn, int64_t deadline_ns) {
  if (bytes == 0 || bytes % sizeof(uint64_t) != 0 || window == 0 || window >= most_under_way || places < window || bytes > bytes_ / places) {
    return failure{EP_STATUS_INVALID, 0, std::to_string(window) + " messages of " + std::to_string(bytes) + " bytes under way in " + std::to_string(places) + " places do not fit the memory of " + std::to_string(bytes_)};
  }
  const uint64_t words = bytes / sizeof(uint64_t);
  for (uint64_t slot = 0; slot < places; ++slot) {
    auto* out = reinterpret_cast<uint64_t*>(out_.data() + slot * bytes);
    for (uint64_t i = 0; i < words; ++i) out[i] = word_of(turn, slot, i);
  }
  // Both begin together.
  if (auto written = write(bytes_, sizeof(uint64_t), 0, deadline_ns); !written.ok()) return written.why();
  if (auto came = wait(++awaited_, 0, deadline_ns); !came.ok()) return came.why();
  const int64_t begin = clock_now_ns();
  for (uint64_t sent = 0; sent < sends; ++sent) {
    if (auto written = write(sent % places * bytes, bytes, 0, deadline_ns); !written.ok()) return written.why();
    if (auto room = wait(0, window - 1, deadline_ns); !room.ok()) return room.why();
  }
  awaited_ += receives;
  if (auto came = wait(awaited_, 0, deadline_ns); !came.ok()) return came.why();
  // The other has all, too: nobody times what still flies.
  if (auto written = write(bytes_, sizeof(uint64_t), 0, deadline_ns); !written.ok()) return written.why();
  if (auto came = wait(++awaited_, 0, deadline_ns); !came.ok()) return came.why();
  const double seconds = static_cast<double>(clock_now_ns() - begin) / 1e9;
  for (uint64_t slot = 0; slot < std::min(places, receives); ++slot) {
    const auto* in = reinterpret_cast<const uint64_t*>(in_.data() + slot * bytes);
    for (uint64_t i = 0; i < words; ++i) {
      if (in[i] != word_of(turn, slot, i)) return failure{EP_STATUS_MISMATCH, 0, "word " + std::to_string(i) + " of slot " + std::to_string(slot) + " is not the one that was sent"};
    }
  }
  return seconds;
}

} // namespace ep::fabric
