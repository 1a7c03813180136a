#include "wqe.hpp"

#include "bits.hpp"

namespace ep::nic {
namespace {

// Collects the first violation.
struct reader {
  const uint8_t* bytes;
  work_request& request;
  violation& wrong;

  bool is(const char* field, uint64_t found, uint64_t expected, const char* rule = nullptr) const {
    if (found == expected) return true;
    return refuse(field, found, expected, rule);
  }
  bool refuse(const char* field, uint64_t found, uint64_t expected, const char* rule) const {
    wrong.field = field;
    wrong.found = found;
    wrong.expected = expected;
    wrong.rule = rule;
    return false;
  }

  const uint8_t* segment(uint32_t number) const { return bytes + number * EP_MLX5_DS_BYTES; }

  bool control(uint16_t index, uint32_t qpn, uint32_t posted, uint32_t ds) const {
    const uint32_t qpn_ds = load_be32(bytes + 4);
    if (!is("ctrl.index", request.index, index)) return false;
    if (!is("ctrl.qpn", qpn_ds >> 8, qpn)) return false;
    if (!is("ctrl.ds reserved bits 7:6", qpn_ds & 0xc0, 0)) return false;
    if (ds == 0) return refuse("ctrl.ds", ds, 1, "at least the control segment");
    if (request.wqebbs > posted) return refuse("ctrl.ds", ds, posted * 4, "at most what was posted");
    if (!is("ctrl.signature", bytes[8], 0)) return false;
    if (!is("ctrl.dci_stream", bytes[9] | bytes[10], 0)) return false;
    const uint8_t fm_ce_se = bytes[11];
    if (!is("ctrl.fm_ce_se reserved bits 4 and 0", fm_ce_se & 0x11, 0)) return false;
    if (request.ce == 3) return refuse("ctrl.ce", 3, EP_MLX5_CE_ALWAYS, "0, 1 or 2");
    if (request.fence > 4) return refuse("ctrl.fence", request.fence, 4, "at most 4");
    const bool immediate = request.opcode == EP_MLX5_OPCODE_RDMA_WRITE_IMM;
    return immediate || is("ctrl.imm", load_raw<uint32_t>(bytes + 12), 0, "only a write with immediate has one");
  }

  bool remote() const {
    request.has_remote = true;
    request.address = load_be64(bytes + 16);
    request.rkey = load_be32(bytes + 24);
    return is("raddr.reserved", load_be32(bytes + 28), 0);
  }

  bool data(uint32_t first, uint32_t ds) const {
    for (uint32_t number = first; number < ds; ++number) {
      const uint8_t* at = segment(number);
      const wqe_data one{load_be32(at), load_be32(at + 4), load_be64(at + 8)};
      if ((one.bytes & EP_MLX5_INLINE) != 0) return refuse("data.byte_count", one.bytes, 0, "bit 31 clear: inline data is the first and only data of a write");
      if (one.bytes == 0) {
        if (one.lkey == EP_MLX5_INVALID_LKEY && one.address == 0) continue;
        return refuse("data.byte_count", 0, 1, "leave out segments of no bytes: some generations take 0 for 2 GiB");
      }
      request.length += one.bytes;
      request.data[request.data_count++] = one;
    }
    return true;
  }

  bool inline_data(uint32_t ds) const {
    const uint32_t length = load_be32(bytes + 32) & ~EP_MLX5_INLINE;
    const uint64_t needed = 2 + (4 + uint64_t{length} + EP_MLX5_DS_BYTES - 1) / EP_MLX5_DS_BYTES;
    if (!is("ctrl.ds", ds, needed, "2 and the inline data with its head, in segments")) return false;
    request.inlined = true;
    request.inline_at = 36;
    request.length = length;
    return true;
  }

  // The last segment says where the old value goes.
  bool atomic(uint32_t ds, uint32_t segments, uint8_t word_bytes) const {
    request.atomic_bytes = word_bytes;
    if (!is("ctrl.ds", ds, 3 + segments)) return false;
    if (!data(2 + segments, ds)) return false;
    if (request.data_count != 1) return refuse("data.byte_count", 0, word_bytes, "the old value needs a place");
    return is("data.byte_count", request.length, word_bytes);
  }

  uint64_t word(uint32_t at) const { return load_be64(bytes + at); }
  uint64_t half(uint32_t at) const { return load_be32(bytes + at); }

