// Every way to fail, and on which side it shows. Nothing here may hang: the stepper runs out of work.
#include <functional>
#include <numeric>
#include <set>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

// The request fails with this syndrome, what was posted behind it is flushed, and the queue pair is in error, which an event says.
void expect_failure(pair_of_nics& pair, uint16_t index, uint8_t syndrome, const char* what) {
  queue& a = pair.a;
  const auto failed = a.completed(index);
  if (failed.opcode != EP_MLX5_CQE_REQ_ERR || failed.counter != index || a.syndrome(index) != syndrome) {
    std::fprintf(stderr, "%s: opcode %x, counter %u, syndrome %02x, expected d, %u, %02x\n", what, failed.opcode, failed.counter, a.syndrome(index), index, syndrome);
  }
  EP_CHECK_EQ(failed.opcode, EP_MLX5_CQE_REQ_ERR);
  EP_CHECK_EQ(failed.counter, index);
  EP_CHECK_EQ(a.syndrome(index), syndrome);
  dl::mlx5_event event;
  EP_CHECK(must(pair.a_node.device->poll_async(event)));
  EP_CHECK(event.kind == dl::mlx5_event_kind::qp_error);
  EP_CHECK_EQ(event.number, pair.a.qpn);
  EP_CHECK_EQ(event.syndrome, syndrome);
  EP_CHECK(!must(pair.b_node.device->poll_async(event))); // the responder hears nothing of it
  const uint16_t late = a.post(rdma_wqe(a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 8)}));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(a.completed(late).opcode, EP_MLX5_CQE_REQ_ERR);
  EP_CHECK_EQ(a.syndrome(late), EP_MLX5_SYNDROME_FLUSHED);
  EP_CHECK_EQ(a.completed(late).counter, late);
}

queue_options ordinary() {
  queue_options options;
  options.collapsed = false;
  return options;
}

using build = std::function<wqe_bytes(pair_of_nics&)>;

void fails(const char* what, uint8_t syndrome, const build& wqe, queue_options options = ordinary()) {
  pair_of_nics pair(31, options);
  std::memset(pair.b_node.data(), 0x5a, 1 << 16);
  pair.a.post(wqe(pair));
  EP_CHECK(pair.steps.run());
  expect_failure(pair, 0, syndrome, what);
  for (uint32_t i = 0; i < 1 << 16; ++i) {
    if (pair.b_node.data()[i] != 0x5a) {
      EP_CHECK_EQ(std::string(what), std::string("wrote nothing"));
      break;
    }
  }
  EP_CHECK(pair.a_node.device->violations().empty());
}

void keys_and_ranges() {
  const auto write = [](uint64_t roff, uint32_t bytes) {
    return [=](pair_of_nics& pair) { return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(roff), pair.rkey(), {pair.local(0, bytes)}); };
  };
  fails("no such lkey", EP_MLX5_SYNDROME_LOCAL_PROTECTION, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {{pair.a_node.address(), pair.a_node.mr.lkey ^ 1, 8}});
  });
  fails("beyond the lkey", EP_MLX5_SYNDROME_LOCAL_PROTECTION, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local((1 << 16) - 4, 8)});
  });
  fails("no such rkey", EP_MLX5_SYNDROME_REMOTE_ACCESS, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey() + 1, {pair.local(0, 8)});
  });
  fails("an rkey beyond the table", EP_MLX5_SYNDROME_REMOTE_ACCESS, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), 0xffffff01, {pair.local(0, 8)});
  });
  fails("key 0", EP_MLX5_SYNDROME_REMOTE_ACCESS, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), 0, {pair.local(0, 8)});
  });
  fails("one byte too far", EP_MLX5_SYNDROME_REMOTE_ACCESS, write((1 << 16) - 7, 8));
  fails("one byte too early", EP_MLX5_SYNDROME_REMOTE_ACCESS, write(UINT64_MAX, 8));
  fails("an address that wraps", EP_MLX5_SYNDROME_REMOTE_ACCESS, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, UINT64_MAX - 3, pair.rkey(), {pair.local(0, 8)});
  });
  fails("a misaligned atomic", EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
        [](pair_of_nics& pair) { return add8_wqe(pair.a, pair.remote(4), pair.rkey(), pair.local(0, 8), 1); });
  fails("a misaligned atomic of 4 bytes", EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
        [](pair_of_nics& pair) { return add4_wqe(pair.a, pair.remote(2), pair.rkey(), pair.local(0, 4), 1); });
  queue_options closed = ordinary();
  closed.rwe = closed.rre = closed.rae = false;
  fails("no rwe", EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST, write(0, 8), closed);
  fails("no rre", EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(0), pair.rkey(), {pair.local(0, 8)});
  }, closed);
  fails("no rae", EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST,
        [](pair_of_nics& pair) { return add8_wqe(pair.a, pair.remote(8), pair.rkey(), pair.local(0, 8), 1); }, closed);
  fails("an immediate without a receive queue", EP_MLX5_SYNDROME_REMOTE_INVALID_REQUEST, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE_IMM, pair.remote(0), pair.rkey(), {pair.local(0, 8)}, EP_MLX5_CQ_UPDATE, 7);
  });
  queue_options impatient = ordinary();
  impatient.has_rq = true;
  impatient.log_rq = 4;
  impatient.rnr_retry = 3;
  fails("an immediate that no receive request waits for", EP_MLX5_SYNDROME_RNR_RETRY_EXCEEDED, [](pair_of_nics& pair) {
    return rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE_IMM, pair.remote(0), pair.rkey(), {pair.local(0, 8)}, EP_MLX5_CQ_UPDATE, 7);
  }, impatient);
}

