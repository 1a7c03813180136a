#include "queues.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace ep::ibgda {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t line = 64;
constexpr uint64_t cqe_bytes = 64;
constexpr uint64_t doorbell_bytes = 512; // two halves

uint64_t whole_pages(uint64_t bytes) { return (bytes + page - 1) / page * page; }

failure invalid(const std::string& text) { return {EP_STATUS_INVALID, 0, text}; }

// The table's failure, with what was being done in front.
failure during(const std::string& step, failure why) {
  why.message = step + ": " + why.message;
  return why;
}

// Adds what the NIC answered where it refused the command itself.
failure refused(const std::string& step, failure why, std::span<const uint8_t> out) {
  if (why.sys_errno == EREMOTEIO) why.message += " (the NIC answered " + command_answer_text(out) + ")";
  return during(step, std::move(why));
}

ep_handle_header header_of(uint32_t magic, uint64_t bytes) {
  return {magic, EP_ABI_MAJOR, EP_ABI_MINOR, 0, static_cast<uint32_t>(bytes)};
}

result<nothing> check(const queue_options& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size) {
    return invalid("rank " + std::to_string(options.rank) + " is not in a world of " + std::to_string(options.world_size));
  }
  if (options.qps_per_peer < 1) return invalid("qps per peer must be 1 or more");
  if (options.host_qps >= options.qps_per_peer) return invalid("all " + std::to_string(options.qps_per_peer) + " queue pairs of each peer are the host's: kernels have none");
  if (options.active_qps > options.qps_per_peer - options.host_qps) {
    return invalid(std::to_string(options.active_qps) + " active queue pairs of each peer are more than the " + std::to_string(options.qps_per_peer - options.host_qps) + " that it has");
  }
  if (options.depth < 2 || options.depth > EP_IBGDA_MAX_DEPTH || !std::has_single_bit(options.depth)) {
    return invalid("depth " + std::to_string(options.depth) + " is no power of two from 2 to " + std::to_string(EP_IBGDA_MAX_DEPTH));
  }
  if (options.mtu > EP_MLX5_MTU_4096) return invalid("mtu " + std::to_string(options.mtu) + " is none of 0 (the port's), 1 to 5 (256 to 4096 bytes)");
  if (options.service_level > 15) return invalid("service level " + std::to_string(options.service_level) + " exceeds 15");
  if (options.ack_timeout < 1 || options.ack_timeout > 31) return invalid("ack timeout " + std::to_string(options.ack_timeout) + " is not in 1 to 31");
  if (options.retry_count > 7) return invalid("retry count " + std::to_string(options.retry_count) + " exceeds 7");
  if (options.sharing > EP_IBGDA_SHARE_THREAD) return invalid("sharing " + std::to_string(options.sharing) + " is no EP_IBGDA_SHARE_*");
  return nothing{};
}

} // namespace

result<std::unique_ptr<rank_queues>> rank_queues::create(open_port port, const queue_options& options, std::span<control_memory* const> sources) {
  if (auto checked = check(options); !checked.ok()) return checked.why();
  if (sources.empty()) return invalid("no place for control memory was given");
  std::unique_ptr<rank_queues> made(new rank_queues(std::move(port), options));
  made->kernels_.count = options.qps_per_peer - options.host_qps;
  made->host_.first = made->kernels_.count;
  made->host_.count = options.host_qps;
  made->pairs_.assign(made->pair_count(), {});
  if (made->options_.active_qps == 0) made->options_.active_qps = made->kernels_.count;
  if (auto read = made->read_capabilities(); !read.ok()) return read.why();
  auto pd = made->device().alloc_pd();
  if (!pd.ok()) return during("protection domain", pd.why());
  made->pd_ = pd.value();
  if (auto built = made->build_kernels(sources); !built.ok()) return built.why();
  if (options.host_qps != 0) {
    if (auto built = made->build(made->host_, *made->host_source_); !built.ok()) return during("queue pairs of the host", built.why());
  }
  return made;
}

result<nothing> rank_queues::build_kernels(std::span<control_memory* const> sources) {
  std::string earlier;
  for (control_memory* source : sources) {
    auto built = build(kernels_, *source);
    if (built.ok()) return built;
    (void)tear_down(kernels_);
    if (source == sources.back()) {
      failure why = built.why();
      if (!earlier.empty()) why.message += "; before that: " + earlier;
      return why;
    }
    fallbacks_.push_back({source->where(), built.why().message});
    earlier += (earlier.empty() ? "" : "; ") + std::string(placement_name(source->where())) + ": " + built.why().message;
  }
  return invalid("no place for control memory was given");
}

