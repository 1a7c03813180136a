#include "efa_libfabric.hpp"

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "libfabric_symbols.hpp"

namespace ep::dl {
namespace {

std::string name_of(const fabric::info& one) {
  if (one.nic != nullptr && one.nic->device != nullptr && one.nic->device->name != nullptr) return one.nic->device->name;
  return one.domain->name == nullptr ? "" : one.domain->name;
}

class libfabric_device final : public efa_device {
 public:
  libfabric_device(libfabric_ref lib, std::string name, fabric::info* info) : lib_(std::move(lib)), name_(std::move(name)), info_(info) {}
  ~libfabric_device() override { (void)release(); }

  // fabric, domain, address vector, operations.
  result<nothing> start() {
    if (const int code = lib_->fabric(info_->fabric, &fabric_, nullptr); code != 0) return libfabric_refused(*lib_, "fi_fabric", code, name_);
    if (const int code = fabric_->ops->domain(fabric_, info_, &domain_, nullptr); code != 0) return libfabric_refused(*lib_, "fi_domain", code, name_);
    void* ops = nullptr;
    if (const int code = domain_->base.ops->ops_open(&domain_->base, fabric::gda_ops_name, 0, &ops, nullptr); code != 0 || ops == nullptr) {
      failure why = libfabric_refused(*lib_, "fi_open_ops", code, name_ + " has no operations for requests that a GPU posts");
      why.sys_errno = EOPNOTSUPP;
      return why;
    }
    ops_ = static_cast<fabric::gda_ops*>(ops);
    fabric::av_attr attr{};
    attr.type = fabric::av_table;
    if (const int code = domain_->ops->av_open(domain_, &attr, &av_, nullptr); code != 0) return libfabric_refused(*lib_, "fi_av_open", code, name_);
    const fabric::domain_attr& domain = *info_->domain;
    can_.max_depth = static_cast<uint32_t>(info_->tx->size);
    can_.max_endpoints = static_cast<uint32_t>(domain.ep_count);
    can_.max_counters = static_cast<uint32_t>(domain.cntr_count);
    can_.max_message = info_->ep->max_message;
    can_.read = (info_->caps & fabric::cap_rma) != 0;
    return probe_counter();
  }

  const std::string& name() const override { return name_; }
  const efa_capabilities& capabilities() const override { return can_; }

  result<nothing> close() override {
    if (const int64_t alive = alive_.load(); alive != 0) return failure{EP_STATUS_SYSTEM, EBUSY, "closing " + name_ + ": " + std::to_string(alive) + " objects of it live"};
    if (const int code = release(); code != 0) return libfabric_refused(*lib_, "fi_close", code, name_);
    return nothing{};
  }

  result<efa_mr> reg_mr(const efa_memory& memory, uint32_t access) override {
    if (memory.byte_length == 0) return failure{EP_STATUS_SYSTEM, EINVAL, "fi_mr_regattr: " + name_ + ": no bytes"};
    const fabric::io_vector vector{reinterpret_cast<void*>(memory.address), memory.byte_length};
    const fabric::mr_dmabuf dmabuf{memory.dmabuf_fd, memory.dmabuf_offset, memory.byte_length, reinterpret_cast<void*>(memory.address)};
    fabric::mr_attr attr{};
    attr.vector = &vector;
    if (memory.dmabuf_fd >= 0) {
      attr.dmabuf = &dmabuf;
      attr.memory = fabric::memory_cuda;
    }
    attr.count = 1;
    attr.rights = fabric::right_send | fabric::right_write;
    if ((access & EFA_ACCESS_LOCAL_WRITE) != 0) attr.rights |= fabric::right_recv | fabric::right_read;
    if ((access & EFA_ACCESS_REMOTE_WRITE) != 0) attr.rights |= fabric::right_remote_write;
    if ((access & EFA_ACCESS_REMOTE_READ) != 0) attr.rights |= fabric::right_remote_read;
    fabric::fid_mr* made = nullptr;
    const int code = domain_->mr->regattr(&domain_->base, &attr, memory.dmabuf_fd >= 0 ? fabric::flag_mr_dmabuf : 0, &made);
    if (code != 0) return libfabric_refused(*lib_, "fi_mr_regattr", code, name_ + ": " + std::to_string(memory.byte_length) + " bytes");
    ++alive_;
    return efa_mr{made, static_cast<uint32_t>(ops_->get_mr_lkey(made)), static_cast<uint32_t>(made->key)};
  }
  result<nothing> dereg_mr(const efa_mr& mr) override { return end(mr.handle, "memory region"); }

