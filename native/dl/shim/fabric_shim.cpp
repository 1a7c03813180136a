// libfabric with its provider "efa", as far as dl/libfabric_abi.hpp asks for it, over a driver of ours. Success and failure are told as that library tells them: 0 or a negative
// error number.
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "dl/libfabric_abi.hpp"
#include "dl/shim/fabric_attach.hpp"

namespace {

using namespace ep::dl;

std::atomic<efa_driver*> attached{nullptr};
fabric_shim_manner manner;

struct shim_info {
  fabric::info base{}; // first: the caller knows this part
  fabric::transmit_attr tx{};
  fabric::endpoint_attr ep{};
  fabric::domain_attr domain{};
  fabric::fabric_attr fabric{};
  fabric::fid_nic nic{};
  fabric::device_attr device{};
};

fabric::info* make_info() {
  auto* made = new shim_info;
  made->base.tx = &made->tx;
  made->base.ep = &made->ep;
  made->base.domain = &made->domain;
  made->base.fabric = &made->fabric;
  return &made->base;
}
shim_info& of(fabric::info* info) { return *reinterpret_cast<shim_info*>(info); }
const shim_info& of(const fabric::info* info) { return *reinterpret_cast<const shim_info*>(info); }
void name_device(shim_info& info, const std::string& name) {
  info.device.name = strdup(name.c_str());
  info.nic.device = &info.device;
  info.base.nic = &info.nic;
}

struct shim_fabric {
  fabric::fid_fabric base{};
};
struct shim_domain {
  fabric::fid_domain base{};
  std::unique_ptr<efa_device> real;
};
struct shim_av {
  fabric::fid_av base{};
  shim_domain* owner;
  std::map<fabric::address, efa_address> known;
  std::map<fabric::address, efa_peer> opened;
  fabric::address next = 0;
};
struct shim_cq {
  fabric::fid_cq base{};
  shim_domain* owner;
  efa_cq real;
};
struct shim_cntr {
  fabric::fid_cntr base{};
  shim_domain* owner;
  efa_counter real;
};
struct shim_mr {
  fabric::fid_mr base{};
  shim_domain* owner;
  efa_mr real;
};
struct shim_ep {
  fabric::fid_ep base{};
  shim_domain* owner;
  shim_av* av = nullptr;
  efa_endpoint_spec spec;
  efa_endpoint real;
};

template <class Value> int code_of(const ep::result<Value>& done) { return done.ok() ? 0 : -(done.why().sys_errno == 0 ? EINVAL : done.why().sys_errno); }
template <class Made> Made& as(void* at) { return *static_cast<Made*>(at); }

// ---- endings

fabric::ops_base fabric_ops{sizeof fabric_ops, [](fabric::fid* fid) { delete &as<shim_fabric>(fid); return 0; }, nullptr, nullptr, nullptr};
fabric::ops_base mr_ops{sizeof mr_ops,
                        [](fabric::fid* fid) {
                          auto& mr = as<shim_mr>(fid);
                          const int code = code_of(mr.owner->real->dereg_mr(mr.real));
                          if (code == 0) delete &mr;
                          return code;
                        },
                        nullptr, nullptr, nullptr};
fabric::ops_base cq_ops{sizeof cq_ops,
                        [](fabric::fid* fid) {
                          auto& cq = as<shim_cq>(fid);
                          const int code = code_of(cq.owner->real->destroy_cq(cq.real));
                          if (code == 0) delete &cq;
                          return code;
                        },
                        nullptr, nullptr, nullptr};
fabric::ops_base cntr_ops{sizeof cntr_ops,
                          [](fabric::fid* fid) {
                            auto& cntr = as<shim_cntr>(fid);
                            const int code = code_of(cntr.owner->real->close_counter(cntr.real));
                            if (code == 0) delete &cntr;
                            return code;
                          },
                          nullptr, nullptr, nullptr};
fabric::ops_base av_base_ops{sizeof av_base_ops, [](fabric::fid* fid) { delete &as<shim_av>(fid); return 0; }, nullptr, nullptr, nullptr};

// ---- endpoints

int ep_close(fabric::fid* fid) {
  auto& ep = as<shim_ep>(fid);
  const int code = ep.real.handle == nullptr ? 0 : code_of(ep.owner->real->destroy_endpoint(ep.real));
  if (code == 0) delete &ep;
  return code;
}
int ep_bind(fabric::fid* fid, fabric::fid* to, uint64_t flags) {
  auto& ep = as<shim_ep>(fid);
  if (ep.real.handle != nullptr) return -EOPNOTSUPP; // enabled: too late
  if (to->ops == &av_base_ops) ep.av = &as<shim_av>(to);
  else if (to->ops == &cq_ops) ep.spec.cq = as<shim_cq>(to).real;
  else if (to->ops == &cntr_ops) {
    if ((flags & fabric::right_write) != 0) ep.spec.written = as<shim_cntr>(to).real;
    if ((flags & fabric::right_read) != 0) ep.spec.read = as<shim_cntr>(to).real;
    if ((flags & fabric::right_remote_write) != 0) ep.spec.arrived = as<shim_cntr>(to).real;
  } else {
    return -EINVAL;
  }
  return 0;
}
int ep_control(fabric::fid* fid, int command, void*) {
  auto& ep = as<shim_ep>(fid);
  if (command != fabric::command_enable || ep.av == nullptr || ep.spec.cq.handle == nullptr) return -EINVAL;
  auto made = ep.owner->real->create_endpoint(ep.spec);
  if (made.ok()) ep.real = made.value();
  return code_of(made);
}
int ep_name(fabric::fid* fid, void* address, size_t* length) {
  const efa_address& own = as<shim_ep>(fid).real.address;
  if (*length < own.length) return -EINVAL;
  std::memcpy(address, own.bytes.data(), own.length);
  *length = own.length;
  return 0;
}
fabric::ops_base ep_ops{sizeof ep_ops, ep_close, ep_bind, ep_control, nullptr};
fabric::ops_cm ep_cm{sizeof ep_cm, nullptr, ep_name};

// ---- the address vector. The table of ours inserts for an endpoint, so it does when an endpoint asks.

int av_insert(fabric::fid_av* base, const void* addresses, size_t count, fabric::address* made, uint64_t, void*) {
  auto& av = as<shim_av>(base);
  if (count != 1) return -EINVAL;
  efa_address one;
  std::memcpy(one.bytes.data(), addresses, one.bytes.size());
  av.known[av.next] = one;
  *made = av.next++;
  return 1;
}
int av_remove(fabric::fid_av* base, fabric::address* of, size_t, uint64_t) {
  auto& av = as<shim_av>(base);
  const auto opened = av.opened.find(*of);
  const int code = opened == av.opened.end() ? 0 : code_of(av.owner->real->remove_address(opened->second));
  av.opened.erase(*of);
  av.known.erase(*of);
  return code;
}
fabric::ops_av av_ops{sizeof av_ops, av_insert, nullptr, nullptr, av_remove};

// ---- operations for requests that a GPU posts

int query_addr(fabric::fid_ep* ep, fabric::address at, uint16_t* ahn, uint16_t* qpn, uint32_t* qkey) {
  auto& from = as<shim_ep>(ep);
  const auto known = from.av->known.find(at);
  if (known == from.av->known.end()) return -EINVAL;
  known->second.length = from.real.address.length; // addresses of one device are of one length
  auto peer = from.owner->real->insert_address(from.real, known->second);
  if (!peer.ok()) return code_of(peer);
  from.av->opened[at] = peer.value();
  *ahn = peer.value().ah;
  *qpn = peer.value().qpn;
  *qkey = peer.value().qkey;
  return 0;
}
int query_qp_wqs(fabric::fid_ep* ep, fabric::gda_wq_attr* sq, fabric::gda_wq_attr* rq) {
  const efa_queue& real = as<shim_ep>(ep).real.sq;
  *sq = {reinterpret_cast<uint8_t*>(real.buffer), real.wqe_bytes, real.depth, reinterpret_cast<uint32_t*>(real.doorbell), real.max_batch,
         static_cast<uint16_t>(real.wide_ids ? fabric::gda_wide_ids : 0)};
  *rq = {};
  return 0;
}
int query_cq(fabric::fid_cq* cq, fabric::gda_cq_attr* out) {
  const efa_cq& real = as<shim_cq>(cq).real;
  *out = {reinterpret_cast<uint8_t*>(real.buffer), real.entry_bytes, real.depth};
  return 0;
}
uint64_t get_mr_lkey(fabric::fid_mr* mr) { return as<shim_mr>(mr).real.lkey; }

int cq_make(fabric::fid_domain* base, const efa_cq_spec& spec, fabric::fid_cq** made) {
  auto& domain = as<shim_domain>(base);
  auto cq = domain.real->create_cq(spec);
  if (!cq.ok()) return code_of(cq);
  auto* of = new shim_cq;
  of->base.base = {0, nullptr, &cq_ops};
  of->owner = &domain;
  of->real = cq.value();
  *made = &of->base;
  return 0;
}
int cq_open(fabric::fid_domain* base, fabric::cq_attr* attr, fabric::fid_cq** made, void*) {
  efa_cq_spec spec;
  spec.depth = static_cast<uint32_t>(attr->size);
  return cq_make(base, spec, made);
}
int cq_open_ext(fabric::fid_domain* base, fabric::cq_attr* attr, fabric::gda_cq_init* init, fabric::fid_cq** made, void*) {
  efa_cq_spec spec;
  spec.depth = static_cast<uint32_t>(attr->size);
  spec.ring = {reinterpret_cast<uint64_t>(init->memory.buffer), init->memory.length, static_cast<int>(init->memory.fd), init->memory.offset};
  return cq_make(base, spec, made);
}
efa_memory memory_of(const fabric::gda_location& at) {
  return {reinterpret_cast<uint64_t>(at.address), 8, at.type == 1 ? at.dmabuf.fd : -1, at.type == 1 ? at.dmabuf.offset : 0};
}
int cntr_open_ext(fabric::fid_domain* base, fabric::cntr_attr*, fabric::fid_cntr** made, void*, fabric::gda_counter_init* init) {
  auto& domain = as<shim_domain>(base);
  if (init->flags != (fabric::gda_counter_completed | fabric::gda_counter_failed)) return -EINVAL;
  auto counter = domain.real->open_counter({memory_of(init->completed), memory_of(init->failed)});
  if (!counter.ok()) return code_of(counter);
  auto* of = new shim_cntr;
  of->base.base = {0, nullptr, &cntr_ops};
  of->owner = &domain;
  of->real = counter.value();
  *made = &of->base;
  return 0;
}
fabric::gda_ops gda{query_addr, query_qp_wqs, query_cq, cq_open_ext, get_mr_lkey, cntr_open_ext};

// ---- the domain

int domain_close(fabric::fid* fid) {
  auto& domain = as<shim_domain>(fid);
  const int code = code_of(domain.real->close());
  if (code == 0) delete &domain;
  return code;
}
int domain_ops_open(fabric::fid*, const char* name, uint64_t, void** ops, void*) {
  if (!manner.gda || std::strcmp(name, fabric::gda_ops_name) != 0) return -EINVAL;
  *ops = &gda;
  return 0;
}
int regattr(fabric::fid* base, const fabric::mr_attr* attr, uint64_t flags, fabric::fid_mr** made) {
  auto& domain = as<shim_domain>(base);
  efa_memory memory;
  if ((flags & fabric::flag_mr_dmabuf) != 0) {
    memory = {reinterpret_cast<uint64_t>(attr->dmabuf->base), attr->dmabuf->length, attr->dmabuf->fd, attr->dmabuf->offset};
  } else {
    memory.address = reinterpret_cast<uint64_t>(attr->vector->base);
    memory.byte_length = attr->vector->length;
  }
  uint32_t access = 0;
  if ((attr->rights & fabric::right_read) != 0) access |= EFA_ACCESS_LOCAL_WRITE;
  if ((attr->rights & fabric::right_remote_write) != 0) access |= EFA_ACCESS_REMOTE_WRITE;
  if ((attr->rights & fabric::right_remote_read) != 0) access |= EFA_ACCESS_REMOTE_READ;
  auto mr = domain.real->reg_mr(memory, access);
  if (!mr.ok()) return code_of(mr);
  auto* of = new shim_mr;
  of->base.base = {0, nullptr, &mr_ops};
  of->base.key = mr.value().rkey;
  of->owner = &domain;
  of->real = mr.value();
  *made = &of->base;
  return 0;
}
int av_open(fabric::fid_domain* base, fabric::av_attr*, fabric::fid_av** made, void*) {
  auto* av = new shim_av;
  av->base.base = {0, nullptr, &av_base_ops};
  av->base.ops = &av_ops;
  av->owner = &as<shim_domain>(base);
  *made = &av->base;
  return 0;
}
int endpoint(fabric::fid_domain* base, fabric::info* info, fabric::fid_ep** made, void*) {
  auto* ep = new shim_ep;
  ep->base.base = {0, nullptr, &ep_ops};
  ep->base.cm = &ep_cm;
  ep->owner = &as<shim_domain>(base);
  ep->spec.depth = static_cast<uint32_t>(info->tx->size);
  *made = &ep->base;
  return 0;
}
fabric::ops_base domain_base_ops{sizeof domain_base_ops, domain_close, nullptr, nullptr, domain_ops_open};
fabric::ops_domain domain_ops{sizeof domain_ops, av_open, cq_open, endpoint};
fabric::ops_mr domain_mr{sizeof domain_mr, nullptr, nullptr, regattr};

int domain_open(fabric::fid_fabric*, fabric::info* info, fabric::fid_domain** made, void*) {
  auto real = attached.load()->open(info->nic->device->name);
  if (!real.ok()) return code_of(real);
  auto* domain = new shim_domain;
  domain->base.base = {0, nullptr, &domain_base_ops};
  domain->base.ops = &domain_ops;
  domain->base.mr = &domain_mr;
  domain->real = std::move(real.value());
  *made = &domain->base;
  return 0;
}
fabric::ops_fabric fabric_calls{sizeof fabric_calls, domain_open, nullptr, nullptr, nullptr, nullptr};

} // namespace

