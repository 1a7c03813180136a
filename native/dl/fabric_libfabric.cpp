#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include <sys/random.h>

#include "fabric.hpp"
#include "fabric_atomics.hpp"
#include "libfabric_rdm_abi.hpp"
#include "libfabric_symbols.hpp"

namespace ep::dl {
namespace {

// `net` is where 1.17 keeps endpoints over TCP without a layer between; later versions call it tcp.
constexpr std::array<const char*, 5> policy{"efa", "verbs;ofi_rxm", "tcp;ofi_rxm", "net", "tcp"};

// Their writes to several places are one message, whose parts are read where they belong one behind the other, and its arrival is told behind the last. HAZARD: others offer several places as well, and have not been seen to do it.
constexpr std::array<const char*, 3> pairing{"tcp;ofi_rxm", "net", "tcp"};

constexpr uint32_t least_data_bytes = 4;
constexpr size_t event_batch = 32;
constexpr int64_t trial_ns = 5'000'000'000; // of atomics, which take a moment: this long only where they never end

struct chosen {
  libfabric_ref lib;
  std::shared_ptr<libfabric_infos> infos;  // the first of its list is taken
  std::shared_ptr<libfabric_infos> atomic; // the same with atomics; null: offer.no_atomics says why there are none
  fabric_offer offer;
};

std::string quoted(const std::string& provider, const std::string& address) {
  return "provider " + provider + (address.empty() ? "" : " at " + address);
}

// Empty where the provider has nothing that fits.
result<std::shared_ptr<libfabric_infos>> ask(const libfabric_ref& lib, const std::string& provider, const std::string& address, uint64_t more_caps = 0) {
  libfabric_infos hints(lib, lib->dupinfo(nullptr));
  if (hints.list == nullptr) return failure{EP_STATUS_SYSTEM, ENOMEM, "fi_allocinfo"};
  hints.list->caps = fabric::cap_msg | fabric::cap_rma | more_caps;
  hints.list->mode = fabric::mode_context | fabric::mode_context2;
  hints.list->ep->type = fabric::endpoint_rdm;
  fabric::domain_attr& domain = *hints.list->domain;
  // FI_MR_LOCAL is not among them on purpose: then the provider registers what requests read from.
  const bool gpu = (more_caps & fabric::cap_hmem) != 0;
  domain.mr_mode = fabric::mr_virtual_address | fabric::mr_allocated | fabric::mr_provider_key | (gpu ? fabric::mr_hmem : 0);
  domain.threading = fabric::threading_safe;
  domain.resource_mgmt = fabric::resources_managed;
  domain.cq_data_size = least_data_bytes;
  hints.list->fabric->provider = strdup(provider.c_str()); // freed with the hints
  fabric::info* list = nullptr;
  const char* node = address.empty() ? nullptr : address.c_str();
  // HAZARD: providers take a DMA-BUF only from whoever asks for an interface that knows it.
  const uint32_t since = gpu && lib->version() >= fabric::dmabuf_since ? fabric::dmabuf_since : fabric::rdm_since;
  const int code = lib->getinfo(since, node, nullptr, node == nullptr ? 0 : fabric::flag_source, hints.list, &list);
  if (code != 0 && code != -fabric::error_no_data) return libfabric_refused(*lib, "fi_getinfo", code, quoted(provider, address));
  return std::make_shared<libfabric_infos>(lib, list);
}

std::string text_of(const char* text) { return text == nullptr ? "" : text; }

// HAZARD: what is asked for besides must not change what is chosen: a later libfabric may know the provider with atomics under another name, or on another device.
bool same_choice(const fabric::info& a, const fabric::info& b) {
  return text_of(a.fabric->provider) == text_of(b.fabric->provider) && text_of(a.domain->name) == text_of(b.domain->name) && a.address_format == b.address_format;
}

void add_atomics(chosen& made, const std::string& provider, const std::string& address) {
  // HAZARD: those of 1.17 end the process with SIGSEGV at the first one on a word of its own, so they cannot even be tried.
  if (made.offer.provider.find("ofi_rxd") != std::string::npos) {
    made.offer.no_atomics = "atomics of " + made.offer.provider + " are not used: they may end the process";
    return;
  }
  auto found = ask(made.lib, provider, address, fabric::cap_atomic | (made.infos->list->caps & fabric::cap_hmem));
  if (!found.ok()) {
    made.offer.no_atomics = found.why().message;
  } else if (found.value()->list == nullptr || !same_choice(*found.value()->list, *made.infos->list)) {
    made.offer.no_atomics = made.offer.provider + " of libfabric " + made.offer.version + " offers no FI_ATOMIC";
  } else {
    made.atomic = found.value();
  }
}

// From here on the choice reaches memory of the GPU, or says why not.
void add_gpu(chosen& made, const std::string& provider, const fabric_query& query) {
  if (query.gpu < 0) {
    made.offer.no_gpu = "no GPU was named when the fabric was opened";
    return;
  }
  auto found = ask(made.lib, provider, query.address, fabric::cap_hmem);
  if (found.ok() && found.value()->list != nullptr && same_choice(*found.value()->list, *made.infos->list)) {
    made.infos = found.value();
    return;
  }
  made.offer.no_gpu = made.offer.provider + " of libfabric " + made.offer.version + " registers no memory of GPUs (FI_HMEM)";
}

result<chosen> choose(const fabric_query& query) {
  auto lib = open_libfabric(query.library, fabric::rdm_since, "1.17 or newer is needed");
  if (!lib.ok()) return lib.why();
  std::vector<std::string> candidates;
  if (query.provider.empty()) candidates.assign(policy.begin(), policy.end());
  else candidates.push_back(query.provider);
  std::string tried;
  for (const std::string& provider : candidates) {
    auto found = ask(lib.value(), provider, query.address);
    const fabric::info* first = found.ok() ? found.value()->list : nullptr;
    if (first == nullptr) {
      tried += (tried.empty() ? "" : "; ") + provider + ": " + (found.ok() ? "not offered" : found.why().message);
      continue;
    }
    chosen made{lib.value(), found.value(), nullptr, {}};
    made.offer.provider = first->fabric->provider == nullptr ? provider : first->fabric->provider;
    made.offer.domain = text_of(first->domain->name);
    made.offer.version = libfabric_version(lib.value()->version());
    made.offer.max_message = first->ep->max_message;
    made.offer.data_bytes = static_cast<uint32_t>(first->domain->cq_data_size);
    made.offer.inject_bytes = static_cast<uint32_t>(std::min<size_t>(first->tx->inject_size, UINT32_MAX));
    made.offer.pairs = std::find(pairing.begin(), pairing.end(), made.offer.provider) != pairing.end() && std::min(first->tx->vector_limit, first->tx->place_limit) >= 2;
    const bool provider_makes = (first->domain->mr_mode & fabric::mr_provider_key) != 0;
    made.offer.key_bytes = provider_makes ? 0 : static_cast<uint32_t>(first->domain->mr_key_size);
    add_gpu(made, provider, query);
    add_atomics(made, provider, query.address);
    return made;
  }
  return failure{EP_STATUS_SYSTEM, ENODATA,
                 "libfabric " + libfabric_version(lib.value()->version()) + " offers no reliable endpoint with RMA and 4 bytes of remote completion data" +
                     (query.address.empty() ? "" : " at " + query.address) + " (" + tried + ")"};
}

class libfabric_port final : public fabric_port {
 public:
  // Without atomics, also where the provider has them, if `no_atomics` says why.
  libfabric_port(const chosen& from, const fabric_query& query, const std::string& no_atomics) : sleeps_(query.sleeps), gpu_(query.gpu), lib_(from.lib), infos_(no_atomics.empty() ? from.atomic : from.infos), offer_(from.offer) {
    offer_.no_atomics = no_atomics;
  }
  ~libfabric_port() override {
    if (ep_ != nullptr) empty_queue();
    for (void* one : {static_cast<void*>(ep_), static_cast<void*>(cq_), static_cast<void*>(av_), static_cast<void*>(domain_), static_cast<void*>(fabric_)}) {
      if (one != nullptr) (void)libfabric_close(one);
    }
  }

