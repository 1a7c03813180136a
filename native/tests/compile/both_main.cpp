// Both machines in one program. It must start without a GPU and without a driver, and the host's code must be the host's.
#include <cstdio>

#include "cuda/kernels.hpp"
#include "host_kernels.hpp"

extern "C" const ep_cuda_table* ep_cuda_table_of(uint32_t version);
const void* second_kernel(bool proxy);
const void* post_kernel(uint32_t way);
const void* efa_kernel();
const void* gin_kernel(bool ours);

int main() {
  const auto first = compile_test::first_view();
  const auto second = compile_test::second_view();
  const bool host = first.fast[0] == second.fast[0] && first.bf16_of_third == 0x3eab && second.f16_of_third == 0x3555;
  int count = 0;
  const ep_cuda_table* table = ep_cuda_table_of(EP_CUDA_TABLE_VERSION);
  const bool versions = table != nullptr && ep_cuda_table_of(EP_CUDA_TABLE_VERSION + 1) == nullptr;
  if (table == nullptr) return 1;
  const int error = table->device_count(&count);
  std::printf("devices %d (%s)\n", count, table->error_text(error));
  // A refused launch: no kernel, no device needed to say so.
  ep_compat_args args{};
  const bool refused = ep::cuda_compat({nullptr, 1, 320, 0, 0, 0}, args) != 0;
  const bool kernels = second_kernel(false) != second_kernel(true) && post_kernel(0) != post_kernel(1) && post_kernel(1) != post_kernel(2) &&
                       gin_kernel(true) != gin_kernel(false) && efa_kernel() != second_kernel(true);
  return host && versions && refused && kernels ? 0 : 1;
}
