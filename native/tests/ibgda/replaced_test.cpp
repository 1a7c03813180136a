// A rank of three dies, and another process comes in its place on the same NIC: the others keep their memories, keys and queue pairs, and what the dead one's requests still do comes to
// nothing. Ranks of this thread, each with a software NIC; what stays of the dead one's is held back by a fault.
#include <sched.h>

#include <cstring>
#include <utility>

#include "../check.hpp"
#include "core/ibgda/rank_nic.hpp"
#include "device/fast.hpp"
#include "ep/device/ibgda_endpoint.h"
#include "nic/mlx5/soft_device.hpp"

namespace {

using ep::ibgda::host_request;
using ep::ibgda::rank_nic;
using ep::ibgda::request_state;

template <class Value> Value must(ep::result<Value> got) {
  if (!got.ok()) {
    std::fprintf(stderr, "%s\n", got.why().message.c_str());
    std::abort();
  }
  return std::move(got.value());
}

constexpr int32_t world_size = 3;
constexpr int32_t victim = 2;
constexpr uint64_t part_bytes = 4096;
constexpr uint64_t slots = 4;

// All processes of a host have the same port of a NIC: whoever receives cannot tell by where a packet is from which of them sent it.
class opened_again final : public ep::dl::mlx5_device {
 public:
  explicit opened_again(std::shared_ptr<ep::nic::soft_device> of) : of_(std::move(of)) {}
  const std::string& name() const override { return of_->name(); }
  ep::result<ep::nothing> close() override { return ep::nothing{}; }
  ep::result<ep::dl::mlx5_port> query_port(uint8_t port) override { return of_->query_port(port); }
  ep::result<ep::dl::mlx5_gid> query_gid(uint8_t port, uint32_t index) override { return of_->query_gid(port, index); }
  ep::result<ep::dl::mlx5_pd> alloc_pd() override { return of_->alloc_pd(); }
  ep::result<ep::nothing> dealloc_pd(const ep::dl::mlx5_pd& pd) override { return of_->dealloc_pd(pd); }
  ep::result<ep::dl::mlx5_mr> reg_mr(const ep::dl::mlx5_pd& pd, const ep::dl::mlx5_memory& memory, uint32_t access) override { return of_->reg_mr(pd, memory, access); }
  ep::result<ep::nothing> dereg_mr(const ep::dl::mlx5_mr& mr) override { return of_->dereg_mr(mr); }
  ep::result<ep::dl::mlx5_uar> alloc_uar(ep::dl::mlx5_uar_kind kind) override { return of_->alloc_uar(kind); }
  ep::result<ep::nothing> free_uar(const ep::dl::mlx5_uar& uar) override { return of_->free_uar(uar); }
  ep::result<ep::dl::mlx5_umem> umem_reg(const ep::dl::mlx5_memory& memory, uint32_t access) override { return of_->umem_reg(memory, access); }
  ep::result<ep::nothing> umem_dereg(const ep::dl::mlx5_umem& umem) override { return of_->umem_dereg(umem); }
  ep::result<uint32_t> query_eqn(uint32_t vector) override { return of_->query_eqn(vector); }
  ep::result<ep::nothing> general_cmd(std::span<const uint8_t> in, std::span<uint8_t> out) override { return of_->general_cmd(in, out); }
  ep::result<ep::dl::mlx5_object> obj_create(std::span<const uint8_t> in, std::span<uint8_t> out) override { return of_->obj_create(in, out); }
  ep::result<ep::nothing> obj_modify(const ep::dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override { return of_->obj_modify(object, in, out); }
  ep::result<ep::nothing> obj_query(const ep::dl::mlx5_object& object, std::span<const uint8_t> in, std::span<uint8_t> out) override { return of_->obj_query(object, in, out); }
  ep::result<ep::nothing> obj_destroy(const ep::dl::mlx5_object& object) override { return of_->obj_destroy(object); }
  ep::result<ep::dl::mlx5_path> resolve_ah(const ep::dl::mlx5_pd& pd, const ep::dl::mlx5_route& route) override { return of_->resolve_ah(pd, route); }
  ep::result<bool> poll_async(ep::dl::mlx5_event& event) override { return of_->poll_async(event); }

 private:
  std::shared_ptr<ep::nic::soft_device> of_;
};

class driver_of_one final : public ep::dl::mlx5_driver {
 public:
  explicit driver_of_one(std::shared_ptr<ep::nic::soft_device> nic) : nic_(std::move(nic)) {}
  const char* backing() const override { return "soft"; }
  ep::result<std::vector<ep::dl::mlx5_device_info>> list_devices() override { return ep::nic::soft_driver({}).list_devices(); }
  ep::result<std::unique_ptr<ep::dl::mlx5_device>> open(const std::string&) override { return std::unique_ptr<ep::dl::mlx5_device>(new opened_again(nic_)); }