  result<nothing> start() {
    fabric::info* info = infos_->list;
    if (const int code = lib_->fabric(info->fabric, &fabric_, nullptr); code != 0) return why("fi_fabric", code);
    if (const int code = fabric_->ops->domain(fabric_, info, &domain_, nullptr); code != 0) return why("fi_domain", code);
    fabric::av_attr av{};
    av.type = fabric::av_table;
    if (const int code = domain_->ops->av_open(domain_, &av, &av_, nullptr); code != 0) return why("fi_av_open", code);
    fabric::cq_attr cq{};
    cq.format = fabric::cq_format_data;
    cq.wait_object = fabric::wait_descriptor;
    if (!sleeps_ || domain_->ops->cq_open(domain_, &cq, &cq_, nullptr) != 0) {
      // `shm` has none.
      cq.wait_object = fabric::wait_none;
      if (const int code = domain_->ops->cq_open(domain_, &cq, &cq_, nullptr); code != 0) return why("fi_cq_open", code);
    } else if (cq_->base.ops->control(&cq_->base, fabric::command_get_wait, &descriptor_) != 0) {
      descriptor_ = -1;
    }
    if (const int code = domain_->ops->endpoint(domain_, info, &ep_, nullptr); code != 0) return why("fi_endpoint", code);
    fabric::fid& ep = ep_->base;
    if (const int code = ep.ops->bind(&ep, &av_->base, 0); code != 0) return why("fi_ep_bind", code);
    if (const int code = ep.ops->bind(&ep, &cq_->base, fabric::right_send | fabric::right_recv); code != 0) return why("fi_ep_bind", code);
    if (const int code = ep.ops->control(&ep, fabric::command_enable, nullptr); code != 0) return why("fi_enable", code);
    return offer_.no_atomics.empty() ? check_atomics() : nothing{};
  }