result<nothing> rank_queues::read_capabilities() {
  std::vector<uint8_t> out(EP_MLX5_QUERY_HCA_CAP_OUT_BYTES);
  const auto query = [&](uint16_t capability, const char* name) -> result<nothing> {
    std::fill(out.begin(), out.end(), uint8_t{0});
    const query_command command = hca_cap_command(capability);
    auto answered = device().general_cmd(command, out);
    return answered.ok() ? answered : result<nothing>(refused(std::string("QUERY_HCA_CAP of ") + name, answered.why(), out));
  };
  const std::span<uint8_t> caps = std::span<uint8_t>(out).subspan(EP_MLX5_CAP_AT);
  if (auto asked = query(EP_MLX5_CAP_GENERAL, "general capabilities"); !asked.ok()) return asked;
  const uint64_t version = prm_get(caps, EP_MLX5_GENERAL_CAP_CQE_VERSION);
  if (version != 1) {
    return failure{EP_STATUS_SYSTEM, EPROTO, device().name() + " writes completions of version " + std::to_string(version) + ", kernels read version 1: its firmware is too old"};
  }
  const uint64_t log_depth = prm_get(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP_SIZE);
  if (log_depth < 32 && options_.depth > uint64_t{1} << log_depth) {
    return invalid("depth " + std::to_string(options_.depth) + " exceeds what " + device().name() + " can do: " + std::to_string(uint64_t{1} << log_depth));
  }
  const uint64_t log_qps = prm_get(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_QP);
  if (log_qps < 32 && pair_count() > uint64_t{1} << log_qps) {
    return invalid(std::to_string(pair_count()) + " queue pairs exceed what " + device().name() + " has: " + std::to_string(uint64_t{1} << log_qps) + "; lower the queue pairs per peer");
  }
  log_max_message_ = static_cast<uint8_t>(std::min<uint64_t>(30, prm_get(caps, EP_MLX5_GENERAL_CAP_LOG_MAX_MESSAGE)));
  if (auto asked = query(EP_MLX5_CAP_ATOMIC, "atomic capabilities"); !asked.ok()) return asked;
  const bool adds = (prm_get(caps, EP_MLX5_ATOMIC_CAP_OPERATIONS) & EP_MLX5_ATOMIC_MASKED_FETCH_ADD) != 0;
  const bool wide = (prm_get(caps, EP_MLX5_ATOMIC_CAP_SIZES) & 1u << 3) != 0;
  if (!adds || !wide) {
    return failure{EP_STATUS_SYSTEM, EPROTO, device().name() + " has no masked fetch-add of 8 bytes, by which signals travel: atomics are switched off in its firmware, or it is too old"};
  }
  // Signals need the masked fetch-add only, whose order is always the host's.
  const bool swaps = (prm_get(caps, EP_MLX5_ATOMIC_CAP_OPERATIONS) & EP_MLX5_ATOMIC_COMPARE_SWAP) != 0;
  has_masked_swap_ = (prm_get(caps, EP_MLX5_ATOMIC_CAP_OPERATIONS) & EP_MLX5_ATOMIC_MASKED_COMPARE_SWAP) != 0;
  has_atomics_ = swaps && prm_get(caps, EP_MLX5_ATOMIC_CAP_ENDIANNESS_MODE) == 1;
  return nothing{};
}

rank_queues::layout rank_queues::lay_out(const bank& of) const {
  layout at;
  const uint64_t pairs = size_of(of);
  // A collapsed CQ overwrites its first entry, and the command still names a ring: one page of it.
  at.cq_bytes = options_.collapsed ? page : whole_pages(options_.depth * cqe_bytes);
  at.sq_bytes = whole_pages(uint64_t{options_.depth} * EP_IBGDA_WQE_BYTES);
  at.records = 0;
  at.responses = whole_pages(pairs * 2 * line);
  at.response_bytes = whole_pages(pairs * line);
  at.cqs = at.responses + at.response_bytes;
  at.sqs = at.cqs + pairs * at.cq_bytes;
  at.total = at.sqs + pairs * at.sq_bytes;
  return at;
}

result<nothing> rank_queues::build(bank& of, control_memory& source) {
  of.source = &source;
  const layout at = lay_out(of);
  auto block = source.allocate(at.total);
  if (!block.ok()) return during("memory of the queues", block.why());
  of.queues = block.value();
  if (auto filled = source.fill(of.queues, at.cqs, 0xff, size_of(of) * at.cq_bytes); !filled.ok()) return during("memory of the queues", filled.why());
  auto umem = device().umem_reg(of.queues.part(0, at.total), dl::MLX5_ACCESS_LOCAL_WRITE);
  if (!umem.ok()) return during("registration of the queues in " + std::string(placement_name(source.where())), umem.why());
  of.umem = umem.value();
  auto responses = device().reg_mr(pd_, of.queues.part(at.responses, at.response_bytes), dl::MLX5_ACCESS_LOCAL_WRITE);
  if (!responses.ok()) return during("registration of the atomics' responses", responses.why());
  of.responses = responses.value();
  auto eqn = device().query_eqn(0);
  if (!eqn.ok()) return during("event queue", eqn.why());
  for (uint32_t i = 0; i < size_of(of); ++i) {
    if (auto built = build_pair(of, i, eqn.value(), at); !built.ok()) return built;
  }
  return fill_structs(of, at);
}

