// Messages and pieces that nobody meant, mutated from good ones: of strangers, whose tags are wrong, and of ranks that are in the world and break the rules. The engine may refuse the
// one and give up the other; it must not crash, hang, write anywhere but where the message says, take a stranger's word for anything, or be of no use to the rest of the world.
//
// EP_FUZZ_RUNS=N messages (default: a few seconds' worth), EP_FUZZ_SEED=N. A finding prints the seed and round that repeat it.
#include <cstring>

#include "environment.hpp"
#include "fabric_ranks.hpp"
#include "scripted_port.hpp"

namespace {

using namespace ep;
using namespace ep::test;
using fabric::message_kind;
using fabric::wire_message;

constexpr int32_t world_size = 64;
constexpr uint64_t memory_bytes = 4096;
constexpr uint64_t slots = 16;
constexpr uint64_t posted = 6; // requests of the engine to each peer, so that peers have something to say about them

uint64_t interesting(random_source& random) {
  static constexpr uint64_t values[] = {0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 951, 952, 953, 4088, 4095, 4096, 4097, 0xffff, 0x10000, 0xfffff, 0x100000, 0x7fffffff, 0xffffffff, UINT64_MAX, UINT64_MAX - 7};
  return random.below(4) == 0 ? random.next() : values[random.below(std::size(values))];
}

// One engine, and as many peers as the fuzzer plays.
class fuzz_world {
 public:
  explicit fuzz_world(uint64_t seed) : network(world_size, seed) {
    context = must(rank_context::create(0, world_size, world_size));
    context->connect_apart();
    fabric::engine_options options;
    options.heartbeat_ns = options.silence_ns = 3'600'000'000'000;
    engine = std::make_unique<fabric::engine>(context, network.port(0), options);
    std::vector<std::vector<uint8_t>> addresses;
    const std::vector<uint8_t> own = must(engine->address());
    std::memcpy(&mail, own.data() + own.size() - sizeof mail, sizeof mail);
    // What is put to those who are played goes to the places of this rank's own mail to itself, which nobody reads.
    for (int32_t rank = 0; rank < world_size; ++rank) {
      addresses.push_back(own);
      addresses.back()[0] = static_cast<uint8_t>(rank);
    }
    must(engine->connect(addresses, keys_of(0, world_size)));
    memory = allocate();
    guard = allocate();
    sequence.assign(world_size, 0);
    for (int32_t peer = 1; peer < world_size; ++peer) {
      for (uint64_t i = 0; i < posted; ++i) {
        fabric::request put;
        put.peer = peer;
        put.local = reinterpret_cast<uint64_t>(guard->own_data());
        put.row_bytes = put.stride = i % 2 == 0 ? 64 : 2000;
        put.rows = 1;
        put.keep = guard;
        must(engine->post(*guard, put));
      }
    }
    EP_CHECK(soon([&] { return engine->counts().messages >= posted * (world_size - 1); }));
    for (int32_t peer = 1; peer < world_size; ++peer) network.forget(peer);
  }
  ~fuzz_world() {
    for (int32_t peer = 1; peer < world_size; ++peer) network.cut(peer);
    engine->stop(false);
    context->leave(true);
  }

  std::shared_ptr<symmetric_memory> allocate() {
    auto made = must(symmetric_memory::create(context, memory_bytes, slots));
    const std::vector<uint8_t> own = must(engine->add_memory(made));
    std::vector<std::vector<uint8_t>> parts(world_size, own);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      fabric::remote_part part{};
      std::memcpy(&part, own.data(), sizeof part);
      part.memory = 1000 * rank + part.memory;
      std::memcpy(parts[rank].data(), &part, sizeof part);
    }
    must(engine->route(*made, parts));
    return made;
  }
  uint64_t id_of(const symmetric_memory& of) const { return of.device_handle().memory_id; }

  wire_message request(int32_t peer, uint64_t number) const {
    wire_message made{};
    made.magic = fabric::wire_magic;
    made.kind = message_kind::request;
    made.source = peer;
    made.sequence = number;
    made.memory = id_of(*memory);
    return made;
  }
  // As the peer would say it, in few bytes where asked for and where it fits.
  std::vector<uint8_t> sealed(int32_t peer, wire_message message, size_t bytes, bool brief) const {
    message.tag = 0;
    const fabric::tagger tag(keys_of(peer, world_size)[0].out);
    if (bytes >= fabric::head_bytes) message.tag = tag(&message, bytes);
    const auto small = brief && bytes == fabric::head_bytes + message.payload_bytes ? fabric::brief_of(message) : std::nullopt;
    if (!small.has_value()) return {reinterpret_cast<uint8_t*>(&message), reinterpret_cast<uint8_t*>(&message) + bytes};
    const auto* from = reinterpret_cast<const uint8_t*>(&*small);
    return {from, from + fabric::brief_head_bytes + message.payload_bytes};
  }
  // By the mailbox where asked for and where it is a brief, which then is to be read as the request of this number; as a message otherwise.
  void say(int32_t peer, uint64_t number, std::vector<uint8_t> wire, bool by_mail) {
    uint16_t begin = 0;
    if (wire.size() >= sizeof begin) std::memcpy(&begin, wire.data(), sizeof begin);
    if (!by_mail || begin != fabric::brief_magic) return network.inject(0, std::move(wire));
    network.inject_write(0, std::move(wire), fabric::mailbox::address(mail, peer, number), fabric::mail_data(peer, number));
    ++mailed;
  }
  uint64_t signal(uint64_t slot) const { return std::atomic_ref<uint64_t>(memory->own_signals()[slot]).load(std::memory_order_acquire); }
  void settle() { EP_CHECK(soon([&] { return network.quiet(0); })); }