// The same bytes, registered again with fewer rights or in another domain.
void rights_of_regions() {
  struct one {
    uint32_t access;
    uint8_t opcode;
    bool ok;
  };
  constexpr uint32_t local = dl::MLX5_ACCESS_LOCAL_WRITE;
  for (const one& test : {one{local | dl::MLX5_ACCESS_REMOTE_WRITE, EP_MLX5_OPCODE_RDMA_WRITE, true}, one{local | dl::MLX5_ACCESS_REMOTE_WRITE, EP_MLX5_OPCODE_RDMA_READ, false},
                          one{dl::MLX5_ACCESS_REMOTE_READ, EP_MLX5_OPCODE_RDMA_READ, true}, one{dl::MLX5_ACCESS_REMOTE_READ, EP_MLX5_OPCODE_RDMA_WRITE, false},
                          one{local | dl::MLX5_ACCESS_REMOTE_WRITE, EP_MLX5_OPCODE_ATOMIC_MASKED_FA, false},
                          one{local | dl::MLX5_ACCESS_REMOTE_ATOMIC, EP_MLX5_OPCODE_ATOMIC_MASKED_FA, true}}) {
    pair_of_nics pair(37, ordinary());
    const auto mr = must(pair.b_node.device->reg_mr(pair.b_node.pd, {pair.remote(0), 64}, test.access));
    pair.a.post(test.opcode == EP_MLX5_OPCODE_ATOMIC_MASKED_FA ? add8_wqe(pair.a, pair.remote(0), mr.rkey, pair.local(0, 8), 1)
                                                               : rdma_wqe(pair.a, test.opcode, pair.remote(0), mr.rkey, {pair.local(0, 8)}));
    EP_CHECK(pair.steps.run());
    if (test.ok) {
      EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
    } else {
      expect_failure(pair, 0, EP_MLX5_SYNDROME_REMOTE_ACCESS, "right of a region");
    }
    must(pair.b_node.device->dereg_mr(mr));
  }
  { // a read into memory that may not be written
    pair_of_nics pair(38, ordinary());
    const auto mr = must(pair.a_node.device->reg_mr(pair.a_node.pd, {pair.a_node.address(), 64}, 0));
    pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(0), pair.rkey(), {{pair.a_node.address(), mr.lkey, 8}}));
    EP_CHECK(pair.steps.run());
    expect_failure(pair, 0, EP_MLX5_SYNDROME_LOCAL_PROTECTION, "read into read-only memory");
  }
  for (const bool at_the_peer : {false, true}) { // another protection domain
    pair_of_nics pair(39, ordinary());
    node& of = at_the_peer ? pair.b_node : pair.a_node;
    const auto pd = must(of.device->alloc_pd());
    const auto mr = must(of.device->reg_mr(pd, {of.address(), 64}, node::all_rights));
    pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), at_the_peer ? mr.rkey : pair.rkey(),
                         {{pair.a_node.address(), at_the_peer ? pair.a_node.mr.lkey : mr.lkey, 8}}));
    EP_CHECK(pair.steps.run());
    expect_failure(pair, 0, at_the_peer ? EP_MLX5_SYNDROME_REMOTE_ACCESS : EP_MLX5_SYNDROME_LOCAL_PROTECTION, "another domain");
    EP_CHECK(!of.device->dealloc_pd(pd).ok());
    must(of.device->dereg_mr(mr));
    must(of.device->dealloc_pd(pd));
  }
}

