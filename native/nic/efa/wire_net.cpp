// The network wire of the software EFA: one request of the hub for each fragment, tick or refusal. The responder's half carries it out in its own port, as a peer of the same machine would.
#include <cstring>
#include <set>

#include "wire.hpp"

namespace ep::nic::efa {
namespace {

enum class request_kind : uint32_t { write = 1, read = 2, tick = 3, send = 4 };

struct request_head {
  uint32_t kind;
  uint32_t qpn;
  uint32_t qkey;
  uint32_t rkey;
  uint64_t address; // of a tick: its serial
  uint64_t length;  // of a tick: the lowest serial that may be asked for from here on
  uint64_t begin;
  uint64_t bytes;
};
static_assert(sizeof(request_head) == 48, "what goes over the network");

struct reply_head {
  uint8_t status;
  uint8_t busy;
  uint8_t reserved[6];
};
static_assert(sizeof(reply_head) == 8, "what goes over the network");

static_assert(sizeof(request_head) + net::part_bytes <= net::max_payload, "a fragment and its head are a frame");

// Ticks of one peer that may be asked for again; more than any device has under way.
constexpr size_t most_ticks = 1 << 20;

class net_peer final : public wire_peer {
 public:
  net_peer(net::hub& hub, uint32_t number) : hub_(hub), number_(number) {}

  bool gone() const override { return false; } // who does not answer is asked again for as long as the device waits
  int64_t moved_ns() const override { return hub_.moved_ns(number_); }
  void give_up() override { hub_.give_up(number_); }

  wire_reply write(const wire_target& target, const wire_range& range, const uint8_t* from, wire_ticket& ticket) override {
    return ask(request_kind::write, target, {range.rkey, range.address, range.length, range.begin, range.bytes}, from, nullptr, ticket);
  }
  wire_reply read(const wire_target& target, const wire_range& range, uint8_t* to, wire_ticket& ticket) override {
    return ask(request_kind::read, target, range, nullptr, to, ticket);
  }
  wire_reply tick(const wire_target& target, uint64_t serial, uint64_t oldest, wire_ticket& ticket) override {
    return ask(request_kind::tick, target, {0, serial, oldest, 0, 0}, nullptr, nullptr, ticket);
  }
  wire_reply refuse_send(const wire_target& target, wire_ticket& ticket) override { return ask(request_kind::send, target, {}, nullptr, nullptr, ticket); }

 private:
  wire_reply ask(request_kind kind, const wire_target& target, const wire_range& range, const uint8_t* from, uint8_t* to, wire_ticket& ticket) {
    wire_reply pending;
    pending.pending = true;
    if (!ticket) {
      const request_head head{static_cast<uint32_t>(kind), target.qpn, target.qkey, range.rkey, range.address, range.length, range.begin, range.bytes};
      std::vector<uint8_t> request(sizeof head + (from == nullptr ? 0 : range.bytes));
      std::memcpy(request.data(), &head, sizeof head);
      if (from != nullptr && range.bytes != 0) std::memcpy(request.data() + sizeof head, from, range.bytes);
      ticket = hub_.ask(number_, std::move(request)); // null: too much is under way, and it is asked again later
      return pending;
    }
    if (!ticket->answered.load(std::memory_order_acquire)) return pending;
    const wire_ticket done = std::move(ticket);
    ticket.reset();
    if (done->lost) return {EP_EFA_STATUS_UNRESPONSIVE, false, "the stream to the peer's host ended"};
    reply_head head;
    const bool carries = done->reply.size() >= sizeof head && to != nullptr && done->reply[0] == EP_EFA_STATUS_OK && done->reply[1] == 0;
    if (done->reply.size() != sizeof head + (carries ? range.bytes : 0)) return {EP_EFA_STATUS_REMOTE_ABORT, false, "the peer's device answers with what is no answer"};
    std::memcpy(&head, done->reply.data(), sizeof head);
    if (carries) copy_words(to, done->reply.data() + sizeof head, range.bytes);
    return {head.status, head.busy != 0, head.status == EP_EFA_STATUS_OK ? nullptr : "the peer's device says so"};
  }

  net::hub& hub_;
  const uint32_t number_;
};

// The responder's half, for all who come.
class answerer {
 public:
  explicit answerer(const port_view& port) : own_(port), visitor_{port.header().number, port.mapping()->handle().nonce} {}

  bool answer(uint32_t from, std::span<const uint8_t> request, std::vector<uint8_t>& reply) {
    request_head head;
    if (request.size() < sizeof head) return false;
    std::memcpy(&head, request.data(), sizeof head);
    const auto kind = static_cast<request_kind>(head.kind);
    const uint64_t carried = request.size() - sizeof head;
    if (head.kind < 1 || head.kind > 4 || head.qpn > 0xffff) return false;
    if (carried != (kind == request_kind::write ? head.bytes : 0)) return false;
    const wire_target target{visitor_, from, head.qpn, head.qkey};
    const wire_range range{head.rkey, head.address, head.length, head.begin, head.bytes};
    const bool moves = kind == request_kind::write || kind == request_kind::read;
    // HAZARD: the key's range is checked against the whole request, so the part has to lie in it.
    if (moves && (range.bytes > net::part_bytes || range.begin > range.length || range.bytes > range.length - range.begin)) return false;
    reply.assign(sizeof(reply_head) + (kind == request_kind::read ? range.bytes : 0), 0);
    wire_reply done;
    switch (kind) {
      case request_kind::write: done = own_.write(target, range, request.data() + sizeof head); break;
      case request_kind::read: done = own_.read(target, range, reply.data() + sizeof(reply_head)); break;
      case request_kind::tick:
        if (!tick(target, from, head.address, head.length, done)) return false;
        break;
      case request_kind::send: done = own_.refuse_send(target); break;
    }
    if (done.status != EP_EFA_STATUS_OK || done.busy) reply.resize(sizeof(reply_head));
    const reply_head out{done.status, done.busy, {}};
    std::memcpy(reply.data(), &out, sizeof out);
    return true;
  }

 private:
  // HAZARD: an answer may be lost, and a count that is asked for twice is one signal too many.
  bool tick(const wire_target& target, uint32_t from, uint64_t serial, uint64_t oldest, wire_reply& done) {
    std::set<uint64_t>& counted = counted_[from];
    counted.erase(counted.begin(), counted.lower_bound(oldest));
    if (serial < oldest || counted.size() >= most_ticks) return false;
    if (counted.count(serial) != 0) return true;
    done = own_.tick(target);
    if (!done.busy) counted.insert(serial);
    return true;
  }

  shm_peer own_;
  const port_visitor visitor_;
  std::map<uint32_t, std::set<uint64_t>> counted_; // by peer: serials of ticks that were carried out
};

} // namespace

std::shared_ptr<wire_peer> peer_of_network(net::hub& hub, uint32_t number) { return std::make_shared<net_peer>(hub, number); }

net::hub::answerer answerer_of(const port_view& port) {
  auto made = std::make_shared<answerer>(port);
  return [made](uint32_t from, std::span<const uint8_t> request, std::vector<uint8_t>& reply) { return made->answer(from, request, reply); };
}

} // namespace ep::nic::efa
