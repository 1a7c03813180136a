// Bytes that nobody meant: WQEs, doorbells, stores and fault scripts, mutated from good ones. The software EFA may refuse, complete with an error or carry out what was asked
// for; it must not crash, hang, touch what was not registered, complete a request twice or not at all, tick a peer for a failure, or be of no use afterwards.
//
// EP_FUZZ_RUNS=N executions of each kind (default: a few seconds' worth), EP_FUZZ_SEED=N. A finding prints the seed and run that repeat it.
#include <string>

#include "environment.hpp"
#include "nic/efa_rig.hpp"

using namespace ep;
using namespace ep::test;

namespace {

uint64_t interesting(random_source& random) {
  static constexpr uint64_t values[] = {0, 1, 2, 7, 8, 15, 16, 31, 63, 64, 80, 81, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_MAX, UINT64_MAX - 7};
  return random.below(3) == 0 ? random.next() : values[random.below(std::size(values))];
}

void mutate(random_source& random, std::vector<uint8_t>& bytes, uint64_t changes) {
  for (uint64_t i = 0; i < changes; ++i) {
    const size_t at = random.below(bytes.size());
    const uint64_t value = interesting(random);
    switch (random.below(5)) {
      case 0: bytes[at] ^= static_cast<uint8_t>(1u << random.below(8)); break;
      case 1: bytes[at] = static_cast<uint8_t>(value); break;
      case 2: std::memcpy(&bytes[at / 2 * 2], &value, 2); break;
      case 3: std::memcpy(&bytes[at / 4 * 4], &value, 4); break;
      default: std::memcpy(&bytes[at / 8 * 8], &value, 8);
    }
  }
}

efa::soft_options options_of(uint64_t seed) {
  efa::soft_options options = stepped(seed);
  options.engine.trace_events = 0;
  options.engine.fragment_bytes = 256;
  options.engine.unresponsive_ns = 1000;
  options.engine.max_message = 1536;
  options.engine.reserved = seed % 2 == 0 ? efa::lint::error : efa::lint::warn;
  options.engine.wide_ids = seed % 3 == 0;
  return options;
}

// A world that is made anew every so often, because a queue pair that broke a rule stays broken.
struct fuzz_world {
  fuzz_world(uint64_t seed, uint64_t round) : pair(seed * 1000 + round, shape(seed + round), options_of(seed + round)) {
    pair.b.knows(pair.b.endpoint.address); // and to itself
    pair.a.knows(pair.a.endpoint.address);
  }
  static efa_queue_options shape(uint64_t mix) {
    efa_queue_options options;
    options.depth = 16;
    options.inline_write = mix % 2 == 1;
    return options;
  }
  efa_pair pair;
  uint64_t arrived = 0; // by the completions
};

constexpr uint64_t rounds_of_world = 200;

// A request of any kind, mutated a little or not at all.
std::vector<uint8_t> request(random_source& random, efa_pair& pair) {
  const auto bytes = static_cast<uint32_t>(random.below(4) == 0 ? random.below(2000) : random.below(100));
  efa_request what = pair.write(random.below(1024), 32768 + random.below(1024), bytes);
  if (random.below(4) == 0) what.opcode = EP_EFA_OPCODE_RDMA_READ;
  uint8_t value[80];
  for (size_t i = 0; i < sizeof value; ++i) value[i] = static_cast<uint8_t>(random.next());
  const bool small = bytes <= EP_EFA_MAX_INLINE_WRITE && pair.a.endpoint.sq.wqe_bytes == EP_EFA_WIDE_WQE_BYTES;
  std::vector<uint8_t> wqe = small && random.below(2) == 0 ? pair.a.inline_wqe(what, value) : pair.a.wqe(what);
  if (random.below(3) != 0) mutate(random, wqe, 1 + random.below(3));
  return wqe;
}

bool settle(fuzz_world& world, uint64_t seed, uint64_t run) {
  const bool quiet = world.pair.steps.run_all(1'000'000);
  uint64_t bad = quiet ? 0 : 1;
  for (const efa_completion& one : world.pair.a.poll_all()) {
    if (one.status == EP_EFA_STATUS_OK && one.opcode == EP_EFA_OPCODE_RDMA_WRITE) ++world.arrived;
    bad += one.qpn != world.pair.a.endpoint.qpn;
  }
  const efa::engine_counts counts = world.pair.a_node.device->counts();
  bad += counts.requests != counts.completions;
  bad += efa_queue::count_of(world.pair.b.arrived) + efa_queue::count_of(world.pair.a.arrived) != world.arrived;
  bad += efa_queue::count_of(world.pair.a.written) != world.arrived;
  // The page of counts is not registered: behind the counts it stays as it was.
  for (const efa_node* node : {&world.pair.a_node, &world.pair.b_node}) {
    for (uint64_t at = 256; at < efa_node::count_bytes; at += 8) bad += *reinterpret_cast<const uint64_t*>(node->memory->data() + at) != 0;
  }
  if (bad != 0) std::fprintf(stderr, "EP_FUZZ_SEED=%llu, run %llu\n", static_cast<unsigned long long>(seed), static_cast<unsigned long long>(run));
  EP_CHECK_EQ(bad, uint64_t{0});
  return bad == 0;
}

void requests(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  std::unique_ptr<fuzz_world> world;
  uint64_t good = 0, broken = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    if (run % rounds_of_world == 0) world = std::make_unique<fuzz_world>(seed, run);
    efa_pair& pair = world->pair;
    for (uint64_t n = 1 + random.below(4); n > 0; --n) pair.a.put(request(random, pair));
    if (random.below(8) != 0) pair.a.bell();
    if (random.below(2) == 0) pair.steps.run_all(random.below(40));
    pair.a.bell();
    if (!settle(*world, seed, run)) return;
    good = std::max(good, world->arrived);
    dl::efa_event event;
    if (must(pair.a_node.device->poll_async(event))) {
      ++broken;
      world = std::make_unique<fuzz_world>(seed, run);
    }
  }
  EP_CHECK(good > 0 && broken > 0);
  // As good as new.
  world = std::make_unique<fuzz_world>(seed, 0);
  world->pair.a.post(world->pair.write(0, 0, 8));
  EP_CHECK(settle(*world, seed, runs) && world->arrived == 1);
}

