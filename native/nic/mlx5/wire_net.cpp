// The network wire: the requester's half packs a message into a request of the hub, the responder's half unpacks it and carries it out in its own port, as a peer of the same machine
// would. What comes is of an authenticated NIC, and is still looked at as if anybody had sent it: lengths here, rights and ranges by the responder's rules.
#include <algorithm>
#include <cstring>
#include <map>

#include "port.hpp"
#include "wire.hpp"

namespace ep::nic {
namespace {

struct request_head {
  uint8_t operation; // wire_operation
  uint8_t flags;     // flag_*
  uint8_t atomic_bytes;
  uint8_t reserved0;
  uint32_t source_qpn;
  uint32_t target_qpn;
  uint32_t psn;
  uint32_t packets;
  uint32_t immediate;
  uint32_t rkey;
  uint32_t reserved1;
  uint64_t address;
  uint64_t length;
  uint64_t begin;
  uint64_t end;
  uint64_t operand[4];
};
static_assert(sizeof(request_head) == 96, "what goes over the network");

struct reply_head {
  uint8_t answer; // wire_answer
  uint8_t reserved[3];
  uint32_t rnr_timer;
  uint64_t old;
};
static_assert(sizeof(reply_head) == 16, "what goes over the network");

constexpr uint8_t flag_immediate = 1;
constexpr uint8_t flag_big_endian = 2;
constexpr uint8_t flag_last = 4;
constexpr uint64_t longest_message = uint64_t{1} << 31;

static_assert(sizeof(request_head) + net::part_bytes <= net::max_payload && sizeof(reply_head) + net::part_bytes <= net::max_payload, "a part and its head are a frame");

// Static text, as replies have it; the peer's own words stay there.
const char* text_of(wire_answer answer) {
  switch (answer) {
    case wire_answer::not_ready: return "the peer's NIC has no receive request, or is behind with its completions";
    case wire_answer::invalid_request: return "the peer's NIC says that its queue pair allows no such request";
    case wire_answer::access_error: return "the peer's NIC says that the key, its rights or its range do not allow it";
    case wire_answer::lost: return "the peer's NIC has no queue pair that would take this";
    default: return nullptr;
  }
}

// Copies between the bytes begin..end of a message and one run of bytes.
template <class Copy> void for_part(const wire_message& message, uint64_t begin, uint64_t end, const Copy& copy) {
  uint64_t at = 0;
  for (const wire_piece& piece : message.pieces) {
    const uint64_t from = std::max(begin, at);
    const uint64_t to = std::min(end, at + piece.bytes);
    if (from < to) copy(piece.base + (from - at), from - begin, to - from);
    at += piece.bytes;
  }
}

class net_peer final : public wire_peer {
 public:
  net_peer(net::hub& hub, uint32_t number) : hub_(hub), number_(number) {}

  bool gone() const override { return false; } // who does not answer is asked again by the queue pair's own rules
  int64_t moved_ns() const override { return hub_.moved_ns(number_); }
  void give_up() override { hub_.give_up(number_); }

  wire_reply deliver(const wire_message& message, uint64_t begin, uint64_t end, bool last, wire_ticket& ticket) override {
    if (!ticket) {
      ticket = hub_.ask(number_, pack(message, begin, end, last));
      // Null: too much is under way, and it is asked again later.
      return {wire_answer::pending, 0, nullptr};
    }
    if (!ticket->answered.load(std::memory_order_acquire)) return {wire_answer::pending, 0, nullptr};
    const wire_ticket done = std::move(ticket);
    ticket.reset();
    if (done->lost) return {wire_answer::lost, 0, "the stream to the peer's host ended", 0, true};
    return unpack(message, begin, end, done->reply);
  }

 private:
  static std::vector<uint8_t> pack(const wire_message& message, uint64_t begin, uint64_t end, bool last) {
    request_head head{};
    head.operation = static_cast<uint8_t>(message.operation);
    head.flags = static_cast<uint8_t>((message.has_immediate ? flag_immediate : 0) | (message.big_endian ? flag_big_endian : 0) | (last ? flag_last : 0));
    head.atomic_bytes = message.atomic_bytes;
    head.source_qpn = message.source_qpn;
    head.target_qpn = message.target_qpn;
    head.psn = message.psn;
    head.packets = message.packets;
    head.immediate = message.immediate;
    head.rkey = message.rkey;
    head.address = message.address;
    head.length = message.length;
    head.begin = begin;
    head.end = end;
    std::copy(message.operand.begin(), message.operand.end(), head.operand);
    const bool carries = message.operation == wire_operation::write;
    std::vector<uint8_t> out(sizeof head + (carries ? end - begin : 0));
    std::memcpy(out.data(), &head, sizeof head);
    if (carries) for_part(message, begin, end, [&](const uint8_t* local, uint64_t at, uint64_t bytes) { std::memcpy(out.data() + sizeof head + at, local, bytes); });
    return out;
  }