 private:
  std::shared_ptr<ep::nic::soft_device> nic_;
};

using psn_rule = std::function<uint32_t(std::optional<uint32_t>)>;

// Numbers that begin where they had begun: the protocol that is wrong.
uint32_t same_again(std::optional<uint32_t>) { return 1000; }

struct process {
  std::shared_ptr<ep::rank_context> context; // what the others see
  std::shared_ptr<ep::rank_context> inside;  // of its NIC and its memory, which outlive the other one
  std::shared_ptr<rank_nic> nic;
  std::shared_ptr<ep::symmetric_memory> memory;
  ep_ibgda_remote part{};

  uint64_t signal(uint64_t slot) const { return std::atomic_ref<uint64_t>(memory->own_signals()[slot]).load(); }
};

struct world {
  std::shared_ptr<ep::nic::soft_device> devices[world_size];
  process ranks[world_size];
  process dead;
  bool collapsed;
  psn_rule rule;

  world(bool collapsed_queues, psn_rule starting_psn) : collapsed(collapsed_queues), rule(std::move(starting_psn)) {
    std::vector<ep_segment_handle> handles;
    for (auto& device : devices) device = must(ep::nic::soft_device::open(ep::nic::soft_device_name, {}));
    for (int32_t rank = 0; rank < world_size; ++rank) {
      ranks[rank].context = must(ep::rank_context::create(rank, world_size, world_size));
      handles.push_back(ranks[rank].context->handle());
    }
    std::vector<std::vector<uint8_t>> connections;
    std::vector<ep_ibgda_remote> remotes;
    for (int32_t rank = 0; rank < world_size; ++rank) {
      must(ranks[rank].context->connect(handles));
      begin(rank, handles);
      connections.push_back(ranks[rank].nic->queues().connection());
      remotes.push_back(ranks[rank].part);
    }
    for (process& one : ranks) must(one.nic->queues().connect(connections));
    for (process& one : ranks) must(one.nic->route(*one.memory, remotes));
  }
  ~world() {
    for (process* one : {&ranks[0], &ranks[1], &ranks[2], &dead}) {
      if (!one->nic) continue;
      one->nic->stop();
      one->inside->leave(true);
      if (one->context) one->context->leave(true);
    }
    for (process* one : {&ranks[0], &ranks[1], &ranks[2], &dead}) *one = {};
  }

  // NIC and memory of a rank that the others see.
  void begin(int32_t rank, std::vector<ep_segment_handle> handles) {
    process& one = ranks[rank];
    one.inside = must(ep::rank_context::create(rank, world_size, world_size));
    handles[static_cast<size_t>(rank)] = one.inside->handle();
    must(one.inside->connect(handles));
    auto driver = std::make_unique<driver_of_one>(devices[rank]);
    ep::ibgda::open_port port = must(ep::ibgda::device_open(*driver, {}));
    ep::ibgda::emulator_hooks hooks;
    hooks.adds_as_processors = true;
    hooks.doorbell_wake = reinterpret_cast<uint64_t>(devices[rank]->doorbell_wake());
    hooks.region_wake = [device = devices[rank].get()](const ep::dl::mlx5_mr& mr, const ep_wake_word* wake) { return device->region_wake(mr, wake); };
    ep::ibgda::queue_options options;
    options.qps_per_peer = 2;
    options.depth = 16;
    options.collapsed = collapsed;
    options.ack_timeout = 12;
    options.starting_psn = rule;
    one.nic = must(rank_nic::create(one.inside, std::move(driver), std::move(port), options, std::move(hooks)));
    one.memory = must(ep::symmetric_memory::create(one.inside, part_bytes, slots));
    one.part = must(one.nic->add_memory(*one.memory));
  }

