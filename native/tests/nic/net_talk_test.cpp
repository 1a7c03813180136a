// Streams between software NICs, without sockets: who is let in, which frames are taken, and that no bytes whatever do more than end the stream.
//
// EP_FUZZ_RUNS=N mutated streams (default: a second's worth), EP_FUZZ_SEED=N.
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "environment.hpp"
#include "hostile/random.hpp"
#include "nic/net/talk.hpp"

using namespace ep;
using namespace ep::nic::net;

namespace {

nic::gid_bytes gid(uint8_t host) { return gid_of({{10, 0, 0, host}, 4000, host}); }

talk::nonce drawn(uint8_t seed) {
  talk::nonce made;
  made.fill(seed);
  return made;
}

link_keys keys(uint8_t out, uint8_t in) {
  link_keys made;
  made.out.fill(out);
  made.in.fill(in);
  return made;
}

// An initiator that is 10.0.0.1 and an acceptor that is 10.0.0.2; each has what the other said.
struct ends {
  ends(link_keys of_initiator, link_keys of_acceptor, uint8_t nonce = 7)
      : a(gid(1), gid(2), of_initiator, drawn(1)),
        b(gid(2), [of_acceptor](const nic::gid_bytes& who) { return who == gid(1) ? std::optional(of_acceptor) : std::nullopt; }, drawn(nonce)) {}
  ends() : ends(keys(1, 2), keys(2, 1)) {}

