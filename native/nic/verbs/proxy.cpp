#include "proxy.hpp"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include <sched.h>
#include <time.h>

#include "dl/verbs_context.hpp"
#include "proxy_qp.hpp"
#include "wire/bits.hpp"

namespace ep::nic {
namespace {

namespace verbs = dl::verbs;
using ep::wire::get;
using ep::wire::put;

constexpr uint64_t queue_pair_kind = uint64_t{1} << 32;
constexpr uint64_t completion_queue_kind = uint64_t{2} << 32;
constexpr uint32_t log_max_depth = 13; // what soft-RoCE and the smaller NICs have
constexpr int looks_before_sleep = 2000;
constexpr long sleep_ns = 50'000;

void* handle_of(uint64_t number) { return reinterpret_cast<void*>(static_cast<uintptr_t>(number)); }
uint64_t number_of(void* handle) { return reinterpret_cast<uintptr_t>(handle); }

class proxy_device final : public dl::mlx5_device {
 public:
  proxy_device(std::shared_ptr<const dl::rc_symbols> verbs, verbs::context* context, std::string name)
      : verbs_(verbs), base_(verbs, context, std::move(name)), thread_([this] { run(); }) {}
  ~proxy_device() override {
    stop();
    qps_.clear();
    for (auto& [id, page] : pages_) std::free(page);
  }

  const std::string& name() const override { return base_.name(); }
  result<nothing> close() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const uint64_t alive = static_cast<uint64_t>(base_.alive.load()) + qps_.size() + cqs_.size() + umems_.size() + pages_.size();
      if (alive != 0) return base_.fail("close", EBUSY, std::to_string(alive) + " objects of it live");
    }
    stop();
    if (const int error = base_.close(); error != 0) return base_.fail("ibv_close_device", error, "closing");
    return nothing{};
  }

  result<dl::mlx5_port> query_port(uint8_t port) override { return base_.query_port(port); }
  result<dl::mlx5_gid> query_gid(uint8_t port, uint32_t index) override { return base_.query_gid(port, index); }

