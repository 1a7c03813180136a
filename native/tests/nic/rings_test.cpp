// Rings over their ends: send queues, completion queues, indices of 16 bits, receive counts, doorbell pages that several share.
#include <numeric>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

// 10^5 wraps of a ring of 4 over the 16-bit index, several times; requests of 1 and 2 WQEBBs, so that some lie over the ring's end.
void rings_wrap() {
  queue_options options;
  options.log_sq = 2;
  pair_of_nics pair(17, options, [] {
    soft_options devices = pair_of_nics::stepped();
    devices.engine.trace_events = 0;
    return devices;
  }());
  uint64_t sum = 0;
  for (uint64_t i = 0; sum < 400'000; ++i) {
    uint32_t expected_index = pair.a.tail;
    if (i % 3 == 0) {
      wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_MASKED_CS, EP_MLX5_OPMOD_ATOMIC_8, pair.remote(0), pair.rkey());
      for (const uint64_t word : {i + 1, uint64_t{0}, UINT64_MAX, uint64_t{0}}) add64(wqe, word);
      add_data(wqe, pair.local(0, 8));
      pair.a.post(finish_wqe(wqe));
      sum += 2;
    } else {
      const uint64_t value = i + 1;
      pair.a.post(inline_wqe(pair.a, pair.remote(0), pair.rkey(), &value, 8));
      sum += 1;
    }
    if (!pair.steps.run(1000) || pair.b_node.word(0).load() != i + 1 || pair.a.completed().counter != expected_index || pair.a.completed().opcode != EP_MLX5_CQE_REQ) {
      EP_CHECK_EQ(i, uint64_t{UINT64_MAX}); // names the request
      return;
    }
  }
  EP_CHECK(pair.a_node.device->violations().empty());
}

// The record of 16 bits: the wrap from index 0xffff to 0.
void sixteen_bit_wrap_in_one_batch() {
  pair_of_nics pair(19);
  while (pair.a.tail != 0xfffe) {
    pair.a.put(finish_wqe(begin_wqe(pair.a, EP_MLX5_OPCODE_NOP, 0, 0, 0, 0)));
    if (pair.a.tail % 32 != 0) continue;
    pair.a.ring();
    EP_CHECK(pair.steps.run());
  }
  for (uint64_t i = 0; i < 4; ++i) pair.a.put(inline_wqe(pair.a, pair.remote(8 * i), pair.rkey(), &i, 8));
  EP_CHECK_EQ(pair.a.tail, 2);
  EP_CHECK_EQ(nic::load_be32(pair.a.slot(0xffff)), 0x00ffff08u);
  pair.a.ring();
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed().counter, 1);
  for (uint64_t i = 0; i < 4; ++i) EP_CHECK_EQ(pair.b_node.word(8 * i).load(), i);
}

void ordinary_completions_and_their_owner_bit() {
  queue_options options;
  options.collapsed = false;
  options.ignore_overrun = false;
  options.log_cq = 3;
  pair_of_nics pair(21, options);
  uint32_t consumer = 0;
  for (uint32_t i = 0; i < 50; ++i) {
    // Only every second request asks for a completion.
    pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 16)}, i % 2 == 1 ? EP_MLX5_CQ_UPDATE : 0));
    EP_CHECK(pair.steps.run());
    if (i % 2 == 0) continue;
    const auto entry = pair.a.completed(consumer & 7);
    EP_CHECK_EQ(entry.opcode, EP_MLX5_CQE_REQ);
    EP_CHECK_EQ(entry.owner, consumer >> 3 & 1);
    EP_CHECK_EQ(entry.counter, i);
    ++consumer;
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(pair.a.cq_dbr)).store(be32(consumer), std::memory_order_release);
  }
  // Nobody takes completions any more: the ninth finds no room. It is not written, the queue has overrun, its queue pair fails.
  for (uint32_t i = 0; i < 9; ++i) {
    pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 16)}));
    EP_CHECK(pair.steps.run());
  }
  EP_CHECK_EQ(pair.a.completed((consumer + 8) & 7).counter, 50); // the oldest, untouched
  dl::mlx5_event event;
  bool cq_error = false;
  bool qp_error = false;
  while (must(pair.a_node.device->poll_async(event))) {
    cq_error = cq_error || (event.kind == dl::mlx5_event_kind::cq_error && event.number == pair.a.cqn);
    qp_error = qp_error || (event.kind == dl::mlx5_event_kind::qp_error && event.number == pair.a.qpn);
  }
  EP_CHECK(cq_error);
  EP_CHECK(qp_error);
  std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> in{};
  std::array<uint8_t, EP_MLX5_QUERY_CQ_OUT_BYTES> out{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_QUERY_CQ);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, pair.a.cqn);
  must(pair.a_node.device->obj_query(pair.a.cq_object, in, out));
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_CQC_AT, EP_MLX5_CQC_STATUS), uint64_t{EP_MLX5_CQ_STATUS_OVERFLOW});
}

