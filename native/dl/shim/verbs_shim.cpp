// libibverbs and libmlx5, as far as dl/verbs_symbols.hpp asks for them, over a driver of ours. Success and failure are told as those libraries tell them: a null
// pointer and errno, or an error number.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <cstdio>
#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <endian.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dl/mlx5.hpp"
#include "dl/verbs_symbols.hpp"

namespace ep::dl::verbs {

struct device {
  mlx5_device_info info;
};
struct ah {
  mlx5_av av;
};
struct devx_obj {
  mlx5_object real;
  context* owner;
  uint64_t number; // of the queue
};

} // namespace ep::dl::verbs

namespace {

using namespace ep::dl;

std::atomic<mlx5_driver*> attached{nullptr};

struct shim_context {
  verbs::context base{}; // first: the caller knows this part
  std::unique_ptr<mlx5_device> real;
  std::deque<mlx5_event> of_queues;
  std::deque<mlx5_event> of_ports;
  std::vector<std::pair<uint64_t, uint64_t>> cookies; // number, cookie
};
struct shim_pd {
  verbs::pd base{};
  mlx5_pd real;
};
struct shim_mr {
  verbs::mr base{};
  mlx5_mr real;
};
struct shim_uar {
  verbs::devx_uar base{};
  mlx5_uar real;
  shim_context* owner;
};
struct shim_umem {
  verbs::devx_umem base{};
  mlx5_umem real;
  shim_context* owner;
};
struct shim_channel {
  verbs::devx_event_channel base{};
  shim_context* owner;
};

// A card reaches a DMA-BUF; the software NIC behind this, memory of the process only. Those of cuda_driver.cpp are files that it maps itself: the address, or 0.
uint64_t mapped_here(int fd, uint64_t offset) {
  struct stat file {};
  if (fd < 0 || fstat(fd, &file) != 0) return 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0, at = 0, inode = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %lx %*s %lu", &begin, &end, &at, &inode) != 4) continue;
    if (inode == file.st_ino && at <= offset && offset < at + (end - begin)) return begin + (offset - at);
  }
  return 0;
}

shim_context* of(verbs::context* context) { return reinterpret_cast<shim_context*>(context); }
shim_pd* of(verbs::pd* pd) { return reinterpret_cast<shim_pd*>(pd); }

int number(const ep::failure& why) { return why.sys_errno == 0 ? EINVAL : why.sys_errno; }
template <class Pointer> Pointer* fail(const ep::failure& why) {
  errno = number(why);
  return nullptr;
}
template <class Value> int outcome(const ep::result<Value>& done) { return done.ok() ? 0 : number(done.why()); }
std::span<const uint8_t> bytes_of(const void* in, size_t bytes) { return {static_cast<const uint8_t*>(in), bytes}; }
std::span<uint8_t> bytes_of(void* out, size_t bytes) { return {static_cast<uint8_t*>(out), bytes}; }

verbs::context* opened(std::unique_ptr<mlx5_device> real, verbs::device* device) {
  auto* context = new shim_context;
  context->base.device = device;
  context->base.async_fd = eventfd(0, EFD_CLOEXEC);
  context->base.cmd_fd = -1;
  context->real = std::move(real);
  return &context->base;
}

// Sorts what the device has to tell into the two ways by which the libraries tell it.
void pull(shim_context& context) {
  mlx5_event event;
  for (;;) {
    auto taken = context.real->poll_async(event);
    if (!taken.ok() || !taken.value()) return;
    const bool queue = event.kind == mlx5_event_kind::qp_error || event.kind == mlx5_event_kind::cq_error;
    (queue ? context.of_queues : context.of_ports).push_back(event);
  }
}

} // namespace

