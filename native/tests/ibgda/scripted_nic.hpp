// A table that answers as it is told to, and remembers every call: the control path's own behaviour, without a NIC of any kind.
#pragma once

#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/ibgda/prm.hpp"
#include "dl/mlx5.hpp"

namespace ep::test {

struct scripted_port {
  dl::mlx5_port facts;
  std::vector<dl::mlx5_gid> gids;
};

inline dl::mlx5_gid gid_of(dl::mlx5_gid_type type, std::initializer_list<uint8_t> head, std::initializer_list<uint8_t> tail) {
  dl::mlx5_gid gid;
  gid.type = type;
  size_t at = 0;
  for (const uint8_t byte : head) gid.raw[at++] = byte;
  at = 16 - tail.size();
  for (const uint8_t byte : tail) gid.raw[at++] = byte;
  return gid;
}
inline dl::mlx5_gid ipv4_gid(dl::mlx5_gid_type type, uint8_t a, uint8_t b, uint8_t c, uint8_t d) { return gid_of(type, {}, {0xff, 0xff, a, b, c, d}); }
inline dl::mlx5_gid local_gid(dl::mlx5_gid_type type, uint8_t last) { return gid_of(type, {0xfe, 0x80}, {last}); }

inline scripted_port ethernet_port() {
  using enum dl::mlx5_gid_type;
  return {{dl::mlx5_port_state::active, dl::mlx5_link::ethernet, 3, 0, 4, 1u << 30},
          {local_gid(roce_v1, 1), local_gid(roce_v2, 1), ipv4_gid(roce_v1, 10, 0, 0, 1), ipv4_gid(roce_v2, 10, 0, 0, 1)}};
}
inline scripted_port infiniband_port() {
  return {{dl::mlx5_port_state::active, dl::mlx5_link::infiniband, 5, 0x21, 1, 1u << 30}, {local_gid(dl::mlx5_gid_type::infiniband, 7)}};
}

// Outlives the devices opened by it.
struct nic_script {
  std::map<std::string, std::vector<scripted_port>> devices{{"mlx5_0", {ethernet_port()}}};
  std::map<std::string, std::string> unsupported; // name -> why
  // Before each call: its name and how often it was made; a failure to return, or status OK.
  std::function<failure(const std::string& call, int count)> fails = [](const std::string&, int) { return failure{EP_STATUS_OK, 0, ""}; };
  uint64_t cqe_version = 1;
  uint64_t atomic_operations = 0xf;
  uint64_t atomic_sizes = 0xc;
  std::vector<dl::mlx5_event> events;
  uint32_t next_receive_psn = 0x1234; // of every queue pair

  std::vector<std::vector<uint8_t>> commands; // all that reached the NIC
  std::vector<dl::mlx5_memory> umems;         // registered, ever
  std::vector<dl::mlx5_route> routes;
  std::map<std::string, int> calls;
  std::set<uint64_t> alive; // handles
  uint64_t next = 0x100;

