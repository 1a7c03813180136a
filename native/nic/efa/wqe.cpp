#include "wqe.hpp"

#include <algorithm>
#include <cstring>

#include "ep/abi/efa_cqe.h"

namespace ep::nic::efa {
namespace {

constexpr uint32_t inline_at = EP_EFA_META_BYTES + sizeof(ep_efa_remote_seg);

struct reader {
  const uint8_t* bytes;
  const wqe_limits& limits;
  work_request& request;
  wqe_outcome& outcome;

  void note(const char* field, uint64_t found, uint64_t expected, const char* rule) const {
    if (outcome.noted) return;
    outcome.noted = true;
    outcome.wrong.field = field;
    outcome.wrong.found = found;
    outcome.wrong.expected = expected;
    outcome.wrong.rule = rule;
  }
  // For what no hardware could carry out.
  bool refuse(uint8_t status, const char* field, uint64_t found, uint64_t expected, const char* rule) const {
    note(field, found, expected, rule);
    outcome.status = status;
    return false;
  }
  // For what the format forbids, though hardware may not look.
  bool is(const char* field, uint64_t found, uint64_t expected, const char* rule = nullptr) const {
    if (found == expected) return true;
    note(field, found, expected, rule);
    if (limits.reserved == lint::warn) return true;
    outcome.status = EP_EFA_STATUS_LOCAL_QP_INTERNAL;
    return false;
  }
  template <class Layout> Layout at(uint32_t offset) const {
    Layout layout;
    std::memcpy(&layout, bytes + offset, sizeof layout);
    return layout;
  }

  bool whole() const {
    for (uint32_t word = 0; word < limits.entry_bytes; word += 8) {
      const uint8_t* first = bytes + word;
      if (!std::all_of(first, first + 8, [](uint8_t byte) { return byte == wqe_scrub; })) continue;
      const char* rule = "the offset of a word of the entry that nobody stored since the NIC fetched the one before: whole entries have to be written";
      // Without its first word nothing of it can be believed.
      if (word == 0) return refuse(EP_EFA_STATUS_LOCAL_QP_INTERNAL, "entry", word, limits.entry_bytes, rule);
      if (!is("entry", word, limits.entry_bytes, rule)) return false;
    }
    return true;
  }

  bool meta(const ep_efa_meta& head, uint64_t number, uint32_t shift) const {
    const auto phase = static_cast<uint32_t>(number >> shift & 1);
    if ((head.ctrl1 & 0x80) == 0) return refuse(EP_EFA_STATUS_LOCAL_QP_INTERNAL, "meta.meta_desc", 0, 1, "set: nothing else is a work request");
    if ((head.ctrl2 & 1u) != phase) return refuse(EP_EFA_STATUS_LOCAL_QP_INTERNAL, "meta.phase", head.ctrl2 & 1, phase, "the round of the ring, counted from 0, odd or even");
    return is("meta.first", head.ctrl2 >> 2 & 1, 1) && is("meta.last", head.ctrl2 >> 3 & 1, 1) && is("meta.ctrl1 bit 6", head.ctrl1 >> 6 & 1, 0) &&
           is("meta.ctrl2 bits 7:5 and 1", head.ctrl2 & 0xe2, 0) && is("meta.ctrl3 bits 7:2", head.ctrl3 & 0xfc, 0) && is("meta.reserved0", head.reserved0, 0) &&
           is("meta.reserved1", std::any_of(head.reserved1, head.reserved1 + sizeof head.reserved1, [](uint8_t byte) { return byte != 0; }) ? 1 : 0, 0) &&
           is("meta.comp_req", head.ctrl2 >> 4 & 1, 1, "set: an entry without a completion is never known to be free") &&
           (limits.wide_ids || is("meta.req_id_ex", head.req_id_ex[0] | head.req_id_ex[1] | head.req_id_ex[2], 0, "the device takes 16 bits of a request id")) &&
           (request.has_immediate || is("meta.imm", head.imm, 0, "only a request with immediate has one"));
  }

  bool local(const ep_efa_sge& from) const {
    request.lkey = from.lkey & EP_EFA_LKEY_MASK;
    request.local = from.addr;
    return is("local.lkey bits 31:24", from.lkey >> 24, 0);
  }