  scripted_network network;
  std::shared_ptr<rank_context> context;
  std::unique_ptr<fabric::engine> engine;
  std::shared_ptr<symmetric_memory> memory;
  std::shared_ptr<symmetric_memory> guard; // nobody is to write here
  std::vector<uint64_t> sequence;
  fabric::mailbox_place mail;
  uint64_t mailed = 0;
};

wire_message good(random_source& random, fuzz_world& world, int32_t peer, size_t& bytes) {
  wire_message made = world.request(peer, world.sequence[static_cast<size_t>(peer)]);
  bytes = fabric::head_bytes;
  switch (random.below(8)) {
    case 0: made.kind = message_kind::alive; break;
    case 1: made.kind = random.below(32) == 0 ? message_kind::bye : message_kind::byed; made.value = 1 + random.below(3); break;
    case 2: made.kind = message_kind::retire; made.memory = 1000 * static_cast<uint64_t>(peer) + world.id_of(random.below(2) == 0 ? *world.guard : *world.memory); break;
    case 3: made.kind = message_kind::retired; break;
    default:
      ++world.sequence[static_cast<size_t>(peer)];
      made.pieces = random.below(4) == 0 ? static_cast<uint32_t>(1 + random.below(3)) : 0;
      made.payload_bytes = static_cast<uint16_t>(random.below((random.below(2) == 0 ? fabric::brief_payload_bytes : fabric::inline_bytes) + 1));
      made.offset = random.below(memory_bytes - made.payload_bytes + 1);
      made.op = static_cast<uint8_t>(random.below(3));
      made.slot = random.below(slots);
      made.value = random.next();
      bytes += made.payload_bytes;
      for (uint16_t i = 0; i < made.payload_bytes; ++i) made.payload[i] = static_cast<uint8_t>(random.next());
  }
  made.acked = random.below(posted + 1);
  return made;
}

void spoil(random_source& random, uint8_t* bytes, size_t length) {
  for (uint64_t n = 1 + random.below(3); n > 0; --n) {
    const uint64_t value = interesting(random);
    switch (random.below(4)) {
      case 0: bytes[random.below(length)] ^= static_cast<uint8_t>(1u << random.below(8)); break;
      case 1: bytes[random.below(length)] = static_cast<uint8_t>(value); break;
      case 2: std::memcpy(&bytes[random.below(length - 3) / 4 * 4], &value, 4); break;
      default: std::memcpy(&bytes[random.below(length - 7) / 8 * 8], &value, 8);
    }
  }
}

// Strangers say anything in anybody's name. All of it is refused, and nothing changes.
uint64_t strangers(random_source& random, fuzz_world& world, uint64_t count) {
  const std::vector<uint8_t> before(world.memory->own_data(), world.memory->own_data() + memory_bytes);
  std::vector<uint64_t> signals;
  for (uint64_t slot = 0; slot < slots; ++slot) signals.push_back(world.signal(slot));
  const fabric::engine_counts counts = world.engine->counts();
  for (uint64_t i = 0; i < count; ++i) {
    const auto peer = static_cast<int32_t>(1 + random.below(world_size - 1));
    size_t bytes = 0;
    const std::vector<uint64_t> sequence = world.sequence;
    wire_message message = good(random, world, peer, bytes);
    world.sequence = sequence;
    const bool brief = random.below(2) == 0;
    std::vector<uint8_t> wire = world.sealed(peer, message, bytes, brief);
    uint16_t begin = 0;
    std::memcpy(&begin, wire.data(), sizeof begin);
    const size_t tag_at = begin == fabric::brief_magic ? offsetof(fabric::wire_brief, tag) : offsetof(wire_message, tag);
    if (random.below(8) == 0) wire.resize(random.below(sizeof message + 1));
    // With the tag of another direction, another rank, a tag that is off by a bit, or other bytes under a good tag.
    const uint64_t how = random.below(4);
    uint64_t tag = random.next();
    if (how == 1) tag = fabric::tagger(keys_of(peer, world_size)[0].in)(&message, bytes);
    if (how == 2) tag = fabric::tagger(keys_of(peer % (world_size - 1) + 1, world_size)[0].out)(&message, bytes);
    if (how == 3 && wire.size() > 8) {
      const std::vector<uint8_t> whole = wire;
      spoil(random, wire.data(), wire.size());
      if (wire == whole) wire[0] ^= 1;
    } else if (wire.size() >= tag_at + 8) {
      std::memcpy(wire.data() + tag_at, &tag, 8);
    } else {
      wire.resize(wire.size() / 2);
    }
    world.network.inject(0, std::move(wire));
  }
  world.settle();
  EP_CHECK(soon([&] { return world.engine->counts().refused == counts.refused + count; }));
  EP_CHECK_EQ(world.engine->counts().applied, counts.applied);
  EP_CHECK(std::memcmp(world.memory->own_data(), before.data(), memory_bytes) == 0);
  for (uint64_t slot = 0; slot < slots; ++slot) EP_CHECK_EQ(world.signal(slot), signals[slot]);
  return count;
}

