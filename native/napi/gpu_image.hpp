// Arrays for the device, laid out in one block: a place is known before the block has an address.
#pragma once

#include <cstring>
#include <vector>

#include "gpu/memory.hpp"

namespace ep::binding {

class gpu_image {
 public:
  template <class T> uint64_t add(const std::vector<T>& values) { return add(values.data(), values.size() * sizeof(T)); }
  uint64_t add(const void* from, uint64_t bytes) {
    const uint64_t at = bytes_.size();
    bytes_.resize(at + (bytes + 15) / 16 * 16);
    if (bytes != 0) std::memcpy(bytes_.data() + at, from, bytes);
    return at;
  }
  template <class T> T& at(uint64_t place) { return *reinterpret_cast<T*>(bytes_.data() + place); }
  uint64_t byte_length() const { return bytes_.size(); }
  // Waits for the copy.
  result<nothing> copy_to(const gpu::library_ref& of, int device, uint64_t address) const {
    return gpu::copy_now(of, device, address, reinterpret_cast<uint64_t>(bytes_.data()), bytes_.size(), "copying a plan to the device");
  }

 private:
  std::vector<uint8_t> bytes_;
};

} // namespace ep::binding
