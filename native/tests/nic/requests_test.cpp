// What requests do, and what their completions say.
#include <algorithm>
#include <numeric>

#include "nic/rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

// The golden WQEs of reference/mooncake.md 3.4, with this rig's keys and addresses: byte for byte what encoders make.
void golden_requests_are_executed() {
  queue_options options;
  options.log_sq = 4;
  pair_of_nics pair(3, options);
  for (uint32_t i = 0; i < 5; ++i) pair.a.post(finish_wqe(begin_wqe(pair.a, EP_MLX5_OPCODE_NOP, 0, 0, 0)));
  EP_CHECK(pair.steps.run());
  std::iota(pair.a_node.data(), pair.a_node.data() + 7184, uint8_t{1});
  const auto patch = [&](std::vector<uint32_t> words, uint64_t raddr, uint64_t laddr) {
    words[1] = pair.a.qpn << 8 | (words[1] & 0xff);
    words[4] = static_cast<uint32_t>(raddr >> 32);
    words[5] = static_cast<uint32_t>(raddr);
    words[6] = pair.rkey();
    const size_t data = words.size() - 4;
    words[data + 1] = pair.a_node.mr.lkey;
    words[data + 2] = static_cast<uint32_t>(laddr >> 32);
    words[data + 3] = static_cast<uint32_t>(laddr);
    wqe_bytes bytes;
    for (const uint32_t word : words) add32(bytes, word);
    return bytes;
  };
  // W1, A1, A2: indices 5, 6, 7.
  pair.a.put(patch({0x00000508, 0x00123403, 0x00000008, 0, 0, 0, 0, 0, 0x00001c10, 0, 0, 0}, pair.remote(0), pair.a_node.address(0)));
  pair.a.put(patch({0x08000615, 0x00123404, 0x00000008, 0, 0, 0, 0, 0, 0xfffffff8, 0, 0, 0, 4, 0, 0, 0}, pair.remote(8196), pair.a_node.address(8196)));
  pair.a.put(patch({0x09000715, 0x00123404, 0x00000008, 0, 0, 0, 0, 0, 0, 1, 0, 0, 8, 0, 0, 0}, pair.remote(8200), pair.a_node.address(8200)));
  const uint32_t before = 0x01020304;
  std::memcpy(pair.b_node.data() + 8196, &before, 4);
  pair.b_node.word(8200) = 41;
  pair.a.ring();
  EP_CHECK(pair.steps.run());
  EP_CHECK(std::memcmp(pair.a_node.data(), pair.b_node.data(), 7184) == 0);
  EP_CHECK_EQ(nic::load_raw<uint32_t>(pair.b_node.data() + 8196), before - 8);
  EP_CHECK_EQ(nic::load_raw<uint32_t>(pair.a_node.data() + 8196), be32(before)); // the 4-byte form answers big-endian
  EP_CHECK_EQ(pair.b_node.word(8200).load(), uint64_t{42});
  EP_CHECK_EQ(pair.a_node.word(8200).load(), uint64_t{41}); // the 8-byte form in the host's order
  const auto done = pair.a.completed();
  EP_CHECK_EQ(done.opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(done.wqe_opcode, EP_MLX5_OPCODE_ATOMIC_MASKED_FA);
  EP_CHECK_EQ(done.counter, 7);
  EP_CHECK_EQ(done.qpn, pair.a.qpn);
  // Byte for byte, but for the time: user index, byte count, tail.
  EP_CHECK_EQ(pair.a.word(0, 0), uint64_t{0});
  EP_CHECK_EQ(pair.a.word(0, 32), uint64_t{be32(0x1234)});
  EP_CHECK_EQ(pair.a.word(0, 40), uint64_t{be32(8)} << 32);
  EP_CHECK_EQ(pair.a.word(0, 56), (uint64_t{be32(0x00070000)} << 32 | be32(0x15000000 | pair.a.qpn)) & ~(uint64_t{1} << 56));
  EP_CHECK(pair.a_node.device->violations().empty());
}

void inline_and_gathered_writes() {
  pair_of_nics pair(5);
  for (uint32_t length : {0u, 1u, 4u, 8u, 12u, 13u, 28u, 29u, 44u, 300u}) {
    std::vector<uint8_t> bytes;
    bytes.reserve(512);
    bytes.resize(length);
    std::iota(bytes.begin(), bytes.end(), static_cast<uint8_t>(length + 1));
    std::fill_n(pair.b_node.data(), 512, uint8_t{0});
    pair.a.post(inline_wqe(pair.a, pair.remote(16), pair.rkey(), bytes.data(), length));
    EP_CHECK(pair.steps.run());
    EP_CHECK(std::memcmp(pair.b_node.data() + 16, bytes.data(), length) == 0);
    EP_CHECK_EQ(pair.b_node.data()[16 + length], uint8_t{0});
    EP_CHECK_EQ(pair.b_node.data()[15], uint8_t{0});
  }
  // 61 pieces: the largest WQE there is, 16 WQEBBs; and scattered back by a read.
  std::iota(pair.a_node.data(), pair.a_node.data() + 4096, uint8_t{7});
  std::vector<data_at> pieces;
  std::vector<uint8_t> expected;
  for (uint32_t i = 0; i < 61; ++i) {
    pieces.push_back(pair.local(i * 64, i + 1));
    expected.insert(expected.end(), pair.a_node.data() + i * 64, pair.a_node.data() + i * 64 + i + 1);
  }
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(1000), pair.rkey(), pieces));
  EP_CHECK(pair.steps.run());
  EP_CHECK(std::memcmp(pair.b_node.data() + 1000, expected.data(), expected.size()) == 0);
  for (data_at& piece : pieces) piece.address += 8192;
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, pair.remote(1000), pair.rkey(), pieces));
  EP_CHECK(pair.steps.run());
  for (uint32_t i = 0; i < 61; ++i) EP_CHECK(std::memcmp(pair.a_node.data() + 8192 + i * 64, pair.a_node.data() + i * 64, i + 1) == 0);
  EP_CHECK_EQ(pair.a.completed().counter, static_cast<uint16_t>(pair.a.last));
  EP_CHECK(pair.a_node.device->violations().empty());
}

