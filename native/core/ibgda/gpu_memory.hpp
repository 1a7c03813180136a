// Control memory in a GPU, for posters that run there.
#pragma once

#include <memory>
#include <string>

#include "control_memory.hpp"
#include "dl/cuda_symbols.hpp"

namespace ep::ibgda {

struct gpu_facts {
  std::string address; // "0000:84:00.0": key of topology::gpus
  bool gpudirect = false; // its memory can be pinned by address, given nvidia-peermem
  bool dmabuf = false;    // its memory can be exported
};
// ENODEV: no such ordinal.
result<gpu_facts> gpu_facts_read(const dl::cuda_symbols& cuda, int ordinal);

// `where`: gpu_dmabuf or gpu_address. EOPNOTSUPP: the GPU or its driver cannot.
result<std::unique_ptr<control_memory>> gpu_control_memory(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal, placement where);
// placement::host: pages of shared segments, locked for the GPU, at one address for it and for this process. `doorbells_are_memory`: no NIC's registers lie behind them.
result<std::unique_ptr<control_memory>> pinned_control_memory(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal, bool doorbells_are_memory);
// Memory of somebody's in that GPU, for a NIC: the pages around it as a DMA-BUF, or none where the GPU, or its driver, exports none. What is copied there from here on is there before the copy
// returns. EOPNOTSUPP: it has neither that nor GPUDirect.
result<control_block> gpu_export(std::shared_ptr<const dl::cuda_symbols> cuda, int ordinal, uint64_t address, uint64_t byte_length);

} // namespace ep::ibgda
