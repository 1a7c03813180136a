// Bytes that nobody meant: WQEs, doorbells, commands and fault scripts, mutated from good ones. The NIC may refuse, complete with an error or carry out
// what was asked for; it must not crash, hang, read or write outside of what was registered, or be of no use afterwards.
//
// EP_FUZZ_RUNS=N executions of each kind (default: a second's worth), EP_FUZZ_SEED=N. A finding prints the seed and run that repeat it.
#include <numeric>
#include <string>

#include "environment.hpp"
#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

uint64_t interesting(random_source& random) {
  static constexpr uint64_t values[] = {0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 63, 64, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_MAX, UINT64_MAX - 7};
  return random.below(3) == 0 ? random.next() : values[random.below(std::size(values))];
}

void mutate(random_source& random, uint8_t* bytes, size_t size, uint64_t changes) {
  for (uint64_t i = 0; i < changes; ++i) {
    const size_t at = random.below(size);
    switch (random.below(4)) {
      case 0: bytes[at] ^= static_cast<uint8_t>(1u << random.below(8)); break;
      case 1: bytes[at] = static_cast<uint8_t>(interesting(random)); break;
      case 2: {
        const size_t word = at / 4 * 4;
        if (word + 4 <= size) nic::store_be32(bytes + word, static_cast<uint32_t>(interesting(random)));
        break;
      }
      default: {
        const size_t word = at / 8 * 8;
        if (word + 8 <= size) nic::store_be64(bytes + word, interesting(random));
      }
    }
  }
}

soft_options still() {
  soft_options options;
  options.threaded = false;
  return options;
}

// A mutated form of a random good request.
wqe_bytes request(random_source& random, pair_of_nics& pair) {
  const uint64_t to = pair.remote(16384 + random.below(512) * 8);
  const auto at = [&](uint32_t bytes) { return pair.local(16384 + random.below(512) * 8, bytes); };
  const auto opcode = static_cast<uint8_t>(random.below(4) == 0 ? EP_MLX5_OPCODE_RDMA_READ : EP_MLX5_OPCODE_RDMA_WRITE);
  uint8_t bytes[256];
  std::iota(bytes, bytes + sizeof bytes, uint8_t{1});
  switch (random.below(6)) {
    case 0: return rdma_wqe(pair.a, opcode, to, pair.rkey(), {at(static_cast<uint32_t>(1 + random.below(4096)))});
    case 1: return rdma_wqe(pair.a, opcode, to, pair.rkey(), std::vector<data_at>(random.below(61), at(static_cast<uint32_t>(1 + random.below(64)))));
    case 2: return inline_wqe(pair.a, to, pair.rkey(), bytes, static_cast<uint32_t>(random.below(200)));
    case 3: return add4_wqe(pair.a, to, pair.rkey(), at(4), static_cast<uint32_t>(random.next()), static_cast<uint32_t>(random.next()));
    case 4: return add8_wqe(pair.a, to, pair.rkey(), at(8), random.next(), random.next());
    default: {
      wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_MASKED_CS, EP_MLX5_OPMOD_ATOMIC_8, to, pair.rkey());
      for (int i = 0; i < 4; ++i) add64(wqe, random.next());
      add_data(wqe, at(8));
      return finish_wqe(wqe);
    }
  }
}