  bool masked_word(uint8_t& word_bytes) const {
    if (request.opmod == EP_MLX5_OPMOD_ATOMIC_4) word_bytes = 4;
    if (request.opmod == EP_MLX5_OPMOD_ATOMIC_8) word_bytes = 8;
    return word_bytes != 0 || refuse("ctrl.opmod", request.opmod, EP_MLX5_OPMOD_ATOMIC_8, "8 or 9");
  }

  bool body(uint32_t ds) const {
    constexpr uint64_t all = UINT64_MAX;
    auto& operand = request.operand;
    const bool masked = request.opcode == EP_MLX5_OPCODE_ATOMIC_MASKED_FA || request.opcode == EP_MLX5_OPCODE_ATOMIC_MASKED_CS;
    if (!masked && !is("ctrl.opmod", request.opmod, 0)) return false;
    if (request.opcode == EP_MLX5_OPCODE_NOP) return true;
    if (ds < 2) return refuse("ctrl.ds", ds, 2, "at least a remote address");
    uint8_t word_bytes = 0;
    switch (request.opcode) {
      case EP_MLX5_OPCODE_RDMA_WRITE:
      case EP_MLX5_OPCODE_RDMA_WRITE_IMM:
        request.operation = wire_operation::write;
        if (!remote()) return false;
        return ds > 2 && (load_be32(bytes + 32) & EP_MLX5_INLINE) != 0 ? inline_data(ds) : data(2, ds);
      case EP_MLX5_OPCODE_RDMA_READ: request.operation = wire_operation::read; return remote() && data(2, ds);
      case EP_MLX5_OPCODE_ATOMIC_FA:
        request.operation = wire_operation::add;
        operand = {word(32), 0, 0, 0};
        return remote() && atomic(ds, 1, 8) && is("atomic.compare", word(40), 0, "a fetch-add compares nothing");
      case EP_MLX5_OPCODE_ATOMIC_CS:
        request.operation = wire_operation::swap;
        operand = {word(32), word(40), all, all};
        return remote() && atomic(ds, 1, 8);
      case EP_MLX5_OPCODE_ATOMIC_MASKED_FA:
        request.operation = wire_operation::add;
        if (!masked_word(word_bytes) || !remote() || !atomic(ds, 1, word_bytes)) return false;
        operand = word_bytes == 8 ? std::array<uint64_t, 4>{word(32), word(40)} : std::array<uint64_t, 4>{half(32), half(36)};
        return word_bytes == 8 || is("masked_fa4.reserved", word(40), 0);
      case EP_MLX5_OPCODE_ATOMIC_MASKED_CS:
        request.operation = wire_operation::swap;
        if (!masked_word(word_bytes) || !remote() || !atomic(ds, word_bytes == 8 ? 2 : 1, word_bytes)) return false;
        operand = word_bytes == 8 ? std::array<uint64_t, 4>{word(32), word(40), word(48), word(56)}
                                  : std::array<uint64_t, 4>{half(32), half(36), half(40), half(44)};
        return true;
      default: return refuse("ctrl.opcode", request.opcode, EP_MLX5_OPCODE_RDMA_WRITE, "NOP, RDMA_WRITE(_IMM), RDMA_READ or an atomic");
    }
  }
};

} // namespace

uint32_t wqe_wqebbs(const uint8_t* head) {
  const uint32_t ds = load_be32(head + 4) & 0x3f;
  return ds == 0 ? 1 : (ds + 3) / 4;
}

bool wqe_read(const uint8_t* bytes, uint16_t index, uint32_t qpn, uint32_t posted, work_request& request, violation& wrong) {
  const uint32_t head = load_be32(bytes);
  const uint32_t ds = load_be32(bytes + 4) & 0x3f;
  request.opmod = static_cast<uint8_t>(head >> 24);
  request.index = static_cast<uint16_t>(head >> 8);
  request.opcode = static_cast<uint8_t>(head);
  request.ce = (bytes[11] >> 2) & 3;
  request.fence = bytes[11] >> 5;
  request.solicited = (bytes[11] & 2) != 0;
  request.immediate = load_raw<uint32_t>(bytes + 12);
  request.wqebbs = wqe_wqebbs(bytes);
  request.has_remote = false;
  request.inlined = false;
  request.data_count = 0;
  request.atomic_bytes = 0;
  request.length = 0;
  const reader reading{bytes, request, wrong};
  return reading.control(index, qpn, posted, ds) && reading.body(ds);
}

} // namespace ep::nic