void zero_length_names_no_memory() {
  pair_of_nics pair(7);
  // Neither the key nor the address exists.
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, 0x10, 0xdead, {}));
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, 0x10, 0xdead, {{0, EP_MLX5_INVALID_LKEY, 0}}));
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_READ, 0x10, 0xdead, {}));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  EP_CHECK_EQ(pair.a.completed().counter, 2);
}

void largest_message() {
  queue_options options;
  options.log_msg_max = 12;
  pair_of_nics pair(9, options);
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 4096)}));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 4096), pair.local(0, 1)}));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ_ERR);
  EP_CHECK_EQ(pair.a.syndrome(), EP_MLX5_SYNDROME_LOCAL_LENGTH);
  // 1 GiB is the most that any queue pair sends. The length counts first: no such key is needed to see it.
  pair_of_nics most(10);
  most.a.post(rdma_wqe(most.a, EP_MLX5_OPCODE_RDMA_WRITE, most.remote(0), most.rkey(), {{0, 1, EP_MLX5_MAX_MESSAGE_BYTES}, {0, 1, 1}}));
  EP_CHECK(most.steps.run());
  EP_CHECK_EQ(most.a.syndrome(), EP_MLX5_SYNDROME_LOCAL_LENGTH);
  pair_of_nics exactly(10);
  exactly.a.post(rdma_wqe(exactly.a, EP_MLX5_OPCODE_RDMA_WRITE, exactly.remote(0), exactly.rkey(), {{0, 1, EP_MLX5_MAX_MESSAGE_BYTES}}));
  EP_CHECK(exactly.steps.run());
  EP_CHECK_EQ(exactly.a.syndrome(), EP_MLX5_SYNDROME_LOCAL_PROTECTION);
}

// A message takes a sequence number for each packet; they have 24 bits.
void sequence_numbers_wrap() {
  queue_options options;
  options.mtu = EP_MLX5_MTU_256;
  options.send_psn = 0xfffff0;
  options.receive_psn = 0xfffff0;
  pair_of_nics pair(11, options);
  for (int i = 0; i < 40; ++i) { // 10 packets each: the 24-bit sequence number wraps
    pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(0), pair.rkey(), {pair.local(0, 2500)}));
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.a.completed().opcode, EP_MLX5_CQE_REQ);
  }
  std::array<uint8_t, EP_MLX5_CMD_IN_BYTES> in{};
  std::array<uint8_t, EP_MLX5_QUERY_QP_OUT_BYTES> out{};
  set(in.data(), EP_MLX5_CMD_IN_OPCODE, EP_MLX5_CMD_QUERY_QP);
  set(in.data(), EP_MLX5_CMD_IN_OBJECT, pair.a.qpn);
  must(pair.a_node.device->obj_query(pair.a.qp_object, in, out));
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_QPC_AT, EP_MLX5_QPC_NEXT_SEND_PSN), (0xfffff0ull + 400) & 0xffffff);
  EP_CHECK_EQ(wire::get(out.data() + EP_MLX5_QPC_AT, EP_MLX5_QPC_HW_SQ_WQEBB_COUNTER), uint64_t{40});
}