// Each breaks one field of a good request; the report names the field, the slot and what was found.
void strict_fields() {
  struct one {
    const char* field;
    uint8_t opcode;
    std::function<void(wqe_bytes&)> harm;
  };
  const uint8_t write = EP_MLX5_OPCODE_RDMA_WRITE;
  const uint8_t add = EP_MLX5_OPCODE_ATOMIC_MASKED_FA;
  const std::vector<one> cases{
      {"ctrl.index", write, [](wqe_bytes& wqe) { wqe[2] ^= 1; }},
      {"ctrl.qpn", write, [](wqe_bytes& wqe) { wqe[4] ^= 1; }},
      {"ctrl.ds reserved bits 7:6", write, [](wqe_bytes& wqe) { wqe[7] |= 0x40; }},
      {"ctrl.ds", write, [](wqe_bytes& wqe) { wqe[7] = 0; }},
      {"ctrl.ds", write, [](wqe_bytes& wqe) { wqe[7] = 1; }},
      {"ctrl.ds", write, [](wqe_bytes& wqe) { wqe[7] = 5; }}, // two WQEBBs, one was posted
      {"ctrl.signature", write, [](wqe_bytes& wqe) { wqe[8] = 1; }},
      {"ctrl.dci_stream", write, [](wqe_bytes& wqe) { wqe[10] = 1; }},
      {"ctrl.fm_ce_se reserved bits 4 and 0", write, [](wqe_bytes& wqe) { wqe[11] |= 1; }},
      {"ctrl.fm_ce_se reserved bits 4 and 0", write, [](wqe_bytes& wqe) { wqe[11] |= 0x10; }},
      {"ctrl.ce", write, [](wqe_bytes& wqe) { wqe[11] |= 0x0c; }},
      {"ctrl.fence", write, [](wqe_bytes& wqe) { wqe[11] |= 0xa0; }},
      {"ctrl.imm", write, [](wqe_bytes& wqe) { wqe[15] = 1; }},
      {"ctrl.opmod", write, [](wqe_bytes& wqe) { wqe[0] = 8; }},
      {"ctrl.opcode", write, [](wqe_bytes& wqe) { wqe[3] = EP_MLX5_OPCODE_SEND; }},
      {"raddr.reserved", write, [](wqe_bytes& wqe) { wqe[31] = 1; }},
      {"data.byte_count", write, [](wqe_bytes& wqe) { std::fill_n(wqe.begin() + 32, 4, uint8_t{0}); }},
      {"ctrl.ds", write, [](wqe_bytes& wqe) { wqe[32] |= 0x80, wqe[35] = 13; }}, // inline data, but more of it than ds says
      {"ctrl.opmod", add, [](wqe_bytes& wqe) { wqe[0] = 0; }},
      {"ctrl.ds", add, [](wqe_bytes& wqe) { wqe[7] = 3; }},
      {"data.byte_count", add, [](wqe_bytes& wqe) { wqe[51] = 4; }},
      {"ctrl.imm", add, [](wqe_bytes& wqe) { wqe[12] = 1; }},
      {"atomic.compare", EP_MLX5_OPCODE_ATOMIC_FA, [](wqe_bytes& wqe) { wqe[47] = 1; }},
      {"data.byte_count", EP_MLX5_OPCODE_RDMA_READ, [](wqe_bytes& wqe) { wqe[32] |= 0x80; }},
  };
  for (const one& test : cases) {
    pair_of_nics pair(41, ordinary());
    for (uint16_t i = 0; i < 3; ++i) pair.a.post(finish_wqe(begin_wqe(pair.a, EP_MLX5_OPCODE_NOP, 0, 0, 0)));
    wqe_bytes wqe;
    if (test.opcode == add) {
      wqe = add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1);
    } else if (test.opcode == EP_MLX5_OPCODE_ATOMIC_FA) {
      wqe = add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1);
      wqe[0] = 0;
      wqe[3] = EP_MLX5_OPCODE_ATOMIC_FA;
    } else {
      wqe = rdma_wqe(pair.a, test.opcode, pair.remote(0), pair.rkey(), {pair.local(0, 8)});
    }
    test.harm(wqe);
    pair.a.put(wqe);
    pair.a.record();
    // A good doorbell: the first bytes of a WQE that itself is wrong would be a doorbell of nobody.
    const uint64_t value = static_cast<uint64_t>(be32(pair.a.qpn << 8)) << 32;
    nic::store_release(*reinterpret_cast<uint64_t*>(pair.a.uar.reg_addr), value);
    EP_CHECK(pair.steps.run());
    const auto seen = pair.a_node.device->violations();
    EP_CHECK_EQ(seen.size(), size_t{1});
    if (seen.size() != 1 || std::string(seen[0].field) != test.field) {
      EP_CHECK_EQ(std::string(seen.empty() ? "nothing" : seen[0].field), std::string(test.field));
      continue;
    }
    EP_CHECK_EQ(seen[0].slot, 3u);
    EP_CHECK_EQ(seen[0].qpn, pair.a.qpn);
    EP_CHECK(nic::violation_text(seen[0]).find("slot 3") != std::string::npos);
    EP_CHECK_EQ(pair.a.completed(3).opcode, EP_MLX5_CQE_REQ_ERR);
    EP_CHECK_EQ(pair.a.syndrome(3), EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
  }
}

