// What JS says of a NIC that it wants: which of the tables of dl/mlx5.hpp drives it, which device, how many queues.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env_state.hpp"

#include "dl/mlx5_verbs.hpp"
#include "gpu/library.hpp"
#include "ibgda/control_places.hpp"
#include "ibgda/device_choice.hpp"
#include "ibgda/queues.hpp"
#include "nic/mlx5/soft_device.hpp"

namespace ep::binding {

struct nic_description {
  enum class backing : uint8_t { soft, hardware, verbs };
  backing table = backing::soft;
  dl::verbs_libraries libraries;
  nic::soft_options soft;
  ibgda::device_wish wish;
  std::string gpu; // PCI address of the GPU that the device shall be near; "": near the memory of this process
  ibgda::queue_options queues;
  // Kernels of a GPU post; none: those of the host.
  struct gpu_kernels {
    gpu::library_ref library;
    int device = 0;
    std::vector<ibgda::placement> order; // of their queues
    std::string driver;                  // CUDA's library, by name or path
  };
  std::optional<gpu_kernels> kernels;
};

// Of NativeIbgdaOptions (native/js/ibgda.ts).
nic_description nic_description_of(Napi::Value value);
// ELIBACC, ELIBBAD: a library is missing or too old.
result<std::unique_ptr<dl::mlx5_driver>> driver_of(const nic_description& asked);

// Of the queues of those who post. ELIBACC, ELIBBAD, ENODEV: CUDA's driver; EOPNOTSUPP: no place is left, and why.
result<ibgda::control_places> places_of(const nic_description& asked);

Napi::Array strings_of(Napi::Env env, const std::vector<std::string>& list);

void bind_nic_driver(Napi::Env env, Napi::Object exports);
void bind_ibgda_bench(Napi::Env env, Napi::Object exports);

} // namespace ep::binding
