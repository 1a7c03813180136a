// Where the words lie that posters and the NIC share: rings, doorbell records, completions, and the structs of abi/ibgda.h. Best is where the posters run;
// what is possible depends on the machine, so the control path is given several sources in the order of preference, and reports why it passed one over.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "dl/mlx5.hpp"

namespace ep::ibgda {

enum class placement : uint8_t {
  gpu_dmabuf = 1,  // GPU memory, handed to the NIC as a DMA-BUF
  gpu_address = 2, // GPU memory, pinned by its address (nvidia-peermem)
  host = 3,        // host memory; GPUs read it over the bus
};
const char* placement_name(placement where);

// What could not be had as wished, and was passed over.
struct fallback {
  placement wished;
  std::string why;
};

struct control_block {
  uint64_t address = 0;     // as posters, and requests to the NIC, name the first byte
  uint64_t byte_length = 0; // a multiple of 4096, as is the address
  int dmabuf_fd = -1;       // -1: the NIC is given the address
  uint64_t dmabuf_offset = 0;
  std::shared_ptr<void> keep; // the memory goes with its last holder

  // A part of it, as the table wants to be told. Both arguments are multiples of 4096: the NIC maps whole pages.
  dl::mlx5_memory part(uint64_t offset, uint64_t bytes) const;
};

class control_memory {
 public:
  virtual ~control_memory() = default;
  virtual placement where() const = 0;
  // Zeroed. Failures as of the table: EOPNOTSUPP, ENOMEM.
  virtual result<control_block> allocate(uint64_t bytes) = 0;
  // Writes of the control path into a block. They are visible to posters that start later.
  virtual result<nothing> write(const control_block& block, uint64_t offset, const void* bytes, uint64_t length) = 0;
  virtual result<nothing> fill(const control_block& block, uint64_t offset, uint8_t value, uint64_t length) = 0;
  // One aligned word, with release, under posters that are running: they see what was written before it.
  virtual result<nothing> publish(const control_block& block, uint64_t offset, uint64_t value) = 0;
  // What stands there, also under posters that are running.
  virtual result<nothing> read(const control_block& block, uint64_t offset, void* into, uint64_t length) = 0;
  // Makes a doorbell page (of this process) reachable for the posters, and says under which address. EOPNOTSUPP, EPERM: it cannot be.
  virtual result<uint64_t> map_doorbell(uint64_t register_address, uint64_t bytes) = 0;
  virtual void unmap_doorbell(uint64_t register_address) = 0;
};

// Memory of this process, for posters that run on its processors.
std::unique_ptr<control_memory> host_control_memory();

// Aligned words, each with acquire: posters may be changing them.
void read_words(const void* from, void* into, uint64_t length);

} // namespace ep::ibgda
