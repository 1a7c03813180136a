// The calls of dl/mlx5.hpp, by the tables of the engine.
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "soft_device.hpp"
#include "waiting.hpp"
#include "wire/bits.hpp"

#include <sched.h>

namespace ep::nic {
namespace {

using ep::wire::get;

// Handles are numbers of tables: a forged or stale one is looked up in vain.
void* handle_of(uint64_t number) { return reinterpret_cast<void*>(static_cast<uintptr_t>(number)); }
uint64_t number_of(void* handle) { return reinterpret_cast<uintptr_t>(handle); }

constexpr uint64_t queue_pair_kind = uint64_t{1} << 32;
constexpr uint64_t completion_queue_kind = uint64_t{2} << 32;
constexpr uint32_t max_pages = 4096;

uint32_t opcode_of(std::span<const uint8_t> in) { return in.size() < EP_MLX5_CMD_IN_BYTES ? 0 : static_cast<uint32_t>(get(in.data(), EP_MLX5_CMD_IN_OPCODE)); }
uint64_t object_of(std::span<const uint8_t> in) { return get(in.data(), EP_MLX5_CMD_IN_OBJECT); }

bool of_queue_pair(uint32_t opcode) { return opcode >= EP_MLX5_CMD_CREATE_QP && opcode <= EP_MLX5_CMD_QUERY_QP; }

} // namespace

result<dl::mlx5_port> soft_device::query_port(uint8_t port) {
  if (port != 1) return refuse("query_port", EINVAL, "there is port 1 only, not " + std::to_string(port));
  const turn mine(*this);
  dl::mlx5_port facts;
  facts.state = engine_->link_up() ? dl::mlx5_port_state::active : dl::mlx5_port_state::down;
  facts.link = options_.engine.ethernet ? dl::mlx5_link::ethernet : dl::mlx5_link::infiniband;
  facts.active_mtu = EP_MLX5_MTU_4096;
  facts.lid = options_.engine.ethernet ? 0 : static_cast<uint16_t>(port_number());
  facts.gid_count = command_gids;
  facts.max_message = EP_MLX5_MAX_MESSAGE_BYTES;
  return facts;
}

result<dl::mlx5_gid> soft_device::query_gid(uint8_t port, uint32_t index) {
  if (port != 1) return refuse("query_gid", EINVAL, "there is port 1 only, not " + std::to_string(port));
  if (index >= command_gids) return refuse("query_gid", EINVAL, "index " + std::to_string(index) + " of a table of " + std::to_string(command_gids));
  dl::mlx5_gid gid;
  if (!options_.engine.ethernet) {
    if (index == 0) gid = {hub_ ? hub_->gid() : gid_link_local(port_number()), dl::mlx5_gid_type::infiniband};
    return gid;
  }
  // As drivers of real NICs fill it: each address for RoCE v1, then for v2.
  gid.raw = hub_ ? hub_->gid() : index < 2 ? gid_link_local(port_number()) : gid_ipv4(port_number());
  gid.type = index % 2 == 0 ? dl::mlx5_gid_type::roce_v1 : dl::mlx5_gid_type::roce_v2;
  return gid;
}

result<dl::mlx5_pd> soft_device::alloc_pd() {
  const turn mine(*this);
  const uint32_t pdn = engine_->memory.pd_add();
  return dl::mlx5_pd{handle_of(pdn), pdn};
}

result<nothing> soft_device::dealloc_pd(const dl::mlx5_pd& pd) {
  const turn mine(*this);
  bool used = false;
  for (const auto& qp : engine_->qps) used = used || (qp && qp->pdn == pd.pdn);
  return engine_->memory.pd_remove(pd.pdn, used);
}

result<dl::mlx5_mr> soft_device::reg_mr(const dl::mlx5_pd& pd, const dl::mlx5_memory& memory, uint32_t access) {
  const turn mine(*this);
  auto key = engine_->memory.region_add(pd.pdn, memory, access);
  if (!key.ok()) return key.why();
  return dl::mlx5_mr{handle_of(key.value()), key.value(), key.value()};
}

result<nothing> soft_device::dereg_mr(const dl::mlx5_mr& mr) {
  const auto key = static_cast<uint32_t>(number_of(mr.handle));
  const int64_t deadline = clock_now_ns() + let_go_ns;
  for (;;) {
    {
      const turn mine(*this);
      auto cleared = engine_->memory.region_clear(key);
      if (!cleared.ok()) return cleared.why();
      if (!engine_->in_use(key, nullptr)) {
        engine_->memory.region_forget(key);
        return nothing{};
      }
    }
    if (clock_now_ns() >= deadline) return refuse("dereg_mr", EBUSY, "a peer's NIC is inside of an access to this memory and does not come out (is its process stopped?)");
    sched_yield();
  }
}

result<dl::mlx5_uar> soft_device::alloc_uar(dl::mlx5_uar_kind) {
  const turn mine(*this);
  if (engine_->pages.size() >= max_pages) return refuse("alloc_uar", ENOMEM, "all " + std::to_string(max_pages) + " doorbell pages are taken");
  auto page = std::make_unique<doorbell_page>();
  page->id = next_page_++ & 0xffffff;
  page->page = static_cast<uint8_t*>(std::aligned_alloc(EP_MLX5_UAR_BYTES, EP_MLX5_UAR_BYTES));
  if (page->page == nullptr) return refuse("alloc_uar", ENOMEM, "a page of memory is not to be had");
  std::memset(page->page, 0, EP_MLX5_UAR_BYTES);
  const uint64_t base = reinterpret_cast<uint64_t>(page->page);
  const uint32_t id = page->id;
  engine_->pages[id] = std::move(page);
  return dl::mlx5_uar{handle_of(id), id, base, base + EP_MLX5_BF_OFFSET};
}

result<nothing> soft_device::free_uar(const dl::mlx5_uar& uar) {
  const turn mine(*this);
  const auto found = engine_->pages.find(static_cast<uint32_t>(number_of(uar.handle)));
  if (found == engine_->pages.end()) return refuse("free_uar", EINVAL, "there is no such UAR");
  if (found->second->users != 0) return refuse("free_uar", EBUSY, std::to_string(found->second->users) + " queues still use UAR " + std::to_string(found->first));
  std::free(found->second->page);
  engine_->pages.erase(found);
  return nothing{};
}

result<dl::mlx5_umem> soft_device::umem_reg(const dl::mlx5_memory& memory, uint32_t access) {
  const turn mine(*this);
  auto id = engine_->memory.umem_add(memory, access);
  if (!id.ok()) return id.why();
  return dl::mlx5_umem{handle_of(id.value()), id.value()};
}

result<nothing> soft_device::umem_dereg(const dl::mlx5_umem& umem) {
  const turn mine(*this);
  return engine_->memory.umem_remove(static_cast<uint32_t>(number_of(umem.handle)));
}

result<uint32_t> soft_device::query_eqn(uint32_t vector) {
  if (vector != 0) return refuse("query_eqn", EINVAL, "there is completion vector 0 only, not " + std::to_string(vector));
  return command_eqn;
}

result<nothing> soft_device::command(const char* call, std::span<const uint8_t> in, std::span<uint8_t> out) {
  const int64_t deadline = clock_now_ns() + let_go_ns;
  for (;;) {
    command_answer answer;
    {
      const turn mine(*this);
      // Without a thread, time is the caller's, who steps.
      if (options_.threaded) engine_->advance_clock(clock_now_ns());
      answer = command_run(*engine_, in, out);
    }
    if (answer.status == EP_MLX5_CMD_STATUS_OK) return nothing{};
    const uint32_t opcode = opcode_of(in);
    const bool leaving = opcode == EP_MLX5_CMD_DESTROY_QP || opcode == EP_MLX5_CMD_2RST_QP || opcode == EP_MLX5_CMD_2ERR_QP;
    if (!leaving || answer.status != EP_MLX5_CMD_STATUS_RESOURCE_BUSY || clock_now_ns() >= deadline) {
      const int error = answer.status == EP_MLX5_CMD_STATUS_RESOURCE_BUSY ? EBUSY : EREMOTEIO;
      return refuse(call, error, "command 0x" + hex_text(opcode) + " refused with status 0x" + hex_text(answer.status) + ": " + answer.why);
    }
    sched_yield();
  }
}

result<nothing> soft_device::general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) {
  const uint32_t opcode = opcode_of(in);
  if ((opcode >= EP_MLX5_CMD_CREATE_CQ && opcode <= EP_MLX5_CMD_QUERY_CQ) || of_queue_pair(opcode)) {
    return refuse("general_cmd", EINVAL, "command 0x" + hex_text(opcode) + " is about an object");
  }
  return command("general_cmd", in, out);
}