// Long messages take several turns, so that the signals of other queue pairs do not wait for gigabytes.
void long_messages_let_others_pass() {
  constexpr uint64_t bytes = (5 << 20) + 123;
  soft_options options = pair_of_nics::stepped();
  node here(options, 8 << 20);
  node there(options, 8 << 20);
  queue_options plain;
  queue bulk_a(here, plain), bulk_b(there, plain), small_a(here, plain), small_b(there, plain);
  bulk_a.connect(there.device->port_number(), bulk_b.qpn);
  bulk_b.connect(here.device->port_number(), bulk_a.qpn);
  small_a.connect(there.device->port_number(), small_b.qpn);
  small_b.connect(here.device->port_number(), small_a.qpn);
  for (uint64_t i = 8; i < bytes; i += 8) here.word(i) = i * 0x9e3779b97f4a7c15;
  bulk_a.post(rdma_wqe(bulk_a, EP_MLX5_OPCODE_RDMA_WRITE, there.address(8), there.mr.rkey, {{here.address(8), here.mr.lkey, bytes}}));
  small_a.post(add8_wqe(small_a, there.address(0), there.mr.rkey, {here.address(0), here.mr.lkey, 8}, 1));
  int polls = 0;
  for (; there.word(0).load() == 0 && polls < 10; ++polls) here.device->poll(1);
  EP_CHECK(bulk_a.completed().opcode == EP_MLX5_CQE_INVALID);
  EP_CHECK(std::memcmp(here.data() + 8, there.data() + 8, bytes) != 0);
  while (here.device->poll(1)) {
  }
  EP_CHECK_EQ(bulk_a.completed().opcode, EP_MLX5_CQE_REQ);
  EP_CHECK(std::memcmp(here.data() + 8, there.data() + 8, bytes) == 0);
  EP_CHECK_EQ(there.data()[8 + bytes], uint8_t{0});
}

// Every atomic against a plain model of its rule.
void atomics_follow_their_rules() {
  pair_of_nics pair(13);
  random_source random(99);
  const auto by_bits = [](uint64_t old, uint64_t add, uint64_t boundary, int bits) {
    uint64_t made = 0;
    uint64_t carry = 0;
    for (int i = 0; i < bits; ++i) {
      const uint64_t sum = (old >> i & 1) + (add >> i & 1) + carry;
      made |= (sum & 1) << i;
      carry = (boundary >> i & 1) != 0 ? 0 : sum >> 1;
    }
    return made;
  };
  for (int i = 0; i < 300; ++i) {
    const uint64_t old = random.next();
    const uint64_t x = random.next();
    const uint64_t y = i % 3 == 0 ? 0 : random.next() & random.next();
    const uint64_t compare_mask = random.next() & random.next() & random.next();
    const uint64_t compare = i % 2 == 0 ? (old & compare_mask) | (random.next() & ~compare_mask) : random.next();
    uint64_t expected = 0;
    uint64_t answer = old;
    pair.b_node.word(64) = old;
    switch (i % 6) {
      case 0:
        expected = by_bits(old, x, y, 64);
        pair.a.post(add8_wqe(pair.a, pair.remote(64), pair.rkey(), pair.local(64, 8), x, y));
        break;
      case 1:
        expected = by_bits(old, x, y & 0xffffffff, 32) | (old & 0xffffffff00000000);
        answer = be32(static_cast<uint32_t>(old));
        pair.a_node.word(64) = 0;
        pair.a.post(add4_wqe(pair.a, pair.remote(64), pair.rkey(), pair.local(64, 4), static_cast<uint32_t>(x), static_cast<uint32_t>(y)));
        break;
      case 2: {
        expected = old + x;
        wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_FA, 0, pair.remote(64), pair.rkey());
        add64(wqe, x);
        add64(wqe, 0);
        add_data(wqe, pair.local(64, 8));
        pair.a.post(finish_wqe(wqe));
        break;
      }
      case 3: {
        const uint64_t wanted = i % 4 == 3 ? old : old ^ 1;
        expected = wanted == old ? x : old;
        wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_CS, 0, pair.remote(64), pair.rkey());
        add64(wqe, x);
        add64(wqe, wanted);
        add_data(wqe, pair.local(64, 8));
        pair.a.post(finish_wqe(wqe));
        break;
      }
      case 4: { // two WQEBBs
        expected = ((old ^ compare) & compare_mask) == 0 ? (old & ~y) | (x & y) : old;
        wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_MASKED_CS, EP_MLX5_OPMOD_ATOMIC_8, pair.remote(64), pair.rkey());
        for (const uint64_t word : {x, compare, y, compare_mask}) add64(wqe, word);
        add_data(wqe, pair.local(64, 8));
        pair.a.post(finish_wqe(wqe));
        break;
      }
      default: {
        const auto low = [](uint64_t word) { return static_cast<uint32_t>(word); };
        const uint32_t made = ((low(old) ^ low(compare)) & low(compare_mask)) == 0 ? (low(old) & ~low(y)) | (low(x) & low(y)) : low(old);
        expected = (old & 0xffffffff00000000) | made;
        answer = be32(low(old));
        pair.a_node.word(64) = 0;
        wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_MASKED_CS, EP_MLX5_OPMOD_ATOMIC_4, pair.remote(64), pair.rkey());
        for (const uint64_t word : {x, compare, y, compare_mask}) add32(wqe, low(word));
        add_data(wqe, pair.local(64, 4));
        pair.a.post(finish_wqe(wqe));
      }
    }
    EP_CHECK(pair.steps.run());
    EP_CHECK_EQ(pair.b_node.word(64).load(), expected);
    EP_CHECK_EQ(pair.a_node.word(64).load(), answer);
  }
  EP_CHECK(pair.a_node.device->violations().empty());
}

