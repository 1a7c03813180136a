#include "mlx5_verbs.hpp"

#include <cerrno>
#include <cstring>

#include <endian.h>

#include "verbs_context.hpp"
#include "verbs_symbols.hpp"

#include "ep/abi/mlx5_prm.h"
#include "wire/bits.hpp"

namespace ep::dl {
namespace {

using symbols_ptr = std::shared_ptr<const verbs_symbols>;

class verbs_device final : public mlx5_device {
 public:
  verbs_device(symbols_ptr verbs, verbs::context* context, std::string name) : verbs_(verbs), base_(verbs, context, std::move(name)), context_(context) {
    if (verbs_->mlx5dv_devx_create_event_channel != nullptr && verbs_->mlx5dv_devx_subscribe_devx_event != nullptr &&
        verbs_->mlx5dv_devx_get_event != nullptr && verbs_->mlx5dv_devx_destroy_event_channel != nullptr) {
      events_ = verbs_->mlx5dv_devx_create_event_channel(context_, verbs::event_channel_omit_data);
      if (events_ != nullptr) never_block(events_->fd);
    }
  }
  ~verbs_device() override { (void)release(); }

  const std::string& name() const override { return base_.name(); }

  result<nothing> close() override {
    if (const int64_t alive = base_.alive.load(); alive != 0) return base_.fail("close", EBUSY, std::to_string(alive) + " objects of it live");
    if (const int error = release(); error != 0) return base_.fail("ibv_close_device", error, "closing");
    return nothing{};
  }

  result<mlx5_port> query_port(uint8_t port) override { return base_.query_port(port); }
  result<mlx5_gid> query_gid(uint8_t port, uint32_t index) override { return base_.query_gid(port, index); }

  result<mlx5_pd> alloc_pd() override {
    auto pd = base_.alloc_pd();
    if (!pd.ok()) return pd.why();
    verbs::mlx5_pd_out out{};
    verbs::mlx5_obj object{};
    object.pd = {pd.value(), &out};
    if (const int error = verbs_->mlx5dv_init_obj(&object, verbs::obj_pd); error != 0) {
      (void)base_.dealloc_pd(pd.value());
      return base_.fail("mlx5dv_init_obj", error, "number of a protection domain");
    }
    return mlx5_pd{pd.value(), out.pdn};
  }
  result<nothing> dealloc_pd(const mlx5_pd& pd) override { return base_.dealloc_pd(static_cast<verbs::pd*>(pd.handle)); }
  result<mlx5_mr> reg_mr(const mlx5_pd& pd, const mlx5_memory& memory, uint32_t access) override {
    return base_.reg_mr(static_cast<verbs::pd*>(pd.handle), memory, access);
  }
  result<nothing> dereg_mr(const mlx5_mr& mr) override { return base_.dereg_mr(static_cast<verbs::mr*>(mr.handle)); }

  result<mlx5_uar> alloc_uar(mlx5_uar_kind kind) override {
    verbs::devx_uar* uar = verbs_->mlx5dv_devx_alloc_uar(context_, kind == mlx5_uar_kind::noncached ? verbs::uar_noncached : verbs::uar_blueflame);
    if (uar == nullptr) {
      // Kernels that do not know the flag call it an invalid argument.
      const int error = errno == EINVAL && kind == mlx5_uar_kind::noncached ? EOPNOTSUPP : errno;
      return base_.fail("mlx5dv_devx_alloc_uar", error, kind == mlx5_uar_kind::noncached ? "non-cached doorbell page" : "doorbell page");
    }
    ++base_.alive;
    return mlx5_uar{uar, uar->page_id, reinterpret_cast<uint64_t>(uar->base_addr), reinterpret_cast<uint64_t>(uar->reg_addr)};
  }
  result<nothing> free_uar(const mlx5_uar& uar) override {
    verbs_->mlx5dv_devx_free_uar(static_cast<verbs::devx_uar*>(uar.handle));
    return base_.given_back("mlx5dv_devx_free_uar", 0);
  }

  result<mlx5_umem> umem_reg(const mlx5_memory& memory, uint32_t access) override {
    verbs::devx_umem* umem = nullptr;
    if (memory.dmabuf_fd >= 0) {
      if (verbs_->mlx5dv_devx_umem_reg_ex == nullptr) return base_.fail("mlx5dv_devx_umem_reg_ex", EOPNOTSUPP, "libmlx5 is older than DMA-BUF (MLX5_1.19)");
      verbs::devx_umem_in in{};
      in.addr = reinterpret_cast<void*>(memory.dmabuf_offset);
      in.size = memory.byte_length;
      in.access = access;
      in.pgsz_bitmap = ~uint64_t{4095};
      in.comp_mask = verbs::umem_mask_dmabuf;
      in.dmabuf_fd = memory.dmabuf_fd;
      umem = verbs_->mlx5dv_devx_umem_reg_ex(context_, &in);
    } else {
      umem = verbs_->mlx5dv_devx_umem_reg(context_, reinterpret_cast<void*>(memory.address), memory.byte_length, access);
    }
    if (umem == nullptr) return base_.fail("mlx5dv_devx_umem_reg", errno, std::to_string(memory.byte_length) + " bytes");
    ++base_.alive;
    return mlx5_umem{umem, umem->umem_id};
  }
  result<nothing> umem_dereg(const mlx5_umem& umem) override {
    return base_.given_back("mlx5dv_devx_umem_dereg", verbs_->mlx5dv_devx_umem_dereg(static_cast<verbs::devx_umem*>(umem.handle)));
  }