// A write with immediate takes a receive request at the responder, and its NIC writes a completion there.
void immediates_arrive() {
  queue_options options;
  options.has_rq = true;
  options.log_rq = 4;
  options.collapsed = false;
  pair_of_nics pair(23, options);
  const auto post_receives = [&](uint16_t count) { std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(pair.b.dbr)).store(be32(count), std::memory_order_release); };
  post_receives(2);
  EP_CHECK(pair.steps.run());
  std::iota(pair.a_node.data(), pair.a_node.data() + 100, uint8_t{1});
  for (uint32_t i = 0; i < 3; ++i) {
    pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE_IMM, pair.remote(100 * i), pair.rkey(), {pair.local(0, 100)}, EP_MLX5_CQ_UPDATE, 0xabc0 + i));
  }
  for (int i = 0; i < 200; ++i) pair.steps.step();
  EP_CHECK_EQ(pair.a.completed(1).counter, 1);
  EP_CHECK_EQ(pair.a.completed(2).opcode, EP_MLX5_CQE_INVALID); // the third waits: receiver not ready, retried for ever
  for (uint32_t i = 0; i < 2; ++i) {
    EP_CHECK_EQ(pair.b.completed(i).opcode, EP_MLX5_CQE_RESP_WR_IMM);
    EP_CHECK_EQ(pair.b.word(i, 32) >> 32, uint64_t{be32(0xabc0 + i)});
    EP_CHECK_EQ(pair.b.word(i, 40) >> 32, uint64_t{be32(100)});
    EP_CHECK_EQ(pair.b.completed(i).counter, i);
  }
  post_receives(3);
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed(2).opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.b.completed(2).opcode, EP_MLX5_CQE_RESP_WR_IMM);
  EP_CHECK(std::memcmp(pair.b_node.data() + 200, pair.a_node.data(), 100) == 0);
  // In its next life the queue pair counts from 0 again: nothing is left of what was posted before.
  pair.b.to_reset();
  pair.a.to_reset();
  post_receives(0);
  pair.b.connect(pair.a_node.device->port_number(), pair.a.qpn);
  pair.a.connect(pair.b_node.device->port_number(), pair.b.qpn);
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE_IMM, pair.remote(0), pair.rkey(), {pair.local(0, 100)}, EP_MLX5_CQ_UPDATE, 9));
  for (int i = 0; i < 200; ++i) pair.steps.step();
  EP_CHECK_EQ(pair.a.completed(3).opcode, EP_MLX5_CQE_INVALID);
  EP_CHECK_EQ(pair.b.completed(3).opcode, EP_MLX5_CQE_INVALID);
  post_receives(1);
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed(3).opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.b.completed(3).opcode, EP_MLX5_CQE_RESP_WR_IMM);
  EP_CHECK_EQ(pair.b.completed(3).counter, 0);
}

// Two queue pairs ring one register: the second store may replace the first before the NIC has looked. Both are doorbells to hardware, and so they are here.
void doorbell_pages_are_shared() {
  pair_of_nics pair(28);
  queue_options shared;
  shared.page_of = &pair.a;
  queue other_a(pair.a_node, shared);
  queue other_b(pair.b_node, {});
  other_a.connect(pair.b_node.device->port_number(), other_b.qpn);
  other_b.connect(pair.a_node.device->port_number(), other_a.qpn);
  for (uint64_t i = 1; i <= 20; ++i) {
    pair.a.post(add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1));
    other_a.post(add8_wqe(other_a, pair.remote(8), pair.rkey(), pair.local(8, 8), 1));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(0).load(), i);
    EP_CHECK_EQ(pair.b_node.word(8).load(), i);
  }
  EP_CHECK(pair.a_node.device->violations().empty());
}

} // namespace

int main() {
  rings_wrap();
  sixteen_bit_wrap_in_one_batch();
  ordinary_completions_and_their_owner_bit();
  immediates_arrive();
  doorbell_pages_are_shared();
  return ep::check::finish();
}