  const fabric_offer& offer() const override { return offer_; }

  result<std::vector<uint8_t>> address() override {
    std::vector<uint8_t> bytes(512);
    size_t length = bytes.size();
    if (const int code = ep_->cm->get_name(&ep_->base, bytes.data(), &length); code != 0) return why("fi_getname", code);
    bytes.resize(length);
    return bytes;
  }

  result<uint64_t> insert(std::span<const uint8_t> address) override {
    fabric::address at = 0;
    if (av_->ops->insert(av_, address.data(), 1, &at, 0, nullptr) == 1) return uint64_t{at};
    return failure{EP_STATUS_SYSTEM, EHOSTUNREACH, "fi_av_insert: " + offer_.provider + " took no address of " + std::to_string(address.size()) + " bytes: it is of another kind of network"};
  }

  result<fabric_region> register_memory(void* bytes, uint64_t byte_length) override {
    const fabric::io_vector vector{bytes, byte_length};
    fabric::mr_attr attr{};
    attr.vector = &vector;
    attr.count = 1;
    attr.rights = fabric::right_remote_write | fabric::right_remote_read;
    return region_of(attr, 0, reinterpret_cast<uint64_t>(bytes));
  }
  result<fabric_region> register_gpu(const gpu_bytes& what) override {
    if (!offer_.no_gpu.empty()) return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, offer_.no_gpu};
    fabric::mr_attr attr{};
    attr.count = 1;
    attr.rights = fabric::right_read | fabric::right_write | fabric::right_remote_write | fabric::right_remote_read;
    attr.memory = fabric::memory_cuda;
    attr.device = static_cast<uint64_t>(gpu_);
    std::string tried = what.dmabuf_fd < 0 ? "the GPU exports no DMA-BUF" : "libfabric " + offer_.version + " knows no DMA-BUFs, " + libfabric_version(fabric::dmabuf_since) + " or newer does";
    if (what.dmabuf_fd >= 0 && lib_->version() >= fabric::dmabuf_since) {
      const fabric::mr_dmabuf dmabuf{what.dmabuf_fd, what.offset, what.byte_length, reinterpret_cast<void*>(what.address - what.offset)};
      attr.dmabuf = &dmabuf;
      auto made = region_of(attr, fabric::flag_mr_dmabuf, what.address);
      if (made.ok()) return made;
      tried = "as a DMA-BUF: " + made.why().message;
    }
    const fabric::io_vector vector{reinterpret_cast<void*>(what.address), what.byte_length};
    attr.vector = &vector;
    auto made = region_of(attr, 0, what.address);
    if (made.ok()) return made;
    return failure{EP_STATUS_SYSTEM, EOPNOTSUPP, tried + "; by its address: " + made.why().message};
  }
  void give_back(const fabric_region& region) override { (void)libfabric_close(region.handle); }

  int receive(void* buffer, size_t bytes, fabric_context* context) override {
    return errno_of(ep_->msg->recv(ep_, buffer, bytes, nullptr, fabric::address_unspecified, context));
  }
  int send(uint64_t to, const void* buffer, size_t bytes, fabric_context* context) override {
    return errno_of(ep_->msg->send(ep_, buffer, bytes, nullptr, to, context));
  }
  int inject(uint64_t to, const void* buffer, size_t bytes) override { return errno_of(ep_->msg->inject(ep_, buffer, bytes, to)); }
  int write(uint64_t to, const void* buffer, size_t bytes, void* descriptor, uint32_t data, uint64_t at, uint64_t key, fabric_context* context) override {
    return errno_of(ep_->rma->writedata(ep_, buffer, bytes, descriptor, data, to, at, key, context));
  }
  int write_pair(uint64_t to, const fabric_piece& first, const fabric_piece& second, uint32_t data, fabric_context* context) override {
    if (!offer_.pairs) return ENOSYS;
    const std::array vectors{fabric::io_vector{const_cast<void*>(first.bytes), first.length}, fabric::io_vector{const_cast<void*>(second.bytes), second.length}};
    const std::array places{fabric::rma_vector{first.at, first.length, first.key}, fabric::rma_vector{second.at, second.length, second.key}};
    std::array<void*, 2> descriptors{};
    const fabric::rma_message message{vectors.data(), descriptors.data(), vectors.size(), to, places.data(), places.size(), context, data};
    return errno_of(ep_->rma->writemsg(ep_, &message, fabric::flag_remote_cq_data | fabric::flag_completion));
  }
  int read(uint64_t from, void* buffer, size_t bytes, void* descriptor, uint64_t at, uint64_t key, fabric_context* context) override {
    return errno_of(ep_->rma->read(ep_, buffer, bytes, descriptor, from, at, key, context));
  }