  // What the victim still has under way stays as it is, and its NIC goes on.
  void die() {
    ranks[victim].context->leave(false);
    dead = std::exchange(ranks[victim], {});
    dead.context.reset();
  }
  // Whoever has another's words has those of the newcomer now.
  void take_in(int32_t comer) {
    for (int32_t rank = 0; rank < world_size; ++rank) {
      if (rank == comer || !ranks[rank].nic) continue;
      must(ranks[rank].context->replace(comer, ranks[comer].context->handle()));
      must(ranks[rank].inside->replace(comer, ranks[comer].context->handle()));
      must(ranks[rank].nic->reset_peer(comer));
    }
  }

  // Ranks 0 and 1 keep all that they have.
  void replace() {
    process& comer = ranks[victim];
    comer.context = must(ep::rank_context::create(victim, world_size, world_size));
    std::vector<ep_segment_handle> handles;
    for (const process& one : ranks) handles.push_back(one.context->handle());
    must(comer.context->connect(handles));
    begin(victim, handles);
    take_in(victim);
    std::vector<std::vector<uint8_t>> connections;
    std::vector<ep_ibgda_remote> remotes;
    for (process& one : ranks) {
      connections.push_back(one.nic->queues().connection());
      remotes.push_back(one.part);
    }
    must(comer.nic->queues().connect(connections));
    must(comer.nic->route(*comer.memory, remotes));
    for (process& one : ranks) {
      if (&one == &comer) continue;
      must(one.nic->connect_peer(victim, connections[victim]));
      must(one.nic->replace_remote(*one.memory, victim, comer.part));
    }
  }

