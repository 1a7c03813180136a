// libfabric with one provider, "shim": a reliable endpoint with messages and RMA between endpoints of this process, as far as dl/libfabric_rdm_abi.hpp asks for it, which registers
// memory of a GPU. For tests of what registration gets; no part of what is installed.
//
// A region of a DMA-BUF is reached through its file alone, at its offset: a wrong one is seen in the bytes. Memory of a GPU without a descriptor is refused, as by providers with
// FI_MR_HMEM. EP_RDM_SHIM holds words: version=1.17 (2.1 unless given), no-hmem, no-dmabuf (fi_mr_regattr refuses it). Each registration is a line of the file that EP_RDM_SHIM_LOG
// names: flags, then the bytes of the attributes and of what they point to, in hexadecimal.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "dl/libfabric_rdm_abi.hpp"

namespace {

using namespace ep::dl;

constexpr size_t inject_bytes = 64;

std::string manner() {
  const char* text = std::getenv("EP_RDM_SHIM");
  return text == nullptr ? "" : text;
}
bool has(const char* word) { return manner().find(word) != std::string::npos; }

struct shim_info {
  fabric::info base{}; // first: the caller knows this part
  fabric::transmit_attr tx{};
  fabric::endpoint_attr ep{};
  fabric::domain_attr domain{};
  fabric::fabric_attr fabric{};
};
fabric::info* make_info() {
  auto* made = new shim_info;
  made->base.tx = &made->tx;
  made->base.ep = &made->ep;
  made->base.domain = &made->domain;
  made->base.fabric = &made->fabric;
  return &made->base;
}

struct shim_mr {
  fabric::fid_mr base{};
  uint8_t* bytes = nullptr; // as the shim reaches them
  uint64_t first = 0;       // as requests name the first one
  size_t length = 0;
  bool of_gpu = false;
  void* mapped = nullptr;
  size_t mapped_length = 0;
};
struct shim_cq {
  fabric::fid_cq base{};
  std::deque<fabric::cq_data_entry> entries;
};
struct posted {
  void* buffer;
  size_t length;
  void* context;
};
struct shim_ep {
  fabric::fid_ep base{};
  shim_cq* cq = nullptr;
  uint64_t number = 0;
  std::deque<posted> receives;
  std::deque<std::vector<uint8_t>> waiting; // messages without a buffer yet
};
// HAZARD: never destroyed: threads of the process may outlive what is.
struct network {
  std::mutex mutex;
  uint64_t next = 1;
  std::map<uint64_t, shim_ep*> endpoints;
  std::map<uint64_t, shim_mr*> regions; // by key
};
network& net() {
  static auto* made = new network;
  return *made;
}
template <class Made> Made& as(void* at) { return *static_cast<Made*>(at); }
template <class Made> int drop(fabric::fid* fid) {
  delete &as<Made>(fid);
  return 0;
}

// ---- memory

std::string hex(const void* from, size_t bytes) {
  std::string text;
  char two[3];
  for (size_t i = 0; i < bytes; ++i) {
    std::snprintf(two, sizeof two, "%02x", static_cast<const uint8_t*>(from)[i]);
    text += two;
  }
  return text;
}
void record(const fabric::mr_attr& attr, uint64_t flags) {
  const char* path = std::getenv("EP_RDM_SHIM_LOG");
  if (path == nullptr) return;
  FILE* file = std::fopen(path, "a");
  if (file == nullptr) std::abort(); // a test cannot go on
  const bool dmabuf = (flags & fabric::flag_mr_dmabuf) != 0;
  const std::string of = dmabuf ? hex(attr.dmabuf, sizeof *attr.dmabuf) : hex(attr.vector, sizeof *attr.vector);
  std::fprintf(file, "%llx %s %s\n", static_cast<unsigned long long>(flags), hex(&attr, sizeof attr).c_str(), of.c_str());
  std::fclose(file);
}
fabric::ops_base mr_ops{sizeof mr_ops,
                        [](fabric::fid* fid) {
                          auto& mr = as<shim_mr>(fid);
                          const std::lock_guard lock(net().mutex);
                          net().regions.erase(mr.base.key);
                          if (mr.mapped != nullptr) munmap(mr.mapped, mr.mapped_length);
                          delete &mr;
                          return 0;
                        },
                        nullptr, nullptr, nullptr};
int regattr(fabric::fid*, const fabric::mr_attr* attr, uint64_t flags, fabric::fid_mr** made) {
  const std::lock_guard lock(net().mutex);
  record(*attr, flags);
  const bool dmabuf = (flags & fabric::flag_mr_dmabuf) != 0;
  if (dmabuf && has("no-dmabuf")) return -EOPNOTSUPP;
  if (attr->count != 1 || net().regions.contains(attr->requested_key)) return -EINVAL;
  auto* mr = new shim_mr;
  mr->base.base = {0, nullptr, &mr_ops};
  mr->base.key = attr->requested_key;
  mr->base.descriptor = mr;
  mr->of_gpu = attr->memory == fabric::memory_cuda;
  if (dmabuf) {
    mr->length = attr->dmabuf->length;
    mr->mapped_length = attr->dmabuf->offset + attr->dmabuf->length;
    mr->mapped = mmap(nullptr, mr->mapped_length, PROT_READ | PROT_WRITE, MAP_SHARED, attr->dmabuf->fd, 0);
    if (mr->mapped == MAP_FAILED) {
      delete mr;
      return -EINVAL;
    }
    mr->bytes = static_cast<uint8_t*>(mr->mapped) + attr->dmabuf->offset;
    mr->first = reinterpret_cast<uint64_t>(attr->dmabuf->base) + attr->dmabuf->offset;
  } else {
    mr->length = attr->vector->length;
    mr->bytes = static_cast<uint8_t*>(attr->vector->base);
    mr->first = reinterpret_cast<uint64_t>(attr->vector->base);
  }
  net().regions[mr->base.key] = mr;
  *made = &mr->base;
  return 0;
}

// Where a run of a region is; null: not in it.
uint8_t* within(const shim_mr* mr, uint64_t at, size_t length) {
  return mr != nullptr && at >= mr->first && length <= mr->length && at - mr->first <= mr->length - length ? mr->bytes + (at - mr->first) : nullptr;
}
shim_mr* region_of(uint64_t key) {
  const auto known = net().regions.find(key);
  return known == net().regions.end() ? nullptr : known->second;
}
// What a request names of this process. Null: memory of a GPU without its descriptor.
uint8_t* local(const void* buffer, size_t length, void* descriptor) {
  const auto at = reinterpret_cast<uint64_t>(buffer);
  if (descriptor != nullptr) return within(static_cast<shim_mr*>(descriptor), at, length);
  for (const auto& [key, mr] : net().regions) {
    if (mr->of_gpu && at < mr->first + mr->length && mr->first < at + length) return nullptr;
  }
  return static_cast<uint8_t*>(const_cast<void*>(buffer));
}

// ---- requests, each carried out as it is posted

void tell(shim_ep& ep, void* context, uint64_t flags, size_t length, uint64_t data) { ep.cq->entries.push_back({context, flags, length, nullptr, data}); }
void deliver(shim_ep& to) {
  while (!to.waiting.empty() && !to.receives.empty()) {
    const std::vector<uint8_t> bytes = std::move(to.waiting.front());
    const posted one = to.receives.front();
    to.waiting.pop_front();
    to.receives.pop_front();
    std::memcpy(one.buffer, bytes.data(), std::min(bytes.size(), one.length));
    tell(to, one.context, fabric::right_recv, bytes.size(), 0);
  }
}
ssize_t receive(fabric::fid_ep* base, void* buffer, size_t length, void*, fabric::address, void* context) {
  const std::lock_guard lock(net().mutex);
  auto& ep = as<shim_ep>(base);
  ep.receives.push_back({buffer, length, context});
  deliver(ep);
  return 0;
}
// Under the mutex.
ssize_t hand_to(fabric::address target, const void* buffer, size_t length) {
  const auto to = net().endpoints.find(target);
  if (to == net().endpoints.end()) return -EHOSTUNREACH;
  const auto* bytes = static_cast<const uint8_t*>(buffer);
  to->second->waiting.emplace_back(bytes, bytes + length);
  deliver(*to->second);
  return 0;
}
ssize_t send(fabric::fid_ep* base, const void* buffer, size_t length, void*, fabric::address target, void* context) {
  const std::lock_guard lock(net().mutex);
  const ssize_t code = hand_to(target, buffer, length);
  if (code == 0) tell(as<shim_ep>(base), context, fabric::right_send, length, 0);
  return code;
}
ssize_t rma_write(fabric::fid_ep* base, const void* buffer, size_t length, void* descriptor, uint64_t data, fabric::address target, uint64_t at, uint64_t key, void* context) {
  const std::lock_guard lock(net().mutex);
  const auto to = net().endpoints.find(target);
  if (to == net().endpoints.end()) return -EHOSTUNREACH;
  const uint8_t* from = local(buffer, length, descriptor);
  uint8_t* into = within(region_of(key), at, length);
  if (from == nullptr || into == nullptr) return -EFAULT;
  std::memcpy(into, from, length);
  tell(*to->second, nullptr, fabric::flag_remote_cq_data, length, data);
  tell(as<shim_ep>(base), context, fabric::right_write, length, 0);
  return 0;
}
ssize_t rma_read(fabric::fid_ep* base, void* buffer, size_t length, void* descriptor, fabric::address target, uint64_t at, uint64_t key, void* context) {
  const std::lock_guard lock(net().mutex);
  if (!net().endpoints.contains(target)) return -EHOSTUNREACH;
  uint8_t* into = local(buffer, length, descriptor);
  const uint8_t* from = within(region_of(key), at, length);
  if (from == nullptr || into == nullptr) return -EFAULT;
  std::memcpy(into, from, length);
  tell(as<shim_ep>(base), context, fabric::right_read, length, 0);
  return 0;
}
ssize_t inject(fabric::fid_ep*, const void* buffer, size_t length, fabric::address target) {
  const std::lock_guard lock(net().mutex);
  return length > inject_bytes ? -EMSGSIZE : hand_to(target, buffer, length);
}
fabric::ops_msg msg_ops{sizeof msg_ops, receive, nullptr, nullptr, send, nullptr, nullptr, inject};
fabric::ops_rma rma_ops{sizeof rma_ops, rma_read, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, rma_write};

// ---- endpoints, queues, addresses

fabric::ops_base cq_base_ops{sizeof cq_base_ops, drop<shim_cq>, nullptr, nullptr, nullptr};
fabric::ops_base av_base_ops{sizeof av_base_ops, drop<fabric::fid_av>, nullptr, nullptr, nullptr};
fabric::ops_base fabric_base_ops{sizeof fabric_base_ops, drop<fabric::fid_fabric>, nullptr, nullptr, nullptr};
fabric::ops_base domain_base_ops{sizeof domain_base_ops, drop<fabric::fid_domain>, nullptr, nullptr, nullptr};

ssize_t cq_read(fabric::fid_cq* base, void* entries, size_t count) {
  const std::lock_guard lock(net().mutex);
  auto& cq = as<shim_cq>(base);
  size_t got = 0;
  for (; got < count && !cq.entries.empty(); ++got) {
    static_cast<fabric::cq_data_entry*>(entries)[got] = cq.entries.front();
    cq.entries.pop_front();
  }
  return got == 0 ? -EAGAIN : static_cast<ssize_t>(got);
}
ssize_t cq_no_error(fabric::fid_cq*, fabric::cq_error_entry*, uint64_t) { return -EAGAIN; }
fabric::ops_cq cq_ops{sizeof cq_ops, cq_read, nullptr, cq_no_error};
int cq_open(fabric::fid_domain*, fabric::cq_attr* attr, fabric::fid_cq** made, void*) {
  if (attr->wait_object != fabric::wait_none) return -ENOSYS;
  auto* cq = new shim_cq;
  cq->base.base = {0, nullptr, &cq_base_ops};
  cq->base.ops = &cq_ops;
  *made = &cq->base;
  return 0;
}

int av_insert(fabric::fid_av*, const void* addresses, size_t, fabric::address* made, uint64_t, void*) {
  std::memcpy(made, addresses, sizeof *made);
  return 1;
}
fabric::ops_av av_ops{sizeof av_ops, av_insert, nullptr, nullptr, nullptr};
int av_open(fabric::fid_domain*, fabric::av_attr*, fabric::fid_av** made, void*) {
  auto* av = new fabric::fid_av{};
  av->base = {0, nullptr, &av_base_ops};
  av->ops = &av_ops;
  *made = av;
  return 0;
}

int ep_close(fabric::fid* fid) {
  const std::lock_guard lock(net().mutex);
  net().endpoints.erase(as<shim_ep>(fid).number);
  delete &as<shim_ep>(fid);
  return 0;
}
int ep_bind(fabric::fid* fid, fabric::fid* to, uint64_t) {
  if (to->ops == &cq_base_ops) as<shim_ep>(fid).cq = &as<shim_cq>(to);
  return 0;
}
int ep_control(fabric::fid* fid, int command, void*) {
  if (command != fabric::command_enable || as<shim_ep>(fid).cq == nullptr) return -EINVAL;
  const std::lock_guard lock(net().mutex);
  as<shim_ep>(fid).number = net().next++;
  net().endpoints[as<shim_ep>(fid).number] = &as<shim_ep>(fid);
  return 0;
}
int ep_name(fabric::fid* fid, void* address, size_t* length) {
  if (*length < sizeof(uint64_t)) return -EINVAL;
  *length = sizeof(uint64_t);
  std::memcpy(address, &as<shim_ep>(fid).number, *length);
  return 0;
}
fabric::ops_base ep_ops{sizeof ep_ops, ep_close, ep_bind, ep_control, nullptr};
fabric::ops_cm ep_cm{sizeof ep_cm, nullptr, ep_name};
int endpoint(fabric::fid_domain*, fabric::info*, fabric::fid_ep** made, void*) {
  auto* ep = new shim_ep;
  ep->base.base = {0, nullptr, &ep_ops};
  ep->base.cm = &ep_cm;
  ep->base.msg = &msg_ops;
  ep->base.rma = &rma_ops;
  *made = &ep->base;
  return 0;
}

fabric::ops_domain domain_ops{sizeof domain_ops, av_open, cq_open, endpoint};
fabric::ops_mr domain_mr{sizeof domain_mr, nullptr, nullptr, regattr};
int domain_open(fabric::fid_fabric*, fabric::info*, fabric::fid_domain** made, void*) {
  auto* domain = new fabric::fid_domain{};
  domain->base = {0, nullptr, &domain_base_ops};
  domain->ops = &domain_ops;
  domain->mr = &domain_mr;
  *made = domain;
  return 0;
}
fabric::ops_fabric fabric_calls{sizeof fabric_calls, domain_open, nullptr, nullptr, nullptr, nullptr};

} // namespace