result<dl::mlx5_object> soft_device::obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) {
  const uint32_t opcode = opcode_of(in);
  if (opcode != EP_MLX5_CMD_CREATE_CQ && opcode != EP_MLX5_CMD_CREATE_QP) return refuse("obj_create", EINVAL, "command 0x" + hex_text(opcode) + " makes no object");
  auto done = command("obj_create", in, out);
  if (!done.ok()) return done.why();
  return dl::mlx5_object{handle_of((opcode == EP_MLX5_CMD_CREATE_QP ? queue_pair_kind : completion_queue_kind) | get(out.data(), EP_MLX5_CMD_OUT_OBJECT))};
}

result<nothing> soft_device::obj_modify(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) {
  const uint32_t opcode = opcode_of(in);
  const bool known = opcode == EP_MLX5_CMD_RST2INIT_QP || opcode == EP_MLX5_CMD_INIT2RTR_QP || opcode == EP_MLX5_CMD_RTR2RTS_QP ||
                     opcode == EP_MLX5_CMD_2ERR_QP || opcode == EP_MLX5_CMD_2RST_QP;
  if (!known) return refuse("obj_modify", EINVAL, "command 0x" + hex_text(opcode) + " changes no object");
  if (number_of(object.handle) != (queue_pair_kind | object_of(in))) return refuse("obj_modify", EINVAL, "the command names another object");
  return command("obj_modify", in, out);
}