  // By the host's queue pair: a byte, and 1 to a signal word behind it.
  host_request write(int32_t from, int32_t to, uint64_t at, uint8_t value, uint64_t slot) const {
    const process& one = ranks[from];
    one.memory->own_data()[2048 + at] = value;
    const ep_ibgda_remote& there = *one.nic->remote(*one.memory, to);
    host_request request;
    request.what = host_request::kind::write;
    request.peer = to;
    request.local = reinterpret_cast<uint64_t>(one.memory->own_data()) + 2048 + at;
    request.remote = {there.data + at, there.data_rkey};
    request.bytes = 1;
    request.signal = ep::signal_op::add;
    request.slot = rank_nic::signal_place(*one.memory, there, slot, ep::signal_op::add);
    request.value = 1;
    return request;
  }
  request_state ended(int32_t from, int32_t to, uint64_t number) const {
    const int64_t deadline = ep::clock_now_ns() + 30'000'000'000;
    for (;;) {
      const request_state state = ranks[from].nic->look(to, number);
      if (state != request_state::pending || ep::clock_now_ns() > deadline) return state;
      sched_yield();
    }
  }
  bool host_puts(int32_t from, int32_t to, uint64_t at, uint8_t value) const {
    return ended(from, to, must(ranks[from].nic->post(write(from, to, at, value, 0)))) == request_state::done;
  }
  // The same by a queue pair of kernels.
  bool kernel_puts(int32_t from, int32_t to, uint64_t at, uint8_t value, uint32_t key, ep_kernel_status* status) const {
    const process& one = ranks[from];
    one.memory->own_data()[2048 + at] = value;
    const ep::kernel_environment environment{one.inside->waits(nullptr, ep::deadline_after(20'000))};
    ep::fast_context context{environment, 0, 1, nullptr};
    const ep::thread_coop<ep::fast_context> alone{context};
    const ep::ibgda_endpoint endpoint{one.memory->device_handle(), key};
    return endpoint.put_rows(context, alone, to, at, one.memory->own_data() + 2048 + at, 1, 1, 1, false, 1 + key, 1, status) && endpoint.quiet(context, alone, to, status);
  }

  // Everybody to everybody else, by each queue pair, twice, to places that are the pair's own: nothing is missing, and nothing comes twice.
  void all_puts(uint8_t value) {
    uint64_t before[world_size][3];
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (uint64_t slot = 0; slot < 3; ++slot) before[rank][slot] = ranks[rank].signal(slot);
    }
    for (int32_t from = 0; from < world_size; ++from) {
      for (int32_t to = 0; to < world_size; ++to) {
        if (from == to) continue;
        for (uint64_t round = 0; round < 2; ++round) {
          ep_kernel_status status{};
          const auto made = static_cast<uint8_t>(value + from * 16 + to * 4 + static_cast<int32_t>(round));
          const uint64_t at = 64 * static_cast<uint64_t>(from);
          EP_CHECK(host_puts(from, to, at, made));
          EP_CHECK_EQ(int{ranks[to].memory->own_data()[at]}, int{made});
          for (const uint32_t key : {0u, 1u}) {
            EP_CHECK(kernel_puts(from, to, at + 1 + key, made, key, &status));
            EP_CHECK_EQ(int{ranks[to].memory->own_data()[at + 1 + key]}, int{made});
          }
        }
      }
    }
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (uint64_t slot = 0; slot < 3; ++slot) EP_CHECK_EQ(ranks[rank].signal(slot) - before[rank][slot], uint64_t{2 * (world_size - 1)});
    }
  }
};

// Thrice, so that a newcomer is replaced, too; rings are used up to a different place each time.
void test_replaced(bool collapsed) {
  world w(collapsed, {});
  w.all_puts(1);
  for (uint8_t round = 1; round < 4; ++round) {
    w.die();
    // Whoever posts before anybody came breaks its queue pairs, and what had not ended has failed.
    EP_CHECK(w.devices[0]->set_faults("drop").ok());
    const uint64_t lost = must(w.ranks[0].nic->post(w.write(0, victim, 8, 9, 0)));
    int32_t broken = -1;
    for (const int64_t until = ep::clock_now_ns() + 30'000'000'000; broken < 0 && ep::clock_now_ns() < until;) {
      ep_kernel_status status{};
      EP_CHECK(!w.kernel_puts(0, victim, 9, 9, 0, &status));
      (void)w.ranks[0].nic->kernel_failure(&broken);
    }
    EP_CHECK_EQ(broken, victim);
    EP_CHECK(w.devices[0]->set_faults("").ok());
    w.replace();
    EP_CHECK(w.ranks[0].nic->look(victim, lost) == request_state::replaced);
    EP_CHECK_EQ(w.ranks[0].nic->failure_of(victim).status, uint32_t{EP_STATUS_OK});
    EP_CHECK_EQ(w.ranks[0].nic->kernel_failure(&broken).status, uint32_t{EP_STATUS_OK});
    const uint64_t counts[] = {w.ranks[0].signal(0), w.ranks[1].signal(2), w.ranks[victim].signal(0)};
    EP_CHECK_EQ(counts[0], uint64_t{4} * round); // who stays keeps its words
    EP_CHECK_EQ(counts[1], uint64_t{4} * round);
    EP_CHECK_EQ(counts[2], uint64_t{0});
    for (int i = 0; i < round; ++i) w.all_puts(static_cast<uint8_t>(10 * round));
    for (int i = 1; i < round; ++i) {
      for (int32_t rank : {0, 1}) for (uint64_t slot = 0; slot < 3; ++slot) w.ranks[rank].memory->own_signals()[slot] -= 4;
    }
    for (const auto& device : w.devices) EP_CHECK(device->violations().empty());
    w.dead.nic->stop();
    w.dead.inside->leave(true);
    w.dead = {};
  }
}

// A write and an addition that the dead one's NIC had taken over come when its successor has put as much as it had, so that their numbers would be the next ones.
// What a wrong protocol does with them: they land, and the successor's own are taken for repetitions, acknowledged and dropped.
void test_late_packets(bool right) {
  world w(true, right ? psn_rule{} : psn_rule{same_again});
  for (int i = 0; i < 3; ++i) EP_CHECK(w.host_puts(victim, 0, 5, 11));
  const uint32_t late_from = w.ranks[victim].nic->queues().qpn(2); // the host's, to rank 0
  EP_CHECK(w.devices[victim]->set_faults("hold qpn=" + std::to_string(late_from)).ok());
  (void)must(w.ranks[victim].nic->post(w.write(victim, 0, 7, 42, 3)));
  w.die();
  w.replace();
  EP_CHECK_EQ(w.ranks[0].signal(0), 3u);
  for (int i = 0; i < 3; ++i) EP_CHECK(w.host_puts(victim, 0, 5, 12));
  EP_CHECK_EQ(w.ranks[0].signal(0), 6u);
  EP_CHECK(w.ranks[victim].nic->queues().qpn(2) != late_from);
  const auto landed = [&] { return w.ranks[0].signal(3) != 0; };
  const int64_t until = ep::clock_now_ns() + (right ? 60'000'000 : 30'000'000'000);
  while (ep::clock_now_ns() < until && !landed()) {
    w.devices[victim]->release_held();
    sched_yield();
  }
  EP_CHECK_EQ(landed(), !right);
  EP_CHECK_EQ(w.ranks[0].memory->own_data()[7] == 42, !right);
  // What the successor puts now is its own if nothing of the other has come between.
  EP_CHECK(w.host_puts(victim, 0, 5, 13));
  EP_CHECK_EQ(w.ranks[0].memory->own_data()[5] == 13, right);
  EP_CHECK_EQ(w.ranks[0].signal(0) == 7, right);
}

// A newcomer that finds a place empty: whoever posts there is told at once; when somebody comes there, too, all is as with the others.
void test_empty_place() {
  world w(true, {});
  w.ranks[1].context->leave(false);
  w.ranks[1].nic->stop();
  w.ranks[1].inside->leave(false);
  w.ranks[1] = {};
  w.die();
  process& comer = w.ranks[victim];
  comer.context = must(ep::rank_context::create(victim, world_size, world_size));
  const std::vector<ep_segment_handle> handles{w.ranks[0].context->handle(), {}, comer.context->handle()};
  must(comer.context->connect(handles));
  w.begin(victim, handles);
  w.take_in(victim);
  must(comer.nic->queues().connect(std::vector{w.ranks[0].nic->queues().connection(), std::vector<uint8_t>(), comer.nic->queues().connection()}));
  // First it knows nobody's part: what it puts is lost, and its queue pairs stay whole.
  must(comer.nic->route(*comer.memory, std::vector{ep_ibgda_remote{}, ep_ibgda_remote{}, comer.part}));
  must(w.ranks[0].nic->connect_peer(victim, comer.nic->queues().connection()));
  must(w.ranks[0].nic->replace_remote(*w.ranks[0].memory, victim, comer.part));
  EP_CHECK(w.host_puts(victim, 0, 3, 32));
  EP_CHECK_EQ(w.ranks[0].signal(0), uint64_t{0});
  must(comer.nic->replace_remote(*comer.memory, 0, w.ranks[0].part));
  EP_CHECK(w.host_puts(victim, 0, 3, 33));
  EP_CHECK_EQ(w.ranks[0].signal(0), uint64_t{1});
  EP_CHECK(w.host_puts(0, victim, 3, 34));
  host_request astray = w.write(victim, 0, 3, 35, 0);
  astray.peer = 1;
  const auto refused = comer.nic->post(astray);
  EP_CHECK(!refused.ok());
  EP_CHECK_EQ(refused.why().status, uint32_t{EP_STATUS_PEER_LOST});
  ep_kernel_status status{};
  EP_CHECK(!w.kernel_puts(victim, 1, 3, 35, 0, &status));
  EP_CHECK_EQ(status.status, uint32_t{EP_STATUS_PEER_LOST});

  process& second = w.ranks[1];
  second.context = must(ep::rank_context::create(1, world_size, world_size));
  const std::vector<ep_segment_handle> all{w.ranks[0].context->handle(), second.context->handle(), comer.context->handle()};
  must(second.context->connect(all));
  w.begin(1, all);
  w.take_in(1);
  const std::vector connections{w.ranks[0].nic->queues().connection(), second.nic->queues().connection(), comer.nic->queues().connection()};
  must(second.nic->queues().connect(connections));
  must(second.nic->route(*second.memory, std::vector{w.ranks[0].part, second.part, comer.part}));
  for (const int32_t rank : {0, victim}) {
    must(w.ranks[rank].nic->connect_peer(1, connections[1]));
    must(w.ranks[rank].nic->replace_remote(*w.ranks[rank].memory, 1, second.part));
  }
  w.all_puts(50);
}

} // namespace

int main() {
  test_replaced(true);
  test_replaced(false);
  test_late_packets(true);
  test_late_packets(false);
  test_empty_place();
  return ep::check::finish();
}
