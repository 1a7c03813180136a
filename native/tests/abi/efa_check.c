/* Golden bytes of EFA requests and completions, written by the structs and read by the bit fields; and offsets that other repositories count on.
 * Compiled, linked and run by tests/compile/run.mjs. No public header has these formats: both come from the definitions in rdma-core's EFA provider
 * and from the plugin that the pull request is paired with. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "ep/abi/efa_cqe.h"
#include "ep/abi/efa_gda.h"
#include "ep/abi/efa_pr.h"

#define AT(type, field, at) EP_STATIC_ASSERT(offsetof(type, field) == (at), #type "." #field)

AT(ep_efa_meta, ctrl1, 2);
AT(ep_efa_meta, ctrl2, 3);
AT(ep_efa_meta, dest_qpn, 4);
AT(ep_efa_meta, length, 6);
AT(ep_efa_meta, imm, 8);
AT(ep_efa_meta, ah, 12);
AT(ep_efa_meta, ctrl3, 14);
AT(ep_efa_meta, qkey, 16);
AT(ep_efa_meta, req_id_ex, 26);
AT(ep_efa_send_wqe, segments, 32);
AT(ep_efa_rdma_wqe, remote, 32);
AT(ep_efa_rdma_wqe, local, 48);
AT(ep_efa_inline_write_wqe, data, 48);
AT(ep_efa_receive_desc, req_id, 8);
AT(ep_efa_receive_desc, length, 10);
AT(ep_efa_receive_desc, lkey_ctrl, 12);
AT(ep_efa_cqe_head, status, 2);
AT(ep_efa_cqe_head, flags, 3);
AT(ep_efa_cqe_head, qpn, 4);
AT(ep_efa_tx_cqe, req_id_ex, 6);
AT(ep_efa_rx_cqe, length, 6);
AT(ep_efa_rx_cqe, ah, 8);
AT(ep_efa_rx_cqe, src_qpn, 10);
AT(ep_efa_rx_cqe, imm, 12);
AT(ep_efa_wide_rx_cqe, tail, 16);

AT(ep_efa_pr_wq, max_wqes, 4);
AT(ep_efa_pr_wq, queue_mask, 8);
AT(ep_efa_pr_wq, queue_size_shift, 12);
AT(ep_efa_pr_wq, max_batch, 16);
AT(ep_efa_pr_wq, wqes_pending, 20);
AT(ep_efa_pr_wq, wqes_posted, 24);
AT(ep_efa_pr_wq, wqes_completed, 28);
AT(ep_efa_pr_wq, pc, 32);
AT(ep_efa_pr_wq, phase, 36);
AT(ep_efa_pr_wq, buf, 40);
AT(ep_efa_pr_wq, db, 48);
AT(ep_efa_pr_sq, max_inline_data, 56);
AT(ep_efa_pr_sq, max_rdma_sges, 60);
AT(ep_efa_pr_qp, sq, 8);
AT(ep_efa_pr_qp, rq, 72);
AT(ep_efa_pr_cq, entry_size, 8);
AT(ep_efa_pr_cq, num_entries, 12);
AT(ep_efa_pr_cq, queue_mask, 16);
AT(ep_efa_pr_cq, queue_size_shift, 20);
AT(ep_efa_pr_cq, cc, 24);
AT(ep_efa_pr_cq, phase, 28);
AT(ep_efa_pr_cq, buf, 32);
AT(ep_efa_pr_cq, db, 40);
AT(ep_efa_pr_endpoint, cq, 8);
AT(ep_efa_pr_endpoint, address_handles, 16);
AT(ep_efa_pr_endpoint, remote_qpns, 24);
AT(ep_efa_pr_endpoint, qkey, 32);
AT(ep_efa_pr_endpoint, sq_lock, 40);
AT(ep_efa_pr_endpoint, local_cntr_value, 48);
AT(ep_efa_pr_endpoint, submitted_count, 56);
AT(ep_efa_pr_endpoint, sq_size, 64);
AT(ep_efa_pr_endpoint, putvalue_slice_base, 72);
AT(ep_efa_pr_counter, cntr_value, 80);
AT(ep_efa_pr_device, counter_handles, 80);
AT(ep_efa_pr_device, signal_handles, 88);
AT(ep_efa_pr_device, counter_count, 96);
AT(ep_efa_pr_device, signal_count, 100);
AT(ep_efa_pr_device, nranks, 104);
AT(ep_efa_pr_device, rank, 108);
AT(ep_efa_pr_device, scratch_lkey, 112);
AT(ep_efa_pr_device, scratch_local_addr, 120);
AT(ep_efa_pr_device, scratch_remote_addrs, 128);
AT(ep_efa_pr_device, scratch_remote_rkeys, 136);
AT(ep_efa_pr_device, putvalue_lkey, 144);
AT(ep_efa_pr_device, putvalue_slot_size, 148);
AT(ep_efa_pr_mr_peer, rkey, 8);
AT(ep_efa_pr_mr, nranks, 4);
AT(ep_efa_pr_mr, local_addr, 8);

/* What our kernels index, on a cache line of its own. */
AT(ep_efa_qp, taken, 128);
AT(ep_efa_qp, ready, 192);
AT(ep_efa_qp, rung, 256);
AT(ep_efa_qp, poller, 320);
AT(ep_efa_qp, broken, 384);
AT(ep_efa_device, max_message, 64);

