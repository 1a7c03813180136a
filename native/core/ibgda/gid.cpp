#include "gid.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <vector>

namespace ep::ibgda {
namespace {

using dl::mlx5_gid;
using dl::mlx5_gid_type;

// An address path names its source by 8 bits.
constexpr uint32_t addressable = 256;

bool carries_ipv4(const mlx5_gid& gid) {
  const bool zero = std::all_of(gid.raw.begin(), gid.raw.begin() + 10, [](uint8_t byte) { return byte == 0; });
  return zero && gid.raw[10] == 0xff && gid.raw[11] == 0xff;
}
// fe80::/10
bool is_link_local(const mlx5_gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

bool fits(const mlx5_gid& gid, dl::mlx5_link link) {
  if (link == dl::mlx5_link::ethernet) return gid.type == mlx5_gid_type::roce_v1 || gid.type == mlx5_gid_type::roce_v2;
  return gid.type == mlx5_gid_type::infiniband;
}

// Lower is better; none: not by the rule.
std::optional<int> preference(const mlx5_gid& gid, dl::mlx5_link link) {
  if (!fits(gid, link)) return std::nullopt;
  if (link != dl::mlx5_link::ethernet) return 0;
  if (gid.type != mlx5_gid_type::roce_v2) return std::nullopt;
  if (carries_ipv4(gid)) return 0;
  return is_link_local(gid) ? 2 : 1;
}

const char* type_name(mlx5_gid_type type) {
  switch (type) {
    case mlx5_gid_type::empty: return "empty";
    case mlx5_gid_type::infiniband: return "InfiniBand";
    case mlx5_gid_type::roce_v1: return "RoCE v1";
    case mlx5_gid_type::roce_v2: return "RoCE v2";
  }
  return "unknown";
}

const char* link_name(dl::mlx5_link link) {
  switch (link) {
    case dl::mlx5_link::infiniband: return "an InfiniBand";
    case dl::mlx5_link::ethernet: return "an Ethernet";
    case dl::mlx5_link::unknown: break;
  }
  return "an unknown";
}

std::string where(const dl::mlx5_device& device, uint8_t port) { return device.name() + " port " + std::to_string(port); }

} // namespace

std::string gid_text(const std::array<uint8_t, 16>& raw) {
  char text[48];
  if (carries_ipv4({raw, mlx5_gid_type::roce_v2})) {
    std::snprintf(text, sizeof text, "::ffff:%u.%u.%u.%u", raw[12], raw[13], raw[14], raw[15]);
    return text;
  }
  std::string out;
  for (size_t i = 0; i < raw.size(); i += 2) {
    std::snprintf(text, sizeof text, "%s%02x%02x", i == 0 ? "" : ":", raw[i], raw[i + 1]);
    out += text;
  }
  return out;
}

result<chosen_gid> gid_choose(dl::mlx5_device& device, uint8_t port, const dl::mlx5_port& facts, std::optional<uint32_t> wanted) {
  const uint32_t count = std::min(facts.gid_count, addressable);
  if (wanted.has_value()) {
    if (*wanted >= count) {
      return failure{EP_STATUS_INVALID, 0, where(device, port) + " has GID indices 0 to " + std::to_string(count) + " (excluded), gid index " + std::to_string(*wanted) + " was asked for"};
    }
    auto gid = device.query_gid(port, *wanted);
    if (!gid.ok()) return gid.why();
    if (!fits(gid.value(), facts.link)) {
      return failure{EP_STATUS_INVALID, 0,
                     "gid index " + std::to_string(*wanted) + " of " + where(device, port) + " is " + type_name(gid.value().type) + ", which does not fit " + link_name(facts.link) + " port"};
    }
    return chosen_gid{*wanted, gid.value()};
  }
  std::optional<chosen_gid> best;
  int best_preference = 0;
  std::string seen;
  for (uint32_t index = 0; index < count; ++index) {
    auto gid = device.query_gid(port, index);
    if (!gid.ok()) return gid.why();
    if (gid.value().type == mlx5_gid_type::empty) continue;
    const std::optional<int> rank = preference(gid.value(), facts.link);
    if (rank.has_value() && (!best.has_value() || *rank < best_preference)) {
      best = chosen_gid{index, gid.value()};
      best_preference = *rank;
    }
    if (!seen.empty()) seen += ", ";
    seen += std::to_string(index) + ": " + type_name(gid.value().type) + " " + gid_text(gid.value().raw);
  }
  if (best.has_value()) return *best;
  return failure{EP_STATUS_SYSTEM, ENODATA,
                 where(device, port) + " has no GID that " + link_name(facts.link) + " port can use by the rule (it has " + (seen.empty() ? std::string("none") : seen) +
                     "); give its interface an address, or name a gid index"};
}

} // namespace ep::ibgda
