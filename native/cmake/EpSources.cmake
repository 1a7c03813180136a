# Explicit lists: a file that is not named here is not built.
set(EP_CORE_SOURCES
  core/attention/attention_avx2.cpp
  core/attention/attention_avx512.cpp
  core/attention/attention_plan.cpp
  core/attention/attention_portable.cpp
  core/attention/core_attention.cpp
  core/collective/reduce.cpp
  core/collective/reduce_avx2.cpp
  core/collective/reduce_avx512.cpp
  core/collective/reduce_portable.cpp
  core/copy.cpp
  core/device/kernel.cpp
  core/host_memory.cpp
  core/hostile/engine.cpp
  core/huge_pages.cpp
  core/limits.cpp
  core/memory.cpp
  core/rank.cpp
  core/segment.cpp
  core/simt/context.cpp
  core/simt/fiber.cpp
  core/simt/report.cpp
  core/simt/simt.cpp
  core/stream.cpp
  core/team.cpp
  core/waiting.cpp
  core/watcher.cpp
)

# Results must not depend on whether the target has fused multiply-add.
set(EP_UNFUSED_SOURCES
  core/collective/reduce_avx2.cpp
  core/collective/reduce_avx512.cpp
  core/collective/reduce_portable.cpp
)

set(EP_NAPI_SOURCES
  napi/addon.cpp
  napi/bind_attention.cpp
  napi/bind_compat.cpp
  napi/bind_dispatch.cpp
  napi/bind_host.cpp
  napi/bind_hostile.cpp
  napi/bind_memory.cpp
  napi/bind_probe.cpp
  napi/bind_program.cpp
  napi/bind_rank.cpp
  napi/bind_stream.cpp
  napi/env_state.cpp
  napi/kernel_run.cpp
)

set(EP_TESTS
  tests/device/compat_test.cpp
  tests/device/copy_test.cpp
  tests/device/dispatch_simt_test.cpp
  tests/device/fast_test.cpp
  tests/device/naive_test.cpp
  tests/device/number_test.cpp
  tests/device/replica_sum_test.cpp
  tests/device/simt_test.cpp
  tests/collective/reduce_test.cpp
  tests/hostile_test.cpp
  tests/core_attention_test.cpp
  tests/core/memory_test.cpp
  tests/core/segment_test.cpp
  tests/core/stream_test.cpp
  tests/core/team_test.cpp
  tests/core/thread_test.cpp
  tests/core/waiting_test.cpp
)

# As they are, but for the seam in tests/litmus/seam.hpp.
set(EP_LITMUS_SOURCES
  tests/litmus/litmus_test.cpp
  tests/litmus/words.cpp
  core/device/kernel.cpp
  core/huge_pages.cpp
  core/limits.cpp
  core/rank.cpp
  core/segment.cpp
  core/team.cpp
  core/waiting.cpp
)

set(EP_BENCHES
)
