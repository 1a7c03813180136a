// Queue pairs of either NIC as plain memory: what posters of any machine write, so that two runs in the same memory can be compared byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ep/abi/dispatch.h"
#include "ep/abi/efa_gda.h"
#include "ep/abi/efa_pr.h"
#include "ep/abi/gin_program.h"
#include "ep/abi/ibgda.h"
#include "ep/abi/mlx5_wqe.h"

namespace ep::test {

constexpr uint32_t post_most_depth = 64;
constexpr uint32_t post_most_rings = 16384;

// Doorbells, in the order in which they were stored; and how a poster hands over to the NIC when it has to wait.
struct post_log {
  uint64_t asked; // the poster's
  uint64_t answered;
  uint64_t ok;    // lanes of the run that ended well
  uint64_t rings;
  struct {
    uint64_t address;
    uint64_t value;
  } ring[post_most_rings];
  // Words that are looked at wherever the poster stores in a shared word: for doorbells that no context can take over.
  uint32_t watched;
  struct {
    uint64_t address;
    uint64_t bytes; // 4 or 8
    uint64_t last;
  } watch[8];
};

// By the NIC of the run: it takes all that doorbells tell of, and completes it.
void post_serve(post_log& log);

// ---- mlx5: rank 0 of two, a queue pair to either

struct mlx5_lines {
  alignas(64) uint8_t sq[post_most_depth * EP_IBGDA_WQE_BYTES];
  alignas(64) uint8_t cq[post_most_depth * 64];
  alignas(64) uint64_t bf[64];
  alignas(64) ep_mlx5_dbr dbr;
  ep_mlx5_dbr cq_dbr; // 4 bytes of it
  uint64_t response;
  uint64_t marks[post_most_depth / 64];
};

struct mlx5_rig {
  mlx5_lines lines[2];
  alignas(64) ep_ibgda_qp qps[2];
  alignas(64) ep_ibgda_device device;
  ep_ibgda_memory route;
  ep_ibgda_remote remotes[2];
  ep_peer_view views[2];
  struct {
    ep_ibgda_range_table head;
    ep_ibgda_range one;
  } table;
  ep_memory_handle memory;
  ep_kernel_status status;
  uint8_t source[4096]; // registered
  uint8_t loose[256];   // not
};

constexpr uint64_t mlx5_remote = 0x7000'1234'0000; // nobody goes there
constexpr uint32_t mlx5_remote_key = 0xabcdef;
constexpr uint32_t mlx5_local_key = 0x123456;
constexpr uint32_t mlx5_response_key = 0x77;

// Writers of mlx5_wqe.h in their order, but for the last three.
enum class mlx5_op : uint32_t { write, write_nothing, write_immediate, read, write_inline, nop, fetch_add4, fetch_add8, compare_swap8, mixed, long_inline, masked_swap, put_rows, put_loose, signal };
constexpr uint32_t mlx5_writers = 9; // of one block, in a WQE each

struct mlx5_step {
  mlx5_op op;
  uint32_t count; // WQEBBs of the post
  uint64_t bytes; // of a message or a row
  uint64_t rows;
  uint64_t stride;
  uint64_t from;
  uint64_t to;
  uint64_t slot;
  uint64_t value;
  int32_t peer;
};

// ---- EFA: rank 0 of two, a data queue pair and two others, in ours and in the pull request's structs

constexpr uint32_t efa_rig_qps = 3;

struct efa_lines {
  alignas(64) uint64_t sq[post_most_depth * EP_EFA_WIDE_WQE_BYTES / 8];
  alignas(64) uint64_t cq[post_most_depth * 2];
  alignas(64) uint32_t doorbell;
  uint64_t written;
  uint64_t written_failed;
  uint64_t arrived;
  uint64_t arrived_failed;
  uint64_t finished[post_most_depth / 64];
  uint64_t marks[post_most_depth / 64];
  uint64_t values[post_most_depth];
  ep_efa_request requests[post_most_depth];
};

struct efa_rig {
  efa_lines lines[efa_rig_qps];
  alignas(64) ep_efa_qp qps[efa_rig_qps];
  ep_efa_target targets[efa_rig_qps * 2];
  ep_efa_remote remotes[2];
  ep_efa_remote scratch_remotes[2];
  alignas(64) ep_efa_count signals[2];
  alignas(64) ep_efa_count counters[2];
  alignas(64) ep_efa_device device;
  alignas(64) ep_efa_memory part;
  ep_peer_view views[2];
  struct {
    ep_ibgda_range_table head;
    ep_ibgda_range one;
  } table;
  ep_memory_handle memory;
  alignas(64) ep_efa_pr_device pr;
  ep_efa_pr_qp pr_qps[efa_rig_qps];
  ep_efa_pr_counter pr_signals[1];  // queue pair 1
  ep_efa_pr_counter pr_counters[1]; // queue pair 2
  uint64_t pr_signal_views[1];
  uint64_t pr_counter_views[1];
  uint16_t pr_handles[efa_rig_qps * 2];
  uint16_t pr_qpns[efa_rig_qps * 2];
  uint32_t pr_qkeys[efa_rig_qps * 2];
  uint64_t pr_scratch_addresses[2];
  uint32_t pr_scratch_rkeys[2];
  struct {
    ep_efa_pr_mr head;
    ep_efa_pr_mr_peer peers[2];
  } pr_part;
  uint64_t scratch;
  ep_kernel_status status;
  uint8_t source[4096];
};

constexpr uint64_t efa_remote_part = 0x7100'0000'0000;
constexpr uint64_t efa_remote_scratch = 0x7200'0000'0000;

// Ways to post, each run over a list of steps: of mlx5 mlx5_step, of EFA ep_gin_step (of an endpoint: `bytes` of a row, `value` rows, `found` their stride).
enum class post_way : uint32_t {
  in_turn_device,
  in_turn_block,
  in_turn_thread,
  ringer_device,
  ringer_block,
  ringer_thread,
  lock,
  put_in_turn, // by the endpoint; its sharing is the device's
  put_ringer,
  put_lock,
  gin_device,
  gin_block,
  gin_thread,
  lanes_device, // each lane of a warp its own put
  lanes_block,
  efa_endpoint,
  pr,
  pr_lanes,
};
constexpr uint32_t post_ways = 18;
constexpr bool is_mlx5(post_way way) { return way <= post_way::put_lock; }

struct post_arguments {
  mlx5_rig* mlx5;
  efa_rig* efa;
  const void* steps;
  uint32_t count;
  uint32_t lanes; // 1, or a whole warp that posts together
  post_log* log;
};

} // namespace ep::test
