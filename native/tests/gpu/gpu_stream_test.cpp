// What a stream of a device does when nobody can be told of the end of what was put on it. The device is the host's stand-in.
#include <cstdlib>
#include <set>

#include "../check.hpp"
#include "core/gpu/stream.hpp"

namespace {

struct sink : ep::completion_sink {
  void complete(uint64_t, const ep::outcome&) override {}
};

void words_stay_with_what_runs() {
  auto library = ep::gpu::library::open(EP_CUDA_HOST);
  EP_CHECK(library.ok());
  sink ends;
  auto made = ep::gpu::stream::create(library.value(), 0, false, ends);
  EP_CHECK(made.ok());
  ep::gpu::stream& stream = *made.value();
  auto block = ep::gpu::device_block::allocate(library.value(), 0, 64);
  EP_CHECK(block.ok());
  std::weak_ptr<const ep::gpu::device_block> used = block.value();
  auto slot = stream.slot();
  EP_CHECK(slot.ok());
  ep::gpu::launch_slot* const words = slot.value().get();
  ep::gpu::stream::watch how;
  how.kernels.push_back({std::move(slot.value()), nullptr});
  how.keep.push_back(std::move(block.value()));
  setenv("EP_CUDA_HOST_REFUSED_EVENTS", "1", 1);
  const auto followed = stream.follow(1, std::make_shared<ep::cancel_flag>(), std::move(how));
  unsetenv("EP_CUDA_HOST_REFUSED_EVENTS");
  EP_CHECK(!followed.ok());
  EP_CHECK(!used.expired());
  // More than one block of slots has.
  std::vector<ep::gpu::slot_ref> others;
  std::set<ep::gpu::launch_slot*> taken;
  for (int i = 0; i < 600; ++i) {
    auto other = stream.slot();
    EP_CHECK(other.ok());
    taken.insert(other.value().get());
    others.push_back(other.value());
  }
  EP_CHECK_EQ(taken.size(), size_t{600});
  EP_CHECK_EQ(taken.count(words), size_t{0});
  others.clear();
  made.value().reset();
  EP_CHECK(used.expired());
}

} // namespace

int main() {
  words_stay_with_what_runs();
  return ep::check::finish();
}