  bool transfer(const ep_efa_meta& head) const {
    const auto remote = at<ep_efa_remote_seg>(EP_EFA_META_BYTES);
    request.rkey = remote.rkey;
    request.address = remote.addr;
    request.length = remote.length;
    if (request.inlined) {
      if (limits.entry_bytes != EP_EFA_WIDE_WQE_BYTES || request.opcode != EP_EFA_OPCODE_RDMA_WRITE) {
        return refuse(EP_EFA_STATUS_LOCAL_UNSUPPORTED_OP, "meta.inline", 1, 0, "inline bytes are for writes of queue pairs with entries of 128 bytes");
      }
      if (head.length > EP_EFA_MAX_INLINE_WRITE) return refuse(EP_EFA_STATUS_LOCAL_BAD_LENGTH, "meta.length", head.length, EP_EFA_MAX_INLINE_WRITE, "inline bytes, at most");
      if (head.length != remote.length) return refuse(EP_EFA_STATUS_LOCAL_BAD_LENGTH, "remote.length", remote.length, head.length, "that of the inline bytes");
      return true;
    }
    if (head.length != 1) return refuse(EP_EFA_STATUS_LOCAL_BAD_LENGTH, "meta.length", head.length, 1, "one segment of local memory, also for no bytes");
    const auto from = at<ep_efa_sge>(inline_at);
    if (from.length != remote.length) return refuse(EP_EFA_STATUS_LOCAL_BAD_LENGTH, "local.length", from.length, remote.length, "that of the remote segment");
    return local(from);
  }

  // There are no receive queues here, so all that matters of it is that it is well formed.
  bool send(const ep_efa_meta& head) const {
    if (request.inlined) {
      const uint32_t most = limits.entry_bytes == EP_EFA_WIDE_WQE_BYTES ? EP_EFA_MAX_WIDE_INLINE_SEND : EP_EFA_MAX_INLINE_SEND;
      return head.length <= most || refuse(EP_EFA_STATUS_LOCAL_BAD_LENGTH, "meta.length", head.length, most, "inline bytes, at most");
    }
    if (head.length > EP_EFA_MAX_SEND_SEGMENTS) return refuse(EP_EFA_STATUS_LOCAL_BAD_LENGTH, "meta.length", head.length, EP_EFA_MAX_SEND_SEGMENTS, "segments, at most");
    return true;
  }
};

} // namespace

wqe_outcome wqe_read(const uint8_t* bytes, uint64_t number, uint32_t shift, const wqe_limits& limits, work_request& request) {
  wqe_outcome outcome;
  const reader reading{bytes, limits, request, outcome};
  const auto head = reading.at<ep_efa_meta>(0);
  request = work_request{};
  request.id = head.req_id;
  if (limits.wide_ids) request.id |= uint64_t{head.req_id_ex[0]} << 16 | uint64_t{head.req_id_ex[1]} << 32 | uint64_t{head.req_id_ex[2]} << 48;
  request.opcode = head.ctrl1 & 0xf;
  request.has_immediate = (head.ctrl1 & EP_EFA_CTRL1_IMM) != 0;
  request.inlined = (head.ctrl1 & EP_EFA_CTRL1_INLINE) != 0;
  request.ah = head.ah;
  request.qpn = head.dest_qpn;
  request.qkey = head.qkey;
  request.immediate = head.imm;
  if (!reading.whole() || !reading.meta(head, number, shift)) return outcome;
  switch (request.opcode) {
    case EP_EFA_OPCODE_SEND: reading.send(head); break;
    case EP_EFA_OPCODE_RDMA_READ:
      if (request.has_immediate && !reading.is("meta.has_imm", 1, 0, "a read brings nobody an immediate")) break;
      reading.transfer(head);
      break;
    case EP_EFA_OPCODE_RDMA_WRITE: reading.transfer(head); break;
    default: reading.refuse(EP_EFA_STATUS_LOCAL_UNSUPPORTED_OP, "meta.opcode", request.opcode, EP_EFA_OPCODE_RDMA_WRITE, "SEND, RDMA_READ or RDMA_WRITE");
  }
  return outcome;
}

} // namespace ep::nic::efa
