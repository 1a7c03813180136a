// A software NIC's place on a network: a thread that listens at one address, talks to the NICs that it was told of, carries requests there and answers theirs.
//
// Requests go out on a stream that this side opened, answers come back on it. A stream that ends takes what is unanswered on it along: the calls end as lost, and asking again
// is for the NIC above, whose rules say what may be repeated. While nothing is asked nothing is sent, but for heartbeats, if there are any.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ep/abi/rank.h"
#include "status.hpp"
#include "talk.hpp"

namespace ep::nic::net {

// A request under way. Filled in before `answered`.
struct call {
  std::atomic<bool> answered{false};
  bool lost = false; // the stream ended, or there was none
  std::vector<uint8_t> reply;
};

enum class peer_life : uint8_t { alive, closed, dead };

struct hub_options {
  std::string address; // IPv4, of one interface: never of all
  // With heartbeats a stream is kept to every peer, and says so at least that often; a peer that was not heard for `silence_ns` is dead, while
  // this one listened; one that was never heard has longer. 0: none.
  int64_t heartbeat_ns = 0;
  int64_t silence_ns = 0;
};

struct hub_counts {
  uint64_t requests = 0; // asked
  uint64_t answers = 0;  // given
  uint64_t bytes_out = 0;
  uint64_t bytes_in = 0;
  uint64_t streams = 0;  // that became ready, of both directions
  uint64_t refused = 0;  // streams that ended for what came on them
  uint64_t wakes = 0;    // of its thread
};

class hub {
 public:
  // Called on the hub's thread. False: that request makes no sense, and the stream is ended.
  using answerer = std::function<bool(uint32_t from, std::span<const uint8_t> request, std::vector<uint8_t>& reply)>;

  // Binds and listens; start() begins the rest. EP_STATUS_INVALID: not the address of one interface. EP_STATUS_SYSTEM: it cannot be bound.
  static result<std::unique_ptr<hub>> open(const hub_options& options, uint32_t number);
  ~hub();

  // `wake` is notified after answers have come, if it is not null.
  result<nothing> start(answerer answer, ep_wake_word* wake);
  // Says goodbye, as far as that goes at once; all calls end as lost. Nobody is answered any more when it returns.
  void stop();
  // From here on stop() says nothing: peers are to take this NIC for dead.
  void die() { silent_.store(true, std::memory_order_relaxed); }

  const gid_bytes& gid() const { return gid_; }
  // A NIC that may come and that may be asked. Returns the number by which this NIC knows it: one beyond the directory's. 0: there are none left, or the GID is of no network.
  uint32_t know(const gid_bytes& gid, const link_keys& keys);
  uint32_t number_of(const gid_bytes& gid) const; // 0: never told of
  // With heartbeats: `tell` hears of every change but to alive, from tell_lives().
  void on_life(std::function<void(const gid_bytes&, peer_life)> tell);
  // Changes of life that are known here and not told yet. HAZARD: whoever takes answers asks, takes all that have come, then tells: a goodbye comes behind the peer's last
  // answers, and who heard of it before them would take a request for lost that was carried out.
  size_t untold_lives() const { return untold_.load(std::memory_order_acquire); }
  void tell_lives(size_t count);

  // Null: so much is under way to this peer already that it has to wait.
  std::shared_ptr<call> ask(uint32_t number, std::vector<uint8_t> request);
  // Nobody waits for an answer of this peer any more, though one was asked: HAZARD: what has not reached its machine must not do so later, so the stream is cut off.
  void give_up(uint32_t number);
  // When bytes last went to or came from this peer, on the streams opened here.
  int64_t moved_ns(uint32_t number) const;

  hub_counts counts() const;

 private:
  struct stream;
  struct peer;
  struct asked {
    uint64_t id;
    std::shared_ptr<call> of;
    std::vector<uint8_t> request;
  };

  hub() = default;
  void run();
  void poke();
  int64_t plan(int64_t now_ns);
  void open_stream(peer& to, int64_t now_ns);
  void accept_all(int64_t now_ns);
  bool receive(stream& from, int64_t now_ns);
  bool digest(stream& from, std::span<const uint8_t> bytes);
  void begun(stream& of);
  bool send(stream& to, int64_t now_ns);
  bool heard(stream& from, const frame& what);
  void ended(stream& gone, bool refused);
  void lose(peer& of);
  void tell(peer& of, peer_life life);
  void farewell();
  peer* find(uint32_t number) const;
  peer* find(const gid_bytes& gid) const;

  hub_options options_;
  gid_bytes gid_{};
  int listener_ = -1;
  int event_ = -1;
  int64_t accept_again_ns_ = 0;
  int64_t planned_ns_ = 0;
  answerer answer_;
  ep_wake_word* wake_ = nullptr;
  std::function<void(const gid_bytes&, peer_life)> tell_;
  std::vector<std::pair<gid_bytes, peer_life>> lives_; // not told yet
  std::atomic<size_t> untold_{0};
  mutable std::mutex mutex_; // of peers and of what is asked; never held while a request is answered
  std::vector<std::unique_ptr<peer>> peers_;
  std::vector<std::unique_ptr<stream>> streams_; // the thread's own
  hub_counts counts_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> poked_{false};
  std::atomic<bool> silent_{false};
  bool answers_came_ = false;
  std::vector<uint8_t> scratch_;
  std::thread thread_;
};

} // namespace ep::nic::net
