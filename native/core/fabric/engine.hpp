// Carries requests of kernels (ep_proxy_ring) and of the host to ranks on other hosts, over any port of dl/fabric.hpp, and carries out what arrives.
//
// One thread does it all where nobody waits: it looks at the ring, at what the host posted and at the port; it spins while there is something to do, and sleeps when there is not, until the
// port's descriptor is readable or somebody posts; where the port has no descriptor, for at most 1 ms at a time. HAZARD: providers make progress only while someone polls, so nothing here may wait.
//
// Whoever waits does the same in its stead, one at a time (`turn_`), for as long as it looks; meanwhile the thread steps back. So a put passes through one thread of either rank, which is the one
// that posts, and the one that waits. Requests that would hold them up are left to the thread.
//
// Remote completion rests on nothing but counting (wire.hpp), so it is right on providers that deliver in any order. Requests to one peer end when the peer has said that it carried
// them out; a visible signal therefore means that its bytes, and those of all earlier requests to that rank, have landed.
//
// Life. Each engine says to each peer every `heartbeat_ns` that it is alive, if it says nothing else. A peer that is silent for `silence_ns`, or to which something could not be
// delivered, is dead from then on: its life word changes, and every wait on it ends. What was under way to it is given up. Peers of this host (witness) are found dead without that, and so are
// those of others whose process ends, where there is a line to them (lifelines.hpp).
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "dl/fabric.hpp"
#include "gpu_range.hpp"
#include "lifelines.hpp"
#include "link.hpp"
#include "mailbox.hpp"
#include "memory.hpp"
#include "rank.hpp"
#include "wake_descriptor.hpp"

namespace ep::fabric {

struct engine_options {
  int64_t heartbeat_ns = 250'000'000;
  int64_t silence_ns = 5'000'000'000;
  uint64_t ring_capacity = 1024; // power of two
  int64_t tell_after_ns = 200'000; // of silence: sources hear of requests that they do not wait for
};

// Why nothing reaches a peer any more.
struct link_failure {
  uint32_t status = EP_STATUS_OK; // EP_STATUS_OK: it does
  std::string text;
};

struct engine_counts {
  uint64_t requests = 0; // that this rank sent
  uint64_t applied = 0;  // that it carried out for others
  uint64_t writes = 0;
  uint64_t atomics = 0;
  uint64_t messages = 0;
  uint64_t full = 0; // times the port had no room
  uint64_t refused = 0; // messages that no rank of this world sent
  uint64_t registered = 0; // bytes that peers may reach now
  uint64_t lines = 0; // to ranks of other hosts, whose ends are told at once
  uint64_t carried = 0; // of the requests that this rank carried out, those that a thread did which waited or posted
};

enum class request_state : uint32_t { pending, done, failed };

class engine {
 public:
  engine(std::shared_ptr<rank_context> context, std::unique_ptr<dl::fabric_port> port, const engine_options& options);
  ~engine(); // as stop(false)

  int32_t world_size() const { return world_size_; }
  const dl::fabric_offer& offer() const { return port_->offer(); }
  // For connect() on the others: the port's, and where they put their briefs.
  result<std::vector<uint8_t>> address();
  // Before connect(): the control segments of all ranks, by rank. The ends of those that can be mapped here, which are of this host, are seen in their life words from then on. How many
  // that are.
  int32_t witness(std::span<const ep_segment_handle> handles);
  // Before connect(): where this rank listens for ranks of other hosts; zeroes: its network has no addresses of sockets.
  result<line_place> listen();
  // After that, and before connect(): where all ranks do, and to whom there is to be a line; by rank. Alike for both of a pair.
  void set_lines(std::vector<line_place> places, std::vector<uint8_t> far);
  // Of all ranks, by rank; the key of what is said to a rank is the one that it has for what this one says. The thread starts.
  result<nothing> connect(std::span<const std::vector<uint8_t>> addresses, std::span<const link_keys> keys);

  static constexpr uint64_t part_bytes = sizeof(remote_part);
  // Memory of the GPU that the port was opened for. Whoever has the range, or a request under way in it, holds it.
  result<std::shared_ptr<gpu_range>> register_gpu(const dl::gpu_bytes& bytes, std::shared_ptr<const void> keep);
  // Of every rank's part; 0 of a memory that is not known.
  uint64_t byte_length(const symmetric_memory& memory) const;
  // Registers this rank's part; peers need what is returned. With `bytes`, its bytes are those, and the memory's own are none: of that there are the signals.
  result<std::vector<uint8_t>> add_memory(const std::shared_ptr<symmetric_memory>& memory, std::shared_ptr<gpu_range> bytes = nullptr);
  // Given every rank's: kernels and peers reach the memory from here on.
  result<nothing> route(symmetric_memory& memory, std::span<const std::vector<uint8_t>> parts);
  // It stays registered until all peers have said that nothing is under way to it.
  void remove_memory(const symmetric_memory& memory);

