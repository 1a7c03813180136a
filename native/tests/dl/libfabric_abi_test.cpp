// dl/libfabric_abi.hpp against the system's headers, where these are installed (Debian: libfabric-dev). The operations for GPU-posted requests are in no distribution yet: their
// layouts are checked by the shim's test only for agreeing with themselves.
#include <cstddef>
#include <cstdio>

#include "../check.hpp"
#include "../skip.hpp"
#include "dl/libfabric_abi.hpp"
#include "dl/libfabric_rdm_abi.hpp"

#if __has_include(<rdma/fi_domain.h>)
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

namespace {

namespace ours = ep::dl::fabric;

#define SAME(mine, theirs, my_field, their_field) EP_CHECK_EQ(offsetof(ours::mine, my_field), offsetof(struct theirs, their_field))

void test_layouts() {
  EP_CHECK_EQ(sizeof(ours::fid), sizeof(struct fid));
  SAME(fid, fid, ops, ops);
  SAME(ops_base, fi_ops, close, close);
  SAME(ops_base, fi_ops, bind, bind);
  SAME(ops_base, fi_ops, control, control);
  SAME(ops_base, fi_ops, ops_open, ops_open);
  SAME(fid_nic, fid_nic, device, device_attr);
  SAME(device_attr, fi_device_attr, name, name);
  SAME(fabric_attr, fi_fabric_attr, name, name);
  SAME(fabric_attr, fi_fabric_attr, provider, prov_name);
  SAME(domain_attr, fi_domain_attr, name, name);
  SAME(domain_attr, fi_domain_attr, mr_mode, mr_mode);
  SAME(domain_attr, fi_domain_attr, ep_count, ep_cnt);
  SAME(domain_attr, fi_domain_attr, cntr_count, cntr_cnt);
  SAME(endpoint_attr, fi_ep_attr, type, type);
  SAME(endpoint_attr, fi_ep_attr, max_message, max_msg_size);
  SAME(transmit_attr, fi_tx_attr, inject_size, inject_size);
  SAME(transmit_attr, fi_tx_attr, size, size);
  SAME(info, fi_info, next, next);
  SAME(info, fi_info, caps, caps);
  SAME(info, fi_info, mode, mode);
  SAME(info, fi_info, tx, tx_attr);
  SAME(info, fi_info, ep, ep_attr);
  SAME(info, fi_info, domain, domain_attr);
  SAME(info, fi_info, fabric, fabric_attr);
  SAME(info, fi_info, nic, nic);
  SAME(fid_fabric, fid_fabric, ops, ops);
  SAME(ops_fabric, fi_ops_fabric, domain, domain);
  SAME(ops_fabric, fi_ops_fabric, trywait, trywait);
  SAME(fid_domain, fid_domain, ops, ops);
  SAME(fid_domain, fid_domain, mr, mr);
  SAME(ops_domain, fi_ops_domain, av_open, av_open);
  SAME(ops_domain, fi_ops_domain, cq_open, cq_open);
  SAME(ops_domain, fi_ops_domain, endpoint, endpoint);
  SAME(av_attr, fi_av_attr, type, type);
  SAME(av_attr, fi_av_attr, flags, flags);
  EP_CHECK_EQ(sizeof(ours::av_attr), sizeof(struct fi_av_attr));
  SAME(fid_av, fid_av, ops, ops);
  SAME(ops_av, fi_ops_av, insert, insert);
  SAME(ops_av, fi_ops_av, remove, remove);
  SAME(cq_attr, fi_cq_attr, size, size);
  SAME(cq_attr, fi_cq_attr, format, format);
  SAME(cq_attr, fi_cq_attr, wait_object, wait_obj);
  EP_CHECK_EQ(ours::wait_descriptor, uint32_t{FI_WAIT_FD});
  EP_CHECK_EQ(ours::wait_none, uint32_t{FI_WAIT_NONE});
  EP_CHECK_EQ(ours::command_get_wait, int{FI_GETWAIT});
  EP_CHECK_EQ(sizeof(ours::cq_attr), sizeof(struct fi_cq_attr));
  SAME(cntr_attr, fi_cntr_attr, events, events);
  EP_CHECK_EQ(sizeof(ours::cntr_attr), sizeof(struct fi_cntr_attr));
  SAME(mr_attr, fi_mr_attr, vector, mr_iov);
  SAME(mr_attr, fi_mr_attr, count, iov_count);
  SAME(mr_attr, fi_mr_attr, rights, access);
  SAME(mr_attr, fi_mr_attr, memory, iface);
  EP_CHECK(sizeof(ours::mr_attr) >= sizeof(struct fi_mr_attr));
  SAME(fid_mr, fid_mr, key, key);
  SAME(ops_mr, fi_ops_mr, regattr, regattr);
  SAME(fid_ep, fid_ep, cm, cm);
  SAME(ops_cm, fi_ops_cm, get_name, getname);
}

// Of endpoints for messages and RMA.
void test_rdm_layouts() {
  SAME(domain_attr, fi_domain_attr, threading, threading);
  SAME(domain_attr, fi_domain_attr, resource_mgmt, resource_mgmt);
  SAME(domain_attr, fi_domain_attr, cq_data_size, cq_data_size);
  SAME(info, fi_info, source, src_addr);
  SAME(info, fi_info, source_length, src_addrlen);
  SAME(info, fi_info, address_format, addr_format);
  SAME(fid_ep, fid_ep, msg, msg);
  SAME(fid_ep, fid_ep, rma, rma);
  SAME(fid_cq, fid_cq, ops, ops);
  EP_CHECK_EQ(sizeof(ours::context2), sizeof(struct fi_context2));
  EP_CHECK_EQ(sizeof(ours::cq_data_entry), sizeof(struct fi_cq_data_entry));
  SAME(cq_data_entry, fi_cq_data_entry, context, op_context);
  SAME(cq_data_entry, fi_cq_data_entry, flags, flags);
  SAME(cq_data_entry, fi_cq_data_entry, length, len);
  SAME(cq_data_entry, fi_cq_data_entry, data, data);
  EP_CHECK_EQ(sizeof(ours::cq_error_entry), sizeof(struct fi_cq_err_entry));
  SAME(cq_error_entry, fi_cq_err_entry, context, op_context);
  SAME(cq_error_entry, fi_cq_err_entry, error, err);
  SAME(cq_error_entry, fi_cq_err_entry, provider_error, prov_errno);
  SAME(cq_error_entry, fi_cq_err_entry, error_data, err_data);
  SAME(ops_cq, fi_ops_cq, read, read);
  SAME(ops_cq, fi_ops_cq, readerr, readerr);
  SAME(ops_msg, fi_ops_msg, recv, recv);
  SAME(ops_msg, fi_ops_msg, send, send);
  SAME(ops_msg, fi_ops_msg, inject, inject);
  SAME(ops_rma, fi_ops_rma, read, read);
  SAME(ops_rma, fi_ops_rma, writedata, writedata);
  SAME(ops_rma, fi_ops_rma, writemsg, writemsg);
  EP_CHECK_EQ(sizeof(ours::rma_vector), sizeof(struct fi_rma_iov));
  SAME(rma_vector, fi_rma_iov, at, addr);
  SAME(rma_vector, fi_rma_iov, length, len);
  SAME(rma_vector, fi_rma_iov, key, key);
  EP_CHECK_EQ(sizeof(ours::rma_message), sizeof(struct fi_msg_rma));
  SAME(rma_message, fi_msg_rma, vectors, msg_iov);
  SAME(rma_message, fi_msg_rma, descriptors, desc);
  SAME(rma_message, fi_msg_rma, count, iov_count);
  SAME(rma_message, fi_msg_rma, target, addr);
  SAME(rma_message, fi_msg_rma, places, rma_iov);
  SAME(rma_message, fi_msg_rma, place_count, rma_iov_count);
  SAME(rma_message, fi_msg_rma, context, context);
  SAME(rma_message, fi_msg_rma, data, data);
  SAME(transmit_attr, fi_tx_attr, vector_limit, iov_limit);
  SAME(transmit_attr, fi_tx_attr, place_limit, rma_iov_limit);
  SAME(fid_ep, fid_ep, atomic, atomic);
  SAME(ops_atomic, fi_ops_atomic, readwrite, readwrite);
  SAME(ops_atomic, fi_ops_atomic, compwrite, compwrite);
  SAME(ops_atomic, fi_ops_atomic, readwritevalid, readwritevalid);
  SAME(ops_atomic, fi_ops_atomic, compwritevalid, compwritevalid);
  EP_CHECK_EQ(ours::cap_atomic, static_cast<uint64_t>(FI_ATOMIC));
  EP_CHECK_EQ(ours::type_u64, int{FI_UINT64});
  EP_CHECK_EQ(ours::operation_sum, int{FI_SUM});
  EP_CHECK_EQ(ours::operation_swap_if_equal, int{FI_CSWAP});
  EP_CHECK_EQ(ours::flag_remote_cq_data, static_cast<uint64_t>(FI_REMOTE_CQ_DATA));
  EP_CHECK_EQ(ours::flag_completion, static_cast<uint64_t>(FI_COMPLETION));
  EP_CHECK_EQ(ours::flag_source, static_cast<uint64_t>(FI_SOURCE));
  EP_CHECK_EQ(ours::mode_context, static_cast<uint64_t>(FI_CONTEXT));
  EP_CHECK_EQ(ours::mode_context2, static_cast<uint64_t>(FI_CONTEXT2));
  EP_CHECK_EQ(ours::mode_receive_cq_data, static_cast<uint64_t>(FI_RX_CQ_DATA));
  EP_CHECK_EQ(ours::address_unspecified, static_cast<uint64_t>(FI_ADDR_UNSPEC));
  EP_CHECK_EQ(ours::threading_safe, static_cast<uint32_t>(FI_THREAD_SAFE));
  EP_CHECK_EQ(ours::resources_managed, static_cast<uint32_t>(FI_RM_ENABLED));
  EP_CHECK_EQ(ours::cq_format_data, static_cast<uint32_t>(FI_CQ_FORMAT_DATA));
  EP_CHECK_EQ(ours::error_available, FI_EAVAIL);
}

void test_numbers() {
  EP_CHECK_EQ(ours::version_of(2, 5), static_cast<uint32_t>(FI_VERSION(2, 5)));
  EP_CHECK_EQ(ours::cap_msg | ours::cap_rma, static_cast<uint64_t>(FI_MSG | FI_RMA));
  EP_CHECK_EQ(ours::right_read, static_cast<uint64_t>(FI_READ));
  EP_CHECK_EQ(ours::right_write, static_cast<uint64_t>(FI_WRITE));
  EP_CHECK_EQ(ours::right_recv | ours::right_send, static_cast<uint64_t>(FI_RECV | FI_SEND));
  EP_CHECK_EQ(ours::right_remote_read, static_cast<uint64_t>(FI_REMOTE_READ));
  EP_CHECK_EQ(ours::right_remote_write, static_cast<uint64_t>(FI_REMOTE_WRITE));
  EP_CHECK_EQ(ours::mr_local | ours::mr_virtual_address | ours::mr_allocated | ours::mr_provider_key, FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY);
  EP_CHECK_EQ(ours::endpoint_rdm, static_cast<uint32_t>(FI_EP_RDM));
  EP_CHECK_EQ(ours::av_table, static_cast<uint32_t>(FI_AV_TABLE));
  EP_CHECK_EQ(ours::cq_format_context, static_cast<uint32_t>(FI_CQ_FORMAT_CONTEXT));
  EP_CHECK_EQ(ours::cap_hmem, static_cast<uint64_t>(FI_HMEM));
  EP_CHECK_EQ(ours::mr_hmem, FI_MR_HMEM);
  SAME(mr_attr, fi_mr_attr, requested_key, requested_key);
  SAME(mr_attr, fi_mr_attr, device, device);
  EP_CHECK_EQ(ours::memory_cuda, static_cast<uint32_t>(FI_HMEM_CUDA));
  EP_CHECK_EQ(ours::command_enable, static_cast<int>(FI_ENABLE));
#if defined(FI_MR_DMABUF)
  EP_CHECK_EQ(ours::flag_mr_dmabuf, static_cast<uint64_t>(FI_MR_DMABUF));
#endif
}

} // namespace

int main() {
  test_layouts();
  test_rdm_layouts();
  test_numbers();
  return ep::check::finish();
}
#else
int main() {
  return ep::check::skip("libfabric's headers are not installed (Debian: libfabric-dev)");
}
#endif