  result<efa_cq> create_cq(const efa_cq_spec& spec) override {
    fabric::cq_attr attr{};
    attr.size = spec.depth;
    attr.format = fabric::cq_format_context;
    fabric::fid_cq* made = nullptr;
    int code = 0;
    if (spec.ring.byte_length == 0) {
      code = domain_->ops->cq_open(domain_, &attr, &made, nullptr);
    } else {
      fabric::gda_cq_init init{};
      init.flags = fabric::gda_cq_dmabuf;
      init.memory = {reinterpret_cast<uint8_t*>(spec.ring.address), spec.ring.byte_length, spec.ring.dmabuf_offset, static_cast<uint32_t>(spec.ring.dmabuf_fd)};
      code = ops_->cq_open_ext(domain_, &attr, &init, &made, nullptr);
    }
    if (code != 0) return libfabric_refused(*lib_, "fi_cq_open", code, name_ + ": " + std::to_string(spec.depth) + " entries");
    ++alive_;
    fabric::gda_cq_attr queried{};
    code = ops_->query_cq(made, &queried);
    const bool usable = code == 0 && std::has_single_bit(queried.num_entries) && queried.num_entries >= spec.depth;
    if (!usable) {
      (void)end(made, "completion queue");
      if (code != 0) return libfabric_refused(*lib_, "query_cq", code, name_);
      return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "query_cq: " + name_ + ": a ring of " + std::to_string(queried.num_entries) + " entries, where a power of two from " + std::to_string(spec.depth) + " up was expected"};
    }
    const auto buffer = spec.ring.byte_length == 0 ? reinterpret_cast<uint64_t>(queried.buffer) : spec.ring.address;
    return efa_cq{made, buffer, queried.num_entries, queried.entry_size};
  }
  result<nothing> destroy_cq(const efa_cq& cq) override { return end(cq.handle, "completion queue"); }

  result<efa_counter> open_counter(const efa_counter_spec& spec) override {
    fabric::cntr_attr attr{};
    fabric::gda_counter_init init{};
    init.flags = fabric::gda_counter_completed | fabric::gda_counter_failed;
    init.completed = location_of(spec.completed);
    init.failed = location_of(spec.failed);
    fabric::fid_cntr* made = nullptr;
    const int code = ops_->cntr_open_ext(domain_, &attr, &made, nullptr, &init);
    if (code != 0) return libfabric_refused(*lib_, "cntr_open_ext", code, name_ + (code == -ENOMEM ? ": the device has no more completion counters; other processes may hold some" : ""));
    ++alive_;
    return efa_counter{made};
  }
  result<nothing> close_counter(const efa_counter& counter) override { return end(counter.handle, "counter"); }

  result<efa_endpoint> create_endpoint(const efa_endpoint_spec& spec) override {
    libfabric_infos copy(lib_, lib_->dupinfo(info_));
    if (copy.list == nullptr) return failure{EP_STATUS_SYSTEM, ENOMEM, "fi_dupinfo: " + name_};
    copy.list->tx->size = spec.depth;
    fabric::fid_ep* made = nullptr;
    if (const int code = domain_->ops->endpoint(domain_, copy.list, &made, nullptr); code != 0) return libfabric_refused(*lib_, "fi_endpoint", code, name_);
    ++alive_;
    efa_endpoint endpoint;
    endpoint.handle = made;
    if (auto ready = prepare(*made, spec, endpoint); !ready.ok()) {
      (void)end(made, "endpoint");
      return ready.why();
    }
    return endpoint;
  }
  result<nothing> destroy_endpoint(const efa_endpoint& endpoint) override { return end(endpoint.handle, "endpoint"); }

  result<efa_peer> insert_address(const efa_endpoint& of, const efa_address& peer) override {
    auto at = insert(static_cast<fabric::fid_ep*>(of.handle), peer);
    if (!at.ok()) return at.why();
    ++alive_;
    return at;
  }
  result<nothing> remove_address(const efa_peer& peer) override {
    fabric::address at = handle_address(peer.handle);
    if (const int code = av_->ops->remove(av_, &at, 1, 0); code != 0) return libfabric_refused(*lib_, "fi_av_remove", code, name_);
    --alive_;
    return nothing{};
  }

  // The operations tell of nothing: what breaks shows in completions.
  result<bool> poll_async(efa_event&) override { return false; }