result<nothing> rank_queues::build_pair(const bank& of, uint32_t i, uint32_t eqn, const layout& at) {
  const uint32_t index = index_of(of, i);
  pair& made = pairs_[index];
  const std::string about = " of queue pair " + std::to_string(index % options_.qps_per_peer) + " to rank " + std::to_string(index / options_.qps_per_peer);
  // One page of registers for each: posters of different queue pairs never write the same register.
  // HAZARD: in a combining page a doorbell of the CPU may wait in its write buffer until somebody flushes it, which posters do not do. A GPU's stores do not
  // pass that buffer.
  auto uar = device().alloc_uar(dl::mlx5_uar_kind::noncached);
  if (!uar.ok() && uar.why().sys_errno == EOPNOTSUPP && of.source->where() != placement::host) uar = device().alloc_uar(dl::mlx5_uar_kind::blueflame);
  if (!uar.ok()) return during("doorbell page" + about, uar.why());
  made.uar = uar.value();
  auto doorbell = of.source->map_doorbell(made.uar.reg_addr, doorbell_bytes);
  if (!doorbell.ok()) return during("doorbell page" + about, doorbell.why());
  made.doorbell = doorbell.value();

  std::array<uint8_t, EP_MLX5_CMD_OUT_BYTES> out{};
  cq_spec cq;
  cq.ring = {of.umem.id, at.cqs + i * at.cq_bytes};
  cq.doorbell_record = {of.umem.id, at.records + i * 2 * line};
  // A collapsed CQ as large as the send queue: firmware checks the size against what can be outstanding, though one entry is written.
  cq.log_size = static_cast<uint32_t>(std::countr_zero(options_.collapsed ? static_cast<uint32_t>(at.cq_bytes / cqe_bytes) : options_.depth));
  cq.uar_page = made.uar.page_id;
  cq.eqn = eqn;
  cq.collapsed = options_.collapsed;
  auto created = device().obj_create(cq_create_command(cq), out);
  if (!created.ok()) return refused("CREATE_CQ" + about, created.why(), out);
  made.cq = created.value();
  made.cqn = static_cast<uint32_t>(prm_get(out, EP_MLX5_CMD_OUT_OBJECT));

  out = {};
  qp_spec qp;
  qp.ring = {of.umem.id, at.sqs + i * at.sq_bytes};
  qp.doorbell_record = {of.umem.id, at.records + i * 2 * line + line};
  qp.log_depth = static_cast<uint32_t>(std::countr_zero(options_.depth));
  qp.pdn = pd_.pdn;
  qp.uar_page = made.uar.page_id;
  qp.cqn = made.cqn;
  qp.user_index = index;
  created = device().obj_create(qp_create_command(qp), out);
  if (!created.ok()) return refused("CREATE_QP" + about, created.why(), out);
  made.qp = created.value();
  made.qpn = static_cast<uint32_t>(prm_get(out, EP_MLX5_CMD_OUT_OBJECT));
  auto first = draw_psn(std::nullopt);
  if (!first.ok()) return first.why();
  made.starting_psn = first.value();
  return nothing{};
}

ep_ibgda_qp rank_queues::struct_of(const bank& of, uint32_t i, const layout& at) const {
  const pair& from = pairs_[index_of(of, i)];
  ep_ibgda_qp qp{};
  qp.header = header_of(EP_MAGIC_IBGDA_QP, sizeof qp);
  qp.sq = of.queues.address + at.sqs + i * at.sq_bytes;
  qp.dbr = of.queues.address + at.records + i * 2 * line + line;
  qp.bf = from.doorbell;
  qp.cq = of.queues.address + at.cqs + i * at.cq_bytes;
  qp.cq_dbr = options_.collapsed ? 0 : of.queues.address + at.records + i * 2 * line;
  qp.qpn = from.qpn;
  qp.depth = options_.depth;
  qp.cq_depth = options_.collapsed ? 1 : options_.depth;
  qp.flags = options_.collapsed ? EP_IBGDA_CQ_COLLAPSED : 0;
  qp.peer = static_cast<int32_t>(i / of.count);
  qp.index = i;
  qp.response = of.queues.address + at.responses + i * line;
  qp.response_lkey = of.responses.lkey;
  qp.nic_wake = options_.nic_wake;
  qp.marks = of.structs.address + of.marks_offset + i * marks_bytes();
  return qp;
}

