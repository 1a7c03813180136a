// A network within one process that promises as little as dl/fabric.hpp allows: whatever flies lands in any order, by seed; ports are full now and then, or for ever; packets to or
// from a rank that was cut vanish without a word.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>

#include "dl/fabric.hpp"
#include "hostile/random.hpp"

namespace ep::test {

class scripted_network {
 public:
  scripted_network(int32_t ranks, uint64_t seed) : random_(seed), inboxes_(static_cast<size_t>(ranks)) {}

  std::unique_ptr<dl::fabric_port> port(int32_t rank);

  // A message, or a write of nothing with its data, that comes from nowhere.
  void inject(int32_t to, std::vector<uint8_t> bytes) {
    const std::lock_guard lock(mutex_);
    put_in(to, kind::message, std::move(bytes), 0);
  }
  void inject_piece(int32_t to, uint32_t data) {
    const std::lock_guard lock(mutex_);
    put_in(to, kind::write, {}, data);
  }
  void inject_write(int32_t to, std::vector<uint8_t> bytes, uint64_t at, uint32_t data) {
    const std::lock_guard lock(mutex_);
    put_in(to, kind::write, std::move(bytes), data);
    inboxes_[static_cast<size_t>(to)].flying.back().at = at;
  }
  // Nothing is on its way to it.
  bool quiet(int32_t rank) const {
    const std::lock_guard lock(mutex_);
    const inbox& own = inboxes_[static_cast<size_t>(rank)];
    return own.flying.empty() && own.events.empty();
  }
  // What flies to a rank that nobody plays is of no use.
  void forget(int32_t rank) {
    const std::lock_guard lock(mutex_);
    inboxes_[static_cast<size_t>(rank)].flying.clear();
  }

  // Packets to and from it vanish; nothing is refused.
  void cut(int32_t rank) {
    const std::lock_guard lock(mutex_);
    cut_.insert(rank);
  }
  // Posts to it find no room any more, as over a connection that is being made anew for ever.
  void depart(int32_t rank) {
    const std::lock_guard lock(mutex_);
    departed_.insert(rank);
  }
  // One of so many posts finds room; 0: none does.
  void set_room(uint64_t one_of) {
    const std::lock_guard lock(mutex_);
    one_of_ = one_of;
  }
  // Writes to this rank stay in the air, messages do not.
  void hold_writes(bool hold) {
    const std::lock_guard lock(mutex_);
    hold_ = hold;
  }
  // Everything lands in the order in which it was posted.
  void keep_order() {
    const std::lock_guard lock(mutex_);
    in_order_ = true;
  }
  // What is wrong with the atomics.
  enum class lie : uint8_t { none, loses, ignores_compare, other_old, beside, never_ends, fails };
  void set_lie(lie what) {
    const std::lock_guard lock(mutex_);
    lie_ = what;
  }
  uint64_t overtakes() const {
    const std::lock_guard lock(mutex_);
    return overtakes_;
  }
  uint64_t refused() const {
    const std::lock_guard lock(mutex_);
    return refused_;
  }
  // Messages that a rank injected.
  uint64_t injected(int32_t rank) const {
    const std::lock_guard lock(mutex_);
    return inboxes_[static_cast<size_t>(rank)].injected;
  }
  // Writes that it posted.
  uint64_t written(int32_t rank) const {
    const std::lock_guard lock(mutex_);
    return inboxes_[static_cast<size_t>(rank)].written;
  }
  // Of those, to two places.
  uint64_t paired(int32_t rank) const {
    const std::lock_guard lock(mutex_);
    return inboxes_[static_cast<size_t>(rank)].paired;
  }

 private:
  friend class scripted_port;
  enum class kind : uint8_t { message, write, read, add, swap };
  struct packet {
    kind what;
    int32_t from;
    int32_t to;
    uint64_t number;
    std::vector<uint8_t> bytes; // taken at the post
    std::vector<uint8_t> more;  // of a pair: for its second place
    uint64_t more_at = 0;
    uint8_t* local = nullptr;   // of a read or an atomic
    uint64_t operand = 0;
    uint64_t compare = 0;
    size_t length = 0;
    uint64_t at = 0;
    uint32_t data = 0;
    dl::fabric_context* context = nullptr;
  };
  struct buffer {
    void* to;
    size_t bytes;
    dl::fabric_context* context;
  };
  struct inbox {
    std::vector<packet> flying;
    std::deque<buffer> receives;
    std::vector<dl::fabric_event> events;
    uint64_t injected = 0;
    uint64_t written = 0;
    uint64_t paired = 0;
  };

  void put_in(int32_t to, kind what, std::vector<uint8_t> bytes, uint32_t data) {
    packet one{};
    one.what = what;
    one.from = one.to = to;
    one.number = next_++;
    one.bytes = std::move(bytes);
    one.data = data;
    inboxes_[static_cast<size_t>(to)].flying.push_back(std::move(one));
  }