 private:
  // A table index from 0 cannot be a handle as it is: null means none.
  static void* address_handle(fabric::address at) { return reinterpret_cast<void*>(at + 1); }
  static fabric::address handle_address(void* handle) { return reinterpret_cast<uint64_t>(handle) - 1; }

  static fabric::gda_location location_of(const efa_memory& memory) {
    fabric::gda_location at{};
    at.address = reinterpret_cast<uint8_t*>(memory.address);
    if (memory.dmabuf_fd >= 0) {
      at.type = 1;
      at.dmabuf = {memory.dmabuf_offset, memory.dmabuf_fd, 0};
    }
    return at;
  }

  // Whether there are counters shows when one is opened, and then it is time to say so.
  result<nothing> probe_counter() {
    alignas(8) static uint64_t words[2];
    auto counter = open_counter({{reinterpret_cast<uint64_t>(&words[0]), 8}, {reinterpret_cast<uint64_t>(&words[1]), 8}});
    if (counter.ok()) {
      can_.counters = true;
      return close_counter(counter.value());
    }
    if (counter.why().sys_errno == EOPNOTSUPP || counter.why().sys_errno == ENOSYS) return nothing{};
    return counter.why();
  }

  result<efa_peer> insert(fabric::fid_ep* of, const efa_address& peer) {
    fabric::address at = 0;
    const int inserted = av_->ops->insert(av_, peer.bytes.data(), 1, &at, 0, nullptr);
    if (inserted != 1) {
      return failure{EP_STATUS_SYSTEM, EHOSTUNREACH, "fi_av_insert: " + name_ + ": the address was not taken: another network, or another availability zone"};
    }
    efa_peer found;
    found.handle = address_handle(at);
    if (const int code = ops_->query_addr(of, at, &found.ah, &found.qpn, &found.qkey); code != 0) {
      (void)av_->ops->remove(av_, &at, 1, 0);
      return libfabric_refused(*lib_, "query_addr", code, name_);
    }
    return found;
  }

  result<nothing> prepare(fabric::fid_ep& ep, const efa_endpoint_spec& spec, efa_endpoint& endpoint) {
    const auto bind = [&](void* to, uint64_t flags, const char* what) -> result<nothing> {
      const int code = ep.base.ops->bind(&ep.base, static_cast<fabric::fid*>(to), flags);
      return code == 0 ? result<nothing>(nothing{}) : result<nothing>(libfabric_refused(*lib_, "fi_ep_bind", code, name_ + ": " + what));
    };
    if (auto bound = bind(spec.cq.handle, fabric::right_send | fabric::right_recv, "completion queue"); !bound.ok()) return bound;
    if (auto bound = bind(av_, 0, "address vector"); !bound.ok()) return bound;
    // HAZARD: counters are bound before the endpoint is enabled, or never.
    if (spec.written.handle != nullptr) {
      const uint64_t both = spec.read.handle == spec.written.handle ? fabric::right_write | fabric::right_read : fabric::right_write;
      if (auto bound = bind(spec.written.handle, both, "counter of writes"); !bound.ok()) return bound;
    }
    if (spec.read.handle != nullptr && spec.read.handle != spec.written.handle) {
      if (auto bound = bind(spec.read.handle, fabric::right_read, "counter of reads"); !bound.ok()) return bound;
    }
    if (spec.arrived.handle != nullptr) {
      if (auto bound = bind(spec.arrived.handle, fabric::right_remote_write, "counter of arrivals"); !bound.ok()) return bound;
    }
    if (const int code = ep.base.ops->control(&ep.base, fabric::command_enable, nullptr); code != 0) return libfabric_refused(*lib_, "fi_enable", code, name_);

    fabric::gda_wq_attr sq{};
    fabric::gda_wq_attr rq{};
    if (const int code = ops_->query_qp_wqs(&ep, &sq, &rq); code != 0) return libfabric_refused(*lib_, "query_qp_wqs", code, name_);
    if (!std::has_single_bit(sq.num_entries) || (sq.entry_size != 64 && sq.entry_size != 128)) {
      return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, "query_qp_wqs: " + name_ + ": " + std::to_string(sq.num_entries) + " requests of " + std::to_string(sq.entry_size) + " bytes, where a power of two of 64 or 128 was expected"};
    }
    const uint32_t batch = sq.max_batch == 0 ? sq.num_entries : sq.max_batch;
    endpoint.sq = {reinterpret_cast<uint64_t>(sq.buffer), reinterpret_cast<uint64_t>(sq.doorbell), sq.num_entries, sq.entry_size, batch, (sq.caps & fabric::gda_wide_ids) != 0};
    size_t length = endpoint.address.bytes.size();
    if (const int code = ep.cm->get_name(&ep.base, endpoint.address.bytes.data(), &length); code != 0) return libfabric_refused(*lib_, "fi_getname", code, name_);
    endpoint.address.length = static_cast<uint32_t>(length);
    // One's own number is what peers will be told.
    auto own = insert(&ep, endpoint.address);
    if (!own.ok()) return own.why();
    endpoint.qpn = own.value().qpn;
    fabric::address at = handle_address(own.value().handle);
    (void)av_->ops->remove(av_, &at, 1, 0);
    return nothing{};
  }