  static wire_reply unpack(const wire_message& message, uint64_t begin, uint64_t end, const std::vector<uint8_t>& bytes) {
    const wire_reply nonsense{wire_answer::lost, 0, "the peer's NIC answers with what is no answer"};
    reply_head head;
    if (bytes.size() < sizeof head) return nonsense;
    std::memcpy(&head, bytes.data(), sizeof head);
    const auto answer = static_cast<wire_answer>(head.answer);
    if (head.answer > static_cast<uint8_t>(wire_answer::access_error) || answer == wire_answer::pending) return nonsense;
    const bool carries = answer == wire_answer::ack && message.operation == wire_operation::read;
    if (bytes.size() != sizeof head + (carries ? end - begin : 0)) return nonsense;
    if (carries) {
      for_part(message, begin, end, [&](uint8_t* local, uint64_t at, uint64_t count) { copy_bytes(local, bytes.data() + sizeof head + at, count); });
    }
    return {answer, head.old, text_of(answer), head.rnr_timer & 31};
  }

  net::hub& hub_;
  const uint32_t number_;
};

class net_fabric final : public fabric {
 public:
  net_fabric(net::hub& hub, uint32_t own) : hub_(hub), own_(own), memory_(fabric_of_memory()) {}

  result<std::shared_ptr<wire_peer>> connect(uint32_t number) override {
    if (number <= directory_ports) return memory_->connect(number);
    std::shared_ptr<wire_peer>& known = peers_[number];
    if (!known) known = std::make_shared<net_peer>(hub_, number);
    return std::shared_ptr<wire_peer>(known);
  }
  uint32_t number_of(const gid_bytes& gid) const override { return gid == hub_.gid() ? own_ : hub_.number_of(gid); }

 private:
  net::hub& hub_;
  const uint32_t own_;
  std::unique_ptr<fabric> memory_;
  std::map<uint32_t, std::shared_ptr<wire_peer>> peers_;
};

// False: no requester of ours makes such a request.
bool sound(const request_head& head, uint64_t carried) {
  if (head.operation > static_cast<uint8_t>(wire_operation::swap) || (head.flags & ~(flag_immediate | flag_big_endian | flag_last)) != 0) return false;
  const auto operation = static_cast<wire_operation>(head.operation);
  const bool atomic = operation == wire_operation::add || operation == wire_operation::swap;
  if (atomic != (head.atomic_bytes != 0) || (atomic && head.atomic_bytes != 4 && head.atomic_bytes != 8)) return false;
  if (head.length > longest_message || head.begin > head.end || head.end > head.length || head.end - head.begin > net::part_bytes) return false;
  if (atomic && (head.length != head.atomic_bytes || head.begin != 0 || head.end != head.length)) return false;
  if (head.psn > 0xffffff || head.packets == 0 || head.packets > 0x800000) return false;
  return carried == (operation == wire_operation::write ? head.end - head.begin : 0);
}

bool answer(wire_peer& own, uint32_t from, std::span<const uint8_t> request, std::vector<uint8_t>& reply) {
  request_head head;
  if (request.size() < sizeof head) return false;
  std::memcpy(&head, request.data(), sizeof head);
  if (!sound(head, request.size() - sizeof head)) return false;
  wire_message message;
  message.source_port = from;
  message.source_qpn = head.source_qpn;
  message.target_qpn = head.target_qpn;
  message.psn = head.psn;
  message.packets = head.packets;
  message.operation = static_cast<wire_operation>(head.operation);
  message.has_immediate = (head.flags & flag_immediate) != 0;
  message.big_endian = (head.flags & flag_big_endian) != 0;
  message.atomic_bytes = head.atomic_bytes;
  message.immediate = head.immediate;
  message.rkey = head.rkey;
  message.address = head.address;
  message.length = head.length;
  std::copy(std::begin(head.operand), std::end(head.operand), message.operand.begin());
  const bool reads = message.operation == wire_operation::read;
  const uint64_t bytes = head.end - head.begin;
  reply.assign(sizeof(reply_head) + (reads ? bytes : 0), 0);
  // Only this part of the message is here; what lies before it is not touched.
  const wire_piece pieces[] = {{nullptr, head.begin}, {reads ? reply.data() + sizeof(reply_head) : const_cast<uint8_t*>(request.data()) + sizeof head, bytes}};
  message.pieces = pieces;
  wire_ticket none;
  const wire_reply done = own.deliver(message, head.begin, head.end, (head.flags & flag_last) != 0, none);
  if (done.answer != wire_answer::ack) reply.resize(sizeof(reply_head));
  const reply_head out{static_cast<uint8_t>(done.answer), {}, done.rnr_timer, done.old};
  std::memcpy(reply.data(), &out, sizeof out);
  return true;
}

} // namespace

std::unique_ptr<fabric> fabric_of_network(net::hub& hub, uint32_t own) { return std::make_unique<net_fabric>(hub, own); }

net::hub::answerer answerer_of(const port_view& port) {
  std::shared_ptr<wire_peer> own = peer_of_port(port, port.header().number);
  return [own](uint32_t from, std::span<const uint8_t> request, std::vector<uint8_t>& reply) { return answer(*own, from, request, reply); };
}

} // namespace ep::nic