  int fetch_add(uint64_t to, const uint64_t* add, uint64_t* old, uint64_t at, uint64_t key, fabric_context* context) override {
    if (!offer_.no_atomics.empty()) return ENOSYS;
    return errno_of(ep_->atomic->readwrite(ep_, add, 1, nullptr, old, nullptr, to, at, key, fabric::type_u64, fabric::operation_sum, context));
  }
  int compare_swap(uint64_t to, const uint64_t* compare, const uint64_t* swap, uint64_t* old, uint64_t at, uint64_t key, fabric_context* context) override {
    if (!offer_.no_atomics.empty()) return ENOSYS;
    return errno_of(ep_->atomic->compwrite(ep_, swap, 1, nullptr, compare, nullptr, old, nullptr, to, at, key, fabric::type_u64, fabric::operation_swap_if_equal, context));
  }

  void poll(std::vector<fabric_event>& events) override {
    std::array<fabric::cq_data_entry, event_batch> entries;
    const ssize_t got = cq_->ops->read(cq_, entries.data(), entries.size());
    for (ssize_t i = 0; i < got; ++i) {
      const fabric::cq_data_entry& one = entries[static_cast<size_t>(i)];
      // HAZARD: the context of an arrival may be anything: only its data speaks. A message of a stranger can carry data as well: it must neither count as a piece nor cost the buffer
      // that it came in.
      const bool arrived = (one.flags & fabric::flag_remote_cq_data) != 0 && (one.flags & fabric::right_recv) == 0;
      events.push_back({arrived ? fabric_event::kind::arrived : fabric_event::kind::done, arrived ? nullptr : static_cast<fabric_context*>(one.context),
                        static_cast<uint32_t>(one.data), one.length, 0, {}});
    }
    if (got != -fabric::error_available) return;
    fabric::cq_error_entry error{};
    if (cq_->ops->readerr(cq_, &error, 0) != 1) return;
    events.push_back({fabric_event::kind::failed, static_cast<fabric_context*>(error.context), 0, 0, error.error,
                      std::string(lib_->strerror(error.error)) + " (" + offer_.provider + " says " + std::to_string(error.provider_error) + ")"});
  }

  int descriptor() const override { return descriptor_; }
  bool may_sleep() override {
    fabric::fid* of = &cq_->base;
    return descriptor_ >= 0 && fabric_->ops->trywait(fabric_, &of, 1) == 0;
  }