  result<dl::mlx5_pd> alloc_pd() override {
    auto pd = base_.alloc_pd();
    if (!pd.ok()) return pd.why();
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t number = next_++;
    pds_[number] = pd.value();
    return dl::mlx5_pd{handle_of(number), number};
  }
  result<nothing> dealloc_pd(const dl::mlx5_pd& pd) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = pds_.find(pd.pdn);
    if (at == pds_.end()) return base_.fail("dealloc_pd", EINVAL, "there is no such protection domain");
    auto done = base_.dealloc_pd(at->second);
    if (done.ok()) pds_.erase(at);
    return done;
  }
  result<dl::mlx5_mr> reg_mr(const dl::mlx5_pd& pd, const dl::mlx5_memory& memory, uint32_t access) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = pds_.find(pd.pdn);
    if (at == pds_.end()) return base_.fail("reg_mr", EINVAL, "there is no such protection domain");
    return base_.reg_mr(at->second, memory, access);
  }
  result<nothing> dereg_mr(const dl::mlx5_mr& mr) override { return base_.dereg_mr(static_cast<verbs::mr*>(mr.handle)); }

  // A page that nobody reads: the doorbell record is what counts.
  result<dl::mlx5_uar> alloc_uar(dl::mlx5_uar_kind) override {
    void* page = std::aligned_alloc(EP_MLX5_UAR_BYTES, EP_MLX5_UAR_BYTES);
    if (page == nullptr) return base_.fail("alloc_uar", ENOMEM, "a page of memory is not to be had");
    std::memset(page, 0, EP_MLX5_UAR_BYTES);
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t id = next_++;
    pages_[id] = page;
    const uint64_t begin = reinterpret_cast<uint64_t>(page);
    return dl::mlx5_uar{handle_of(id), id, begin, begin + EP_MLX5_BF_OFFSET};
  }
  result<nothing> free_uar(const dl::mlx5_uar& uar) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = pages_.find(uar.page_id);
    if (at == pages_.end()) return base_.fail("free_uar", EINVAL, "there is no such page");
    std::free(at->second);
    pages_.erase(at);
    return nothing{};
  }

  result<dl::mlx5_umem> umem_reg(const dl::mlx5_memory& memory, uint32_t) override {
    if (memory.dmabuf_fd >= 0) return base_.fail("umem_reg", EOPNOTSUPP, "queues lie in host memory, which this process reads");
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t id = next_++;
    umems_[id] = memory;
    return dl::mlx5_umem{handle_of(id), id};
  }
  result<nothing> umem_dereg(const dl::mlx5_umem& umem) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (umems_.erase(umem.id) == 0) return base_.fail("umem_dereg", EINVAL, "there is no such umem");
    return nothing{};
  }

  result<uint32_t> query_eqn(uint32_t vector) override {
    if (vector != 0) return base_.fail("query_eqn", EINVAL, "vector " + std::to_string(vector));
    return uint32_t{1};
  }

  result<nothing> general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) override {
    if (get(in.data(), EP_MLX5_CMD_IN_OPCODE) != EP_MLX5_CMD_QUERY_HCA_CAP || out.size() != EP_MLX5_QUERY_HCA_CAP_OUT_BYTES) return refuse(in, out, "only QUERY_HCA_CAP has no object");
    std::memset(out.data(), 0, out.size());
    uint8_t* caps = out.data() + EP_MLX5_CAP_AT;
    if (get(in.data(), EP_MLX5_CMD_IN_OP_MOD) >> 1 == EP_MLX5_CAP_ATOMIC) {
      // A masked fetch-add without fields is a plain one.
      put(caps, EP_MLX5_ATOMIC_CAP_OPERATIONS, EP_MLX5_ATOMIC_COMPARE_SWAP | EP_MLX5_ATOMIC_FETCH_ADD | EP_MLX5_ATOMIC_MASKED_FETCH_ADD);
      put(caps, EP_MLX5_ATOMIC_CAP_SIZES, 1u << 3);
      put(caps, EP_MLX5_ATOMIC_CAP_ENDIANNESS_MODE, 1); // whatever the device does, verbs speak in the host's order
      return nothing{};
    }
    auto port = base_.query_port(1);
    if (!port.ok()) return port.why();
    put(caps, EP_MLX5_GENERAL_CAP_CQE_VERSION, 1);
    put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP_SIZE, log_max_depth);
    put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_CQ_SIZE, log_max_depth);
    put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP, 16);
    put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_CQ, 16);
    put(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_MESSAGE, std::min(30, 31 - __builtin_clz(std::max(port.value().max_message, 1u))));
    return nothing{};
  }

  result<dl::mlx5_object> obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::memset(out.data(), 0, out.size());
    return get(in.data(), EP_MLX5_CMD_IN_OPCODE) == EP_MLX5_CMD_CREATE_CQ ? create_cq(in, out) : create_qp(in, out);
  }
  result<nothing> obj_modify(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::memset(out.data(), 0, out.size());
    proxy_qp* qp = find(object);
    if (qp == nullptr || get(in.data(), EP_MLX5_CMD_IN_OBJECT) != qp->qpn()) return base_.fail("obj_modify", EINVAL, "no queue pair of that number");
    const auto opcode = static_cast<uint32_t>(get(in.data(), EP_MLX5_CMD_IN_OPCODE));
    const bool whole = opcode != EP_MLX5_CMD_2ERR_QP && opcode != EP_MLX5_CMD_2RST_QP;
    if (whole && in.size() != EP_MLX5_MODIFY_QP_IN_BYTES) return refuse(in, out, "a transition has " + std::to_string(EP_MLX5_MODIFY_QP_IN_BYTES) + " bytes");
    auto port = base_.query_port(1);
    return qp->modify(opcode, in, port.ok() ? port.value().link : dl::mlx5_link::unknown);
  }
  result<nothing> obj_query(const dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::memset(out.data(), 0, out.size());
    const proxy_qp* qp = find(object);
    if (qp == nullptr || get(in.data(), EP_MLX5_CMD_IN_OPCODE) != EP_MLX5_CMD_QUERY_QP) return refuse(in, out, "only QUERY_QP of a queue pair is known");
    put(out.data() + EP_MLX5_QPC_AT, EP_MLX5_QPC_STATE, qp->state());
    if (qp->state() == EP_MLX5_QP_STATE_RST) return nothing{};
    auto awaited = qp->next_psn();
    if (!awaited.ok()) return awaited.why();
    put(out.data() + EP_MLX5_QPC_AT, EP_MLX5_QPC_NEXT_RCV_PSN, awaited.value());
    return nothing{};
  }
  result<nothing> obj_destroy(const dl::mlx5_object& object) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = number_of(object.handle);
    const auto id = static_cast<uint32_t>(number);
    if ((number & queue_pair_kind) != 0 && qps_.erase(id) == 1) return nothing{};
    if ((number & completion_queue_kind) != 0 && cqs_.contains(id)) {
      for (const auto& [qpn, qp] : qps_) {
        if (qp->cq() == cqs_[id].get()) return base_.fail("obj_destroy", EBUSY, "queue pair " + std::to_string(qpn) + " completes into it");
      }
      cqs_.erase(id);
      return nothing{};
    }
    return base_.fail("obj_destroy", EINVAL, "there is no such object");
  }

  // The device resolves the GID itself, in its transition to RTR.
  result<dl::mlx5_path> resolve_ah(const dl::mlx5_pd&, const dl::mlx5_route& route) override {
    dl::mlx5_path path;
    path.gid = route.dgid;
    path.hop_limit = route.hop_limit;
    path.traffic_class = route.traffic_class;
    return path;
  }
  result<bool> poll_async(dl::mlx5_event& event) override {
    auto told = base_.poll_event();
    if (!told.ok()) return told.why();
    if (told.value().has_value()) event = *told.value();
    return told.value().has_value();
  }

 private:
  proxy_qp* find(const dl::mlx5_object& object) {
    const uint64_t number = number_of(object.handle);
    const auto at = qps_.find(static_cast<uint32_t>(number));
    return (number & queue_pair_kind) == 0 || at == qps_.end() ? nullptr : at->second.get();
  }
  failure refuse(std::span<const uint8_t> in, std::span<uint8_t> out, const std::string& why) {
    put(out.data(), EP_MLX5_CMD_OUT_STATUS, EP_MLX5_CMD_STATUS_BAD_PARAM);
    return base_.fail("command", EREMOTEIO, "opcode " + std::to_string(get(in.data(), EP_MLX5_CMD_IN_OPCODE)) + ": " + why);
  }
  // The bytes at an offset of a umem; nullptr: they are not all in it.
  uint8_t* place(uint64_t id, uint64_t offset, uint64_t bytes) {
    const auto at = umems_.find(static_cast<uint32_t>(id));
    if (at == umems_.end() || offset > at->second.byte_length || bytes > at->second.byte_length - offset) return nullptr;
    return reinterpret_cast<uint8_t*>(at->second.address + offset);
  }

  result<dl::mlx5_object> create_cq(std::span<const uint8_t> in, std::span<uint8_t> out) {
    const uint8_t* cqc = in.data() + EP_MLX5_CQC_AT;
    auto cq = std::make_unique<completion_queue>();
    cq->log_size = static_cast<uint32_t>(get(cqc, EP_MLX5_CQC_LOG_CQ_SIZE));
    cq->collapsed = get(cqc, EP_MLX5_CQC_COLLAPSED) != 0;
    cq->ignore_overrun = get(cqc, EP_MLX5_CQC_OVERRUN_IGNORE) != 0;
    cq->ring = place(get(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_ID), get(in.data(), EP_MLX5_CREATE_CQ_IN_UMEM_OFFSET), uint64_t{EP_MLX5_CQE_SIZE} << cq->log_size);
    cq->dbr = place(get(cqc, EP_MLX5_CQC_DBR_UMEM_ID), get(cqc, EP_MLX5_CQC_DBR_ADDR), 8);
    if (cq->ring == nullptr || cq->dbr == nullptr) return refuse(in, out, "the completion queue, or its doorbell record, does not lie in its umem");
    cq->cqn = next_++;
    put(out.data(), EP_MLX5_CMD_OUT_OBJECT, cq->cqn);
    const uint32_t cqn = cq->cqn;
    cqs_[cqn] = std::move(cq);
    return dl::mlx5_object{handle_of(completion_queue_kind | cqn)};
  }
  result<dl::mlx5_object> create_qp(std::span<const uint8_t> in, std::span<uint8_t> out) {
    if (get(in.data(), EP_MLX5_CMD_IN_OPCODE) != EP_MLX5_CMD_CREATE_QP || in.size() != EP_MLX5_CREATE_QP_IN_BYTES) return refuse(in, out, "only CREATE_CQ and CREATE_QP make objects");
    const uint8_t* qpc = in.data() + EP_MLX5_QPC_AT;
    const uint64_t log_depth = get(qpc, EP_MLX5_QPC_LOG_SQ_SIZE);
    uint8_t* sq = place(get(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_ID), get(in.data(), EP_MLX5_CREATE_QP_IN_WQ_UMEM_OFFSET), uint64_t{EP_MLX5_WQEBB_BYTES} << log_depth);
    uint8_t* dbr = place(get(qpc, EP_MLX5_QPC_DBR_UMEM_ID), get(qpc, EP_MLX5_QPC_DBR_ADDR), 8);
    const auto pd = pds_.find(static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_PD)));
    const auto cq = cqs_.find(static_cast<uint32_t>(get(qpc, EP_MLX5_QPC_CQN_SND)));
    if (sq == nullptr || dbr == nullptr) return refuse(in, out, "the send queue, or its doorbell record, does not lie in its umem");
    if (pd == pds_.end() || cq == cqs_.end()) return refuse(in, out, "there is no such protection domain, or no such completion queue");
    auto qp = proxy_qp::create(verbs_, base_, pd->second, in, sq, dbr, cq->second.get());
    if (!qp.ok()) return qp.why();
    const uint32_t qpn = qp.value()->qpn();
    put(out.data(), EP_MLX5_CMD_OUT_OBJECT, qpn);
    qps_[qpn] = std::move(qp.value());
    return dl::mlx5_object{handle_of(queue_pair_kind | qpn)};
  }

  void run() {
    int idle = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      bool did = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto& [qpn, qp] : qps_) did = qp->progress() || did;
      }
      idle = did ? 0 : idle + 1;
      // Yields also let commands have the lock, which a mutex gives to whoever runs.
      if (idle < looks_before_sleep) {
        sched_yield();
      } else {
        const timespec pause{0, sleep_ns};
        nanosleep(&pause, nullptr);
      }
    }
  }
  void stop() {
    stopping_.store(true);
    if (thread_.joinable()) thread_.join();
  }

  std::shared_ptr<const dl::rc_symbols> verbs_;
  dl::verbs_context base_;
  std::mutex mutex_;
  uint32_t next_ = 1;
  std::map<uint32_t, verbs::pd*> pds_;
  std::map<uint32_t, void*> pages_;
  std::map<uint32_t, dl::mlx5_memory> umems_;
  std::map<uint32_t, std::unique_ptr<completion_queue>> cqs_;
  std::map<uint32_t, std::unique_ptr<proxy_qp>> qps_;
  std::atomic<bool> stopping_{false};
  std::thread thread_; // last: it uses all of the above
};