void requests(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  queue_options options;
  options.log_sq = 5;
  options.collapsed = seed % 2 == 0;
  pair_of_nics pair(seed, options, still());
  // Half of each segment is registered: what lies around it stays as it is.
  for (node* of : {&pair.a_node, &pair.b_node}) {
    must(of->device->dereg_mr(of->mr));
    std::memset(of->data(), 0x3c, 1 << 16);
    of->mr = must(of->device->reg_mr(of->pd, {of->address(16384), 32768}, node::all_rights));
  }
  const auto around = [&] {
    for (const node* of : {&pair.a_node, &pair.b_node}) {
      for (uint32_t i = 0; i < 16384; ++i) {
        if (of->data()[i] != 0x3c || of->data()[49152 + i] != 0x3c) return false;
      }
    }
    return true;
  };
  int64_t now = 1;
  uint64_t errors = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    for (uint64_t batch = 1 + random.below(3); batch > 0; --batch) {
      wqe_bytes wqe = request(random, pair);
      mutate(random, wqe.data(), wqe.size(), random.below(5));
      pair.a.put(wqe);
    }
    if (random.below(8) == 0) mutate(random, pair.a.slot(static_cast<uint32_t>(random.next())), EP_MLX5_WQEBB_BYTES, 4);
    pair.a.record();
    if (random.below(16) == 0) mutate(random, pair.a.dbr, 8, 2);
    uint64_t bell = static_cast<uint64_t>(be32(pair.a.qpn << 8)) << 32;
    if (random.below(16) == 0) mutate(random, reinterpret_cast<uint8_t*>(&bell), 8, 2);
    nic::store_release(*reinterpret_cast<uint64_t*>(pair.a.uar.reg_addr + random.below(2) * 256), bell);
    uint64_t turns = 0;
    while (pair.a_node.device->poll(now += 100'000'000) && turns < 10'000) ++turns;
    if (turns >= 10'000) {
      std::fprintf(stderr, "EP_FUZZ_SEED=%llu, run %llu: the NIC does not come to rest\n", static_cast<unsigned long long>(seed), static_cast<unsigned long long>(run));
      EP_CHECK(false);
      return;
    }
    dl::mlx5_event event;
    if (!must(pair.a_node.device->poll_async(event)) && pair.a.tail == be32(nic::load_raw<uint32_t>(pair.a.dbr + 4))) continue;
    ++errors;
    pair.a.to_reset();
    pair.b.to_reset();
    std::memset(pair.a.cq, 0xff, EP_MLX5_CQE_SIZE << options.log_cq);
    pair.a.connect(pair.b_node.device->port_number(), pair.b.qpn);
    pair.b.connect(pair.a_node.device->port_number(), pair.a.qpn);
    while (must(pair.a_node.device->poll_async(event))) {
    }
    if (errors % 64 == 0 && !around()) {
      std::fprintf(stderr, "EP_FUZZ_SEED=%llu, run %llu or the 64 failures before: bytes outside of the regions changed\n", static_cast<unsigned long long>(seed),
                   static_cast<unsigned long long>(run));
      EP_CHECK(false);
      return;
    }
  }
  EP_CHECK(around());
  EP_CHECK(errors > 0 || runs < 50);
  // As good as new.
  pair.a.to_reset();
  pair.b.to_reset();
  pair.a.connect(pair.b_node.device->port_number(), pair.b.qpn);
  pair.b.connect(pair.a_node.device->port_number(), pair.a.qpn);
  pair.b_node.word(16384) = 7;
  pair.a.post(add8_wqe(pair.a, pair.remote(16384), pair.rkey(), pair.local(16384, 8), 1));
  while (pair.a_node.device->poll(now)) {
  }
  EP_CHECK_EQ(pair.b_node.word(16384).load(), uint64_t{8});
}

void raw_requests(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  pair_of_nics pair(seed, {}, still());
  auto request_read = std::make_unique<nic::work_request>();
  uint64_t good = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    // On the heap and of the exact size: the reader must not look behind what it was given.
    wqe_bytes wqe = request(random, pair);
    mutate(random, wqe.data(), wqe.size(), random.below(4));
    const uint32_t wqebbs = nic::wqe_wqebbs(wqe.data());
    wqe.resize(std::max<size_t>(1, wqebbs) * EP_MLX5_WQEBB_BYTES);
    nic::violation wrong;
    if (nic::wqe_read(wqe.data(), 0, pair.a.qpn, wqebbs, *request_read, wrong)) {
      ++good;
      uint64_t sum = 0;
      for (uint32_t i = 0; i < request_read->data_count; ++i) sum += request_read->data[i].bytes;
      const bool fits = request_read->inlined ? request_read->inline_at + request_read->length <= wqe.size() : sum == request_read->length;
      if (!fits) EP_CHECK_EQ(run, uint64_t{UINT64_MAX});
    } else if (wrong.field == nullptr) {
      EP_CHECK_EQ(run, uint64_t{UINT64_MAX});
    }
  }
  EP_CHECK(good > 0);
}