static int failures;

static void same(const char* what, const void* found, const void* expected, size_t bytes) {
  if (memcmp(found, expected, bytes) == 0) return;
  failures++;
  fprintf(stderr, "%s: other bytes than the golden ones:", what);
  for (size_t i = 0; i < bytes; i++) fprintf(stderr, " %02x", ((const unsigned char*)found)[i]);
  fprintf(stderr, "\n");
}

/* The field of a little-endian layout. */
static uint64_t bits(const void* layout, uint32_t field) {
  const uint32_t high = field >> 8 & 0xff, low = field & 0x7f;
  uint64_t word = 0;
  memcpy(&word, (const unsigned char*)layout + (field >> 16), high > 31 ? 8 : 4);
  return word >> low & (~(uint64_t)0 >> (63 - (high - low)));
}

static void reads(const char* what, uint64_t found, uint64_t expected) {
  if (found == expected) return;
  failures++;
  fprintf(stderr, "%s: expected 0x%llx, found 0x%llx\n", what, (unsigned long long)expected, (unsigned long long)found);
}

static void write_from_memory(void) {
  static const unsigned char golden[64] = {
      0x02, 0x01, 0x82, 0x1c, 0x04, 0x03, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x06, 0x05, 0x00, 0x00, 0x0a, 0x09, 0x08, 0x07, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x44, 0x33, 0x22, 0x11, 0x88, 0x77, 0x66, 0x55,
      0x99, 0x7f, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0xcc, 0xbb, 0xaa, 0x00, 0x00, 0xff, 0xee, 0xdd, 0x12, 0x7e, 0x00, 0x00};
  ep_efa_rdma_wqe wqe;
  memset(&wqe, 0, sizeof wqe);
  wqe.meta.req_id = 0x0102;
  wqe.meta.ctrl1 = EP_EFA_CTRL1_WRITE;
  wqe.meta.ctrl2 = EP_EFA_CTRL2;
  wqe.meta.dest_qpn = 0x0304;
  wqe.meta.length = 1;
  wqe.meta.ah = 0x0506;
  wqe.meta.qkey = 0x0708090a;
  wqe.remote.length = 0x1000;
  wqe.remote.rkey = 0x11223344;
  wqe.remote.addr = 0x00007f9955667788u;
  wqe.local.length = 0x1000;
  wqe.local.lkey = 0xaabbcc;
  wqe.local.addr = 0x00007e12ddeeff00u;
  same("a write from memory", &wqe, golden, sizeof golden);
  reads("req_id", bits(golden, EP_EFA_META_REQ_ID), 0x0102);
  reads("opcode", bits(golden, EP_EFA_META_OPCODE), EP_EFA_OPCODE_RDMA_WRITE);
  reads("meta_desc", bits(golden, EP_EFA_META_META_DESC), 1);
  reads("inlined", bits(golden, EP_EFA_META_INLINED), 0);
  reads("phase", bits(golden, EP_EFA_META_PHASE), 0);
  reads("first", bits(golden, EP_EFA_META_FIRST), 1);
  reads("last", bits(golden, EP_EFA_META_LAST), 1);
  reads("comp_req", bits(golden, EP_EFA_META_COMP_REQ), 1);
  reads("qpn", bits(golden, EP_EFA_META_QPN), 0x0304);
  reads("length", bits(golden, EP_EFA_META_LENGTH), 1);
  reads("ah", bits(golden, EP_EFA_META_AH), 0x0506);
  reads("qkey", bits(golden, EP_EFA_META_QKEY), 0x0708090a);
}

