/* One source, two machines: everything under ep/device compiles as C++20 for the host and by nvcc.
 *
 * Hazard: an inline function with one body for the host and another for CUDA would be one entity with two definitions, of which the
 * linker silently keeps one. So both builds live in different inline namespaces, and only plain structs of ep/abi cross between them. */
#ifndef EP_DEVICE_CONFIG_H
#define EP_DEVICE_CONFIG_H

#include <stdint.h>

/* EP_HD_SMALL: small enough that a call would cost more than the body, which g++ does not always see (EP_SMALL_LAMBDA: of a lambda). EP_HD_SELDOM: what fails or waits; kept out of the way of
 * what does not. On a GPU everything is inlined, but for EP_HD_SHARED: long, and seldom what a kernel does. HAZARD: compiled for linking (-rdc), a function of its own may take
 * more registers than the launch bounds of its kernels leave, and ptxas refuses them; so these are inlined there, too. EP_UNROLL: of a loop over an array, which nvcc would else keep in memory. EP_ONE_CODE: of a loop
 * of which the second turn is to find its instructions where the first has left them. EP_SELDOM_APART: for a test of many instances, which nvcc would else inline for minutes. */
#if defined(__CUDACC__)
#define EP_HD __device__ __forceinline__
#define EP_HD_SMALL EP_HD
#if defined(__CUDACC_RDC__)
#define EP_HD_SHARED EP_HD
#else
#define EP_HD_SHARED __device__ __noinline__
#endif
#define EP_UNROLL _Pragma("unroll")
#define EP_ONE_CODE _Pragma("unroll 1")
#define EP_SMALL_LAMBDA
#if defined(EP_SELDOM_APART)
#define EP_HD_SELDOM __device__ __noinline__
#else
#define EP_HD_SELDOM EP_HD
#endif
#define EP_MACHINE_BEGIN namespace ep { inline namespace cuda_machine {
#else
#define EP_HD inline
#define EP_HD_SMALL inline __attribute__((always_inline))
#define EP_SMALL_LAMBDA __attribute__((always_inline))
#define EP_HD_SELDOM inline __attribute__((noinline))
#define EP_HD_SHARED inline
#define EP_UNROLL
#define EP_ONE_CODE
#define EP_MACHINE_BEGIN namespace ep { inline namespace host_machine {
#endif
#define EP_MACHINE_END }}

#endif