void commands(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  node one(still());
  auto q = std::make_unique<queue>(one, queue_options{});
  const auto at = [&](const uint8_t* part) { return static_cast<uint64_t>(part - q->memory->data); };
  std::vector<std::pair<dl::mlx5_object, uint32_t>> made; // and which command made it
  std::vector<uint8_t> out(EP_MLX5_QUERY_HCA_CAP_OUT_BYTES);
  uint64_t accepted = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    const uint64_t kind = random.below(8);
    command_bytes whole{};
    size_t size = whole.size();
    switch (kind) {
      case 0: whole = create_cq_command(*q, at(q->cq), at(q->cq_dbr)); break;
      case 1: whole = create_qp_command(*q, one.pd.pdn, at(q->sq), at(q->dbr)); break;
      case 2: whole = init_command(*q); break;
      case 3: whole = receive_command(*q, one.device->port_number(), q->qpn); break;
      case 4: whole = send_command(*q); break;
      default: {
        static constexpr uint32_t plain[] = {EP_MLX5_CMD_QUERY_HCA_CAP, EP_MLX5_CMD_QUERY_QP, EP_MLX5_CMD_QUERY_CQ, EP_MLX5_CMD_2ERR_QP, EP_MLX5_CMD_2RST_QP};
        size = EP_MLX5_CMD_IN_BYTES;
        set(whole.data(), EP_MLX5_CMD_IN_OPCODE, plain[random.below(std::size(plain))]);
        set(whole.data(), EP_MLX5_CMD_IN_OBJECT, random.below(2) == 0 ? q->qpn : q->cqn);
      }
    }
    mutate(random, whole.data(), size, random.below(4));
    if (random.below(32) == 0) size = random.below(whole.size() + 1);
    static constexpr size_t outs[] = {0, 8, 16, 272, 4112};
    const std::span<uint8_t> answer(out.data(), outs[random.below(8) == 0 ? random.below(5) : size == 16 ? 3 + random.below(2) : 2]);
    const std::vector<uint8_t> in(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)); // of the exact size
    const dl::mlx5_object target = random.below(4) == 0 || made.empty() ? (random.below(4) == 0 ? q->cq_object : q->qp_object) : made[random.below(made.size())].first;
    bool ok = false;
    switch (random.below(8)) {
      case 0: ok = one.device->general_cmd(in, answer).ok(); break;
      case 1:
      case 2:
      case 3: {
        auto object = one.device->obj_create(in, answer);
        ok = object.ok();
        if (ok) made.emplace_back(object.value(), static_cast<uint32_t>(wire::get(in.data(), EP_MLX5_CMD_IN_OPCODE)));
        break;
      }
      case 4: ok = one.device->obj_query(target, in, answer).ok(); break;
      case 5: { // a forged or stale handle
        dl::mlx5_object forged{reinterpret_cast<void*>(interesting(random))};
        for (const auto& known : made) {
          if (known.first.handle == forged.handle) forged.handle = nullptr;
        }
        if (forged.handle != q->qp_object.handle && forged.handle != q->cq_object.handle) EP_CHECK(!one.device->obj_destroy(forged).ok());
        break;
      }
      default: ok = one.device->obj_modify(target, in, answer).ok();
    }
    accepted += ok ? 1 : 0;
    if (made.size() < 40) continue;
    for (const uint32_t what : {EP_MLX5_CMD_CREATE_QP, EP_MLX5_CMD_CREATE_CQ}) {
      for (const auto& [object, command] : made) {
        if (command == what && !one.device->obj_destroy(object).ok()) EP_CHECK_EQ(run, uint64_t{UINT64_MAX});
      }
    }
    made.clear();
  }
  EP_CHECK(accepted > 0);
  for (const uint32_t what : {EP_MLX5_CMD_CREATE_QP, EP_MLX5_CMD_CREATE_CQ}) {
    for (const auto& [object, command] : made) {
      if (command == what) must(one.device->obj_destroy(object));
    }
  }
  // As good as new.
  q->to_reset();
  q->connect(one.device->port_number(), q->qpn);
  q->post(rdma_wqe(*q, EP_MLX5_OPCODE_RDMA_WRITE, one.address(8), one.mr.rkey, {{one.address(), one.mr.lkey, 8}}));
  while (one.device->poll(1)) {
  }
  EP_CHECK_EQ(q->completed().opcode, EP_MLX5_CQE_REQ);
  q.reset();
  must(one.device->dereg_mr(one.mr));
  must(one.device->dealloc_pd(one.pd));
  must(one.device->close()); // nothing is left over
}

void scripts(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  static constexpr const char* words[] = {"drop", "drop-ack", "delay", "hold", "torn", "partial", "lose-doorbell", "repeat-doorbell", "link-down", "reorder", "qpn=", "opcode=", "count=", "skip=", "ns=",
                                          "pieces=", "atomic", "0x", "12", "-1", "99999999999999999999", "\n", " ", "#", "=", "\t", "\r\n"};
  uint64_t good = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    std::string text;
    for (uint64_t n = random.below(12); n > 0; --n) {
      text += words[random.below(std::size(words))];
      if (random.below(2) == 0) text += ' ';
    }
    if (random.below(8) == 0 && !text.empty()) text[random.below(text.size())] = static_cast<char>(random.next());
    auto parsed = nic::fault_script::parse(text);
    good += parsed.ok() ? 1 : 0;
    if (!parsed.ok() && parsed.why().message.find("line ") != 0) EP_CHECK_EQ(text, std::string("a text of which line and word are told"));
  }
  EP_CHECK(good > 0 && (good < runs || runs < 50));
}

} // namespace

int main() {
  const uint64_t seed = number_of("EP_FUZZ_SEED", 1);
  const uint64_t runs = number_of("EP_FUZZ_RUNS", 0);
  requests(seed * 2, runs != 0 ? runs / 2 : 8'000);
  requests(seed * 2 + 1, runs != 0 ? runs / 2 : 8'000);
  raw_requests(seed, runs != 0 ? runs : 40'000);
  commands(seed, runs != 0 ? runs : 40'000);
  scripts(seed, runs != 0 ? runs : 20'000);
  return ep::check::finish();
}