  void count_injected(int32_t rank) {
    const std::lock_guard lock(mutex_);
    ++inboxes_[static_cast<size_t>(rank)].injected;
  }

  int post(packet one) {
    const std::lock_guard lock(mutex_);
    if (one_of_ == 0 || random_.below(one_of_) != 0 || departed_.contains(one.to)) {
      ++refused_;
      return EAGAIN;
    }
    one.number = next_++;
    inboxes_[static_cast<size_t>(one.from)].written += one.what == kind::write ? 1 : 0;
    inboxes_[static_cast<size_t>(one.from)].paired += one.more.empty() ? 0 : 1;
    if (cut_.contains(one.from) || cut_.contains(one.to)) return 0;
    inboxes_[static_cast<size_t>(one.to)].flying.push_back(std::move(one));
    return 0;
  }

  void poll(int32_t rank, std::vector<dl::fabric_event>& events) {
    const std::lock_guard lock(mutex_);
    inbox& own = inboxes_[static_cast<size_t>(rank)];
    if (!own.flying.empty()) {
      const size_t index = in_order_ ? 0 : random_.below(own.flying.size());
      const packet& one = own.flying[index];
      const bool waits = (one.what == kind::message && own.receives.empty()) || (one.what == kind::write && hold_);
      if (!waits) {
        for (const packet& other : own.flying) overtakes_ += other.from == one.from && other.number < one.number ? 1 : 0;
        land(own, one);
        own.flying.erase(own.flying.begin() + static_cast<std::ptrdiff_t>(index));
      }
    }
    events.insert(events.end(), own.events.begin(), own.events.end());
    own.events.clear();
  }

  void land(inbox& own, const packet& one) {
    if (one.what == kind::message) {
      const buffer to = own.receives.front();
      own.receives.pop_front();
      if (!one.bytes.empty()) std::memcpy(to.to, one.bytes.data(), one.bytes.size());
      own.events.push_back({dl::fabric_event::kind::done, to.context, 0, one.bytes.size(), 0, {}});
    } else if (one.what == kind::write) {
      if (!one.bytes.empty()) std::memcpy(reinterpret_cast<void*>(one.at), one.bytes.data(), one.bytes.size());
      if (!one.more.empty()) std::memcpy(reinterpret_cast<void*>(one.more_at), one.more.data(), one.more.size());
      own.events.push_back({dl::fabric_event::kind::arrived, nullptr, one.data, one.bytes.size(), 0, {}});
    } else if (one.what == kind::read) {
      std::memcpy(one.local, reinterpret_cast<const void*>(one.at), one.length);
    } else if (!change_word(one)) {
      return;
    }
    if (one.context != nullptr) inboxes_[static_cast<size_t>(one.from)].events.push_back({dl::fabric_event::kind::done, one.context, 0, 0, 0, {}});
  }

  // True: there is to be an event of its end.
  bool change_word(const packet& one) {
    if (lie_ == lie::fails) {
      inboxes_[static_cast<size_t>(one.from)].events.push_back({dl::fabric_event::kind::failed, one.context, 0, 0, EINVAL, "the scripted port fails it"});
      return false;
    }
    std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(one.at + (lie_ == lie::beside ? sizeof(uint64_t) : 0)));
    uint64_t old = word.load();
    if (one.what == kind::add) word.store(old + (lie_ == lie::loses && one.operand == 3 ? 0 : one.operand));
    else if (old == one.compare || lie_ == lie::ignores_compare) word.store(one.operand);
    if (lie_ == lie::other_old && one.what == kind::swap) ++old;
    std::memcpy(one.local, &old, sizeof old);
    return lie_ != lie::never_ends;
  }

  mutable std::mutex mutex_;
  random_source random_;
  std::vector<inbox> inboxes_;
  std::set<int32_t> cut_;
  std::set<int32_t> departed_;
  uint64_t one_of_ = 1;
  bool hold_ = false;
  bool in_order_ = false;
  lie lie_ = lie::none;
  uint64_t next_ = 0;
  uint64_t overtakes_ = 0;
  uint64_t refused_ = 0;
};

