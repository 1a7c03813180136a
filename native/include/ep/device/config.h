/* One source, two machines: everything under ep/device compiles as C++20 for the host and by nvcc.
 *
 * Hazard: an inline function with one body for the host and another for CUDA would be one entity with two definitions, of which the
 * linker silently keeps one. So both builds live in different inline namespaces, and only plain structs of ep/abi cross between them. */
#ifndef EP_DEVICE_CONFIG_H
#define EP_DEVICE_CONFIG_H

#include <stdint.h>

#if defined(__CUDACC__)
#define EP_HD __device__ __forceinline__
#define EP_MACHINE_BEGIN namespace ep { inline namespace cuda_machine {
#else
#define EP_HD inline
#define EP_MACHINE_BEGIN namespace ep { inline namespace host_machine {
#endif
#define EP_MACHINE_END }}

#endif