// Anything in the ring, anything in the doorbell.
void raw(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  std::unique_ptr<fuzz_world> world;
  for (uint64_t run = 0; run < runs; ++run) {
    if (run % rounds_of_world == 0) world = std::make_unique<fuzz_world>(seed, run);
    efa_pair& pair = world->pair;
    uint8_t* ring = pair.a.ring;
    for (uint64_t n = random.below(8); n > 0; --n) {
      const uint64_t at = random.below(pair.a.endpoint.sq.depth * pair.a.endpoint.sq.wqe_bytes / 8) * 8;
      reinterpret_cast<uint64_t*>(ring)[at / 8] = interesting(random);
    }
    const uint64_t near = pair.a.tail + random.below(20);
    pair.a.ring_to(random.below(3) == 0 ? static_cast<uint32_t>(interesting(random)) : static_cast<uint32_t>(near));
    if (random.below(2) == 0) pair.a.tail = near;
    if (!settle(*world, seed, run)) return;
  }
}

// Stores that are watched: to any place of the rings, by any writer, fenced or not.
void stores(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  std::unique_ptr<efa_pair> pair;
  for (uint64_t run = 0; run < runs; ++run) {
    if (run % rounds_of_world == 0) {
      efa::soft_options options = options_of(seed + run);
      options.engine.watch_stores = true;
      pair = std::make_unique<efa_pair>(seed + run, fuzz_world::shape(run), options);
    }
    const uint64_t writer = 1 + random.below(3);
    const uint64_t ring = reinterpret_cast<uint64_t>(pair->a.ring);
    switch (random.below(6)) {
      case 0: pair->steps.fence(writer); break;
      case 1: pair->steps.store32(writer, pair->a.endpoint.sq.doorbell, static_cast<uint32_t>(pair->a.tail += random.below(4))); break;
      case 2: pair->steps.store32(writer, pair->a.endpoint.sq.doorbell, static_cast<uint32_t>(interesting(random))); break;
      case 3: pair->steps.run_all(random.below(30)); break;
      default: {
        const std::vector<uint8_t> wqe = request(random, *pair);
        const uint64_t slot = random.below(4) == 0 ? random.below(16) : pair->a.tail & 15;
        for (size_t at = 0; at < wqe.size(); at += 8) {
          uint64_t word;
          std::memcpy(&word, &wqe[at], 8);
          if (random.below(50) != 0) pair->steps.store64(writer, ring + slot * wqe.size() + at, word);
        }
      }
    }
    if (run % 16 == 0 && !pair->steps.run_all(1'000'000)) EP_CHECK_EQ(run, UINT64_MAX);
    pair->a.poll_all();
  }
}

void scripts(uint64_t seed, uint64_t runs) {
  random_source random(seed);
  static constexpr const char* words[] = {"hold", "delay", "fail", "cut", "lose-doorbell", "repeat-doorbell", "drop-fence", "qpn=", "opcode=", "count=", "skip=", "ns=", "stage=", "stage=cqe", "stage=fetch",
                                          "status=", "bytes=", "writer=", "0x", "8", "16", "-1", "99999999999999999999", "\n", " ", "#", "=", "\t", "\r\n"};
  uint64_t good = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    std::string text;
    for (uint64_t n = random.below(12); n > 0; --n) {
      text += words[random.below(std::size(words))];
      if (random.below(2) == 0) text += ' ';
    }
    if (random.below(8) == 0 && !text.empty()) text[random.below(text.size())] = static_cast<char>(random.next());
    auto parsed = efa::fault_script::parse(text);
    good += parsed.ok() ? 1 : 0;
    if (!parsed.ok() && parsed.why().message.find("line ") != 0) EP_CHECK_EQ(text, std::string("a text of which line and word are told"));
  }
  EP_CHECK(good > 0 && (good < runs || runs < 50));
}

} // namespace

int main() {
  const uint64_t seed = number_of("EP_FUZZ_SEED", 1);
  const uint64_t runs = number_of("EP_FUZZ_RUNS", 0);
  for (uint64_t i = 0; i < 4; ++i) requests(seed * 4 + i, runs != 0 ? runs / 4 : 250);
  raw(seed, runs != 0 ? runs : 1'000);
  stores(seed, runs != 0 ? runs : 2'500);
  scripts(seed, runs != 0 ? runs : 5'000);
  return check::finish();
}