extern "C" {

#pragma GCC visibility push(default)

uint32_t fi_version() { return has("version=1.17") ? fabric::version_of(1, 17) : fabric::version_of(2, 1); }
const char* fi_strerror(int error) { return std::strerror(error); }
fabric::info* fi_dupinfo(const fabric::info*) { return make_info(); }
void fi_freeinfo(fabric::info* list) {
  while (list != nullptr) {
    auto* one = reinterpret_cast<shim_info*>(list);
    list = list->next;
    std::free(one->fabric.provider);
    std::free(one->domain.name);
    delete one;
  }
}
int fi_getinfo(uint32_t version, const char*, const char*, uint64_t, const fabric::info* hints, fabric::info** found) {
  const bool named = hints->fabric->provider != nullptr && std::strcmp(hints->fabric->provider, "shim") == 0;
  const bool gpu = (hints->caps & fabric::cap_hmem) != 0;
  if (version > fi_version()) return -ENOSYS;
  if (!named || (hints->caps & fabric::cap_atomic) != 0 || (gpu && has("no-hmem"))) return -fabric::error_no_data;
  fabric::info* made = make_info();
  made->caps = hints->caps;
  made->ep->max_message = 1000; // so that most puts take several pieces
  made->domain->cq_data_size = 4;
  made->tx->inject_size = inject_bytes;
  made->domain->mr_key_size = 8;
  made->domain->mr_mode = fabric::mr_virtual_address | (gpu ? fabric::mr_hmem : 0);
  made->domain->name = strdup("shim0");
  made->fabric->provider = strdup("shim");
  *found = made;
  return 0;
}
int fi_fabric(fabric::fabric_attr*, fabric::fid_fabric** made, void*) {
  auto* fabric = new fabric::fid_fabric{};
  fabric->base = {0, nullptr, &fabric_base_ops};
  fabric->ops = &fabric_calls;
  *made = fabric;
  return 0;
}

#pragma GCC visibility pop
}