class scripted_port final : public dl::fabric_port {
 public:
  scripted_port(scripted_network& network, int32_t rank) : network_(network), rank_(rank) {
    offer_.provider = "scripted";
    offer_.max_message = 1000; // so that most puts take several pieces
    offer_.data_bytes = 4;
    offer_.inject_bytes = rank % 2 == 0 ? 64 : 56; // so that one half has to send what the other half injects
    offer_.pairs = rank % 2 == 0;
  }
  // What was under way is forgotten: its contexts and buffers go away.
  ~scripted_port() override {
    const std::lock_guard lock(network_.mutex_);
    for (auto& inbox : network_.inboxes_) std::erase_if(inbox.flying, [&](const auto& one) { return one.from == rank_; });
    network_.inboxes_[static_cast<size_t>(rank_)] = {};
    network_.cut_.insert(rank_);
  }
  const dl::fabric_offer& offer() const override { return offer_; }
  result<std::vector<uint8_t>> address() override { return std::vector<uint8_t>{static_cast<uint8_t>(rank_)}; }
  result<uint64_t> insert(std::span<const uint8_t> address) override { return uint64_t{address[0]}; }
  result<dl::fabric_region> register_memory(void* bytes, uint64_t) override { return dl::fabric_region{bytes, 7, reinterpret_cast<uint64_t>(bytes)}; }
  result<dl::fabric_region> register_gpu(const dl::gpu_bytes&) override { return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "there are no GPUs"}; }
  void give_back(const dl::fabric_region&) override {}
  int receive(void* buffer, size_t bytes, dl::fabric_context* context) override {
    const std::lock_guard lock(network_.mutex_);
    network_.inboxes_[static_cast<size_t>(rank_)].receives.push_back({buffer, bytes, context});
    return 0;
  }
  int send(uint64_t to, const void* buffer, size_t bytes, dl::fabric_context* context) override {
    auto one = packet_to(scripted_network::kind::message, to, context);
    one.bytes.assign(static_cast<const uint8_t*>(buffer), static_cast<const uint8_t*>(buffer) + bytes);
    return network_.post(std::move(one));
  }
  int inject(uint64_t to, const void* buffer, size_t bytes) override {
    if (bytes > offer_.inject_bytes) return EMSGSIZE;
    const int code = send(to, buffer, bytes, nullptr);
    if (code == 0) network_.count_injected(rank_);
    return code;
  }
  int write(uint64_t to, const void* buffer, size_t bytes, void*, uint32_t data, uint64_t at, uint64_t key, dl::fabric_context* context) override {
    if (key != 7) return EINVAL;
    auto one = packet_to(scripted_network::kind::write, to, context);
    one.bytes.assign(static_cast<const uint8_t*>(buffer), static_cast<const uint8_t*>(buffer) + bytes);
    one.at = at;
    one.data = data;
    return network_.post(std::move(one));
  }
  int write_pair(uint64_t to, const dl::fabric_piece& first, const dl::fabric_piece& second, uint32_t data, dl::fabric_context* context) override {
    if (!offer_.pairs) return ENOSYS;
    if (first.key != 7 || second.key != 7) return EINVAL;
    if (first.length + second.length > offer_.max_message) return EMSGSIZE;
    const auto bytes_of = [](const dl::fabric_piece& one) { return std::vector<uint8_t>(static_cast<const uint8_t*>(one.bytes), static_cast<const uint8_t*>(one.bytes) + one.length); };
    auto one = packet_to(scripted_network::kind::write, to, context);
    one.bytes = bytes_of(first);
    one.at = first.at;
    one.more = bytes_of(second);
    one.more_at = second.at;
    one.data = data;
    return network_.post(std::move(one));
  }
  int read(uint64_t from, void* buffer, size_t bytes, void*, uint64_t at, uint64_t key, dl::fabric_context* context) override {
    if (key != 7) return EINVAL;
    auto one = packet_to(scripted_network::kind::read, from, context);
    one.local = static_cast<uint8_t*>(buffer);
    one.length = bytes;
    one.at = at;
    return network_.post(std::move(one));
  }
  int fetch_add(uint64_t to, const uint64_t* add, uint64_t* old, uint64_t at, uint64_t key, dl::fabric_context* context) override {
    return post_atomic(scripted_network::kind::add, to, *add, 0, old, at, key, context);
  }
  int compare_swap(uint64_t to, const uint64_t* compare, const uint64_t* swap, uint64_t* old, uint64_t at, uint64_t key, dl::fabric_context* context) override {
    return post_atomic(scripted_network::kind::swap, to, *swap, *compare, old, at, key, context);
  }
  void poll(std::vector<dl::fabric_event>& events) override { network_.poll(rank_, events); }

 private:
  int post_atomic(scripted_network::kind what, uint64_t to, uint64_t operand, uint64_t compare, uint64_t* old, uint64_t at, uint64_t key, dl::fabric_context* context) {
    if (key != 7) return EINVAL;
    auto one = packet_to(what, to, context);
    one.local = reinterpret_cast<uint8_t*>(old);
    one.operand = operand;
    one.compare = compare;
    one.at = at;
    return network_.post(std::move(one));
  }
  scripted_network::packet packet_to(scripted_network::kind what, uint64_t to, dl::fabric_context* context) const {
    scripted_network::packet one{};
    one.what = what;
    one.from = rank_;
    one.to = static_cast<int32_t>(to);
    one.context = context;
    return one;
  }
  scripted_network& network_;
  const int32_t rank_;
  dl::fabric_offer offer_;
};

inline std::unique_ptr<dl::fabric_port> scripted_network::port(int32_t rank) { return std::make_unique<scripted_port>(*this, rank); }

} // namespace ep::test
