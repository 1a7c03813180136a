#include "mapped.hpp"

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

namespace ep {
namespace {

failure refuse(std::string text) { return {EP_STATUS_SYSTEM, EFAULT, std::move(text)}; }

} // namespace

result<nothing> check_mapped(uint64_t address, uint64_t byte_length) {
  if (address == 0 || address + byte_length < address) return refuse("no range of addresses");
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = address / page * page;
  const uint64_t end = (address + byte_length + page - 1) / page * page;
  // In parts: the answer is a byte for each page.
  std::vector<unsigned char> present(1 << 16);
  for (uint64_t at = begin; at < end; at += present.size() * page) {
    const uint64_t bytes = std::min<uint64_t>(end - at, present.size() * page);
    if (mincore(reinterpret_cast<void*>(at), bytes, present.data()) == 0) continue;
    return refuse(std::to_string(byte_length) + " bytes at address " + std::to_string(address) + " are not all mapped");
  }
  // Mapped is not readable: the addresses of a GPU's memory are mapped, but the NIC's thread would die of the first access. Where the kernel does not let a process
  // look at itself this way, the caller's word has to do.
  constexpr uint64_t stride = 1 << 20;
  const uint64_t last = address + byte_length - 1;
  for (uint64_t at = address;; at = std::min(last, at + stride)) {
    uint8_t byte = 0;
    iovec to{&byte, 1};
    iovec from{reinterpret_cast<void*>(at), 1};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) < 0 && errno == EFAULT) {
      return refuse("the byte at address " + std::to_string(at) + " cannot be read by a processor; device memory is for hardware");
    }
    if (at == last) break;
  }
  return nothing{};
}

} // namespace ep