 private:
  // HAZARD: `ofi_rxm` over verbs looks through its queue once more behind the end of each connection, and a message that still lies there has it post the buffer to the connection that is gone: SIGSEGV, in all
  // releases so far. One look may take what shows nothing here.
  void empty_queue() {
    constexpr int empty_looks = 8;
    constexpr int most_looks = 10'000; // whoever goes on sending
    std::array<fabric::cq_data_entry, event_batch> entries;
    for (int looks = 0, empty = 0; empty < empty_looks && looks < most_looks; ++looks) {
      const ssize_t got = cq_->ops->read(cq_, entries.data(), entries.size());
      fabric::cq_error_entry error{};
      if (got == -fabric::error_available) (void)cq_->ops->readerr(cq_, &error, 0);
      empty = got > 0 || got == -fabric::error_available ? 0 : empty + 1;
    }
  }
  // `first`: address of its first byte.
  result<fabric_region> region_of(fabric::mr_attr& attr, uint64_t flags, uint64_t first) {
    // HAZARD: whoever knows the key of a memory can write there.
    if (getrandom(&attr.requested_key, sizeof attr.requested_key, 0) != sizeof attr.requested_key) return failure_errno("getrandom", errno, "for the key of a memory");
    if (offer_.key_bytes < sizeof attr.requested_key) attr.requested_key &= (uint64_t{1} << (8 * offer_.key_bytes)) - 1;
    fabric::fid_mr* made = nullptr;
    if (const int code = domain_->mr->regattr(&domain_->base, &attr, flags, &made); code != 0) return why("fi_mr_regattr", code);
    const bool by_address = (infos_->list->domain->mr_mode & fabric::mr_virtual_address) != 0;
    return fabric_region{made, made->key, by_address ? first : 0, made->descriptor};
  }
  result<nothing> check_atomics() const {
    size_t most = 0;
    const fabric::ops_atomic* of = ep_->atomic;
    if (of == nullptr || of->readwritevalid == nullptr || of->compwritevalid == nullptr) return failure{EP_STATUS_SYSTEM, ENOSYS, offer_.provider + " claims FI_ATOMIC and has no calls for it"};
    if (const int code = of->readwritevalid(ep_, fabric::type_u64, fabric::operation_sum, &most); code != 0) return why("fi_fetch_atomicvalid of a sum of 8 bytes", code);
    if (const int code = of->compwritevalid(ep_, fabric::type_u64, fabric::operation_swap_if_equal, &most); code != 0) return why("fi_compare_atomicvalid of a swap of 8 bytes", code);
    return nothing{};
  }
  static int errno_of(ssize_t code) { return code >= 0 ? 0 : static_cast<int>(-code); }
  failure why(const char* call, int code) const { return libfabric_refused(*lib_, call, code, offer_.provider + " on " + offer_.domain); }

  const bool sleeps_;
  const int gpu_;
  libfabric_ref lib_;
  std::shared_ptr<libfabric_infos> infos_;
  fabric_offer offer_;
  fabric::fid_fabric* fabric_ = nullptr;
  fabric::fid_domain* domain_ = nullptr;
  fabric::fid_av* av_ = nullptr;
  fabric::fid_cq* cq_ = nullptr;
  fabric::fid_ep* ep_ = nullptr;
  int descriptor_ = -1; // the provider's
};

// What trials have found in this process: they take as long as making a connection does.
class trial_verdicts {
 public:
  // Why there are no atomics, empty: there are; nullopt: they have not been tried.
  std::optional<std::string> of(const fabric_query& query, const chosen& what) {
    if (what.atomic == nullptr) return what.offer.no_atomics;
    const std::lock_guard lock(mutex_);
    const auto known = found_.find(key(query, what));
    return known == found_.end() ? std::nullopt : std::optional(known->second);
  }
  void keep(const fabric_query& query, const chosen& what, const std::string& no_atomics) {
    const std::lock_guard lock(mutex_);
    found_[key(query, what)] = no_atomics;
  }

 private:
  static std::string key(const fabric_query& query, const chosen& what) { return query.library + '\n' + what.offer.provider + '\n' + what.offer.domain; }
  std::mutex mutex_;
  std::map<std::string, std::string> found_;
};
trial_verdicts& verdicts() {
  static trial_verdicts made;
  return made;
}

} // namespace

std::span<const char* const> fabric_policy() { return policy; }

result<fabric_offer> probe_fabric(const fabric_query& query) {
  auto found = choose(query);
  if (!found.ok()) return found.why();
  if (const auto known = verdicts().of(query, found.value())) {
    found.value().offer.no_atomics = *known;
    return found.value().offer;
  }
  auto opened = open_fabric(query);
  if (!opened.ok()) return opened.why();
  return opened.value()->offer();
}

result<std::unique_ptr<fabric_port>> open_fabric(const fabric_query& query) {
  auto found = choose(query);
  if (!found.ok()) return found.why();
  const auto known = verdicts().of(query, found.value());
  std::string no_atomics = known.value_or("");
  if (no_atomics.empty()) {
    atomics_trial trial; // HAZARD: before the port
    auto port = std::make_unique<libfabric_port>(found.value(), query, "");
    if (auto started = port->start(); !started.ok()) {
      no_atomics = started.why().message;
    } else {
      if (!known) {
        if (auto why = trial.run(*port, trial_ns); !why.empty()) no_atomics = found.value().offer.provider + " claims FI_ATOMIC, but " + why;
        verdicts().keep(query, found.value(), no_atomics);
      }
      if (no_atomics.empty()) return std::unique_ptr<fabric_port>(std::move(port));
    }
  }
  auto port = std::make_unique<libfabric_port>(found.value(), query, no_atomics);
  if (auto started = port->start(); !started.ok()) return started.why();
  return std::unique_ptr<fabric_port>(std::move(port));
}

} // namespace ep::dl
