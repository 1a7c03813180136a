// One rank on this host: its control segment, its liveness, its view of the peers.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "ep/abi/rank.h"
#include "life.hpp"
#include "operation.hpp"
#include "segment.hpp"
#include "waiting.hpp"

namespace ep {

// World rank of each rank that somebody numbers anew; null: they have their own numbers.
using rank_list = std::shared_ptr<const std::vector<int32_t>>;

// Created, connected and closed by one thread, the rank's own: that thread holds the robust mutex whose death mark tells peers.
class rank_context {
 public:
  static result<std::shared_ptr<rank_context>> create(int32_t rank, int32_t world_size, int32_t ranks_on_host);
  ~rank_context();

  int32_t rank() const { return rank_; }
  int32_t world_size() const { return world_size_; }
  const ep_segment_handle& handle() const { return own_->handle(); }
  ep_rank_control& control() const { return *reinterpret_cast<ep_rank_control*>(own_->data()); }
  ep_rank_control& control_of(int32_t rank) const { return *reinterpret_cast<ep_rank_control*>(peers_[static_cast<size_t>(rank)]->data()); }

  // Maps the peers' control segments; `handles` has one entry per rank, one's own included. All zeroes: nobody is in that place, which is EP_LIFE_ABSENT.
  // `elsewhere`: ranks of other hosts, of which nothing is mapped; they are EP_LIFE_ABSENT until another context informs this one.
  result<nothing> connect(const std::vector<ep_segment_handle>& handles, const std::vector<int32_t>& elsewhere = {});
  // After connect(): another rank has come in the place of a dead one, or of one that was never here. Everybody who has the old one's words has this one's now.
  result<nothing> replace(int32_t rank, const ep_segment_handle& handle);
  // The place is empty from here on, as if nobody had ever come. EP_STATUS_BUSY while who was there, of this process, is there.
  result<nothing> vacate(int32_t rank);
  // Dead, closed or never there, and no longer held by anybody in this process: replace() may come.
  bool gone(int32_t rank) const;
  // It is not alive, and nothing of its process runs any more that could write: a rank's own thread may end before the others of its process. True for ranks that were never here, or elsewhere.
  bool ended(int32_t rank) const;
  // EP_LIFE_* of the rank whose control segment this is; DEAD where it cannot be mapped.
  static uint32_t life_behind(const ep_segment_handle& handle);
  // Instead, where peers are on other hosts: whoever hears of them says by set_life() whether they live. Nothing of theirs is mapped.
  void connect_apart();
  bool connected() const { return !views_.empty(); }
  // Of a peer, after connect_apart(): EP_LIFE_*. Any thread. Ends waits on it.
  void set_life(int32_t rank, uint32_t state);
  // After connect_apart(): what is known here of ranks that are elsewhere for `other`, the same rank of the same world, ends its waits as well, as long as both are there.
  // EP_STATUS_INVALID for one of another world, or where this context shares the memory of its peers, of which nobody hears.
  result<nothing> inform(const std::shared_ptr<rank_context>& other);
  // A rank of another host, beside others whose memory is mapped here.
  bool elsewhere(int32_t rank) const { return !peers_.empty() && peers_[static_cast<size_t>(rank)] == nullptr; }

  // EP_LIFE_* of a rank.
  uint32_t life(int32_t rank) const;
  // Ends every wait of this rank with EP_STATUS_CLOSED, then tells the peers: closed, or dead where the environment went away without close().
  void leave(bool orderly);
  const std::atomic<uint32_t>& closing() const { return closing_; }

  const wait_policy& policy() const { return policy_; }
  // Before anybody waits: peers answer through a network. Whoever sleeps wakes late, and then its peer sleeps for it.
  void wait_for_networks();
  wait_scope waits(const std::atomic<uint32_t>* cancel, int64_t deadline_ns) const;
  // Peers as kernels see them: wake and life words; data and signals are filled in by a memory.
  const std::vector<ep_peer_view>& views() const { return views_; }
  ep_wake_word* wake() const { return &control().wake; }
  // What makes this rank's words from what a NIC leaves elsewhere; run it before a look at a word that peers change.
  progress_list& progress() { return progress_; }
  const progress_list& progress() const { return progress_; }
  // After changes of words that others of this process may await.
  void wake_own() const { sleepers_.notify(wake()); }
  sleeper_list& sleepers() const { return sleepers_; }
  void wake_rank(int32_t rank) const { wake_notify(reinterpret_cast<ep_wake_word*>(views_[static_cast<size_t>(rank)].wake)); }

 private:
  rank_context() = default;
  result<std::shared_ptr<segment>> control_segment(int32_t rank, const ep_segment_handle& handle) const;
  segment* shared_place(int32_t rank) const; // null: there is none
  void hear(int32_t rank, uint32_t state);
  int32_t rank_ = 0;
  int32_t world_size_ = 0;
  int32_t ranks_on_host_ = 0;
  wait_policy policy_{};
  progress_list progress_;
  mutable sleeper_list sleepers_; // on the own wake word
  std::shared_ptr<segment> own_;
  std::vector<std::shared_ptr<segment>> peers_; // null: elsewhere
  std::vector<ep_peer_view> views_;
  std::vector<ep_rank_control> apart_; // of peers on other hosts, as far as is known here
  std::mutex informed_mutex_;
  std::vector<std::weak_ptr<rank_context>> informed_;
  std::atomic<uint32_t> closing_{0};
  life_holder life_;
  bool left_ = false;
};

} // namespace ep