extern "C" {

#pragma GCC visibility push(default)

void ep_fabric_shim_attach(ep::dl::efa_driver* driver, const ep::dl::fabric_shim_manner* how) {
  attached.store(driver);
  manner = *how;
}

uint32_t fi_version() { return manner.version; }
const char* fi_strerror(int error) { return std::strerror(error); }

fabric::info* fi_dupinfo(const fabric::info* from) {
  fabric::info* made = make_info();
  if (from == nullptr) return made;
  const shim_info& source = of(from);
  shim_info& copy = of(made);
  copy.base.caps = source.base.caps;
  copy.tx = source.tx;
  copy.ep = source.ep;
  copy.domain = source.domain;
  if (source.device.name != nullptr) name_device(copy, source.device.name);
  return made;
}

void fi_freeinfo(fabric::info* list) {
  while (list != nullptr) {
    shim_info& one = of(list);
    list = one.base.next;
    std::free(one.fabric.name);
    std::free(one.fabric.provider);
    std::free(one.device.name);
    delete &one;
  }
}

int fi_getinfo(uint32_t version, const char*, const char*, uint64_t, const fabric::info* hints, fabric::info** found) {
  const bool direct = hints->fabric->name != nullptr && std::strcmp(hints->fabric->name, "efa-direct") == 0 && hints->fabric->provider != nullptr &&
                      std::strcmp(hints->fabric->provider, "efa") == 0;
  if (version > manner.version || !direct || hints->ep->type != fabric::endpoint_rdm) return -EINVAL;
  efa_driver* driver = attached.load();
  if (driver == nullptr) return -fabric::error_no_data;
  auto listed = driver->list_devices();
  if (!listed.ok()) return code_of(listed);
  *found = nullptr;
  for (const efa_device_info& device : listed.value()) {
    fabric::info* made = make_info();
    made->caps = hints->caps;
    made->tx->size = 1024;
    made->ep->max_message = uint64_t{1} << 30;
    made->domain->ep_count = manner.endpoints;
    made->domain->cntr_count = manner.counters;
    name_device(of(made), device.name);
    made->next = *found;
    *found = made;
  }
  return *found == nullptr ? -fabric::error_no_data : 0;
}

int fi_fabric(fabric::fabric_attr*, fabric::fid_fabric** made, void*) {
  auto* fabric = new shim_fabric;
  fabric->base.base = {0, nullptr, &fabric_ops};
  fabric->base.ops = &fabric_calls;
  *made = &fabric->base;
  return 0;
}

#pragma GCC visibility pop
}