  failure enter(const std::string& call) { return fails(call, ++calls[call]); }
  void* make() {
    alive.insert(++next);
    return reinterpret_cast<void*>(next);
  }
  result<nothing> drop(void* handle) {
    if (alive.erase(reinterpret_cast<uint64_t>(handle)) == 0) return failure{EP_STATUS_SYSTEM, EINVAL, "no such object"};
    return nothing{};
  }
};

#define EP_SCRIPT(call) \
  if (const failure why = script_.enter(call); why.status != EP_STATUS_OK) return why

class scripted_device final : public dl::mlx5_device {
 public:
  scripted_device(nic_script& script, std::string name) : script_(script), name_(std::move(name)) {}
  const std::string& name() const override { return name_; }
  result<nothing> close() override {
    EP_SCRIPT("close");
    if (!script_.alive.empty()) return failure{EP_STATUS_SYSTEM, EBUSY, std::to_string(script_.alive.size()) + " objects live"};
    return nothing{};
  }
  result<dl::mlx5_port> query_port(uint8_t port) override {
    EP_SCRIPT("query_port");
    const auto& ports = script_.devices[name_];
    if (port < 1 || port > ports.size()) return failure{EP_STATUS_SYSTEM, EINVAL, "no port " + std::to_string(port)};
    return ports[port - 1u].facts;
  }
  result<dl::mlx5_gid> query_gid(uint8_t port, uint32_t index) override {
    EP_SCRIPT("query_gid");
    const auto& gids = script_.devices[name_][port - 1u].gids;
    return index < gids.size() ? gids[index] : dl::mlx5_gid{};
  }
  result<dl::mlx5_pd> alloc_pd() override {
    EP_SCRIPT("alloc_pd");
    return dl::mlx5_pd{script_.make(), 0x0abc};
  }
  result<nothing> dealloc_pd(const dl::mlx5_pd& pd) override { return script_.drop(pd.handle); }
  result<dl::mlx5_mr> reg_mr(const dl::mlx5_pd&, const dl::mlx5_memory&, uint32_t) override {
    EP_SCRIPT("reg_mr");
    void* handle = script_.make();
    const uint32_t key = static_cast<uint32_t>(script_.next) << 8;
    return dl::mlx5_mr{handle, key, key};
  }
  result<nothing> dereg_mr(const dl::mlx5_mr& mr) override { return script_.drop(mr.handle); }
  result<dl::mlx5_uar> alloc_uar(dl::mlx5_uar_kind kind) override {
    EP_SCRIPT(kind == dl::mlx5_uar_kind::noncached ? "alloc_uar noncached" : "alloc_uar");
    void* handle = script_.make();
    return dl::mlx5_uar{handle, static_cast<uint32_t>(script_.next), 0x10000000 + (script_.next << 12), 0x10000800 + (script_.next << 12)};
  }
  result<nothing> free_uar(const dl::mlx5_uar& uar) override { return script_.drop(uar.handle); }
  result<dl::mlx5_umem> umem_reg(const dl::mlx5_memory& memory, uint32_t) override {
    EP_SCRIPT("umem_reg");
    script_.umems.push_back(memory);
    return dl::mlx5_umem{script_.make(), 0x77};
  }
  result<nothing> umem_dereg(const dl::mlx5_umem& umem) override { return script_.drop(umem.handle); }
  result<uint32_t> query_eqn(uint32_t) override {
    EP_SCRIPT("query_eqn");
    return uint32_t{9};
  }
  result<nothing> general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) override {
    script_.commands.emplace_back(in.begin(), in.end());
    EP_SCRIPT("general_cmd");
    const std::span<uint8_t> caps = out.subspan(EP_MLX5_CAP_AT);
    if (ibgda::prm_get(in, EP_MLX5_CMD_IN_OP_MOD) >> 1 == EP_MLX5_CAP_GENERAL) {
      ibgda::prm_set(caps, EP_MLX5_GENERAL_CAP_CQE_VERSION, script_.cqe_version);
      ibgda::prm_set(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP_SIZE, 15);
      ibgda::prm_set(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP, 8);
      ibgda::prm_set(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_MESSAGE, 30);
    } else {
      ibgda::prm_set(caps, EP_MLX5_ATOMIC_CAP_OPERATIONS, script_.atomic_operations);
      ibgda::prm_set(caps, EP_MLX5_ATOMIC_CAP_SIZES, script_.atomic_sizes);
    }
    return nothing{};
  }
  result<dl::mlx5_object> obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) override {
    script_.commands.emplace_back(in.begin(), in.end());
    const bool cq = ibgda::prm_get(in, EP_MLX5_CMD_IN_OPCODE) == EP_MLX5_CMD_CREATE_CQ;
    ibgda::prm_set(out, EP_MLX5_CMD_OUT_STATUS, EP_MLX5_CMD_STATUS_BAD_PARAM);
    ibgda::prm_set(out, EP_MLX5_CMD_OUT_SYNDROME, 0x12ab34);
    EP_SCRIPT(cq ? "CREATE_CQ" : "CREATE_QP");
    ibgda::prm_set(out, EP_MLX5_CMD_OUT_STATUS, 0);
    void* handle = script_.make();
    ibgda::prm_set(out, EP_MLX5_CMD_OUT_OBJECT, script_.next);
    return dl::mlx5_object{handle};
  }
  result<nothing> obj_modify(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override {
    script_.commands.emplace_back(in.begin(), in.end());
    ibgda::prm_set(out, EP_MLX5_CMD_OUT_STATUS, EP_MLX5_CMD_STATUS_BAD_QP_STATE);
    EP_SCRIPT("obj_modify");
    if (ibgda::prm_get(in, EP_MLX5_CMD_IN_OBJECT) != reinterpret_cast<uint64_t>(object.handle)) return failure{EP_STATUS_SYSTEM, EINVAL, "another object"};
    ibgda::prm_set(out, EP_MLX5_CMD_OUT_STATUS, 0);
    return nothing{};
  }
  result<nothing> obj_query(const dl::mlx5_object&, std::span<const uint8_t> in, std::span<uint8_t> out) override {
    script_.commands.emplace_back(in.begin(), in.end());
    EP_SCRIPT("obj_query");
    ibgda::prm_set(out.subspan(EP_MLX5_QPC_AT), EP_MLX5_QPC_STATE, EP_MLX5_QP_STATE_RTS);
    ibgda::prm_set(out.subspan(EP_MLX5_QPC_AT), EP_MLX5_QPC_NEXT_RCV_PSN, script_.next_receive_psn);
    return nothing{};
  }
  result<nothing> obj_destroy(const dl::mlx5_object& object) override { return script_.drop(object.handle); }
  result<dl::mlx5_path> resolve_ah(const dl::mlx5_pd&, const dl::mlx5_route& route) override {
    script_.routes.push_back(route);
    EP_SCRIPT("resolve_ah");
    dl::mlx5_path path;
    path.mac = {2, 0, 0, 0, 0, route.dgid[15]};
    path.gid = route.dgid;
    path.hop_limit = route.hop_limit;
    return path;
  }
  result<bool> poll_async(dl::mlx5_event& event) override {
    EP_SCRIPT("poll_async");
    if (script_.events.empty()) return false;
    event = script_.events.front();
    script_.events.erase(script_.events.begin());
    return true;
  }

 private:
  nic_script& script_;
  std::string name_;
};

class scripted_driver final : public dl::mlx5_driver {
 public:
  explicit scripted_driver(nic_script& script) : script_(script) {}
  const char* backing() const override { return "script"; }
  result<std::vector<dl::mlx5_device_info>> list_devices() override {
    EP_SCRIPT("list_devices");
    std::vector<dl::mlx5_device_info> list;
    for (const auto& [name, ports] : script_.devices) {
      const auto why = script_.unsupported.find(name);
      list.push_back({name, "", why == script_.unsupported.end(), why == script_.unsupported.end() ? "" : why->second});
    }
    return list;
  }
  result<std::unique_ptr<dl::mlx5_device>> open(const std::string& name) override {
    EP_SCRIPT("open " + name);
    return std::unique_ptr<dl::mlx5_device>(new scripted_device(script_, name));
  }

 private:
  nic_script& script_;
};

#undef EP_SCRIPT

} // namespace ep::test