  result<nothing> end(void* handle, const char* what) {
    if (const int code = libfabric_close(handle); code != 0) return libfabric_refused(*lib_, "fi_close", code, name_ + ": " + what);
    --alive_;
    return nothing{};
  }

  int release() {
    int first = 0;
    const auto keep = [&](int code) {
      if (first == 0) first = code;
    };
    if (av_ != nullptr) keep(libfabric_close(av_));
    if (domain_ != nullptr) keep(libfabric_close(domain_));
    if (fabric_ != nullptr) keep(libfabric_close(fabric_));
    if (info_ != nullptr) lib_->freeinfo(info_);
    av_ = nullptr;
    domain_ = nullptr;
    fabric_ = nullptr;
    info_ = nullptr;
    return first;
  }

  libfabric_ref lib_;
  std::string name_;
  fabric::info* info_;
  fabric::fid_fabric* fabric_ = nullptr;
  fabric::fid_domain* domain_ = nullptr;
  fabric::fid_av* av_ = nullptr;
  fabric::gda_ops* ops_ = nullptr;
  efa_capabilities can_;
  std::atomic<int64_t> alive_{0};
};

class libfabric_driver final : public efa_driver {
 public:
  explicit libfabric_driver(libfabric_ref lib) : lib_(std::move(lib)) {}
  const char* backing() const override { return "hardware"; }

  result<std::vector<efa_device_info>> list_devices() override {
    auto found = find();
    if (!found.ok()) return found.why();
    std::vector<efa_device_info> devices;
    for (const fabric::info* one = found.value()->list; one != nullptr; one = one->next) devices.push_back({name_of(*one), true, ""});
    return devices;
  }

  result<std::unique_ptr<efa_device>> open(const std::string& name) override {
    auto found = find();
    if (!found.ok()) return found.why();
    for (fabric::info* one = found.value()->list; one != nullptr; one = one->next) {
      if (name_of(*one) != name) continue;
      auto device = std::make_unique<libfabric_device>(lib_, name, lib_->dupinfo(one));
      if (auto started = device->start(); !started.ok()) return started.why();
      return std::unique_ptr<efa_device>(std::move(device));
    }
    return failure{EP_STATUS_SYSTEM, ENODEV, "libfabric knows no EFA device " + name};
  }

 private:
  // The fabric by which kernels may post: "efa-direct", of the provider "efa".
  result<std::shared_ptr<libfabric_infos>> find() {
    libfabric_infos hints(lib_, lib_->dupinfo(nullptr));
    if (hints.list == nullptr) return failure{EP_STATUS_SYSTEM, ENOMEM, "fi_allocinfo"};
    hints.list->caps = fabric::cap_msg | fabric::cap_rma;
    hints.list->mode = ~uint64_t{0};
    hints.list->ep->type = fabric::endpoint_rdm;
    hints.list->domain->mr_mode = fabric::mr_local | fabric::mr_virtual_address | fabric::mr_allocated | fabric::mr_provider_key;
    hints.list->fabric->name = strdup("efa-direct"); // freed with the hints
    hints.list->fabric->provider = strdup("efa");
    fabric::info* list = nullptr;
    const int code = lib_->getinfo(fabric::gda_since, nullptr, nullptr, 0, hints.list, &list);
    if (code != 0 && code != -fabric::error_no_data) return libfabric_refused(*lib_, "fi_getinfo", code, "provider efa, fabric efa-direct");
    return std::make_shared<libfabric_infos>(lib_, list);
  }

  libfabric_ref lib_;
};

} // namespace

result<std::unique_ptr<efa_driver>> efa_libfabric_driver(const std::string& name) {
  auto lib = open_libfabric(name, fabric::gda_since, "requests that kernels post need 2.5 or newer, which counts completions in memory");
  if (!lib.ok()) return lib.why();
  return std::unique_ptr<efa_driver>(new libfabric_driver(lib.value()));
}

} // namespace ep::dl
