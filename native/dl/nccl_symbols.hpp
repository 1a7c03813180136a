// NVIDIA's NCCL, opened by name. Its headers are not needed: what is declared here has not changed since 2.14, the first version whose communicators do not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "library.hpp"

namespace ep::dl {

using nccl_result = int;
using nccl_comm = void*;   // opaque
using nccl_stream = void*; // a stream of CUDA

inline constexpr nccl_result nccl_success = 0;
inline constexpr nccl_result nccl_in_progress = 7;

inline constexpr int nccl_oldest = 21400; // major · 10000 + minor · 100 + patch
inline constexpr int nccl_newest = 29999;

struct nccl_unique_id {
  char bytes[128];
};

// As 2.14 has it. Later versions have more members, and take this from whoever says that it is of 2.14.
struct nccl_config {
  size_t byte_length = sizeof(nccl_config);
  uint32_t magic = 0xcafebeef;
  uint32_t version = nccl_oldest;
  int32_t blocking = 0;
  int32_t undefined = INT32_MIN;
};
static_assert(sizeof(nccl_config) == 24 && offsetof(nccl_config, blocking) == 16);

// Elements, by their numbers there.
enum class nccl_type : int { i8 = 0, u8, i32, u32, i64, u64, f16, f32, f64, bf16 };
enum class nccl_fold : int { sum = 0, product, max, min, avg };
inline constexpr int nccl_scalar_of_host = 1;

// X(name, (arguments))
#define EP_NCCL_SYMBOLS(X)                                                                                                                     \
  X(ncclGetVersion, (int* version))                                                                                                            \
  X(ncclGetUniqueId, (nccl_unique_id * id))                                                                                                    \
  X(ncclCommInitRankConfig, (nccl_comm * comm, int ranks, nccl_unique_id id, int rank, nccl_config* config))                                   \
  X(ncclCommFinalize, (nccl_comm comm))                                                                                                        \
  X(ncclCommDestroy, (nccl_comm comm))                                                                                                         \
  X(ncclCommAbort, (nccl_comm comm))                                                                                                           \
  X(ncclCommGetAsyncError, (nccl_comm comm, nccl_result* state))                                                                               \
  X(ncclRedOpCreatePreMulSum, (int* op, void* scalar, int type, int residence, nccl_comm comm))                                                \
  X(ncclRedOpDestroy, (int op, nccl_comm comm))                                                                                                \
  X(ncclGroupStart, ())                                                                                                                        \
  X(ncclGroupEnd, ())                                                                                                                          \
  X(ncclAllReduce, (const void* from, void* to, size_t count, int type, int op, nccl_comm comm, nccl_stream stream))                           \
  X(ncclBroadcast, (const void* from, void* to, size_t count, int type, int root, nccl_comm comm, nccl_stream stream))                         \
  X(ncclReduce, (const void* from, void* to, size_t count, int type, int op, int root, nccl_comm comm, nccl_stream stream))                    \
  X(ncclAllGather, (const void* from, void* to, size_t count, int type, nccl_comm comm, nccl_stream stream))                                   \
  X(ncclReduceScatter, (const void* from, void* to, size_t count, int type, int op, nccl_comm comm, nccl_stream stream))                       \
  X(ncclSend, (const void* from, size_t count, int type, int peer, nccl_comm comm, nccl_stream stream))                                        \
  X(ncclRecv, (void* to, size_t count, int type, int peer, nccl_comm comm, nccl_stream stream))

struct nccl_symbols {
#define EP_MEMBER(name, arguments) nccl_result(*name) arguments = nullptr;
  EP_NCCL_SYMBOLS(EP_MEMBER)
#undef EP_MEMBER
  const char* (*ncclGetErrorString)(nccl_result) = nullptr;
  const char* (*ncclGetLastError)(nccl_comm) = nullptr;

  std::string path; // as it was opened
  int version = 0;
};

// ELIBACC: it is not there. ELIBBAD: a version that is older or newer than what is declared here.
result<std::shared_ptr<const nccl_symbols>> nccl_symbols_load(const std::string& name);

// "2.28.9"
std::string nccl_version_text(int version);

// "unhandled system error: Call to connect returned …"
std::string nccl_error_text(const nccl_symbols& nccl, nccl_result error, nccl_comm comm);

} // namespace ep::dl
