#include "keys.hpp"

#include <cerrno>
#include <string>

#include "nic/mlx5/registrations.hpp"

namespace ep::nic::efa {
namespace {

failure refuse(int error, std::string text) { return {EP_STATUS_SYSTEM, error, std::move(text)}; }

constexpr uint32_t known_access = dl::EFA_ACCESS_LOCAL_WRITE | dl::EFA_ACCESS_REMOTE_WRITE | dl::EFA_ACCESS_REMOTE_READ;

} // namespace

bool keys::known(uint32_t lkey) const {
  const uint32_t index = lkey >> 8;
  return lkey != 0 && index < port_max_keys && local_[index].used && (index << 8 | local_[index].variant) == lkey;
}

result<uint32_t> keys::add(const dl::efa_memory& memory, uint32_t access) {
  auto checked = memory_check("reg_mr", {memory.address, memory.byte_length, memory.dmabuf_fd, memory.dmabuf_offset});
  if (!checked.ok()) return checked.why();
  if ((access & ~known_access) != 0) return refuse(EINVAL, "reg_mr of a software NIC: unknown rights " + std::to_string(access & ~known_access));
  uint32_t index = 1; // 0 would make key 0 possible, which means none
  while (index < port_max_keys && local_[index].used) ++index;
  if (index == port_max_keys) return refuse(ENOMEM, "reg_mr of a software NIC: all " + std::to_string(port_max_keys - 1) + " keys are taken");
  local_region& mine = local_[index];
  auto* base = reinterpret_cast<uint8_t*>(memory.address);
  mine.used = true;
  mine.dying = false;
  mine.base = base;
  port_key& key = port_.key(index);
  key.access = access;
  key.address = memory.address;
  key.bytes = memory.byte_length;
  key.place = place_of(base, memory.byte_length, mine.memory);
  key.has_wake = 0;
  key.generation = ++generation_;
  ++count_;
  // The low byte changes with every use of the place, so that an old key is not the new one's.
  ++mine.variant;
  const uint32_t number = index << 8 | mine.variant;
  store_ordered(key.key, number);
  return number;
}

result<nothing> keys::set_wake(uint32_t lkey, const ep_wake_word* wake) {
  if (!known(lkey)) return refuse(EINVAL, "region_wake: there is no such key");
  local_region& mine = local_[lkey >> 8];
  std::shared_ptr<segment> held;
  const port_place place = place_of(wake, sizeof *wake, held);
  if (!held) return refuse(EINVAL, "region_wake: the wake word lies in no shared segment, so peers could not notify it");
  port_key& key = port_.key(lkey >> 8);
  store_ordered(key.key, uint32_t{0}); // nobody reads the entry while it changes; the caller does this before it tells peers of the key
  key.wake = place;
  key.has_wake = 1;
  key.generation = ++generation_;
  mine.wake = std::move(held);
  store_ordered(key.key, lkey);
  return nothing{};
}

result<nothing> keys::clear(uint32_t lkey) {
  if (!known(lkey)) return refuse(EINVAL, "dereg_mr of a software NIC: there is no such key");
  local_[lkey >> 8].dying = true;
  store_ordered(port_.key(lkey >> 8).key, uint32_t{0});
  return nothing{};
}

void keys::forget(uint32_t lkey) {
  local_region& mine = local_[lkey >> 8];
  mine.used = false;
  mine.base = nullptr;
  mine.memory.reset();
  mine.wake.reset();
  --count_;
}

uint8_t* keys::local(uint32_t lkey, uint64_t address, uint64_t bytes, bool write, const char** why) const {
  *why = "there is no such lkey";
  if (!known(lkey) || local_[lkey >> 8].dying) return nullptr;
  const port_key& key = port_.key(lkey >> 8);
  *why = "the lkey gives no right to write";
  if (write && (key.access & dl::EFA_ACCESS_LOCAL_WRITE) == 0) return nullptr;
  *why = "the range ends outside of what the lkey covers";
  const uint64_t from = address - key.address;
  if (address < key.address || from > key.bytes || bytes > key.bytes - from) return nullptr;
  return local_[lkey >> 8].base + from;
}

} // namespace ep::nic::efa
