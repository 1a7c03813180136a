// One byte stream between two software NICs: who speaks, then frames. No sockets here: bytes go in and come out, so tests and fuzzers have the whole of it.
//
// The initiator names both ends and draws a nonce; the acceptor, if it knows that initiator, answers with a nonce of its own and a tag over both; the initiator proves itself by
// another one. What follows is tagged with keys that both made of the two nonces, and numbered: a frame that anybody else made, changed, left out or says again ends the stream.
// Nothing is encrypted.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "fabric/tag.hpp"
#include "place.hpp"

namespace ep::nic::net {

using fabric::link_keys;

// Raise it when anything that goes over the network changes.
inline constexpr uint32_t talk_version = 1;
// What a frame carries at most: a NIC sends longer messages in parts.
inline constexpr uint32_t part_bytes = 1 << 20;
inline constexpr uint32_t max_payload = part_bytes + 256;

// On its way out of one stream in memory; with more, nothing is taken in that could add to it.
inline constexpr size_t most_output_bytes = 4u << 20;

enum class frame_kind : uint32_t { request = 1, reply = 2, ping = 3, pong = 4, goodbye = 5 };

struct frame {
  frame_kind kind = frame_kind::ping;
  uint64_t id = 0; // of a request and its reply
  std::span<const uint8_t> payload;
};

struct frame_head {
  uint64_t tag; // over the rest and the payload
  uint64_t sequence;
  uint32_t kind;
  uint32_t bytes;
  uint64_t id;
};
static_assert(sizeof(frame_head) == 32, "what goes over the network");

class talk {
 public:
  using nonce = std::array<uint8_t, 16>;
  // Keys for a stranger who says this is its name; none: unknown.
  using find_keys = std::function<std::optional<link_keys>(const gid_bytes&)>;

  // The initiator: its hello is the first output.
  talk(const gid_bytes& own, const gid_bytes& peer, const link_keys& keys, const nonce& drawn);
  // The acceptor.
  talk(const gid_bytes& own, find_keys find, const nonce& drawn);

  // Bytes that came. False: the stream is to be ended, and why() says it. Frames are given in their order; `on` returns false for one that should not have been sent. While too
  // much has to go out, frames stay here: after sent(), give it no bytes.
  bool take(std::span<const uint8_t> bytes, const std::function<bool(const frame&)>& on);
  // Both ends are known, so frames may be said.
  bool ready() const { return stage_ == stage::frames; }
  // Of an acceptor only once it is ready.
  const gid_bytes& peer() const { return peer_; }
  void say(frame_kind kind, uint64_t id, std::span<const uint8_t> payload);
  const char* why() const { return why_; }

  // What has to go out, and how much of it went.
  std::span<const uint8_t> output() const { return {out_.data() + gone_, out_.size() - gone_}; }
  void sent(size_t bytes);

 private:
  enum class stage : uint8_t { hello, welcome, proof, frames, broken };
  bool refuse(const char* why);
  void put(const void* bytes, size_t length);
  void begin_frames();
  bool step(std::span<const uint8_t> bytes, size_t& used, const std::function<bool(const frame&)>& on);

  gid_bytes own_{};
  gid_bytes peer_{};
  link_keys keys_;
  find_keys find_;
  bool initiator_ = false;
  stage stage_ = stage::hello;
  std::array<uint8_t, 72> said_{}; // hello and the acceptor's nonce: what tags are made of
  fabric::tagger out_tag_;
  fabric::tagger in_tag_;
  uint64_t out_sequence_ = 0;
  uint64_t in_sequence_ = 0;
  std::vector<uint8_t> in_;
  std::vector<uint8_t> out_;
  size_t gone_ = 0;
  const char* why_ = "";
};

} // namespace ep::nic::net