void doorbells_that_are_wrong() {
  { // of a queue pair that is not on this page
    pair_of_nics pair(43);
    nic::store_release(*reinterpret_cast<uint64_t*>(pair.a.uar.reg_addr), static_cast<uint64_t>(be32((pair.a.qpn + 1) << 8)) << 32);
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(std::string(pair.a_node.device->violations().at(0).field), std::string("doorbell.qpn"));
  }
  { // more posted than the ring holds: what was overwritten is lost for good
    pair_of_nics pair(44);
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(pair.a.dbr + 4)).store(be32(65));
    nic::store_release(*reinterpret_cast<uint64_t*>(pair.a.uar.reg_addr), static_cast<uint64_t>(be32(pair.a.qpn << 8)) << 32);
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(std::string(pair.a_node.device->violations().at(0).field), std::string("dbr.send"));
    EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ_ERR);
    EP_CHECK_EQ(pair.a.syndrome(), EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
  }
  { // the record's upper half
    pair_of_nics pair(45);
    pair.a.put(finish_wqe(begin_wqe(pair.a, EP_MLX5_OPCODE_NOP, 0, 0, 0)));
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(pair.a.dbr + 4)).store(be32(0x10001));
    pair.a.bell();
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(std::string(pair.a_node.device->violations().at(0).field), std::string("dbr.send upper half"));
    EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  }
  { // rung before the WQE is written: what lies there has the index of a lap ago
    pair_of_nics pair(46);
    for (uint32_t i = 0; i < pair.a.depth(); ++i) pair.a.put(finish_wqe(begin_wqe(pair.a, EP_MLX5_OPCODE_NOP, 0, 0, 0)));
    pair.a.ring();
    EP_CHECK(pair.steps.run());
    ++pair.a.tail;
    pair.a.ring();
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(std::string(pair.a_node.device->violations().at(0).field), std::string("ctrl.index"));
    EP_CHECK_EQ(pair.a.syndrome(), EP_MLX5_SYNDROME_LOCAL_QP_OPERATION);
  }
  { // not ready to send
    pair_of_nics pair(47);
    pair.a.to_reset();
    pair.a.post(finish_wqe(begin_wqe(pair.a, EP_MLX5_OPCODE_NOP, 0, 0, 0)));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(std::string(pair.a_node.device->violations().at(0).field), std::string("doorbell"));
    EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_INVALID);
  }
}

} // namespace

int main() {
  keys_and_ranges();
  rights_of_regions();
  strict_fields();
  doorbells_that_are_wrong();
  return ep::check::finish();
}
