#include "registrations.hpp"

#include <cerrno>
#include <string>

#include "mapped.hpp"

namespace ep::nic {
namespace {

failure refuse(int error, std::string text) { return {EP_STATUS_SYSTEM, error, std::move(text)}; }

constexpr uint32_t known_access = dl::MLX5_ACCESS_LOCAL_WRITE | dl::MLX5_ACCESS_REMOTE_WRITE | dl::MLX5_ACCESS_REMOTE_READ |
                                  dl::MLX5_ACCESS_REMOTE_ATOMIC | dl::MLX5_ACCESS_RELAXED_ORDERING;

} // namespace

result<nothing> memory_check(const char* call, const dl::mlx5_memory& memory) {
  const std::string who = std::string(call) + " of a software NIC: ";
  if (memory.dmabuf_fd != -1) return refuse(EOPNOTSUPP, who + "a DMA-BUF cannot be mapped by it; register the address instead");
  if (memory.byte_length == 0) return refuse(EINVAL, who + "0 bytes");
  auto mapped = check_mapped(memory.address, memory.byte_length);
  if (mapped.ok()) return mapped;
  return refuse(mapped.why().sys_errno, who + mapped.why().message);
}

uint32_t registrations::pd_add() {
  pds_.insert(next_pd_);
  return next_pd_++;
}

result<nothing> registrations::pd_remove(uint32_t pdn, bool used) {
  if (!pd_known(pdn)) return refuse(EINVAL, "dealloc_pd of a software NIC: there is no protection domain " + std::to_string(pdn));
  for (uint32_t i = 1; i < port_max_keys && !used; ++i) used = local_[i].used && port_.key(i).pdn == pdn;
  if (used) return refuse(EBUSY, "dealloc_pd of a software NIC: regions or queue pairs still belong to protection domain " + std::to_string(pdn));
  pds_.erase(pdn);
  return nothing{};
}

result<uint32_t> registrations::region_add(uint32_t pdn, const dl::mlx5_memory& memory, uint32_t access) {
  auto checked = memory_check("reg_mr", memory);
  if (!checked.ok()) return checked.why();
  if (!pd_known(pdn)) return refuse(EINVAL, "reg_mr of a software NIC: there is no protection domain " + std::to_string(pdn));
  if ((access & ~known_access) != 0) return refuse(EINVAL, "reg_mr of a software NIC: unknown rights " + std::to_string(access & ~known_access));
  constexpr uint32_t changing = dl::MLX5_ACCESS_REMOTE_WRITE | dl::MLX5_ACCESS_REMOTE_ATOMIC;
  if ((access & changing) != 0 && (access & dl::MLX5_ACCESS_LOCAL_WRITE) == 0) {
    return refuse(EINVAL, "reg_mr of a software NIC: remote rights to write need the local one");
  }
  uint32_t index = 1; // 0 would make key 0 possible, which means none
  while (index < port_max_keys && local_[index].used) ++index;
  if (index == port_max_keys) return refuse(ENOMEM, "reg_mr of a software NIC: all " + std::to_string(port_max_keys - 1) + " keys are taken");
  local_region& mine = local_[index];
  auto* base = reinterpret_cast<uint8_t*>(memory.address);
  mine.used = true;
  mine.dying = false;
  mine.base = base;
  mine.memory = segment::containing(base, memory.byte_length);
  port_key& key = port_.key(index);
  key.access = access;
  key.pdn = pdn;
  key.iova = memory.address;
  key.bytes = memory.byte_length;
  key.memory = mine.memory ? mine.memory->handle() : ep_segment_handle{};
  key.offset = mine.memory ? static_cast<uint64_t>(base - mine.memory->data()) : memory.address;
  key.wake = ep_segment_handle{};
  key.wake_offset = UINT64_MAX;
  key.generation = ++generation_;
  ++region_count_;
  // The low byte changes with every use of the place, so that an old key is not the new one's.
  ++mine.variant;
  const uint32_t number = index << 8 | mine.variant;
  store_ordered(key.key, number);
  return number;
}

result<nothing> registrations::region_wake(uint32_t number, const ep_wake_word* wake) {
  const uint32_t index = number >> 8;
  if (index >= port_max_keys || number == 0 || port_.key(index).key != number) return refuse(EINVAL, "region_wake: there is no such key");
  auto memory = segment::containing(wake, sizeof *wake);
  if (!memory) return refuse(EINVAL, "region_wake: the wake word lies in no shared segment, so peers could not notify it");
  port_key& key = port_.key(index);
  store_ordered(key.key, uint32_t{0}); // nobody reads the entry while it changes; the caller does this before it tells peers of the key
  key.wake = memory->handle();
  key.wake_offset = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(wake) - memory->data());
  key.generation = ++generation_;
  local_[index].wake = std::move(memory);
  store_ordered(key.key, number);
  return nothing{};
}