class proxy_driver final : public dl::mlx5_driver {
 public:
  explicit proxy_driver(std::shared_ptr<const dl::rc_symbols> verbs) : verbs_(std::move(verbs)) {}
  const char* backing() const override { return "verbs"; }
  result<std::vector<dl::mlx5_device_info>> list_devices() override {
    std::vector<dl::mlx5_device_info> found;
    auto walked = dl::verbs_each_device(*verbs_, [&](verbs::device*, const std::string& name) {
      found.push_back({name, "/sys/class/infiniband/" + name, true, ""});
      return false;
    });
    if (!walked.ok()) return walked.why();
    return found;
  }
  result<std::unique_ptr<dl::mlx5_device>> open(const std::string& name) override {
    failure why{EP_STATUS_SYSTEM, ENODEV, "no RDMA device is called " + name};
    std::unique_ptr<dl::mlx5_device> opened;
    auto walked = dl::verbs_each_device(*verbs_, [&](verbs::device* device, const std::string& candidate) {
      if (candidate != name) return false;
      verbs::context* context = verbs_->ibv_open_device(device);
      if (context != nullptr) opened = std::make_unique<proxy_device>(verbs_, context, name);
      else why = failure_errno("ibv_open_device", errno, name + "; is /dev/infiniband/uverbs* readable and writable?");
      return true;
    });
    if (!walked.ok()) return walked.why();
    if (opened == nullptr) return why;
    return opened;
  }

 private:
  std::shared_ptr<const dl::rc_symbols> verbs_;
};

} // namespace

result<std::unique_ptr<dl::mlx5_driver>> verbs_proxy_driver(const std::string& ibverbs) {
  auto symbols = dl::rc_symbols_load(ibverbs);
  if (!symbols.ok()) return symbols.why();
  return std::unique_ptr<dl::mlx5_driver>(new proxy_driver(symbols.value()));
}

} // namespace ep::nic