  // Takes it over. The number is for look(): requests to one peer end in their order.
  result<uint64_t> post(const symmetric_memory& memory, request wanted);
  request_state look(int32_t peer, uint64_t number) const;
  // Somebody waits for what was posted to the peer, also for what nobody was to wait for.
  void want_end(int32_t peer);
  // Number of the last request to this peer, 0: none.
  uint64_t accepted(int32_t peer) const;
  // Something is under way that only the thread carries.
  bool heavy() const { return heavy_.load(std::memory_order_relaxed) != 0; }
  // Nothing is to be sent, and no peer is awaited.
  bool quiet() const;
  link_failure failure_of(int32_t peer) const;
  engine_counts counts() const;
  // What a kernel's request, or a peer, did wrong first; empty: nothing.
  std::string violation() const;

  // Tells the peers, and ends. What is under way is given up: waits for the ring end as kernel_run.cpp says, requests of the host as failed.
  void stop(bool orderly);

 private:
  struct ring_storage {
    ep_proxy_ring ring{};
    std::vector<ep_proxy_request> entries;
    ep_wake_word wake{};
    std::unique_ptr<wake_descriptor> sleeper; // on that and the port's descriptor
  };
  class ring_route;
  struct routed_memory {
    std::shared_ptr<symmetric_memory> memory;
    std::shared_ptr<gpu_range> gpu; // null: the bytes are the memory's
    uint64_t byte_length = 0;
    dl::fabric_region region;
    std::vector<remote_part> remotes; // empty before route()
    std::vector<uint8_t> closed;      // by rank: given up there
    bool retired = false;             // here
    std::vector<uint8_t> awaited;     // by rank: has not said `retired`
  };
  // A rank of another transport whose memories this one reaches as well: whoever waits on its words sees what lands, and carries it on.
  struct sharer {
    std::shared_ptr<rank_context> context;
    size_t memories;
  };
  enum class operation_kind : uint8_t { message, receive, piece };
  struct operation {
    dl::fabric_context context; // HAZARD: the first member: events give its address
    operation_kind kind;
    int32_t peer;
    uint64_t number; // of the request
    uint64_t word;    // what is written or changed comes from here
    uint64_t compare; // of an atomic
    std::shared_ptr<const void> keep;
    std::shared_ptr<const void> memory;
    wire_message message;
  };
  // Counted by whoever has the turn, without a locked operation, and read by anybody.
  class tally {
   public:
    void operator+=(uint64_t more) { count_.store(count_.load(std::memory_order_relaxed) + more, std::memory_order_relaxed); }
    void operator++() { *this += 1; }
    operator uint64_t() const { return count_.load(std::memory_order_relaxed); }

   private:
    std::atomic<uint64_t> count_{0};
  };
  struct counters {
    tally requests;
    tally applied;
    tally writes;
    tally atomics;
    tally messages;
    tally full;
    tally refused;
    tally carried;
    std::atomic<uint64_t> registered{0}; // of any thread
  };

  static constexpr int64_t shortest_nap_ns = 100'000;
  static constexpr int64_t longest_nap_ns = 1'000'000;

  // engine.cpp
  void run();
  bool step(int64_t now);
  bool assist();
  void rest();
  bool step_if_free(int64_t now);
  bool send_if_free();
  bool all_out() const;
  void step_back(std::unique_lock<std::mutex>& turn);
  bool assisted(int64_t now) const;
  bool take_ring();
  bool take_posted();
  void begin(outgoing one);
  bool carry_out_here(outgoing& one, uint64_t most);
  void finish(link& at, const outgoing& one);
  void lighten(const outgoing& one);
  void ring_landed(uint64_t number);
  // Empty: it can be sent. Otherwise what is wrong with it. Under the mutex.
  std::string prepare(outgoing& one, uint64_t memory_id, uint32_t& status) const;
  void violate(const std::string& text);
  void nudge();

  void wake_waiters() const;

  // sleep.cpp
  void keep_pace(int64_t now);
  int64_t patience() const;
  bool stays(int64_t now);
  void pause(std::unique_lock<std::mutex>& turn, bool yields);
  void nap(std::unique_lock<std::mutex>& turn, int64_t now, int64_t idle_ns);
  void doubt_descriptor(bool any, int64_t now);
  bool outstanding() const;
  bool awaits_peers() const;
  int64_t until_due(int64_t now) const;

  // peers.cpp
  void watch_life(int64_t now);
  bool farewell_over(int64_t now);

  // memories.cpp
  void give_back(const routed_memory& memory);
  void share(const std::shared_ptr<rank_context>& other);
  void unshare(const rank_context& other);
  bool retire_memories();
  void give_memories_up();