result<nothing> registrations::region_clear(uint32_t number) {
  const uint32_t index = number >> 8;
  if (index >= port_max_keys || !local_[index].used || (index << 8 | local_[index].variant) != number) {
    return refuse(EINVAL, "dereg_mr of a software NIC: there is no such key");
  }
  local_[index].dying = true;
  store_ordered(port_.key(index).key, uint32_t{0});
  return nothing{};
}

void registrations::region_forget(uint32_t number) {
  local_region& mine = local_[number >> 8];
  mine.used = false;
  mine.base = nullptr;
  mine.memory.reset();
  mine.wake.reset();
  --region_count_;
}

uint8_t* registrations::local(uint32_t lkey, uint32_t pdn, uint64_t address, uint64_t bytes, bool write, const char** why) const {
  const uint32_t index = lkey >> 8;
  *why = "there is no such lkey";
  if (index >= port_max_keys || !local_[index].used || local_[index].dying) return nullptr;
  const port_key& key = port_.key(index);
  if (key.key != lkey) return nullptr;
  *why = "the lkey belongs to another protection domain than the queue pair";
  if (key.pdn != pdn) return nullptr;
  *why = "the lkey gives no right to write";
  if (write && (key.access & dl::MLX5_ACCESS_LOCAL_WRITE) == 0) return nullptr;
  *why = "the range ends outside of what the lkey covers";
  const uint64_t from = address - key.iova;
  if (address < key.iova || from > key.bytes || bytes > key.bytes - from) return nullptr;
  return local_[index].base + from;
}

result<uint32_t> registrations::umem_add(const dl::mlx5_memory& memory, uint32_t access) {
  auto checked = memory_check("umem_reg", memory);
  if (!checked.ok()) return checked.why();
  if ((access & ~known_access) != 0) return refuse(EINVAL, "umem_reg of a software NIC: unknown rights " + std::to_string(access & ~known_access));
  auto* base = reinterpret_cast<uint8_t*>(memory.address);
  umems_.emplace(next_umem_, umem_entry{base, memory.byte_length, access, 0, segment::containing(base, memory.byte_length)});
  return next_umem_++;
}

result<nothing> registrations::umem_remove(uint32_t id) {
  const auto found = umems_.find(id);
  if (found == umems_.end()) return refuse(EINVAL, "umem_dereg of a software NIC: there is no umem " + std::to_string(id));
  if (found->second.users != 0) return refuse(EBUSY, "umem_dereg of a software NIC: queues still live in umem " + std::to_string(id));
  umems_.erase(found);
  return nothing{};
}

uint8_t* registrations::umem(uint32_t id, uint64_t offset, uint64_t bytes, bool write) const {
  const auto found = umems_.find(id);
  if (found == umems_.end()) return nullptr;
  const umem_entry& entry = found->second;
  if (offset > entry.bytes || bytes > entry.bytes - offset) return nullptr;
  if (write && (entry.access & dl::MLX5_ACCESS_LOCAL_WRITE) == 0) return nullptr;
  return entry.base + offset;
}

void registrations::umem_use(uint32_t id, int change) {
  const auto found = umems_.find(id);
  if (found != umems_.end()) found->second.users += change;
}

} // namespace ep::nic