extern "C" {

#pragma GCC visibility push(default)

void ep_verbs_shim_attach(ep::dl::mlx5_driver* driver) { attached.store(driver); }

verbs::device** ibv_get_device_list(int* count) {
  mlx5_driver* driver = attached.load();
  if (driver == nullptr) {
    errno = ENOSYS;
    return nullptr;
  }
  auto listed = driver->list_devices();
  if (!listed.ok()) return fail<verbs::device*>(listed.why());
  const size_t size = listed.value().size();
  auto** list = new verbs::device*[size + 1];
  for (size_t i = 0; i < size; ++i) list[i] = new verbs::device{listed.value()[i]};
  list[size] = nullptr;
  if (count != nullptr) *count = static_cast<int>(size);
  return list;
}
void ibv_free_device_list(verbs::device** list) {
  for (verbs::device** at = list; *at != nullptr; ++at) delete *at;
  delete[] list;
}
const char* ibv_get_device_name(verbs::device* device) { return device->info.name.c_str(); }
bool mlx5dv_is_supported(verbs::device* device) { return device->info.supported; }

verbs::context* mlx5dv_open_device(verbs::device* device, verbs::mlx5_context_attr*) {
  auto real = attached.load()->open(device->info.name);
  if (real.ok()) return opened(std::move(real.value()), device);
  // As the library has it: a kernel that refuses DevX is an invalid argument.
  errno = real.why().sys_errno == EPERM ? EINVAL : number(real.why());
  return nullptr;
}
verbs::context* ibv_open_device(verbs::device* device) {
  auto real = attached.load()->open(device->info.name);
  if (real.ok()) return opened(std::move(real.value()), device);
  if (real.why().sys_errno == EPERM) return opened(nullptr, device); // opens, but not for DevX
  return fail<verbs::context>(real.why());
}
int ibv_close_device(verbs::context* context) {
  std::unique_ptr<shim_context> mine(of(context));
  ::close(mine->base.async_fd);
  if (mine->real == nullptr) return 0;
  auto done = mine->real->close();
  if (done.ok()) return 0;
  errno = number(done.why());
  return -1;
}

int ibv_query_port(verbs::context* context, uint8_t port, verbs::port_attr* out) {
  auto facts = of(context)->real->query_port(port);
  if (!facts.ok()) return number(facts.why());
  *out = {};
  out->state = static_cast<uint32_t>(facts.value().state);
  out->link_layer = static_cast<uint8_t>(facts.value().link);
  out->active_mtu = facts.value().active_mtu;
  out->max_mtu = facts.value().active_mtu;
  out->lid = facts.value().lid;
  out->gid_tbl_len = static_cast<int>(facts.value().gid_count);
  out->max_msg_sz = facts.value().max_message;
  return 0;
}
int _ibv_query_gid_ex(verbs::context* context, uint32_t port, uint32_t index, verbs::gid_entry* out, uint32_t, size_t) {
  auto gid = of(context)->real->query_gid(static_cast<uint8_t>(port), index);
  if (!gid.ok()) return number(gid.why());
  if (gid.value().type == mlx5_gid_type::empty) return ENODATA;
  *out = {};
  std::memcpy(out->gid, gid.value().raw.data(), sizeof out->gid);
  out->gid_index = index;
  out->port_num = port;
  out->gid_type = static_cast<uint32_t>(gid.value().type) - 1;
  return 0;
}

verbs::pd* ibv_alloc_pd(verbs::context* context) {
  auto real = of(context)->real->alloc_pd();
  if (!real.ok()) return fail<verbs::pd>(real.why());
  auto* pd = new shim_pd;
  pd->base.owner = context;
  pd->real = real.value();
  return &pd->base;
}
int ibv_dealloc_pd(verbs::pd* pd) {
  const int error = outcome(of(pd->owner)->real->dealloc_pd(of(pd)->real));
  if (error == 0) delete of(pd);
  return error;
}

static verbs::mr* registered(verbs::pd* pd, const mlx5_memory& memory, unsigned access) {
  auto real = of(pd->owner)->real->reg_mr(of(pd)->real, memory, access);
  if (!real.ok()) return fail<verbs::mr>(real.why());
  auto* mr = new shim_mr;
  mr->base = {pd->owner, pd, reinterpret_cast<void*>(memory.address), memory.byte_length, 0, real.value().lkey, real.value().rkey};
  mr->real = real.value();
  return &mr->base;
}
verbs::mr* ibv_reg_mr_iova2(verbs::pd* pd, void* addr, size_t length, uint64_t iova, unsigned access) {
  if (iova != reinterpret_cast<uint64_t>(addr)) {
    errno = EINVAL;
    return nullptr;
  }
  return registered(pd, {iova, length}, access);
}
verbs::mr* ibv_reg_dmabuf_mr(verbs::pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  if (const uint64_t mapped = mapped_here(fd, offset); mapped != 0 && mapped == iova) return registered(pd, {iova, length}, static_cast<unsigned>(access));
  return registered(pd, {iova, length, fd, offset}, static_cast<unsigned>(access));
}
int ibv_dereg_mr(verbs::mr* mr) {
  auto* mine = reinterpret_cast<shim_mr*>(mr);
  const int error = outcome(of(mr->owner)->real->dereg_mr(mine->real));
  if (error == 0) delete mine;
  return error;
}

verbs::ah* ibv_create_ah(verbs::pd* pd, verbs::ah_attr* attributes) {
  mlx5_route route;
  route.port = attributes->port_num;
  route.global = attributes->is_global != 0;
  route.sl = attributes->sl;
  route.dlid = attributes->dlid;
  route.sgid_index = attributes->grh.sgid_index;
  route.hop_limit = attributes->grh.hop_limit;
  route.traffic_class = attributes->grh.traffic_class;
  std::memcpy(route.dgid.data(), attributes->grh.dgid, route.dgid.size());
  auto path = of(pd->owner)->real->resolve_ah(of(pd)->real, route);
  if (!path.ok()) {
    errno = path.why().sys_errno == EHOSTUNREACH ? ETIMEDOUT : number(path.why());
    return nullptr;
  }
  auto* made = new verbs::ah{};
  std::memcpy(made->av.rmac, path.value().mac.data(), sizeof made->av.rmac);
  std::memcpy(made->av.rgid, path.value().gid.data(), sizeof made->av.rgid);
  made->av.rlid = htobe16(path.value().rlid);
  made->av.hop_limit = path.value().hop_limit;
  made->av.tclass = path.value().traffic_class;
  return made;
}
int ibv_destroy_ah(verbs::ah* ah) {
  delete ah;
  return 0;
}

int mlx5dv_init_obj(verbs::mlx5_obj* object, uint64_t type) {
  if ((type & verbs::obj_pd) != 0) static_cast<verbs::mlx5_pd_out*>(object->pd.out)->pdn = of(static_cast<verbs::pd*>(object->pd.in))->real.pdn;
  if ((type & verbs::obj_ah) != 0) static_cast<verbs::mlx5_ah_out*>(object->ah.out)->av = &static_cast<verbs::ah*>(object->ah.in)->av;
  return (type & ~(verbs::obj_pd | verbs::obj_ah)) == 0 ? 0 : EOPNOTSUPP;
}

verbs::devx_uar* mlx5dv_devx_alloc_uar(verbs::context* context, uint32_t flags) {
  auto real = of(context)->real->alloc_uar(flags == verbs::uar_noncached ? mlx5_uar_kind::noncached : mlx5_uar_kind::blueflame);
  if (!real.ok()) {
    errno = real.why().sys_errno == EOPNOTSUPP ? EINVAL : number(real.why());
    return nullptr;
  }
  auto* uar = new shim_uar;
  uar->base.page_id = real.value().page_id;
  uar->base.base_addr = reinterpret_cast<void*>(real.value().base_addr);
  uar->base.reg_addr = reinterpret_cast<void*>(real.value().reg_addr);
  uar->real = real.value();
  uar->owner = of(context);
  return &uar->base;
}
void mlx5dv_devx_free_uar(verbs::devx_uar* uar) {
  auto* mine = reinterpret_cast<shim_uar*>(uar);
  (void)mine->owner->real->free_uar(mine->real);
  delete mine;
}

static verbs::devx_umem* umem_of(verbs::context* context, const mlx5_memory& memory, uint32_t access) {
  auto real = of(context)->real->umem_reg(memory, access);
  if (!real.ok()) return fail<verbs::devx_umem>(real.why());
  auto* umem = new shim_umem;
  umem->base.umem_id = real.value().id;
  umem->real = real.value();
  umem->owner = of(context);
  return &umem->base;
}
verbs::devx_umem* mlx5dv_devx_umem_reg(verbs::context* context, void* addr, size_t bytes, uint32_t access) {
  return umem_of(context, {reinterpret_cast<uint64_t>(addr), bytes}, access);
}
verbs::devx_umem* mlx5dv_devx_umem_reg_ex(verbs::context* context, verbs::devx_umem_in* in) {
  if ((in->comp_mask & verbs::umem_mask_dmabuf) == 0) return mlx5dv_devx_umem_reg(context, in->addr, in->size, in->access);
  const uint64_t offset = reinterpret_cast<uint64_t>(in->addr);
  if (const uint64_t mapped = mapped_here(in->dmabuf_fd, offset); mapped != 0) return umem_of(context, {mapped, in->size}, in->access);
  return umem_of(context, {offset, in->size, in->dmabuf_fd, offset}, in->access);
}
int mlx5dv_devx_umem_dereg(verbs::devx_umem* umem) {
  auto* mine = reinterpret_cast<shim_umem*>(umem);
  const int error = outcome(mine->owner->real->umem_dereg(mine->real));
  if (error == 0) delete mine;
  return error;
}

int mlx5dv_devx_query_eqn(verbs::context* context, uint32_t vector, uint32_t* eqn) {
  auto real = of(context)->real->query_eqn(vector);
  if (real.ok()) *eqn = real.value();
  return outcome(real);
}
int mlx5dv_devx_general_cmd(verbs::context* context, const void* in, size_t in_bytes, void* out, size_t out_bytes) {
  return outcome(of(context)->real->general_cmd(bytes_of(in, in_bytes), bytes_of(out, out_bytes)));
}
verbs::devx_obj* mlx5dv_devx_obj_create(verbs::context* context, const void* in, size_t in_bytes, void* out, size_t out_bytes) {
  auto real = of(context)->real->obj_create(bytes_of(in, in_bytes), bytes_of(out, out_bytes));
  if (!real.ok()) return fail<verbs::devx_obj>(real.why());
  const auto* answer = static_cast<const uint8_t*>(out);
  return new verbs::devx_obj{real.value(), context, uint64_t{answer[9]} << 16 | uint64_t{answer[10]} << 8 | answer[11]};
}
int mlx5dv_devx_obj_modify(verbs::devx_obj* object, const void* in, size_t in_bytes, void* out, size_t out_bytes) {
  return outcome(of(object->owner)->real->obj_modify(object->real, bytes_of(in, in_bytes), bytes_of(out, out_bytes)));
}
int mlx5dv_devx_obj_query(verbs::devx_obj* object, const void* in, size_t in_bytes, void* out, size_t out_bytes) {
  return outcome(of(object->owner)->real->obj_query(object->real, bytes_of(in, in_bytes), bytes_of(out, out_bytes)));
}
int mlx5dv_devx_obj_destroy(verbs::devx_obj* object) {
  const int error = outcome(of(object->owner)->real->obj_destroy(object->real));
  if (error == 0) delete object;
  return error;
}

int ibv_get_async_event(verbs::context* context, verbs::async_event* event) {
  shim_context& mine = *of(context);
  pull(mine);
  if (mine.of_ports.empty()) {
    errno = EAGAIN; // the descriptor is non-blocking, or the caller would hang here
    return -1;
  }
  const mlx5_event told = mine.of_ports.front();
  mine.of_ports.pop_front();
  *event = {};
  event->element.port_num = told.port;
  event->event_type = told.kind == mlx5_event_kind::port_up      ? verbs::event_port_active
                      : told.kind == mlx5_event_kind::port_down  ? verbs::event_port_err
                      : told.kind == mlx5_event_kind::gid_change ? verbs::event_gid_change
                                                                 : verbs::event_device_fatal;
  return 0;
}
void ibv_ack_async_event(verbs::async_event*) {}

verbs::devx_event_channel* mlx5dv_devx_create_event_channel(verbs::context* context, int) {
  auto* channel = new shim_channel;
  channel->base.fd = eventfd(0, EFD_CLOEXEC);
  channel->owner = of(context);
  return &channel->base;
}
void mlx5dv_devx_destroy_event_channel(verbs::devx_event_channel* channel) {
  ::close(channel->fd);
  delete reinterpret_cast<shim_channel*>(channel);
}
int mlx5dv_devx_subscribe_devx_event(verbs::devx_event_channel* channel, verbs::devx_obj* object, uint16_t, uint16_t[], uint64_t cookie) {
  reinterpret_cast<shim_channel*>(channel)->owner->cookies.emplace_back(object->number, cookie);
  return 0;
}
ssize_t mlx5dv_devx_get_event(verbs::devx_event_channel* channel, verbs::devx_event_header* out, size_t) {
  shim_context& mine = *reinterpret_cast<shim_channel*>(channel)->owner;
  pull(mine);
  while (!mine.of_queues.empty()) {
    const mlx5_event told = mine.of_queues.front();
    mine.of_queues.pop_front();
    const uint64_t opcode = told.kind == mlx5_event_kind::cq_error ? 0x400 : 0x500; // of the command that made it: the subscriber's cookie begins with it
    for (const auto& [number, cookie] : mine.cookies) {
      if (number != told.number || cookie >> 32 != opcode) continue;
      out->cookie = cookie;
      return sizeof *out;
    }
  }
  errno = EAGAIN;
  return -1;
}

#pragma GCC visibility pop
}
