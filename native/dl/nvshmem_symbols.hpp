// NVIDIA's NVSHMEM, opened by name: what its host library has as plain C functions, which is all that hosts start. Kernels that call NVSHMEM need its headers and device library, and are
// built apart (native/nvshmem). Nothing of its headers is needed here; what is declared has the layout that versions 3.x have had since 3.0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "library.hpp"

namespace ep::dl {

using nvshmem_stream = void*; // a stream of CUDA

inline constexpr int nvshmem_major = 3; // others are refused: structs carry versions, functions do not

// Structs say which version of them they are: 1, and their length.
template <class Struct> constexpr int nvshmem_first_version() { return (1 << 16) + static_cast<int>(sizeof(Struct)); }

struct nvshmem_unique_id {
  int version = nvshmem_first_version<nvshmem_unique_id>();
  char bytes[124] = {};
};
static_assert(sizeof(nvshmem_unique_id) == 128);

struct nvshmem_unique_id_args {
  int version = nvshmem_first_version<nvshmem_unique_id_args>();
  nvshmem_unique_id* id = nullptr;
  int pe = -1;
  int pes = -1;
};
static_assert(sizeof(nvshmem_unique_id_args) == 24);

struct nvshmem_init_args {
  int version = nvshmem_first_version<nvshmem_init_args>();
  nvshmem_unique_id_args unique_id;
  char rest[96] = {};
};
static_assert(sizeof(nvshmem_init_args) == 128 && offsetof(nvshmem_init_args, unique_id) == 8);

struct nvshmem_init_attr {
  int version = nvshmem_first_version<nvshmem_init_attr>();
  void* mpi = nullptr;
  nvshmem_init_args args;
};
static_assert(sizeof(nvshmem_init_attr) == 144 && offsetof(nvshmem_init_attr, args) == 16);

inline constexpr unsigned nvshmem_with_unique_id = 1u << 3;
inline constexpr int nvshmem_signal_set = 9;
inline constexpr int nvshmem_signal_add = 10;

// Of nvshmemx_init_status.
inline constexpr int nvshmem_initialized = 2;
inline constexpr int nvshmem_limited_mpg = 3; // several PEs share a GPU by turns
inline constexpr int nvshmem_full_mpg = 4;

// X(name, result, (arguments))
#define EP_NVSHMEM_SYMBOLS(X)                                                                                                                                \
  X(nvshmemx_vendor_get_version_info, void, (int* major, int* minor, int* patch))                                                                            \
  X(nvshmemx_get_uniqueid, int, (nvshmem_unique_id * id))                                                                                                    \
  X(nvshmemx_set_attr_uniqueid_args, int, (const int pe, const int pes, const nvshmem_unique_id* id, nvshmem_init_attr* attr))                               \
  X(nvshmemx_hostlib_init_attr, int, (unsigned flags, nvshmem_init_attr* attr))                                                                              \
  X(nvshmemx_init_status, int, ())                                                                                                                           \
  X(nvshmem_my_pe, int, ())                                                                                                                                  \
  X(nvshmem_n_pes, int, ())                                                                                                                                  \
  X(nvshmem_malloc, void*, (size_t bytes))                                                                                                                   \
  X(nvshmem_ptr, void*, (const void* at, int pe))                                                                                                            \
  X(nvshmemx_putmem_on_stream, void, (void* to, const void* from, size_t bytes, int pe, nvshmem_stream stream))                                              \
  X(nvshmemx_putmem_signal_on_stream, void, (void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int op, int pe, nvshmem_stream stream)) \
  X(nvshmemx_getmem_on_stream, void, (void* to, const void* from, size_t bytes, int pe, nvshmem_stream stream))                                              \
  X(nvshmemx_uint8_p_on_stream, void, (uint8_t * to, uint8_t value, int pe, nvshmem_stream stream))                                                          \
  X(nvshmemx_uint16_p_on_stream, void, (uint16_t * to, uint16_t value, int pe, nvshmem_stream stream))                                                       \
  X(nvshmemx_uint32_p_on_stream, void, (uint32_t * to, uint32_t value, int pe, nvshmem_stream stream))                                                       \
  X(nvshmemx_uint64_p_on_stream, void, (uint64_t * to, uint64_t value, int pe, nvshmem_stream stream))                                                       \
  X(nvshmemx_signal_op_on_stream, void, (uint64_t * signal, uint64_t value, int op, int pe, nvshmem_stream stream))                                          \
  X(nvshmemx_quiet_on_stream, void, (nvshmem_stream stream))                                                                                                 \
  X(nvshmemx_barrier_all_on_stream, void, (nvshmem_stream stream))

struct nvshmem_symbols {
#define EP_MEMBER(name, returned, arguments) returned(*name) arguments = nullptr;
  EP_NVSHMEM_SYMBOLS(EP_MEMBER)
#undef EP_MEMBER

  std::string path; // as it was opened
  int version = 0;  // major · 10000 + minor · 100 + patch
};

// ELIBACC: it is not there. ELIBBAD: no NVSHMEM, another major version, or one that lacks a function.
result<std::shared_ptr<const nvshmem_symbols>> nvshmem_symbols_load(const std::string& name);

// "3.4.5"
std::string nvshmem_version_text(int version);

} // namespace ep::dl
