#include "attention_call.hpp"
#include "ep/abi/expert_layer.h"
#include "gpu_wraps.hpp"

#include <array>

namespace ep::binding {
namespace {

uint64_t number_bytes(Napi::Env env, uint32_t format) {
  switch (format) {
    case EP_MOE_F32: return 4;
    case EP_MOE_F16:
    case EP_MOE_BF16: return 2;
    case EP_MOE_F8_F32:
    case EP_MOE_F8_F32_POW2:
    case EP_MOE_F8_UE8M0: return 1;
    default: throw_invalid(env, std::to_string(format) + " is no format of rows that experts take");
  }
}

// Rows of each expert in x and y, within `rows`; how many tiles they make.
uint32_t read_runs(Napi::Env env, const Napi::Object& from, uint64_t rows, ep_expert_args& args) {
  const std::vector<int32_t> counts = ranks_of(from.Get("counts"), "counts");
  const std::vector<int32_t> starts = ranks_of(from.Get("blockStart"), "blockStart");
  if (counts.size() < args.experts || starts.size() < args.experts) {
    throw_invalid(env, std::to_string(args.experts) + " experts have " + std::to_string(counts.size()) + " counts and " + std::to_string(starts.size()) + " starts of blocks");
  }
  uint64_t tiles = 0;
  for (uint32_t e = 0; e < args.experts; ++e) {
    const bool within = counts[e] >= 0 && starts[e] >= 0 && static_cast<uint64_t>(starts[e]) + static_cast<uint64_t>(counts[e]) <= rows;
    if (!within) {
      throw_invalid(env, "expert " + std::to_string(e) + " has " + std::to_string(counts[e]) + " rows from row " + std::to_string(starts[e]) + " on, beyond the " + std::to_string(rows) + " there are");
    }
    args.runs[e] = {static_cast<uint32_t>(starts[e]), static_cast<uint32_t>(counts[e])};
    tiles += (static_cast<uint64_t>(counts[e]) + EP_EXPERT_ROWS - 1) / EP_EXPERT_ROWS;
  }
  if (tiles > INT32_MAX) throw_invalid(env, std::to_string(tiles) + " tiles of rows exceed 2^31 - 1");
  return static_cast<uint32_t>(tiles);
}

// Of that many rows, however they are divided among experts.
uint32_t most_tiles(Napi::Env env, uint64_t rows, uint32_t experts) {
  const uint64_t tiles = rows == 0 ? 0 : rows / EP_EXPERT_ROWS + experts;
  if (tiles > INT32_MAX) throw_invalid(env, std::to_string(tiles) + " tiles of rows exceed 2^31 - 1");
  return static_cast<uint32_t>(tiles);
}

} // namespace

// ({gate, gateOffset, up, upOffset, down, downOffset, experts, hidden, intermediate, payload, dtype, rows, x, y, scales, scalesOffset, scaleRoom, and either counts, blockStart or, in a capture,
// countsAt, countsOffset, startsAt, startsOffset}) -> operation; 0 while the stream is being captured
Napi::Value gpu_stream_wrap::experts_forward(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  gpu::stream& stream = open(env);
  if (!info[0].IsObject()) throw_invalid(env, "experts take a description");
  const auto from = info[0].As<Napi::Object>();
  const bool finds_runs = !from.Get("countsAt").IsUndefined();
  if (finds_runs != (capturing != nullptr)) throw_invalid(env, capturing ? "the stream is being captured: rows of experts are counted on the device there" : "the stream is not being captured");
  const auto number = [&](const char* name, uint64_t least, uint64_t most) {
    const uint64_t value = arg_size(from.Get(name), name);
    if (value < least || value > most) throw_invalid(env, std::string(name) + " is " + std::to_string(value) + ", not " + std::to_string(least) + " to " + std::to_string(most));
    return static_cast<uint32_t>(value);
  };
  gpu::stream::watch how;
  ep_expert_args args{};
  args.experts = number("experts", 0, EP_EXPERT_MOST);
  args.hidden = number("hidden", 1, 1u << 20);
  args.intermediate = number("intermediate", 1, 1u << 20);
  args.payload = number("payload", 0, UINT32_MAX);
  args.dtype = number("dtype", EP_MOE_F32, EP_MOE_BF16);
  const uint64_t rows = arg_size(from.Get("rows"), "rows");
  const uint64_t code_bytes = number_bytes(env, args.payload);
  args.rows = rows;
  args.tiles = finds_runs ? most_tiles(env, rows, args.experts) : read_runs(env, from, rows, args);
  const auto find = [&](Napi::Value value, const char* what) { return gpu_operand_of(value, what, stream, false); };
  const rows_operand x = rows_within(from, "x", rows, code_bytes * args.hidden, find);
  const rows_operand y = rows_within(from, "y", rows, number_bytes(env, args.dtype) * args.hidden, find);
  args.x = x.address;
  args.x_stride_bytes = x.stride;
  args.y = y.address;
  args.y_stride_bytes = y.stride;
  how.keep = {x.keep, y.keep};
  const auto packed = [&](const char* name, const char* offset_name, uint64_t bytes, uint64_t alignment) -> uint64_t {
    const operand memory = find(from.Get(name), name);
    const uint64_t offset = arg_size(from.Get(offset_name), offset_name);
    if (offset > memory.byte_length || bytes > memory.byte_length - offset) {
      throw_invalid(env, std::string(name) + " needs " + std::to_string(bytes) + " bytes, its operand holds " + std::to_string(memory.byte_length) + ", from byte " + std::to_string(offset) + " on");
    }
    if ((memory.address + offset) % alignment != 0) throw_invalid(env, std::string(name) + " is not aligned to " + std::to_string(alignment) + " bytes");
    how.keep.push_back(memory.keep);
    return memory.address + offset;
  };
  const uint64_t matrices = uint64_t{args.experts} * args.hidden * args.intermediate * sizeof(float);
  if (matrices != 0) {
    args.gate = packed("gate", "gateOffset", matrices, sizeof(float));
    args.up = packed("up", "upOffset", matrices, sizeof(float));
    args.down = packed("down", "downOffset", matrices, sizeof(float));
  }
  if (finds_runs) {
    args.counts = packed("countsAt", "countsOffset", args.experts * sizeof(int32_t), sizeof(int32_t));
    args.starts = packed("startsAt", "startsOffset", args.experts * sizeof(int32_t), sizeof(int32_t));
  }
  if (code_bytes == 1 && rows != 0) {
    args.scale_room = arg_size(from.Get("scaleRoom"), "scaleRoom");
    if (args.scale_room < rows) throw_invalid(env, "scales have room for " + std::to_string(args.scale_room) + " rows of " + std::to_string(rows));
    const uint64_t blocks = (uint64_t{args.hidden} + EP_MOE_SCALED_CHANNELS - 1) / EP_MOE_SCALED_CHANNELS;
    const uint64_t scale_bytes = args.payload == EP_MOE_F8_UE8M0 ? 1 : sizeof(float);
    args.scales = packed("scales", "scalesOffset", blocks * args.scale_room * scale_bytes, scale_bytes);
  }
  if (rows != 0) {
    if (args.x % code_bytes != 0 || x.stride % code_bytes != 0) throw_invalid(env, "x is not aligned to its numbers");
    const uint64_t bytes = number_bytes(env, args.dtype);
    if (args.y % bytes != 0 || y.stride % bytes != 0) throw_invalid(env, "y is not aligned to its numbers");
    check_disjoint(env, {&x}, {&y});
  }
  // As for attention: nothing waits for anybody here.
  auto slot = stream.slot();
  how.kernels.push_back({value_or_throw(env, slot), nullptr});
  const ep_cuda_launch launch = stream.launch(1, 32, 0, nullptr);
  check(env, stream.of()->table().experts_forward(&launch, &args), "launching experts");
  if (capturing) {
    capturing->kernels.insert(capturing->kernels.end(), how.kernels.begin(), how.kernels.end());
    capturing->keep.insert(capturing->keep.end(), how.keep.begin(), how.keep.end());
    return Napi::Number::New(env, 0);
  }
  return Napi::Number::New(env, static_cast<double>(begin(env, std::move(how))));
}

} // namespace ep::binding
