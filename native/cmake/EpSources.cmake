# Explicit lists: a file that is not named here is not built.
set(EP_CORE_SOURCES
  core/attention/attention_avx2.cpp
  core/attention/attention_avx512.cpp
  core/attention/attention_plan.cpp
  core/attention/attention_portable.cpp
  core/attention/core_attention.cpp
  core/copy.cpp
  core/device/kernel.cpp
  core/host_memory.cpp
  core/hostile/engine.cpp
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

set(EP_NAPI_SOURCES
  napi/addon.cpp
  napi/bind_attention.cpp
  napi/bind_dispatch.cpp
  napi/bind_host.cpp
  napi/bind_hostile.cpp
  napi/bind_memory.cpp
  napi/bind_rank.cpp
  napi/bind_stream.cpp
  napi/env_state.cpp
)

set(EP_TESTS
  tests/hostile_test.cpp
  tests/core_attention_test.cpp
  tests/core/segment_test.cpp
  tests/core/team_test.cpp
)

set(EP_BENCHES
)
