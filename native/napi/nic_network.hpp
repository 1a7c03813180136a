// What software NICs on a network take from JS in the same way.
#pragma once

#include <algorithm>
#include <map>
#include <optional>

#include "nic/net/hub.hpp"
#include "nic_arguments.hpp"
#include "rank.hpp"

namespace ep::binding {

// {address, heartbeatMs, silenceMs}; undefined: the NIC is on none.
inline std::optional<nic::net::hub_options> network_of(Napi::Value value) {
  if (value.IsUndefined()) return std::nullopt;
  const Napi::Env env = value.Env();
  if (!value.IsObject()) throw_invalid(env, "network is an object or undefined");
  const auto description = value.As<Napi::Object>();
  constexpr uint64_t day_ms = 86'400'000;
  const auto ns = [&](const char* name) {
    const uint64_t found = arg_size(description.Get(name), name);
    if (found < 1 || found > day_ms) throw_invalid(env, std::string(name) + " " + std::to_string(found) + " is not in 1.." + std::to_string(day_ms));
    return static_cast<int64_t>(found) * 1'000'000;
  };
  return nic::net::hub_options{description.Get("address").ToString().Utf8Value(), ns("heartbeatMs"), ns("silenceMs")};
}

// By rank the keys of both directions, this rank's first.
inline std::vector<fabric::link_keys> link_keys_of(Napi::Value value) {
  std::vector<fabric::link_keys> keys;
  for (const std::vector<uint8_t>& both : blobs_of(value, "keys")) {
    fabric::link_keys& one = keys.emplace_back();
    if (both.size() != one.out.size() + one.in.size()) throw_invalid(value.Env(), "the keys of a rank are of " + std::to_string(both.size()) + " bytes");
    std::copy_n(both.begin(), one.out.size(), one.out.begin());
    std::copy_n(both.begin() + static_cast<std::ptrdiff_t>(one.out.size()), one.in.size(), one.in.begin());
  }
  return keys;
}

// Tells the hub of the other ranks, and the rank of what the hub hears of their lives.
inline void tell_hub(Napi::Env env, nic::net::hub& hub, const std::shared_ptr<rank_context>& context, const std::vector<nic::gid_bytes>& gids, Napi::Value keys_by_rank) {
  const std::vector<fabric::link_keys> keys = link_keys_of(keys_by_rank);
  if (keys.size() != gids.size()) throw_invalid(env, "keys of " + std::to_string(keys.size()) + " ranks for " + std::to_string(gids.size()));
  std::map<nic::gid_bytes, int32_t> ranks;
  for (size_t rank = 0; rank < gids.size(); ++rank) {
    if (static_cast<int32_t>(rank) != context->rank()) ranks[gids[rank]] = static_cast<int32_t>(rank);
  }
  hub.on_life([context, ranks](const nic::gid_bytes& gid, nic::net::peer_life life) {
    context->set_life(ranks.at(gid), life == nic::net::peer_life::closed ? EP_LIFE_CLOSED : EP_LIFE_DEAD);
  });
  for (const auto& [gid, rank] : ranks) {
    if (hub.know(gid, keys[static_cast<size_t>(rank)]) == 0) throw_invalid(env, "the address of rank " + std::to_string(rank) + " is of no software NIC on a network");
  }
}

} // namespace ep::binding
