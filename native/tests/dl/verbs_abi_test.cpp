// Our declarations of libibverbs and libmlx5 against the headers and libraries of the system, where they are installed; what is not there is named.
#include "dl/mlx5.hpp"
#include "dl/verbs_symbols.hpp"

#include <cerrno>
#include <cstdio>
#include <string>

#include "check.hpp"

#if __has_include(<infiniband/verbs.h>) && __has_include(<infiniband/mlx5dv.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#pragma GCC diagnostic pop
#define EP_HAS_HEADERS 1
#else
#define EP_HAS_HEADERS 0
#endif

namespace {

namespace verbs = ep::dl::verbs;

#if EP_HAS_HEADERS
#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME(ours, member, theirs, their_member) \
  static_assert(offsetof(ours, member) == offsetof(theirs, their_member) && sizeof(ours::member) == sizeof(theirs::their_member), #theirs "." #their_member)

SAME_SIZE(verbs::pd, ibv_pd);
SAME_SIZE(verbs::mr, ibv_mr);
SAME(verbs::mr, lkey, ibv_mr, lkey);
SAME(verbs::mr, rkey, ibv_mr, rkey);
SAME_SIZE(verbs::context_ops, ibv_context_ops);
SAME(verbs::context_ops, poll_cq, ibv_context_ops, poll_cq);
SAME(verbs::context_ops, post_send, ibv_context_ops, post_send);
SAME_SIZE(verbs::context, ibv_context);
SAME(verbs::context, ops, ibv_context, ops);
SAME(verbs::context, async_fd, ibv_context, async_fd);
SAME_SIZE(verbs::port_attr, ibv_port_attr);
SAME(verbs::port_attr, active_mtu, ibv_port_attr, active_mtu);
SAME(verbs::port_attr, gid_tbl_len, ibv_port_attr, gid_tbl_len);
SAME(verbs::port_attr, max_msg_sz, ibv_port_attr, max_msg_sz);
SAME(verbs::port_attr, lid, ibv_port_attr, lid);
SAME(verbs::port_attr, link_layer, ibv_port_attr, link_layer);
static_assert(IBV_LINK_LAYER_INFINIBAND == static_cast<int>(ep::dl::mlx5_link::infiniband) && IBV_LINK_LAYER_ETHERNET == static_cast<int>(ep::dl::mlx5_link::ethernet));
static_assert(IBV_PORT_ACTIVE == static_cast<int>(ep::dl::mlx5_port_state::active) && IBV_PORT_DOWN == static_cast<int>(ep::dl::mlx5_port_state::down));
SAME_SIZE(verbs::gid_entry, ibv_gid_entry);
SAME(verbs::gid_entry, gid_type, ibv_gid_entry, gid_type);
static_assert(IBV_GID_TYPE_IB == 0 && IBV_GID_TYPE_ROCE_V1 == 1 && IBV_GID_TYPE_ROCE_V2 == 2);
SAME_SIZE(verbs::ah_attr, ibv_ah_attr);
SAME(verbs::ah_attr, grh, ibv_ah_attr, grh);
static_assert(offsetof(verbs::ah_attr, grh.sgid_index) == offsetof(ibv_ah_attr, grh.sgid_index));
static_assert(offsetof(verbs::ah_attr, grh.hop_limit) == offsetof(ibv_ah_attr, grh.hop_limit));
static_assert(offsetof(verbs::ah_attr, grh.traffic_class) == offsetof(ibv_ah_attr, grh.traffic_class));
SAME(verbs::ah_attr, dlid, ibv_ah_attr, dlid);
SAME(verbs::ah_attr, sl, ibv_ah_attr, sl);
SAME(verbs::ah_attr, is_global, ibv_ah_attr, is_global);
SAME(verbs::ah_attr, port_num, ibv_ah_attr, port_num);
SAME_SIZE(verbs::async_event, ibv_async_event);
SAME(verbs::async_event, event_type, ibv_async_event, event_type);
static_assert(verbs::event_device_fatal == IBV_EVENT_DEVICE_FATAL && verbs::event_port_active == IBV_EVENT_PORT_ACTIVE);
static_assert(verbs::event_port_err == IBV_EVENT_PORT_ERR && verbs::event_gid_change == IBV_EVENT_GID_CHANGE);
static_assert(ep::dl::MLX5_ACCESS_LOCAL_WRITE == IBV_ACCESS_LOCAL_WRITE && ep::dl::MLX5_ACCESS_REMOTE_WRITE == IBV_ACCESS_REMOTE_WRITE);
static_assert(ep::dl::MLX5_ACCESS_REMOTE_READ == IBV_ACCESS_REMOTE_READ && ep::dl::MLX5_ACCESS_REMOTE_ATOMIC == IBV_ACCESS_REMOTE_ATOMIC);
static_assert(ep::dl::MLX5_ACCESS_RELAXED_ORDERING == IBV_ACCESS_RELAXED_ORDERING);
SAME_SIZE(verbs::mlx5_context_attr, mlx5dv_context_attr);
static_assert(verbs::context_flags_devx == MLX5DV_CONTEXT_FLAGS_DEVX);
SAME_SIZE(verbs::mlx5_av, mlx5_wqe_av);
SAME(verbs::mlx5_av, rlid, mlx5_wqe_av, rlid);
SAME(verbs::mlx5_av, rmac, mlx5_wqe_av, rmac);
SAME(verbs::mlx5_av, tclass, mlx5_wqe_av, tclass);
SAME(verbs::mlx5_av, hop_limit, mlx5_wqe_av, hop_limit);
SAME(verbs::mlx5_av, rgid, mlx5_wqe_av, rgid);
SAME_SIZE(verbs::mlx5_ah_out, mlx5dv_ah);
SAME_SIZE(verbs::mlx5_pd_out, mlx5dv_pd);
SAME(verbs::mlx5_pd_out, pdn, mlx5dv_pd, pdn);
SAME_SIZE(verbs::mlx5_obj, mlx5dv_obj);
SAME(verbs::mlx5_obj, ah, mlx5dv_obj, ah);
SAME(verbs::mlx5_obj, pd, mlx5dv_obj, pd);
static_assert(verbs::obj_ah == MLX5DV_OBJ_AH && verbs::obj_pd == MLX5DV_OBJ_PD);
SAME_SIZE(verbs::devx_umem, mlx5dv_devx_umem);
SAME_SIZE(verbs::devx_umem_in, mlx5dv_devx_umem_in);
SAME(verbs::devx_umem_in, pgsz_bitmap, mlx5dv_devx_umem_in, pgsz_bitmap);
SAME(verbs::devx_umem_in, comp_mask, mlx5dv_devx_umem_in, comp_mask);
SAME(verbs::devx_umem_in, dmabuf_fd, mlx5dv_devx_umem_in, dmabuf_fd);
static_assert(verbs::umem_mask_dmabuf == MLX5DV_UMEM_MASK_DMABUF);
SAME_SIZE(verbs::devx_uar, mlx5dv_devx_uar);
SAME(verbs::devx_uar, base_addr, mlx5dv_devx_uar, base_addr);
SAME(verbs::devx_uar, page_id, mlx5dv_devx_uar, page_id);
static_assert(verbs::uar_blueflame == MLX5DV_UAR_ALLOC_TYPE_BF && verbs::uar_noncached == MLX5DV_UAR_ALLOC_TYPE_NC);
SAME_SIZE(verbs::devx_event_channel, mlx5dv_devx_event_channel);
static_assert(verbs::event_channel_omit_data == MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA);
SAME(verbs::qp, qp_num, ibv_qp, qp_num);
SAME_SIZE(verbs::qp_cap, ibv_qp_cap);
SAME_SIZE(verbs::qp_init_attr, ibv_qp_init_attr);
SAME(verbs::qp_init_attr, cap, ibv_qp_init_attr, cap);
SAME(verbs::qp_init_attr, qp_type, ibv_qp_init_attr, qp_type);
static_assert(verbs::qp_type_rc == IBV_QPT_RC);
SAME_SIZE(verbs::qp_attr, ibv_qp_attr);
SAME(verbs::qp_attr, path_mtu, ibv_qp_attr, path_mtu);
SAME(verbs::qp_attr, rq_psn, ibv_qp_attr, rq_psn);
SAME(verbs::qp_attr, sq_psn, ibv_qp_attr, sq_psn);
SAME(verbs::qp_attr, dest_qp_num, ibv_qp_attr, dest_qp_num);
SAME(verbs::qp_attr, qp_access_flags, ibv_qp_attr, qp_access_flags);
SAME(verbs::qp_attr, ah, ibv_qp_attr, ah_attr);
SAME(verbs::qp_attr, pkey_index, ibv_qp_attr, pkey_index);
SAME(verbs::qp_attr, max_rd_atomic, ibv_qp_attr, max_rd_atomic);
SAME(verbs::qp_attr, max_dest_rd_atomic, ibv_qp_attr, max_dest_rd_atomic);
SAME(verbs::qp_attr, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME(verbs::qp_attr, port_num, ibv_qp_attr, port_num);
SAME(verbs::qp_attr, timeout, ibv_qp_attr, timeout);
SAME(verbs::qp_attr, retry_cnt, ibv_qp_attr, retry_cnt);
SAME(verbs::qp_attr, rnr_retry, ibv_qp_attr, rnr_retry);
static_assert(verbs::qps_reset == IBV_QPS_RESET && verbs::qps_init == IBV_QPS_INIT && verbs::qps_rtr == IBV_QPS_RTR && verbs::qps_rts == IBV_QPS_RTS && verbs::qps_err == IBV_QPS_ERR);
static_assert(verbs::attr_state == IBV_QP_STATE && verbs::attr_access == IBV_QP_ACCESS_FLAGS && verbs::attr_pkey_index == IBV_QP_PKEY_INDEX);
static_assert(verbs::attr_port == IBV_QP_PORT && verbs::attr_av == IBV_QP_AV && verbs::attr_path_mtu == IBV_QP_PATH_MTU && verbs::attr_timeout == IBV_QP_TIMEOUT);
static_assert(verbs::attr_retry_cnt == IBV_QP_RETRY_CNT && verbs::attr_rnr_retry == IBV_QP_RNR_RETRY && verbs::attr_rq_psn == IBV_QP_RQ_PSN);
static_assert(verbs::attr_max_rd_atomic == IBV_QP_MAX_QP_RD_ATOMIC && verbs::attr_min_rnr_timer == IBV_QP_MIN_RNR_TIMER && verbs::attr_sq_psn == IBV_QP_SQ_PSN);
static_assert(verbs::attr_max_dest_rd_atomic == IBV_QP_MAX_DEST_RD_ATOMIC && verbs::attr_dest_qpn == IBV_QP_DEST_QPN);
SAME_SIZE(verbs::sge, ibv_sge);
SAME_SIZE(verbs::send_wr, ibv_send_wr);
SAME(verbs::send_wr, opcode, ibv_send_wr, opcode);
SAME(verbs::send_wr, send_flags, ibv_send_wr, send_flags);
SAME(verbs::send_wr, imm_data, ibv_send_wr, imm_data);
static_assert(offsetof(verbs::send_wr, wr.rdma.rkey) == offsetof(ibv_send_wr, wr.rdma.rkey));
static_assert(offsetof(verbs::send_wr, wr.atomic.swap) == offsetof(ibv_send_wr, wr.atomic.swap));
static_assert(offsetof(verbs::send_wr, wr.atomic.rkey) == offsetof(ibv_send_wr, wr.atomic.rkey));
static_assert(verbs::wr_write == IBV_WR_RDMA_WRITE && verbs::wr_write_imm == IBV_WR_RDMA_WRITE_WITH_IMM && verbs::wr_read == IBV_WR_RDMA_READ);
static_assert(verbs::wr_compare_swap == IBV_WR_ATOMIC_CMP_AND_SWP && verbs::wr_fetch_add == IBV_WR_ATOMIC_FETCH_AND_ADD);
static_assert(verbs::send_fence == IBV_SEND_FENCE && verbs::send_signaled == IBV_SEND_SIGNALED && verbs::send_solicited == IBV_SEND_SOLICITED && verbs::send_inline == IBV_SEND_INLINE);
SAME_SIZE(verbs::wc, ibv_wc);
SAME(verbs::wc, status, ibv_wc, status);
SAME(verbs::wc, byte_len, ibv_wc, byte_len);
SAME(verbs::wc, qp_num, ibv_wc, qp_num);
static_assert(sizeof(verbs::devx_event_header) == offsetof(mlx5dv_devx_async_event_hdr, out_data));
#endif

void headers() {
#if EP_HAS_HEADERS
  std::printf("compared with the system's infiniband/verbs.h and mlx5dv.h\n");
#else
  std::printf("NOT compared with infiniband/verbs.h and mlx5dv.h: they are not installed (libibverbs-dev)\n");
#endif
}

void symbols_of(const char* name, const std::vector<ep::dl::symbol_name>& symbols) {
  auto library = ep::dl::library::open(name);
  if (!library.ok()) {
    std::printf("NOT checked: %s\n", library.why().message.c_str());
    return;
  }
  for (const ep::dl::symbol_name& symbol : symbols) {
    const bool found = library.value()->find(symbol.name, symbol.version) != nullptr;
    if (!found) std::fprintf(stderr, "  %s lacks %s@%s\n", name, symbol.name, symbol.version);
    EP_CHECK(found);
  }
  EP_CHECK(library.value()->find(symbols[0].name, "EP_NO_SUCH_VERSION") == nullptr);
  std::printf("checked %zu symbols of %s\n", symbols.size(), name);
}

} // namespace

int main() {
  headers();
  symbols_of("libibverbs.so.1", ep::dl::ibverbs_symbol_names());
  symbols_of("libmlx5.so.1", ep::dl::mlx5_symbol_names());
  symbols_of("libibverbs.so.1", ep::dl::rc_symbol_names());
  return ep::check::finish();
}