// A rank of the world breaks the rules: it may be given up, the others are not.
uint64_t member(random_source& random, fuzz_world& world, int32_t peer, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    size_t bytes = 0;
    wire_message message = good(random, world, peer, bytes);
    const uint32_t pieces = message.kind == message_kind::request ? message.pieces : 0;
    if (random.below(24) == 0) {
      spoil(random, reinterpret_cast<uint8_t*>(&message), bytes);
      if (random.below(16) != 0) {
        message.magic = fabric::wire_magic;
        message.source = peer;
      }
      // What it says of the guard would be its right.
      if (message.memory == world.id_of(*world.guard)) message.memory = 0;
    }
    if (random.below(48) == 0) bytes = random.below(sizeof message + 1);
    for (uint32_t i = 0; i < pieces; ++i) world.network.inject_piece(0, fabric::piece_data(peer, message.sequence));
    if (random.below(64) == 0) world.network.inject_piece(0, fabric::piece_data(peer, random.below(2) == 0 ? message.sequence : interesting(random)));
    std::vector<uint8_t> wire = world.sealed(peer, message, bytes, random.below(2) == 0);
    if (wire.size() >= 8 && random.below(200) == 0) spoil(random, wire.data(), wire.size());
    world.say(peer, message.sequence, std::move(wire), message.kind == message_kind::request && random.below(2) == 0);
  }
  world.settle();
  return count;
}

// A rank that has said nothing yet reaches the engine as if nothing had happened.
void probe(fuzz_world& world, int32_t peer) {
  wire_message message = world.request(peer, 0);
  message.payload_bytes = 8;
  message.offset = 8 * static_cast<uint64_t>(peer);
  message.op = static_cast<uint8_t>(signal_op::set);
  message.slot = 3;
  message.value = 0xabcd000000000000 + static_cast<uint64_t>(peer);
  std::memset(message.payload, peer, 8);
  world.say(peer, 0, world.sealed(peer, message, fabric::head_bytes + 8, peer % 2 == 0), peer % 4 == 0);
  world.sequence[static_cast<size_t>(peer)] = 1;
  EP_CHECK(soon([&] { return world.signal(3) == message.value; }));
  EP_CHECK(std::memcmp(world.memory->own_data() + message.offset, message.payload, 8) == 0);
  EP_CHECK_EQ(world.context->life(peer), uint32_t{EP_LIFE_ALIVE});
  // HAZARD: the engine counts what it has carried out after that shows: one message more, and it has.
  const uint64_t refused = world.engine->counts().refused;
  world.network.inject(0, {1});
  EP_CHECK(soon([&] { return world.engine->counts().refused == refused + 1; }));
  for (uint64_t i = 0; i < memory_bytes; ++i) EP_CHECK_EQ(world.guard->own_data()[i], 0);
  for (uint64_t slot = 0; slot < slots; ++slot) EP_CHECK_EQ(world.guard->own_signals()[slot], 0u);
}

} // namespace

int main() {
  const uint64_t runs = number_of("EP_FUZZ_RUNS", 30'000);
  const uint64_t seed = number_of("EP_FUZZ_SEED", 20261121);
  uint64_t done = 0, lost = 0, applied = 0, mailed = 0;
  for (uint64_t round = 0; done < runs; ++round) {
    random_source random(seed * 1'000'003 + round);
    fuzz_world world(seed + round);
    // Half of the peers misbehave, the other half shows after each of them that the engine is well.
    for (int32_t peer = 1; peer < world_size / 2; ++peer) {
      done += strangers(random, world, 64);
      done += member(random, world, peer, 64);
      probe(world, world_size / 2 + peer - 1);
      lost += world.context->life(peer) == EP_LIFE_ALIVE ? 0 : 1;
    }
    applied += world.engine->counts().applied;
    mailed += world.mailed;
    if (check::failed.load() != 0) {
      std::fprintf(stderr, "EP_FUZZ_SEED=%llu, round %llu\n", static_cast<unsigned long long>(seed), static_cast<unsigned long long>(round));
      break;
    }
  }
  // Or it fuzzed nothing but the first check.
  EP_CHECK(lost > 0 && applied > lost * 4); // how many more depends on when what is lost shows
  EP_CHECK(mailed > lost); // probe() shows that some of them are carried out
  std::printf("%llu messages, %llu of them by mail, %llu carried out, %llu ranks given up\n", static_cast<unsigned long long>(done), static_cast<unsigned long long>(mailed), static_cast<unsigned long long>(applied), static_cast<unsigned long long>(lost));
  return check::finish();
}