  // posts.cpp
  bool pump(int32_t peer);
  int post_pieces(int32_t peer, outgoing& one);
  int post_last_piece(int32_t peer, outgoing& one, const uint8_t* local, uint64_t length, uint64_t remote);
  operation* take_piece(int32_t peer, const outgoing& one);
  void count_piece(outgoing& one, uint64_t length);
  int post_word(int32_t peer, outgoing& one);
  int post_atomic(int32_t peer, outgoing& one);
  wire_message announcement(const outgoing& one) const;
  int announce(int32_t peer, const outgoing& one);
  void seal(const link& at, wire_message& message) const;
  void told(link& at);
  int send(int32_t peer, wire_message& message);
  int mail(int32_t peer, const wire_brief& brief, size_t bytes, uint64_t sequence);
  int send_whole(int32_t peer, const void* bytes, size_t length);
  int posted(operation* message, int code);
  void say(int32_t peer, message_kind kind, uint64_t value = 0, uint64_t memory = 0);
  void post_receive(operation* one);
  void post_receives();
  operation* take_operation(operation_kind kind, int32_t peer);
  void give_operation(operation* one);

  // traffic.cpp
  bool poll();
  void tell_applied();
  void on_failed(const dl::fabric_event& event);
  void on_arrived(uint32_t data);
  void on_mail(int32_t source, uint64_t sequence);
  bool on_bytes(operation& one, size_t bytes);
  bool authentic(wire_message& message);
  bool on_authentic(const wire_message& message);
  void on_request(int32_t source, const wire_message& message);
  bool carry_out_next(int32_t source, const wire_message& message);
  void apply(int32_t source);
  bool carry_out(const wire_message& message);
  const routed_memory* reach(uint64_t memory);
  void end_requests(int32_t peer);
  void take_off(link& at);
  void drop_requests(link& at, bool left_in_order);
  void lose(int32_t peer, const std::string& why);

  std::shared_ptr<rank_context> context_; // null once stopped
  const int32_t world_size_;
  const engine_options options_;
  std::vector<std::unique_ptr<operation>> operations_; // HAZARD: before the port, which may write to them until it is closed
  std::unique_ptr<mailbox> mail_; // HAZARD: before the port, for the same reason
  std::unique_ptr<dl::fabric_port> port_;
  std::shared_ptr<ring_storage> ring_;
  std::vector<std::unique_ptr<link>> links_;
  std::vector<std::shared_ptr<segment>> witnesses_; // by rank; null: not of this host
  std::unique_ptr<lifelines> lines_;                // null: none were asked for, or its network has no addresses of sockets
  std::vector<line_place> line_places_;
  std::vector<uint8_t> far_;

  // HAZARD: before `mutex_`, where both are taken.
  mutable std::mutex turn_;
  // Of whoever has the turn.
  bool over_ = true; // the thread has not begun, or has ended
  int64_t now_ns_ = 0; // when it began to look
  std::vector<sharer> sharers_;
  // The memory that a request came for last. HAZARD: whoever has the turn, and nobody else, takes one out of `memories_`, and forgets it here.
  const routed_memory* reached_ = nullptr;
  uint64_t reached_id_ = 0;
  std::vector<operation*> free_;
  std::vector<operation*> receives_unposted_;
  std::vector<dl::fabric_event> events_;
  std::deque<outgoing> taken_; // of `posted_`; empty in between
  std::vector<uint64_t> ring_ahead_;
  uint64_t messages_under_way_ = 0;
  int64_t leave_by_ns_ = 0;
  bool ended_any_ = false;
  bool ring_held_ = false; // its next request is for a peer that has too many

  // The engine's thread only.
  int64_t watched_ns_ = 0;
  int64_t found_ns_ = 0; // when it last found something to do
  int64_t pace_ns_ = INT64_MAX; // from one such time to the next, of late
  int64_t burdened_ns_ = 0; // when something was under way last that only it carries
  int64_t away_ns_ = shortest_nap_ns; // between looks whether others still look
  uint32_t looks_again_ = 0; // in a row, because the port would not have the thread sleep
  bool listens_ = false;     // false: the port has no descriptor, or one that wakes for nothing
  bool woken_ = false;       // before its time was up, or kept awake by the port
  int64_t vain_ = 0;         // times that this was for nothing, less what made up for it
  int64_t doubted_ns_ = 0;

  mutable std::mutex mutex_;
  std::deque<outgoing> posted_;
  std::map<uint64_t, routed_memory> memories_;
  std::vector<std::weak_ptr<gpu_range>> ranges_;
  std::vector<uint64_t> accepted_;
  std::vector<link_failure> failures_;
  std::string violation_;
  bool stopped_ = false;

  counters count_;
  std::atomic<uint64_t> heavy_{0};      // requests under way that only the thread carries
  // Until when other threads look, or try to: each has a place, which some may share.
  static constexpr size_t assistants = 16;
  std::atomic<int64_t> assisted_until_ns_[assistants]{};
  std::atomic<bool> stepped_back_{false};
  ep_wake_word away_{}; // where the thread sleeps meanwhile
  std::atomic<bool> dormant_{false}; // asleep for longer than it would be with something under way
  std::atomic<bool> any_posted_{false};
  std::atomic<uint32_t> retiring_{0}; // memories that were given up here and are still registered
  std::atomic<uint32_t> stopping_{0}; // EP_LIFE_* to leave with
  std::thread thread_;
};

} // namespace ep::fabric
