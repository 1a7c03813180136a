#include "talk.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ep::nic::net {
namespace {

static_assert(std::endian::native == std::endian::little, "what goes over the network is little-endian");

struct hello_message {
  uint32_t magic;
  uint32_t version;
  gid_bytes from;
  gid_bytes to;
  talk::nonce drawn;
};
static_assert(sizeof(hello_message) == 56, "what goes over the network");

struct welcome_message {
  talk::nonce drawn;
  uint64_t tag;
};
static_assert(sizeof(welcome_message) == 24, "what goes over the network");

constexpr uint32_t hello_magic = 0x31575045; // "EPW1"

// What a tag is for goes into it: the same bytes never serve two purposes.
enum class purpose : uint8_t { welcome = 1, proof = 2, first_half = 3, second_half = 4 };

uint64_t tag_of(const fabric::tag_key& key, purpose what, const std::array<uint8_t, 72>& said) {
  std::array<uint8_t, 73> bytes;
  bytes[0] = static_cast<uint8_t>(what);
  std::copy(said.begin(), said.end(), bytes.begin() + 1);
  return fabric::tagger(key)(bytes.data(), bytes.size());
}

fabric::tagger session_of(const fabric::tag_key& key, const std::array<uint8_t, 72>& said) {
  const uint64_t halves[2] = {tag_of(key, purpose::first_half, said), tag_of(key, purpose::second_half, said)};
  fabric::tag_key made;
  std::memcpy(made.data(), halves, sizeof halves);
  return fabric::tagger(made);
}

} // namespace

talk::talk(const gid_bytes& own, const gid_bytes& peer, const link_keys& keys, const nonce& drawn) : own_(own), peer_(peer), keys_(keys), initiator_(true), stage_(stage::welcome) {
  const hello_message hello{hello_magic, talk_version, own, peer, drawn};
  std::memcpy(said_.data(), &hello, sizeof hello);
  put(&hello, sizeof hello);
}

talk::talk(const gid_bytes& own, find_keys find, const nonce& drawn) : own_(own), find_(std::move(find)) {
  std::copy(drawn.begin(), drawn.end(), said_.begin() + sizeof(hello_message));
}

bool talk::refuse(const char* why) {
  stage_ = stage::broken;
  why_ = why;
  return false;
}

void talk::put(const void* bytes, size_t length) {
  const auto* from = static_cast<const uint8_t*>(bytes);
  out_.insert(out_.end(), from, from + length);
}

void talk::sent(size_t bytes) {
  gone_ += bytes;
  if (gone_ == out_.size()) {
    out_.clear();
    gone_ = 0;
  } else if (gone_ > out_.size() / 2) {
    out_.erase(out_.begin(), out_.begin() + static_cast<ptrdiff_t>(gone_));
    gone_ = 0;
  }
}

void talk::begin_frames() {
  out_tag_ = session_of(keys_.out, said_);
  in_tag_ = session_of(keys_.in, said_);
  stage_ = stage::frames;
}

void talk::say(frame_kind kind, uint64_t id, std::span<const uint8_t> payload) {
  const size_t at = out_.size();
  const frame_head head{0, out_sequence_++, static_cast<uint32_t>(kind), static_cast<uint32_t>(payload.size()), id};
  put(&head, sizeof head);
  put(payload.data(), payload.size());
  const uint64_t tag = out_tag_(out_.data() + at + sizeof tag, sizeof head - sizeof tag + payload.size());
  std::memcpy(out_.data() + at, &tag, sizeof tag);
}

// One message out of what has come, if it is whole.
bool talk::step(std::span<const uint8_t> bytes, size_t& used, const std::function<bool(const frame&)>& on) {
  used = 0;
  switch (stage_) {
    case stage::hello: {
      hello_message hello;
      if (bytes.size() < sizeof hello) return true;
      std::memcpy(&hello, bytes.data(), sizeof hello);
      if (hello.magic != hello_magic) return refuse("a stranger that is no software NIC");
      if (hello.version != talk_version) return refuse("a software NIC of another version");
      if (hello.to != own_) return refuse("a stream for another NIC");
      const auto keys = find_(hello.from);
      if (!keys) return refuse("a NIC that nobody has told of");
      keys_ = *keys;
      peer_ = hello.from;
      std::memcpy(said_.data(), &hello, sizeof hello);
      welcome_message welcome{{}, tag_of(keys_.out, purpose::welcome, said_)};
      std::copy(said_.begin() + sizeof hello, said_.end(), welcome.drawn.begin());
      put(&welcome, sizeof welcome);
      stage_ = stage::proof;
      used = sizeof hello;
      return true;
    }
    case stage::welcome: {
      welcome_message welcome;
      if (bytes.size() < sizeof welcome) return true;
      std::memcpy(&welcome, bytes.data(), sizeof welcome);
      std::copy(welcome.drawn.begin(), welcome.drawn.end(), said_.begin() + sizeof(hello_message));
      if (welcome.tag != tag_of(keys_.in, purpose::welcome, said_)) return refuse("the acceptor does not have the keys of this job");
      const uint64_t proof = tag_of(keys_.out, purpose::proof, said_);
      put(&proof, sizeof proof);
      begin_frames();
      used = sizeof welcome;
      return true;
    }
    case stage::proof: {
      uint64_t proof;
      if (bytes.size() < sizeof proof) return true;
      std::memcpy(&proof, bytes.data(), sizeof proof);
      if (proof != tag_of(keys_.in, purpose::proof, said_)) return refuse("the initiator does not have the keys of this job");
      begin_frames();
      used = sizeof proof;
      return true;
    }
    case stage::frames: {
      frame_head head;
      if (bytes.size() < sizeof head) return true;
      std::memcpy(&head, bytes.data(), sizeof head);
      if (head.bytes > max_payload) return refuse("a frame that is longer than any may be");
      if (bytes.size() - sizeof head < head.bytes) return true;
      const std::span<const uint8_t> payload = bytes.subspan(sizeof head, head.bytes);
      if (head.tag != in_tag_(bytes.data() + sizeof head.tag, sizeof head - sizeof head.tag + head.bytes)) return refuse("a frame whose tag is wrong");
      if (head.sequence != in_sequence_++) return refuse("a frame out of its turn");
      if (head.kind < static_cast<uint32_t>(frame_kind::request) || head.kind > static_cast<uint32_t>(frame_kind::goodbye)) return refuse("a frame of an unknown kind");
      used = sizeof head + head.bytes;
      if (!on({static_cast<frame_kind>(head.kind), head.id, payload})) return refuse("a frame that makes no sense");
      return true;
    }
    case stage::broken: return false;
  }
  return false;
}

bool talk::take(std::span<const uint8_t> bytes, const std::function<bool(const frame&)>& on) {
  if (stage_ == stage::broken) return false;
  in_.insert(in_.end(), bytes.begin(), bytes.end());
  size_t at = 0;
  for (size_t used = 1; used != 0 && output().size() < most_output_bytes; at += used) {
    if (!step({in_.data() + at, in_.size() - at}, used, on)) return false;
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(at));
  return true;
}

} // namespace ep::nic::net