  static std::vector<uint8_t> taken(talk& from) {
    std::vector<uint8_t> bytes(from.output().begin(), from.output().end());
    from.sent(bytes.size());
    return bytes;
  }
  // All that has been said arrives, `step` bytes at a time. False: an end refused.
  bool run(size_t step = 1 << 20) {
    for (int quiet = 0; quiet < 2;) {
      bool any = false;
      for (auto [from, to, got] : {std::tuple{&a, &b, &at_b}, std::tuple{&b, &a, &at_a}}) {
        const std::vector<uint8_t> bytes = taken(*from);
        any = any || !bytes.empty();
        for (size_t at = 0; at < bytes.size(); at += step) {
          const bool sound = to->take({bytes.data() + at, std::min(step, bytes.size() - at)}, [got = got](const frame& what) {
            got->emplace_back(std::to_string(static_cast<uint32_t>(what.kind)) + " " + std::to_string(what.id) + " " + std::string(what.payload.begin(), what.payload.end()));
            return true;
          });
          if (!sound) return false;
        }
      }
      quiet = any ? 0 : quiet + 1;
    }
    return true;
  }
  talk a, b;
  std::vector<std::string> at_a, at_b;
};

std::span<const uint8_t> text(const char* of) { return {reinterpret_cast<const uint8_t*>(of), std::strlen(of)}; }

void frames_arrive_in_any_pieces() {
  for (const size_t step : {size_t{1}, size_t{7}, size_t{1} << 20}) {
    ends two;
    EP_CHECK(two.run(step) && two.a.ready() && two.b.ready());
    EP_CHECK(two.b.peer() == gid(1));
    two.a.say(frame_kind::request, 5, text("write this"));
    two.a.say(frame_kind::ping, 0, {});
    two.b.say(frame_kind::reply, 5, text(""));
    EP_CHECK(two.run(step));
    EP_CHECK(two.at_b == (std::vector<std::string>{"1 5 write this", "3 0 "}) && two.at_a == std::vector<std::string>{"2 5 "});
  }
}

void strangers_stay_outside() {
  ends other(keys(1, 2), keys(2, 9));
  EP_CHECK(!other.run() && !other.b.ready());
  EP_CHECK_EQ(std::string(other.b.why()), std::string("the initiator does not have the keys of this job"));
  ends posing(keys(1, 9), keys(2, 1));
  EP_CHECK(!posing.run() && !posing.a.ready());
  EP_CHECK_EQ(std::string(posing.a.why()), std::string("the acceptor does not have the keys of this job"));
  // One who is not known, one who means another NIC, one of another version.
  for (const size_t at : {size_t{4 + 4 + 7}, size_t{4 + 4 + 16 + 7}, size_t{4}}) {
    ends two;
    std::vector<uint8_t> hello = ends::taken(two.a);
    hello[at] ^= 0x40;
    EP_CHECK(!two.b.take(hello, [](const frame&) { return true; }));
    EP_CHECK(two.b.output().empty());
  }
  // What was recorded of one stream opens no other: the acceptor has drawn another nonce.
  ends first;
  std::vector<uint8_t> said = ends::taken(first.a);
  EP_CHECK(first.b.take(said, [](const frame&) { return true; }));
  EP_CHECK(first.a.take(ends::taken(first.b), [](const frame&) { return true; }));
  first.a.say(frame_kind::request, 1, text("again"));
  const std::vector<uint8_t> rest = ends::taken(first.a);
  said.insert(said.end(), rest.begin(), rest.end());
  ends second(keys(1, 2), keys(2, 1), 8);
  int frames = 0;
  EP_CHECK(!second.b.take(said, [&](const frame&) { return ++frames > 0; }));
  EP_CHECK_EQ(frames, 0);
}

// Each byte of a stream of frames, changed: nothing of that frame or behind it is taken.
void changed_frames_end_the_stream() {
  for (size_t at = 0; at < sizeof(frame_head) + 5; ++at) {
    ends two;
    EP_CHECK(two.run());
    two.a.say(frame_kind::request, 1, text("first"));
    two.a.say(frame_kind::request, 2, text("other"));
    std::vector<uint8_t> bytes = ends::taken(two.a);
    bytes[at] ^= 1;
    int frames = 0;
    const bool sound = two.b.take(bytes, [&](const frame&) { return ++frames > 0; });
    EP_CHECK_EQ(frames, 0);
    // A length that grew by some bytes is waited for, and then its tag is wrong.
    if (sound) EP_CHECK(!two.b.take(std::vector<uint8_t>(max_payload), [&](const frame&) { return ++frames > 0; }) && frames == 0);
  }
  ends two;
  EP_CHECK(two.run());
  two.a.say(frame_kind::request, 1, text("first"));
  const std::vector<uint8_t> once = ends::taken(two.a);
  int frames = 0;
  EP_CHECK(two.b.take(once, [&](const frame&) { return ++frames > 0; }));
  EP_CHECK(!two.b.take(once, [&](const frame&) { return ++frames > 0; })); // said again
  EP_CHECK_EQ(frames, 1);
  ends longer;
  EP_CHECK(longer.run());
  frame_head head{0, 0, 1, max_payload + 1, 0};
  EP_CHECK(!longer.b.take({reinterpret_cast<const uint8_t*>(&head), sizeof head}, [](const frame&) { return true; }));
}

// While much has to go out, requests stay where they are.
void a_full_output_holds_requests_back() {
  ends two;
  EP_CHECK(two.run());
  const std::vector<uint8_t> large(part_bytes);
  for (int i = 0; i < 10; ++i) two.a.say(frame_kind::request, static_cast<uint64_t>(i), {});
  int frames = 0;
  const auto answer = [&](const frame& what) {
    ++frames;
    two.b.say(frame_kind::reply, what.id, large);
    return true;
  };
  EP_CHECK(two.b.take(ends::taken(two.a), answer));
  EP_CHECK_EQ(frames, 4);
  (void)ends::taken(two.b);
  EP_CHECK(two.b.take({}, answer));
  EP_CHECK_EQ(frames, 8);
}

void mutated_streams(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  uint64_t refused = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    ends two;
    // At any point of the conversation.
    const uint64_t steps = random.below(4);
    if (steps > 0) (void)two.b.take(ends::taken(two.a), [](const frame&) { return true; });
    if (steps > 1) (void)two.a.take(ends::taken(two.b), [](const frame&) { return true; });
    if (steps > 2) {
      (void)two.b.take(ends::taken(two.a), [](const frame&) { return true; });
      for (uint64_t i = random.below(4); i > 0; --i) two.a.say(static_cast<frame_kind>(random.below(7)), random.next(), std::vector<uint8_t>(random.below(200)));
    }
    talk& to = random.below(4) == 0 ? two.a : two.b;
    std::vector<uint8_t> bytes = ends::taken(&to == &two.b ? two.a : two.b);
    if (bytes.empty() || random.below(8) == 0) bytes.resize(random.below(300), static_cast<uint8_t>(random.next()));
    bool changed = false;
    for (uint64_t i = random.below(4); i > 0 && !bytes.empty(); --i) {
      bytes[random.below(bytes.size())] ^= static_cast<uint8_t>(1u << random.below(8));
      changed = true;
    }
    if (random.below(4) == 0) bytes.resize(random.below(bytes.size() + 1));
    bool sound = true;
    for (size_t at = 0; at < bytes.size() && sound;) {
      const size_t step = std::min<size_t>(1 + random.below(200), bytes.size() - at);
      sound = to.take({bytes.data() + at, step}, [&](const frame& what) { return what.payload.size() <= max_payload; });
      at += step;
    }
    refused += sound ? 0 : 1;
    // Whoever refused goes on refusing.
    if (!sound) EP_CHECK(!to.take(bytes, [](const frame&) { return true; }) && !to.ready() && changed <= true);
  }
  EP_CHECK(refused > runs / 10 && refused < runs);
}

} // namespace

int main() {
  frames_arrive_in_any_pieces();
  strangers_stay_outside();
  changed_frames_end_the_stream();
  a_full_output_holds_requests_back();
  mutated_streams(test::number_of("EP_FUZZ_SEED", 1), test::number_of("EP_FUZZ_RUNS", 20'000));
  return ep::check::finish();
}