result<nothing> soft_device::obj_query(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) {
  const uint32_t opcode = opcode_of(in);
  if (opcode != EP_MLX5_CMD_QUERY_CQ && opcode != EP_MLX5_CMD_QUERY_QP) return refuse("obj_query", EINVAL, "command 0x" + hex_text(opcode) + " queries no object");
  const uint64_t kind = opcode == EP_MLX5_CMD_QUERY_QP ? queue_pair_kind : completion_queue_kind;
  if (number_of(object.handle) != (kind | object_of(in))) return refuse("obj_query", EINVAL, "the command names another object");
  return command("obj_query", in, out);
}

result<nothing> soft_device::obj_destroy(const dl::mlx5_object& object) {
  const uint64_t handle = number_of(object.handle);
  std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> in{};
  std::array<uint8_t, EP_MLX5_CMD_OUT_BYTES> out{};
  const uint64_t number = handle & 0xffffff;
  const bool qp = handle == (queue_pair_kind | number);
  if (!qp && handle != (completion_queue_kind | number)) return refuse("obj_destroy", EINVAL, "there is no such object");
  wire::put(in.data(), EP_MLX5_CMD_IN_OPCODE, qp ? EP_MLX5_CMD_DESTROY_QP : EP_MLX5_CMD_DESTROY_CQ);
  wire::put(in.data(), EP_MLX5_CMD_IN_OBJECT, number);
  return command("obj_destroy", in, out);
}

result<dl::mlx5_path> soft_device::resolve_ah(const dl::mlx5_pd& pd, const dl::mlx5_route& route) {
  {
    const turn mine(*this);
    if (!engine_->memory.pd_known(pd.pdn)) return refuse("resolve_ah", EINVAL, "there is no such protection domain");
  }
  if (route.port != 1) return refuse("resolve_ah", EINVAL, "there is port 1 only, not " + std::to_string(route.port));
  dl::mlx5_path path;
  path.gid = route.dgid;
  path.hop_limit = route.hop_limit;
  path.traffic_class = route.traffic_class;
  if (!options_.engine.ethernet) {
    path.rlid = route.dlid;
    return path;
  }
  if (!route.global) return refuse("resolve_ah", EINVAL, "a route on Ethernet needs a GID");
  const uint32_t number = engine_->number_of(route.dgid);
  if (number == 0) return refuse("resolve_ah", EHOSTUNREACH, "the GID is not one of a software NIC");
  if (number <= directory_ports) {
    auto found = directory_find(number);
    if (!found.ok()) return refuse("resolve_ah", EHOSTUNREACH, found.why().message);
  }
  path.mac = mac_of(number);
  return path;
}

result<bool> soft_device::poll_async(dl::mlx5_event& event) {
  const turn mine(*this);
  return engine_->take_event(event);
}

} // namespace ep::nic