result<nothing> rank_queues::fill_structs(bank& of, const layout& at) {
  const uint64_t qps_bytes = uint64_t{size_of(of)} * sizeof(ep_ibgda_qp);
  of.device_offset = qps_bytes;
  of.marks_offset = of.device_offset + sizeof(ep_ibgda_device);
  const uint64_t marks = size_of(of) * marks_bytes();
  auto block = of.source->allocate(whole_pages(of.marks_offset + marks));
  if (!block.ok()) return during("memory of the queue pairs' structs", block.why());
  of.structs = block.value();
  if (auto filled = of.source->fill(of.structs, of.marks_offset, 0, marks); !filled.ok()) return during("memory of the queue pairs' structs", filled.why());
  for (uint32_t i = 0; i < size_of(of); ++i) {
    const ep_ibgda_qp qp = struct_of(of, i, at);
    if (auto written = of.source->write(of.structs, i * sizeof qp, &qp, sizeof qp); !written.ok()) return during("structs of the queue pairs", written.why());
  }
  ep_ibgda_device device{};
  device.header = header_of(EP_MAGIC_IBGDA, sizeof device);
  device.rank = options_.rank;
  device.world_size = options_.world_size;
  device.qps = of.structs.address;
  device.qps_per_peer = of.count;
  device.active_qps = &of == &kernels_ ? options_.active_qps : of.count;
  device.sharing = options_.sharing;
  device.max_message = uint64_t{1} << log_max_message_;
  if (auto written = of.source->write(of.structs, of.device_offset, &device, sizeof device); !written.ok()) return during("struct of the device", written.why());
  return publish_ranges(of);
}

// All that build() made, children first. Goes on after a failure: what can be given back is.
result<nothing> rank_queues::tear_down(bank& of) {
  std::optional<failure> first;
  const auto keep = [&](const char* step, const result<nothing>& done) {
    if (!done.ok() && !first.has_value()) first = during(step, done.why());
  };
  for (uint32_t i = 0; i < size_of(of); ++i) {
    const pair& made = pairs_[index_of(of, i)];
    if (made.qp.handle != nullptr) keep("destroying a queue pair", device().obj_destroy(made.qp));
  }
  for (uint32_t i = 0; i < size_of(of); ++i) {
    pair& made = pairs_[index_of(of, i)];
    if (made.cq.handle != nullptr) keep("destroying a completion queue", device().obj_destroy(made.cq));
    if (made.doorbell != 0) of.source->unmap_doorbell(made.uar.reg_addr);
    if (made.uar.handle != nullptr) keep("freeing a doorbell page", device().free_uar(made.uar));
    made = {};
  }
  if (of.responses.handle != nullptr) keep("deregistering the atomics' responses", device().dereg_mr(of.responses));
  of.responses = {};
  if (of.umem.handle != nullptr) keep("deregistering the queues", device().umem_dereg(of.umem));
  of.umem = {};
  of.range_tables.clear();
  of.structs = {};
  of.queues = {};
  if (first.has_value()) return *first;
  return nothing{};
}

result<ep_ibgda_device> rank_queues::device_now() const {
  ep_ibgda_device found{};
  auto read = kernels_.source->read(kernels_.structs, kernels_.device_offset, &found, sizeof found);
  if (!read.ok()) return read.why();
  return found;
}

result<ep_ibgda_qp> rank_queues::pair_now(uint32_t index) const {
  if (index >= size_of(kernels_)) return invalid("there is no queue pair " + std::to_string(index) + " of kernels");
  ep_ibgda_qp found{};
  auto read = kernels_.source->read(kernels_.structs, index * sizeof found, &found, sizeof found);
  if (!read.ok()) return read.why();
  return found;
}

result<nothing> rank_queues::close() {
  if (closed_) return nothing{};
  closed_ = true;
  result<nothing> ended = tear_down(kernels_);
  if (auto torn = tear_down(host_); ended.ok()) ended = torn;
  const auto keep = [&](const char* step, const result<nothing>& done) {
    if (ended.ok() && !done.ok()) ended = during(step, done.why());
  };
  for (const registered_memory& memory : memories_) keep("deregistering memory", device().dereg_mr(memory.mr));
  memories_.clear();
  if (pd_.handle != nullptr) keep("freeing the protection domain", device().dealloc_pd(pd_));
  pd_ = {};
  keep("closing the device", device().close());
  return ended;
}

rank_queues::~rank_queues() { (void)close(); }

} // namespace ep::ibgda
