// The functions of libibverbs and libmlx5 that are used, each in the oldest version that will do.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "library.hpp"
#include "verbs_abi.hpp"
#include "verbs_rc_abi.hpp"

namespace ep::dl {

// X(result, name, version, (arguments)). A library without one of these is refused, by name and version.
#define EP_IBVERBS_SYMBOLS(X)                                                                                                                       \
  X(verbs::device**, ibv_get_device_list, "IBVERBS_1.1", (int* count))                                                                              \
  X(void, ibv_free_device_list, "IBVERBS_1.1", (verbs::device * *list))                                                                             \
  X(const char*, ibv_get_device_name, "IBVERBS_1.1", (verbs::device * device))                                                                      \
  X(verbs::context*, ibv_open_device, "IBVERBS_1.1", (verbs::device * device))                                                                      \
  X(int, ibv_close_device, "IBVERBS_1.1", (verbs::context * context))                                                                               \
  X(int, ibv_query_port, "IBVERBS_1.1", (verbs::context * context, uint8_t port, verbs::port_attr* out))                                            \
  X(int, _ibv_query_gid_ex, "IBVERBS_1.11",                                                                                                         \
    (verbs::context * context, uint32_t port, uint32_t index, verbs::gid_entry* out, uint32_t flags, size_t entry_size))                            \
  X(verbs::pd*, ibv_alloc_pd, "IBVERBS_1.1", (verbs::context * context))                                                                            \
  X(int, ibv_dealloc_pd, "IBVERBS_1.1", (verbs::pd * pd))                                                                                           \
  X(verbs::mr*, ibv_reg_mr_iova2, "IBVERBS_1.8", (verbs::pd * pd, void* addr, size_t length, uint64_t iova, unsigned access))                       \
  X(int, ibv_dereg_mr, "IBVERBS_1.1", (verbs::mr * mr))                                                                                             \
  X(verbs::ah*, ibv_create_ah, "IBVERBS_1.1", (verbs::pd * pd, verbs::ah_attr * attr))                                                              \
  X(int, ibv_destroy_ah, "IBVERBS_1.1", (verbs::ah * ah))                                                                                           \
  X(int, ibv_get_async_event, "IBVERBS_1.1", (verbs::context * context, verbs::async_event* event))                                                 \
  X(void, ibv_ack_async_event, "IBVERBS_1.1", (verbs::async_event * event))

#define EP_MLX5_SYMBOLS(X)                                                                                                                          \
  X(bool, mlx5dv_is_supported, "MLX5_1.8", (verbs::device * device))                                                                                \
  X(verbs::context*, mlx5dv_open_device, "MLX5_1.7", (verbs::device * device, verbs::mlx5_context_attr * attr))                                     \
  X(int, mlx5dv_init_obj, "MLX5_1.2", (verbs::mlx5_obj * obj, uint64_t type))                                                                       \
  X(verbs::devx_obj*, mlx5dv_devx_obj_create, "MLX5_1.7", (verbs::context * context, const void* in, size_t in_bytes, void* out, size_t out_bytes)) \
  X(int, mlx5dv_devx_obj_query, "MLX5_1.7", (verbs::devx_obj * obj, const void* in, size_t in_bytes, void* out, size_t out_bytes))                  \
  X(int, mlx5dv_devx_obj_modify, "MLX5_1.7", (verbs::devx_obj * obj, const void* in, size_t in_bytes, void* out, size_t out_bytes))                 \
  X(int, mlx5dv_devx_obj_destroy, "MLX5_1.7", (verbs::devx_obj * obj))                                                                              \
  X(int, mlx5dv_devx_general_cmd, "MLX5_1.7", (verbs::context * context, const void* in, size_t in_bytes, void* out, size_t out_bytes))             \
  X(verbs::devx_umem*, mlx5dv_devx_umem_reg, "MLX5_1.7", (verbs::context * context, void* addr, size_t bytes, uint32_t access))                     \
  X(int, mlx5dv_devx_umem_dereg, "MLX5_1.7", (verbs::devx_umem * umem))                                                                             \
  X(verbs::devx_uar*, mlx5dv_devx_alloc_uar, "MLX5_1.7", (verbs::context * context, uint32_t flags))                                                \
  X(void, mlx5dv_devx_free_uar, "MLX5_1.7", (verbs::devx_uar * uar))                                                                                \
  X(int, mlx5dv_devx_query_eqn, "MLX5_1.7", (verbs::context * context, uint32_t vector, uint32_t* eqn))

// Without one of these a call of the table answers EOPNOTSUPP (DMA-BUF), or objects bring no events.
#define EP_IBVERBS_OPTIONAL_SYMBOLS(X) \
  X(verbs::mr*, ibv_reg_dmabuf_mr, "IBVERBS_1.12", (verbs::pd * pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access))

#define EP_MLX5_OPTIONAL_SYMBOLS(X)                                                                                                                 \
  X(verbs::devx_umem*, mlx5dv_devx_umem_reg_ex, "MLX5_1.19", (verbs::context * context, verbs::devx_umem_in * in))                                  \
  X(verbs::devx_event_channel*, mlx5dv_devx_create_event_channel, "MLX5_1.11", (verbs::context * context, int flags))                               \
  X(void, mlx5dv_devx_destroy_event_channel, "MLX5_1.11", (verbs::devx_event_channel * channel))                                                    \
  X(int, mlx5dv_devx_subscribe_devx_event, "MLX5_1.11",                                                                                             \
    (verbs::devx_event_channel * channel, verbs::devx_obj * obj, uint16_t bytes, uint16_t numbers[], uint64_t cookie))                              \
  X(ssize_t, mlx5dv_devx_get_event, "MLX5_1.11", (verbs::devx_event_channel * channel, verbs::devx_event_header * out, size_t bytes))

// Plain queue pairs, which need no libmlx5. Posting and polling have no symbols: verbs::context_ops.
#define EP_RC_SYMBOLS(X)                                                                                                                            \
  X(verbs::cq*, ibv_create_cq, "IBVERBS_1.1", (verbs::context * context, int entries, void* cookie, void* channel, int vector))                     \
  X(int, ibv_destroy_cq, "IBVERBS_1.1", (verbs::cq * cq))                                                                                           \
  X(verbs::qp*, ibv_create_qp, "IBVERBS_1.1", (verbs::pd * pd, verbs::qp_init_attr * attributes))                                                   \
  X(int, ibv_modify_qp, "IBVERBS_1.1", (verbs::qp * qp, verbs::qp_attr * attributes, int mask))                                                     \
  X(int, ibv_query_qp, "IBVERBS_1.1", (verbs::qp * qp, verbs::qp_attr * attributes, int mask, verbs::qp_init_attr * initial))                         \
  X(int, ibv_destroy_qp, "IBVERBS_1.1", (verbs::qp * qp))

#define EP_MEMBER(result, name, version, arguments) result(*name) arguments = nullptr;
// Libraries, opened. Names as the documentation has them; pointers of the optional ones may be null.
struct ibverbs_symbols {
  EP_IBVERBS_SYMBOLS(EP_MEMBER)
  EP_IBVERBS_OPTIONAL_SYMBOLS(EP_MEMBER)
};
struct verbs_symbols : ibverbs_symbols {
  EP_MLX5_SYMBOLS(EP_MEMBER)
  EP_MLX5_OPTIONAL_SYMBOLS(EP_MEMBER)
};
struct rc_symbols : ibverbs_symbols {
  EP_RC_SYMBOLS(EP_MEMBER)
};
#undef EP_MEMBER

struct symbol_name {
  const char* name;
  const char* version;
  bool required;
};
std::vector<symbol_name> ibverbs_symbol_names();
std::vector<symbol_name> mlx5_symbol_names();
std::vector<symbol_name> rc_symbol_names();

// ELIBACC: a library is not there. ELIBBAD: it lacks required symbols; the message names each with its version.
result<std::shared_ptr<const verbs_symbols>> verbs_symbols_load(const std::string& ibverbs, const std::string& mlx5);
result<std::shared_ptr<const rc_symbols>> rc_symbols_load(const std::string& ibverbs);

} // namespace ep::dl