  result<uint32_t> query_eqn(uint32_t vector) override {
    uint32_t eqn = 0;
    if (const int error = verbs_->mlx5dv_devx_query_eqn(context_, vector, &eqn); error != 0) return base_.fail("mlx5dv_devx_query_eqn", error, "vector " + std::to_string(vector));
    return eqn;
  }

  result<nothing> general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) override {
    return answered("mlx5dv_devx_general_cmd", in, out, verbs_->mlx5dv_devx_general_cmd(context_, in.data(), in.size(), out.data(), out.size()));
  }

  result<mlx5_object> obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) override {
    errno = 0;
    verbs::devx_obj* made = verbs_->mlx5dv_devx_obj_create(context_, in.data(), in.size(), out.data(), out.size());
    if (made == nullptr) return answered("mlx5dv_devx_obj_create", in, out, errno == 0 ? EIO : errno).why();
    subscribe(made, in, out);
    ++base_.alive;
    return mlx5_object{made};
  }
  result<nothing> obj_modify(const mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override {
    return answered("mlx5dv_devx_obj_modify", in, out,
                    verbs_->mlx5dv_devx_obj_modify(static_cast<verbs::devx_obj*>(object.handle), in.data(), in.size(), out.data(), out.size()));
  }
  result<nothing> obj_query(const mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override {
    return answered("mlx5dv_devx_obj_query", in, out,
                    verbs_->mlx5dv_devx_obj_query(static_cast<verbs::devx_obj*>(object.handle), in.data(), in.size(), out.data(), out.size()));
  }
  result<nothing> obj_destroy(const mlx5_object& object) override {
    return base_.given_back("mlx5dv_devx_obj_destroy", verbs_->mlx5dv_devx_obj_destroy(static_cast<verbs::devx_obj*>(object.handle)));
  }

  result<mlx5_path> resolve_ah(const mlx5_pd& pd, const mlx5_route& route) override {
    verbs::ah_attr attributes{};
    attributes.is_global = route.global ? 1 : 0;
    attributes.port_num = route.port;
    attributes.sl = route.sl;
    attributes.dlid = route.dlid;
    if (route.global) {
      std::memcpy(attributes.grh.dgid, route.dgid.data(), sizeof attributes.grh.dgid);
      attributes.grh.sgid_index = route.sgid_index;
      attributes.grh.hop_limit = route.hop_limit;
      attributes.grh.traffic_class = route.traffic_class;
    }
    verbs::ah* handle = verbs_->ibv_create_ah(static_cast<verbs::pd*>(pd.handle), &attributes);
    if (handle == nullptr) {
      // The kernel resolves the GID's address to a MAC: it times out, or finds no route.
      const int error = errno == ETIMEDOUT || errno == ENETUNREACH ? EHOSTUNREACH : errno;
      return base_.fail("ibv_create_ah", error, "port " + std::to_string(route.port) + " gid index " + std::to_string(route.sgid_index));
    }
    verbs::mlx5_ah_out out{};
    verbs::mlx5_obj object{};
    object.ah = {handle, &out};
    const int error = verbs_->mlx5dv_init_obj(&object, verbs::obj_ah);
    mlx5_path path;
    if (error == 0) {
      std::memcpy(path.mac.data(), out.av->rmac, path.mac.size());
      path.gid = route.dgid;
      path.rlid = be16toh(out.av->rlid);
      path.hop_limit = out.av->hop_limit;
      path.traffic_class = out.av->tclass;
    }
    verbs_->ibv_destroy_ah(handle);
    if (error != 0) return base_.fail("mlx5dv_init_obj", error, "address vector");
    return path;
  }

  result<bool> poll_async(mlx5_event& event) override {
    if (events_ != nullptr) {
      verbs::devx_event_header header{};
      const ssize_t got = verbs_->mlx5dv_devx_get_event(events_, &header, sizeof header);
      if (got >= static_cast<ssize_t>(sizeof header)) {
        event = {};
        event.kind = header.cookie >> 32 == EP_MLX5_CMD_CREATE_CQ ? mlx5_event_kind::cq_error : mlx5_event_kind::qp_error;
        event.number = static_cast<uint32_t>(header.cookie);
        return true;
      }
      if (got < 0 && errno != EAGAIN) return base_.fail("mlx5dv_devx_get_event", errno, "events of queues");
    }
    auto told = base_.poll_event();
    if (!told.ok()) return told.why();
    if (told.value().has_value()) event = *told.value();
    return told.value().has_value();
  }

 private:
  // Where the NIC answered, its status is what counts: kernels before 6.0 turn it into an error number of their own choice.
  result<nothing> answered(const char* call, std::span<const uint8_t> in, std::span<uint8_t> out, int error) {
    if (error == 0) return nothing{};
    const uint64_t opcode = wire::get(in.data(), EP_MLX5_CMD_IN_OPCODE);
    const bool refused = wire::get(out.data(), EP_MLX5_CMD_OUT_STATUS) != EP_MLX5_CMD_STATUS_OK;
    char about[32];
    std::snprintf(about, sizeof about, "command 0x%x", static_cast<unsigned>(opcode));
    return base_.fail(call, refused ? EREMOTEIO : error, about);
  }

  // Completions tell of every failure as well; an event brings it earlier where nobody posts. So a kernel that refuses the subscription is no error.
  void subscribe(verbs::devx_obj* made, std::span<const uint8_t> in, std::span<const uint8_t> out) {
    if (events_ == nullptr) return;
    const uint64_t opcode = wire::get(in.data(), EP_MLX5_CMD_IN_OPCODE);
    const uint64_t number = wire::get(out.data(), EP_MLX5_CMD_OUT_OBJECT);
    uint16_t of_qp[] = {0x05, 0x10, 0x11}; // catastrophic, invalid request, access violation
    uint16_t of_cq[] = {0x04};
    const bool cq = opcode == EP_MLX5_CMD_CREATE_CQ;
    verbs_->mlx5dv_devx_subscribe_devx_event(events_, made, cq ? sizeof of_cq : sizeof of_qp, cq ? of_cq : of_qp, opcode << 32 | number);
  }

  int release() {
    if (events_ != nullptr) verbs_->mlx5dv_devx_destroy_event_channel(events_);
    events_ = nullptr;
    return base_.close();
  }

  symbols_ptr verbs_;
  verbs_context base_;
  verbs::context* context_;
  verbs::devx_event_channel* events_ = nullptr;
};

class verbs_driver final : public mlx5_driver {
 public:
  explicit verbs_driver(symbols_ptr verbs) : verbs_(std::move(verbs)) {}
  const char* backing() const override { return "hardware"; }

  result<std::vector<mlx5_device_info>> list_devices() override {
    std::vector<mlx5_device_info> found;
    auto walked = verbs_each_device(*verbs_, [&](verbs::device* device, const std::string& name) {
      mlx5_device_info info;
      info.name = name;
      info.sysfs = "/sys/class/infiniband/" + name;
      info.supported = verbs_->mlx5dv_is_supported(device);
      if (!info.supported) info.unsupported = "not an mlx5 device (ConnectX, BlueField)";
      found.push_back(std::move(info));
      return false;
    });
    if (!walked.ok()) return walked.why();
    return found;
  }

  result<std::unique_ptr<mlx5_device>> open(const std::string& name) override {
    failure why{EP_STATUS_SYSTEM, ENODEV, "no RDMA device is called " + name};
    std::unique_ptr<mlx5_device> opened;
    auto walked = verbs_each_device(*verbs_, [&](verbs::device* device, const std::string& candidate) {
      if (candidate != name) return false;
      if (!verbs_->mlx5dv_is_supported(device)) {
        why.message = name + " is not an mlx5 device (ConnectX, BlueField)";
        return true;
      }
      verbs::mlx5_context_attr attributes{verbs::context_flags_devx, 0};
      verbs::context* context = verbs_->mlx5dv_open_device(device, &attributes);
      if (context == nullptr) {
        why = refused_open(device, name, errno);
        return true;
      }
      opened = std::make_unique<verbs_device>(verbs_, context, name);
      return true;
    });
    if (!walked.ok()) return walked.why();
    if (opened == nullptr) return why;
    return opened;
  }

 private:
  // The library says EINVAL for a kernel that refuses DevX. Whether the device opens without it tells the two apart.
  failure refused_open(verbs::device* device, const std::string& name, int error) {
    verbs::context* plain = verbs_->ibv_open_device(device);
    if (plain != nullptr) {
      verbs_->ibv_close_device(plain);
      failure why = failure_errno("mlx5dv_open_device", EPERM, name + ": it opens, but not for DevX (the library says errno " + std::to_string(error) + ")");
      why.message += verbs_hint(EPERM);
      return why;
    }
    const int plain_error = errno == 0 ? error : errno;
    failure why = failure_errno("ibv_open_device", plain_error, name);
    why.message += verbs_hint(plain_error);
    return why;
  }

  symbols_ptr verbs_;
};

} // namespace

result<std::unique_ptr<mlx5_driver>> mlx5_verbs_driver(const verbs_libraries& libraries) {
  auto symbols = verbs_symbols_load(libraries.ibverbs, libraries.mlx5);
  if (!symbols.ok()) return symbols.why();
  return std::unique_ptr<mlx5_driver>(new verbs_driver(symbols.value()));
}

} // namespace ep::dl
