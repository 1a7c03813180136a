// Peers that are gone, as kernels are told of them. The device is the host's stand-in, the kernel a function of the test.
#include <dlfcn.h>

#include "../check.hpp"
#include "../core/ranks.hpp"
#include "core/gpu/stream.hpp"

namespace {

constexpr int32_t dying = 1;
constexpr int32_t closing = 2;
constexpr int32_t size = 4;

bool is_lost(const ep::gpu::peer_losses& losses, int32_t rank) {
  return std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(losses.address())[rank]).load(std::memory_order_acquire) == EP_STATUS_PEER_LOST;
}

// What a kernel does: awaits the word of the rank that dies, and says when it was there.
struct kernel {
  const ep::gpu::peer_losses& losses;
  std::atomic<int64_t> told_ns{0};
  std::atomic<int64_t> closed_told_ns{0};
};

void run_kernel(void* argument) {
  kernel& own = *static_cast<kernel*>(argument);
  const int64_t end = ep::deadline_after(30'000);
  while (!is_lost(own.losses, dying) && ep::clock_now_ns() < end) std::this_thread::yield();
  own.told_ns = ep::clock_now_ns();
  while (!is_lost(own.losses, closing) && ep::clock_now_ns() < end) std::this_thread::yield();
  own.closed_told_ns = ep::clock_now_ns();
}

struct sink : ep::completion_sink {
  std::atomic<uint32_t> status{EP_STATUS_PENDING};
  void complete(uint64_t, const ep::outcome& end) override { status = end.status; }
};

// Of one that dies at once, of one that has closed later, of one that lives never; and neither ends the launch.
void watched(ep::test::member& self) {
  auto library = ep::gpu::library::open(EP_CUDA_HOST);
  EP_CHECK(library.ok());
  sink ends;
  auto made = ep::gpu::stream::create(library.value(), 0, false, ends);
  EP_CHECK(made.ok());
  auto losses = ep::gpu::peer_losses::create(self.context, library.value(), 0);
  EP_CHECK(losses.ok());
  losses.value()->look();
  for (int32_t rank = 0; rank < size; ++rank) EP_CHECK(!is_lost(*losses.value(), rank));
  kernel own{*losses.value()};
  void* file = dlopen(EP_CUDA_HOST, RTLD_NOW);
  const auto put = reinterpret_cast<void (*)(void*, void (*)(void*), void*)>(dlsym(file, "ep_cuda_host_put"));
  EP_CHECK(put != nullptr);
  put(made.value()->native(), run_kernel, &own);
  auto slot = made.value()->slot();
  EP_CHECK(slot.ok());
  const ep::gpu::launch_slot& words = *slot.value();
  ep::gpu::stream::watch how;
  how.kernels.push_back({slot.value(), nullptr});
  how.losses.push_back(losses.value());
  EP_CHECK(made.value()->follow(1, std::make_shared<ep::cancel_flag>(), std::move(how)).ok());
  const int64_t began = ep::clock_now_ns();
  self.in.meet.arrive(); // the others go
  const int64_t end = ep::deadline_after(30'000);
  while (ends.status == EP_STATUS_PENDING && ep::clock_now_ns() < end) std::this_thread::yield();
  EP_CHECK_EQ(ends.status.load(), static_cast<uint32_t>(EP_STATUS_OK));
  EP_CHECK_EQ(words.cancel, 0u);
  EP_CHECK(is_lost(*losses.value(), dying));
  EP_CHECK(is_lost(*losses.value(), closing));
  EP_CHECK(!is_lost(*losses.value(), 0));
  EP_CHECK(!is_lost(*losses.value(), 3));
  EP_CHECK(own.told_ns - began < ep::gpu::closed_peers_grace_ns);
  EP_CHECK(own.closed_told_ns - began >= ep::gpu::closed_peers_grace_ns);
  dlclose(file);
}

} // namespace

int main() {
  ep::test::run_ranks(size, [](ep::test::member& self) {
    if (self.rank == 0) {
      watched(self);
      return;
    }
    self.in.meet.arrive();
    if (self.rank == dying) self.context->leave(false);
    if (self.rank == closing) self.context->leave(true);
  });
  return ep::check::finish();
}
