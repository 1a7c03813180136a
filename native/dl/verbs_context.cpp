#include "verbs_context.hpp"

#include <cerrno>
#include <cstring>

#include <fcntl.h>

namespace ep::dl {

const char* verbs_hint(int error) {
  switch (error) {
    case ENOMEM: return "; is RLIMIT_MEMLOCK large enough (ulimit -l)?";
    case EFAULT: return "; the address is not mapped, or it is device memory and GPUDirect (nvidia-peermem) is not loaded";
    case EPERM:
    case EACCES: return "; DevX needs CAP_NET_RAW in the network namespace of the device, and /dev/infiniband/uverbs* readable and writable";
    default: return "";
  }
}

void never_block(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

result<verbs::device**> verbs_list(const ibverbs_symbols& verbs, int* count) {
  errno = 0;
  verbs::device** list = verbs.ibv_get_device_list(count);
  if (list != nullptr) return list;
  const int error = errno == 0 ? EIO : errno;
  failure why = failure_errno("ibv_get_device_list", error, "list of RDMA devices");
  if (error == ENOSYS) why.message += "; the kernel has no RDMA, or ib_uverbs is not loaded";
  return why;
}

verbs_context::verbs_context(std::shared_ptr<const ibverbs_symbols> verbs, verbs::context* context, std::string name)
    : verbs_(std::move(verbs)), context_(context), name_(std::move(name)) {
  never_block(context_->async_fd);
}

failure verbs_context::fail(const char* call, int error, const std::string& about) const {
  failure why = failure_errno(call, error, name_ + ", " + about);
  why.message += verbs_hint(error);
  return why;
}

result<nothing> verbs_context::given_back(const char* call, int error) {
  if (error != 0) return fail(call, error, "giving an object back");
  --alive;
  return nothing{};
}

int verbs_context::close() {
  if (context_ == nullptr) return 0;
  const int closed = verbs_->ibv_close_device(context_);
  context_ = nullptr;
  return closed == 0 ? 0 : errno;
}

result<mlx5_port> verbs_context::query_port(uint8_t port) const {
  // The function copies as much as its own version knows of; older ones leave the end alone.
  verbs::port_attr attributes{};
  if (const int error = verbs_->ibv_query_port(context_, port, &attributes); error != 0) return fail("ibv_query_port", error, "port " + std::to_string(port));
  mlx5_port facts;
  if (attributes.state <= 5) facts.state = static_cast<mlx5_port_state>(attributes.state);
  // "Unspecified" is what devices say that know nothing but InfiniBand.
  facts.link = attributes.link_layer == 2 ? mlx5_link::ethernet : attributes.link_layer <= 1 ? mlx5_link::infiniband : mlx5_link::unknown;
  facts.active_mtu = static_cast<uint8_t>(attributes.active_mtu);
  facts.lid = attributes.lid;
  facts.gid_count = attributes.gid_tbl_len > 0 ? static_cast<uint32_t>(attributes.gid_tbl_len) : 0;
  facts.max_message = attributes.max_msg_sz;
  return facts;
}

result<mlx5_gid> verbs_context::query_gid(uint8_t port, uint32_t index) const {
  verbs::gid_entry entry{};
  const int error = verbs_->_ibv_query_gid_ex(context_, port, index, &entry, 0, sizeof entry);
  if (error == ENODATA) return mlx5_gid{};
  if (error != 0) return fail("ibv_query_gid_ex", error, "port " + std::to_string(port) + " index " + std::to_string(index));
  mlx5_gid gid;
  std::memcpy(gid.raw.data(), entry.gid, gid.raw.size());
  const bool zero = gid.raw == std::array<uint8_t, 16>{};
  if (!zero && entry.gid_type <= 2) gid.type = static_cast<mlx5_gid_type>(entry.gid_type + 1);
  return gid;
}

result<verbs::pd*> verbs_context::alloc_pd() {
  verbs::pd* pd = verbs_->ibv_alloc_pd(context_);
  if (pd == nullptr) return fail("ibv_alloc_pd", errno, "protection domain");
  ++alive;
  return pd;
}
result<nothing> verbs_context::dealloc_pd(verbs::pd* pd) { return given_back("ibv_dealloc_pd", verbs_->ibv_dealloc_pd(pd)); }

result<mlx5_mr> verbs_context::reg_mr(verbs::pd* pd, const mlx5_memory& memory, uint32_t access) {
  verbs::mr* made = nullptr;
  if (memory.dmabuf_fd >= 0) {
    if (verbs_->ibv_reg_dmabuf_mr == nullptr) return fail("ibv_reg_dmabuf_mr", EOPNOTSUPP, "libibverbs is older than DMA-BUF (IBVERBS_1.12)");
    made = verbs_->ibv_reg_dmabuf_mr(pd, memory.dmabuf_offset, memory.byte_length, memory.address, memory.dmabuf_fd, static_cast<int>(access));
  } else {
    made = verbs_->ibv_reg_mr_iova2(pd, reinterpret_cast<void*>(memory.address), memory.byte_length, memory.address, access);
  }
  if (made == nullptr) return fail(memory.dmabuf_fd >= 0 ? "ibv_reg_dmabuf_mr" : "ibv_reg_mr", errno, std::to_string(memory.byte_length) + " bytes");
  ++alive;
  return mlx5_mr{made, made->lkey, made->rkey};
}
result<nothing> verbs_context::dereg_mr(verbs::mr* mr) { return given_back("ibv_dereg_mr", verbs_->ibv_dereg_mr(mr)); }

result<std::optional<mlx5_event>> verbs_context::poll_event() const {
  for (;;) {
    verbs::async_event raw{};
    if (verbs_->ibv_get_async_event(context_, &raw) != 0) {
      if (errno == EAGAIN) return std::optional<mlx5_event>();
      return fail("ibv_get_async_event", errno, "events of the device");
    }
    verbs_->ibv_ack_async_event(&raw);
    mlx5_event event;
    event.port = static_cast<uint8_t>(raw.element.port_num);
    switch (raw.event_type) {
      case verbs::event_port_active: event.kind = mlx5_event_kind::port_up; return std::optional(event);
      case verbs::event_port_err: event.kind = mlx5_event_kind::port_down; return std::optional(event);
      case verbs::event_gid_change: event.kind = mlx5_event_kind::gid_change; return std::optional(event);
      case verbs::event_device_fatal: event.kind = mlx5_event_kind::device_fatal; event.port = 0; return std::optional(event);
      default: break; // of objects that are not ours, or without consequence
    }
  }
}

} // namespace ep::dl
