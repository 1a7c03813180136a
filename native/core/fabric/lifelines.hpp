// A TCP connection between each pair of processes on different hosts, on which nothing is said: the kernel closes it when one of both ends, at once, which providers of libfabric tell
// nobody. Who leaves in order says so first. A network that fails closes nothing: that is found by silence (engine.hpp).
//
// The higher rank of a pair dials. Either side proves that it has the pair's keys (tag.hpp) over a number that the other has just made; whoever does not is closed, and nothing comes of it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "ep/abi/rank.h"
#include "status.hpp"
#include "tag.hpp"

namespace ep::fabric {

// Where a rank listens: a socket's address, or zeroes where its network has none.
inline constexpr size_t line_place_bytes = 32;
using line_place = std::array<uint8_t, line_place_bytes>;

class lifelines {
 public:
  // At the interface whose address `name` is: of an endpoint, as its provider says it. Null: it is none of a socket.
  static result<std::unique_ptr<lifelines>> listen(std::span<const uint8_t> name, int32_t rank, int32_t world_size);
  ~lifelines(); // as close()

  const line_place& place() const { return place_; }
  // Once; everything by rank. `far`: to whom there is a line. The word is notified when ended() has news, and outlives this.
  result<nothing> start(std::span<const line_place> places, std::span<const link_keys> keys, std::span<const uint8_t> far, ep_wake_word* wake);
  // Its process has ended, without a word.
  bool ended(int32_t peer) const { return peers_[static_cast<size_t>(peer)].ended.load(std::memory_order_acquire); }
  // Whether ended() has changed since this was last asked.
  bool has_news() const { return news_.load(std::memory_order_seq_cst); }
  bool take_news() { return news_.load(std::memory_order_relaxed) && news_.exchange(false, std::memory_order_acq_rel); }
  // Lines on which both sides have proved who they are.
  uint32_t standing() const { return standing_.load(std::memory_order_relaxed); }
  // Says goodbye, and ends all of them.
  void close();

 private:
  using number = std::array<uint8_t, 16>;
  struct hello {
    uint32_t magic;
    int32_t from;
    int32_t to;
    uint32_t zero;
    number mine;   // of who dials
    uint64_t tag;  // of all above, then of the number of who was dialled
  };
  // What has come of a connection: of one dialled, `dialling` first; of one accepted, `asked`.
  enum class stage : uint8_t { dialling, greeted, asked, standing };
  struct line {
    int fd = -1;
    stage at = stage::dialling;
    int32_t peer = -1; // of one accepted: not known before its hello
    number own{};
    std::vector<uint8_t> in;
    int64_t until_ns = 0; // to stand
    bool left = false;    // the peer has said goodbye
  };
  struct peer_state {
    link_keys keys{};
    line_place place{};
    bool far = false;
    bool dialled = false; // from here
    bool held = false;    // a line to it is there, or on its way from here
    int64_t dial_ns = 0;  // when to try next
    int64_t pause_ns = 0; // after that
    std::atomic<bool> ended{false};
  };

  lifelines(int listener, int control, int32_t rank, int32_t world_size)
      : listener_(listener), control_(control), rank_(rank), world_size_(world_size), peers_(std::make_unique<peer_state[]>(static_cast<size_t>(world_size))) {}
  void run();
  void dial_due(int64_t now);
  void accept_all(int64_t now);
  // False: it is over.
  bool serve(line& one, short events);
  bool advance(line& one);
  bool on_hello(line& one, const hello& said);
  void end(line& one, bool by_peer);
  bool tell(const line& one, const void* bytes, size_t count) const;
  uint64_t tag_of(const tag_key& key, const hello& said, const number& other) const;

  int listener_;
  int control_; // an eventfd: stop
  const int32_t rank_;
  const int32_t world_size_;
  line_place place_{};
  std::unique_ptr<peer_state[]> peers_;
  ep_wake_word* wake_ = nullptr;
  std::vector<std::unique_ptr<line>> lines_; // of the thread
  int64_t accept_ns_ = 0; // nobody is accepted before
  std::atomic<uint32_t> standing_{0};
  std::atomic<bool> news_{false};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

} // namespace ep::fabric