static void inline_write(void) {
  static const unsigned char golden[128] = {0x07, 0x00, 0xa2, 0x1d, 0x22, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x78,
                                            0x56, 0x34, 0x12, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00,
                                            0x00, 0x00, 0x99, 0x00, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x44,
                                            0x44};
  const uint32_t value = 0x44440000;
  ep_efa_inline_write_wqe wqe;
  memset(&wqe, 0, sizeof wqe);
  wqe.meta.req_id = 7;
  wqe.meta.ctrl1 = EP_EFA_CTRL1_WRITE | EP_EFA_CTRL1_INLINE;
  wqe.meta.ctrl2 = EP_EFA_CTRL2 | 1;
  wqe.meta.dest_qpn = 0x22;
  wqe.meta.length = sizeof value;
  wqe.meta.ah = 3;
  wqe.meta.qkey = 0x12345678;
  wqe.remote.length = sizeof value;
  wqe.remote.rkey = 0x99;
  wqe.remote.addr = 0x1000;
  memcpy(wqe.data, &value, sizeof value);
  same("an inline write", &wqe, golden, sizeof golden);
  reads("inlined", bits(golden, EP_EFA_META_INLINED), 1);
  reads("phase", bits(golden, EP_EFA_META_PHASE), 1);
}

static void completion(void) {
  static const unsigned char golden[16] = {0x02, 0x01, 0x00, 0x23, 0x04, 0x03};
  ep_efa_tx_cqe cqe;
  memset(&cqe, 0, sizeof cqe);
  cqe.head.req_id = 0x0102;
  cqe.head.status = EP_EFA_STATUS_OK;
  cqe.head.flags = 0x22 | 1;
  cqe.head.qpn = 0x0304;
  same("a completion", &cqe, golden, sizeof golden);
  reads("status", bits(golden, EP_EFA_CQE_STATUS), EP_EFA_STATUS_OK);
  reads("phase", bits(golden, EP_EFA_CQE_PHASE), 1);
  reads("queue", bits(golden, EP_EFA_CQE_QUEUE), EP_EFA_QUEUE_SEND);
  reads("opcode", bits(golden, EP_EFA_CQE_OPCODE), EP_EFA_OPCODE_RDMA_WRITE);
  reads("qpn", bits(golden, EP_EFA_CQE_QPN), 0x0304);
}

static void wide_id(void) {
  ep_efa_meta meta;
  memset(&meta, 0, sizeof meta);
  meta.req_id_ex[0] = 0x1111;
  meta.req_id_ex[2] = 0x3333;
  reads("req_id_ex", bits(&meta, EP_EFA_META_REQ_ID_EX), 0x333300001111u);
}

int main(void) {
  write_from_memory();
  inline_write();
  completion();
  wide_id();
  return failures == 0 ? 0 : 1;
}