// 3.3: an 8-byte ATOMIC_FA where the adapter is set to big-endian words.
void big_endian_atomics() {
  soft_options options = pair_of_nics::stepped();
  options.engine.host_order_atomics = false;
  pair_of_nics pair(15, {}, options);
  pair.b_node.word(0) = be64(5);
  wqe_bytes wqe = begin_wqe(pair.a, EP_MLX5_OPCODE_ATOMIC_FA, 0, pair.remote(0), pair.rkey());
  add64(wqe, 3);
  add64(wqe, 0);
  add_data(wqe, pair.local(0, 8));
  pair.a.post(finish_wqe(wqe));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(pair.b_node.word(0).load(), be64(8));
  EP_CHECK_EQ(pair.a_node.word(0).load(), be64(5));
}

// The same place in the key table, other memory behind it: peers must not go on with the mapping that they had.
void keys_of_new_memory_lead_there() {
  pair_of_nics pair(24);
  pair.a_node.word(0) = 11;
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, pair.remote(64), pair.rkey(), {pair.local(0, 8)}));
  EP_CHECK(pair.steps.run());
  const uint32_t old_key = pair.rkey();
  const auto other = must(segment::create(1 << 16));
  const auto at = reinterpret_cast<uint64_t>(other->data());
  must(pair.b_node.device->dereg_mr(pair.b_node.mr));
  pair.b_node.mr = must(pair.b_node.device->reg_mr(pair.b_node.pd, {at, 1 << 16}, node::all_rights));
  EP_CHECK_EQ(pair.rkey() >> 8, old_key >> 8);
  pair.a_node.word(0) = 22;
  pair.a.post(rdma_wqe(pair.a, EP_MLX5_OPCODE_RDMA_WRITE, at + 64, pair.rkey(), {pair.local(0, 8)}));
  EP_CHECK(pair.steps.run());
  EP_CHECK_EQ(nic::load_raw<uint64_t>(other->data() + 64), uint64_t{22});
  EP_CHECK_EQ(pair.b_node.word(64).load(), uint64_t{11});
}

// A landed write notifies the wake word that its region names.
void wakes_sleepers() {
  pair_of_nics pair(25);
  auto* wake = reinterpret_cast<ep_wake_word*>(pair.b_node.data() + 1024);
  must(pair.b_node.device->region_wake(pair.b_node.mr, wake));
  const uint32_t epoch = wake_prepare(wake);
  pair.a.post(add8_wqe(pair.a, pair.remote(0), pair.rkey(), pair.local(0, 8), 1));
  EP_CHECK(pair.steps.run());
  EP_CHECK(std::atomic_ref<uint32_t>(wake->epoch).load() != epoch);
  wake_cancel(wake);
  ep_wake_word outside{};
  EP_CHECK(!pair.b_node.device->region_wake(pair.b_node.mr, &outside).ok());
}

} // namespace

int main() {
  golden_requests_are_executed();
  inline_and_gathered_writes();
  zero_length_names_no_memory();
  largest_message();
  sequence_numbers_wrap();
  long_messages_let_others_pass();
  atomics_follow_their_rules();
  big_endian_atomics();
  keys_of_new_memory_lead_there();
  wakes_sleepers();
  return ep::check::finish();
}
