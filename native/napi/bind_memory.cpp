#include "wraps.hpp"

#include <algorithm>
#include <cstring>

namespace ep::binding {
namespace {

struct word_test {
  const uint8_t* address;
  uint32_t width; // 1, 2, 4 or 8 bytes
  bool is_signed;
  comparison cmp;
  uint64_t value;

  uint64_t load() const {
    switch (width) {
      case 1: return std::atomic_ref<uint8_t>(*const_cast<uint8_t*>(address)).load(std::memory_order_acquire);
      case 2: return std::atomic_ref<uint16_t>(*reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(address))).load(std::memory_order_acquire);
      case 4: return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(address))).load(std::memory_order_acquire);
      default: return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(const_cast<uint8_t*>(address))).load(std::memory_order_acquire);
    }
  }
  bool holds(uint64_t found) const {
    if (!is_signed) return comparison_holds(cmp, found, value);
    // Sign-extend both, then shift the signed order onto the unsigned one.
    const uint32_t up = 64 - 8 * width;
    const uint64_t flip = uint64_t{1} << 63;
    const auto wide = [up](uint64_t v) { return static_cast<uint64_t>(static_cast<int64_t>(v << up) >> up) ^ flip; };
    return comparison_holds(cmp, wide(found), wide(value));
  }
};

comparison comparison_of(Napi::Value value) {
  const uint64_t code = arg_size(value, "cmp");
  if (code > 5) throw_invalid(value.Env(), "cmp " + std::to_string(code) + " is not one of 0..5");
  return static_cast<comparison>(code);
}

int32_t peer_of(const symmetric_memory& memory, Napi::Value value) {
  const int32_t peer = arg_int(value, "peer");
  if (peer < 0 || peer >= memory.context().world_size()) {
    throw_invalid(value.Env(), "peer " + std::to_string(peer) + " is not in a world of " + std::to_string(memory.context().world_size()));
  }
  if (!memory.mapped(peer)) throw_invalid(value.Env(), "the part of rank " + std::to_string(peer) + " is not mapped here: only the NIC reaches it");
  return peer;
}

uint64_t offset_of(const symmetric_memory& memory, Napi::Value value, uint64_t bytes) {
  const uint64_t offset = arg_size(value, "byteOffset");
  if (offset > memory.byte_length() || bytes > memory.byte_length() - offset) {
    throw_invalid(value.Env(), "bytes " + std::to_string(offset) + " + " + std::to_string(bytes) + " exceed a memory of " + std::to_string(memory.byte_length()));
  }
  return offset;
}

uint64_t slot_of(const symmetric_memory& memory, Napi::Value value) {
  const uint64_t slot = arg_size(value, "slot");
  if (slot >= memory.signal_slots()) {
    throw_invalid(value.Env(), "slot " + std::to_string(slot) + " of a pad with " + std::to_string(memory.signal_slots()) + " slots");
  }
  return slot;
}

// Arguments (op, slot, value) of a call that may carry a signal; op 0 is none.
struct signal_arguments {
  signal_op op;
  uint64_t slot;
  uint64_t value;
};
signal_arguments signal_of(const symmetric_memory& memory, const Napi::CallbackInfo& info, size_t first) {
  const uint64_t op = info.Length() > first ? arg_size(info[first], "op") : 0;
  if (op > 2) throw_invalid(info.Env(), "signal op " + std::to_string(op) + " is not one of 0..2");
  if (op == 0) return {signal_op::none, 0, 0};
  return {static_cast<signal_op>(op), slot_of(memory, info[first + 1]), arg_u64(info[first + 2], "signal value")};
}

void put_signalled(const symmetric_memory& memory, int32_t peer, uint64_t offset, const void* source, uint64_t size, const signal_arguments& signal) {
  if (signal.op == signal_op::none) return memory.put(peer, offset, source, size);
  memory.write(peer, offset, source, size);
  memory.signal_update(peer, signal.slot, signal.op, signal.value);
}

uint64_t aligned_offset_of(const symmetric_memory& memory, Napi::Value value, uint64_t width) {
  const uint64_t offset = offset_of(memory, value, width);
  if (offset % width != 0) {
    throw_invalid(value.Env(), "a word of " + std::to_string(width) + " bytes at offset " + std::to_string(offset) + " is not aligned");
  }
  return offset;
}

// words: [{offset, width, signed, cmp, value}] as a flat array of five numbers or bigints each, in one JS array.
std::vector<word_test> words_of(const symmetric_memory& memory, Napi::Value value) {
  if (!value.IsArray()) throw_invalid(value.Env(), "words must be an array");
  const auto flat = value.As<Napi::Array>();
  if (flat.Length() % 5 != 0) throw_invalid(value.Env(), "words must have five entries each");
  std::vector<word_test> words;
  for (uint32_t i = 0; i < flat.Length(); i += 5) {
    const uint64_t width = arg_size(flat.Get(i + 1), "width");
    if (width != 1 && width != 2 && width != 4 && width != 8) throw_invalid(value.Env(), "width must be 1, 2, 4 or 8, got " + std::to_string(width));
    const uint64_t offset = aligned_offset_of(memory, flat.Get(i), width);
    words.push_back({memory.data(memory.context().rank()) + offset, static_cast<uint32_t>(width), arg_size(flat.Get(i + 2), "signed") != 0,
                     comparison_of(flat.Get(i + 3)), arg_u64(flat.Get(i + 4), "value")});
  }
  return words;
}

size_t words_holding(const std::vector<word_test>& words) {
  size_t holding = 0;
  for (const word_test& word : words) holding += word.holds(word.load()) ? 1 : 0;
  return holding;
}

} // namespace

namespace {

bool is_memory(Napi::Value value) {
  bool same = false;
  if (value.IsObject()) napi_check_object_type_tag(value.Env(), value, &memory_wrap::type_tag, &same);
  return same;
}

std::vector<int32_t> near_of(Napi::Value value) {
  const byte_span bytes = arg_bytes(value, "near");
  if (value.As<Napi::TypedArray>().TypedArrayType() != napi_int32_array) throw_invalid(value.Env(), "near must be an Int32Array");
  const auto* first = reinterpret_cast<const int32_t*>(bytes.data);
  return {first, first + bytes.size / sizeof(int32_t)};
}

} // namespace

// (rank, byteLength, signalSlots), or (memory, near: Int32Array): over that memory, for a NIC
memory_wrap::memory_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  if (is_memory(info[0])) {
    memory_wrap& base = unwrap<memory_wrap>(info[0], "memory");
    base.open(info.Env());
    auto over = symmetric_memory::over(base.native, near_of(info[1]));
    native = value_or_throw(info.Env(), over);
    rank = Napi::Persistent(base.rank.Value());
    tag<memory_wrap>(info.This().As<Napi::Object>());
    return;
  }
  rank_wrap& owner = unwrap<rank_wrap>(info[0], "rank");
  owner.open(info.Env());
  auto made = symmetric_memory::create(owner.native->context, arg_size(info[1], "byteLength"), arg_size(info[2], "signalSlots"));
  native = value_or_throw(info.Env(), made);
  rank = Napi::Persistent(info[0].As<Napi::Object>());
  tag<memory_wrap>(info.This().As<Napi::Object>());
}

symmetric_memory& memory_wrap::made(Napi::Env env) const {
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the symmetric memory was closed"});
  return *native;
}

symmetric_memory& memory_wrap::open(Napi::Env env) const {
  symmetric_memory& memory = made(env);
  if (!memory.connected()) throw_invalid(env, "the symmetric memory is not connected to its peers yet");
  return memory;
}

Napi::Value memory_wrap::handle(const Napi::CallbackInfo& info) { return bytes_copy(info.Env(), &made(info.Env()).handle(), sizeof(ep_segment_handle)); }

void memory_wrap::connect(const Napi::CallbackInfo& info) {
  auto done = made(info.Env()).connect(segment_handles(info[0], "handles"));
  value_or_throw(info.Env(), done);
}

// (rank, ep_segment_handle)
void memory_wrap::replace(const Napi::CallbackInfo& info) {
  const std::vector<ep_segment_handle> handles = segment_handles(info[1], "handle");
  if (handles.size() != 1) throw_invalid(info.Env(), "a rank has one part, got " + std::to_string(handles.size()) + " handles");
  auto done = open(info.Env()).replace(arg_int(info[0], "rank"), handles[0]);
  value_or_throw(info.Env(), done);
}

Napi::Value memory_wrap::device_handle(const Napi::CallbackInfo& info) {
  return bytes_copy(info.Env(), &open(info.Env()).device_handle(), sizeof(ep_memory_handle));
}

Napi::Value memory_wrap::address(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  return Napi::BigInt::New(info.Env(), reinterpret_cast<uint64_t>(memory.data(peer_of(memory, info[0]))));
}

Napi::Value memory_wrap::signal_address(const Napi::CallbackInfo& info) {
  return Napi::BigInt::New(info.Env(), reinterpret_cast<uint64_t>(open(info.Env()).own_signals()));
}

// (peer, byteOffset, byteLength) -> ArrayBuffer over the peer's part.
Napi::Value memory_wrap::window(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const uint64_t size = arg_size(info[2], "byteLength");
  const uint64_t offset = offset_of(memory, info[1], size);
  // HAZARD: not the memory: a window lives until it is collected, and would keep a NIC and its thread.
  return window_over(info.Env(), memory.data(peer) + offset, size, memory.mapping(peer));
}

namespace {

// Words that are looked at one after the other are one look: over a network each would ask the kernel what has come.
void look_for_news(const rank_context& context) {
  constexpr int64_t one_look_ns = 3'000;
  thread_local const rank_context* last = nullptr;
  thread_local int64_t last_ns = 0;
  const int64_t now = clock_now_ns();
  if (last == &context && now - last_ns < one_look_ns) return;
  context.progress().run();
  last = &context;
  last_ns = clock_now_ns();
}

} // namespace

Napi::Value memory_wrap::peek(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const uint64_t slot = slot_of(memory, info[0]);
  look_for_news(memory.context());
  return Napi::BigInt::New(info.Env(), std::atomic_ref<uint64_t>(*memory.signal(memory.context().rank(), slot)).load(std::memory_order_acquire));
}

namespace {

// The third argument, which mostly is the very memory that the call is made on: then its type tag need not be looked up (a third of the call's time).
operand operand_near(const memory_wrap& self, const Napi::CallbackInfo& info, const char* what) {
  if (!info[2].StrictEquals(info.This())) return operand_of(info[2], what);
  return {reinterpret_cast<uint64_t>(self.native->data(self.native->context().rank())), self.native->byte_length(), nullptr};
}

} // namespace

// (peer, dstOffset, source: HostMemory | SymmetricMemory, srcOffset, byteLength, op, slot, value)
void memory_wrap::put(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const uint64_t size = arg_size(info[4], "byteLength");
  const uint64_t offset = offset_of(memory, info[1], size);
  const operand source = operand_near(*this, info, "source");
  const uint64_t from = arg_size(info[3], "srcOffset");
  if (from > source.byte_length || size > source.byte_length - from) {
    throw_invalid(info.Env(), "source bytes " + std::to_string(from) + " + " + std::to_string(size) + " exceed " + std::to_string(source.byte_length));
  }
  const signal_arguments signal = signal_of(memory, info, 5);
  put_signalled(memory, peer, offset, reinterpret_cast<const void*>(source.address + from), size, signal);
}

namespace {

// Arguments in the frame: FRAME of native/js/frame.ts.
enum frame_word : size_t { frame_peer, frame_dst, frame_src, frame_bytes, frame_op, frame_slot, frame_value };

int32_t framed_peer(const symmetric_memory& memory, Napi::Env env, const double* frame) {
  const uint64_t peer = frame_size(env, frame[frame_peer], "peer");
  if (peer >= static_cast<uint64_t>(memory.context().world_size())) {
    throw_invalid(env, "peer " + std::to_string(peer) + " is not in a world of " + std::to_string(memory.context().world_size()));
  }
  if (!memory.mapped(static_cast<int32_t>(peer))) throw_invalid(env, "the part of rank " + std::to_string(peer) + " is not mapped here: only the NIC reaches it");
  return static_cast<int32_t>(peer);
}

signal_arguments framed_signal(const symmetric_memory& memory, Napi::Env env, const double* frame) {
  const uint64_t op = frame_size(env, frame[frame_op], "op");
  if (op > 2) throw_invalid(env, "signal op " + std::to_string(op) + " is not one of 0..2");
  if (op == 0) return {signal_op::none, 0, 0};
  const uint64_t slot = frame_size(env, frame[frame_slot], "slot");
  if (slot >= memory.signal_slots()) {
    throw_invalid(env, "slot " + std::to_string(slot) + " of a pad with " + std::to_string(memory.signal_slots()) + " slots");
  }
  uint64_t value = 0;
  std::memcpy(&value, frame + frame_value, sizeof value);
  return {static_cast<signal_op>(op), slot, value};
}

} // namespace

// Within this memory: from this rank's part to the peer's.
void memory_wrap::put_frame(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = open(env);
  const double* frame = state_of(env).frame();
  const int32_t peer = framed_peer(memory, env, frame);
  const uint64_t size = frame_size(env, frame[frame_bytes], "byteLength");
  const uint64_t to = frame_size(env, frame[frame_dst], "byteOffset");
  const uint64_t from = frame_size(env, frame[frame_src], "srcOffset");
  const uint64_t available = memory.byte_length();
  if (std::max(to, from) > available || size > available - std::max(to, from)) {
    throw_invalid(env, "bytes " + std::to_string(std::max(to, from)) + " + " + std::to_string(size) + " exceed a memory of " + std::to_string(available));
  }
  const signal_arguments signal = framed_signal(memory, env, frame);
  put_signalled(memory, peer, to, memory.data(memory.context().rank()) + from, size, signal);
}

void memory_wrap::signal_frame(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = open(env);
  const double* frame = state_of(env).frame();
  const int32_t peer = framed_peer(memory, env, frame);
  const signal_arguments signal = framed_signal(memory, env, frame);
  if (signal.op == signal_op::none) throw_invalid(env, "signal op 0 is neither 1 nor 2");
  memory.signal_update(peer, signal.slot, signal.op, signal.value);
}

// (peer, dstOffset, bytes, op, slot, value)
void memory_wrap::put_bytes(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const byte_span bytes = arg_bytes(info[2], "bytes");
  const uint64_t offset = offset_of(memory, info[1], bytes.size);
  const signal_arguments signal = signal_of(memory, info, 3);
  put_signalled(memory, peer, offset, bytes.data, bytes.size, signal);
}

// (peer, dstOffset, bytes, signalOffset, op, value): the signal is a word of the data part.
void memory_wrap::put_signal(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const byte_span bytes = arg_bytes(info[2], "bytes");
  const uint64_t offset = offset_of(memory, info[1], bytes.size);
  const uint64_t word = aligned_offset_of(memory, info[3], sizeof(uint64_t));
  const uint64_t op = arg_size(info[4], "op");
  if (op != 1 && op != 2) throw_invalid(info.Env(), "signal op " + std::to_string(op) + " is neither 1 nor 2");
  const uint64_t value = arg_u64(info[5], "signal value");
  memory.write(peer, offset, bytes.data, bytes.size);
  memory.signal_data(peer, word, static_cast<signal_op>(op), value);
}

void memory_wrap::fence(const Napi::CallbackInfo& info) { open(info.Env()).fence(); }

// (peer, dstOffset, width, value, op, slot, signalValue): one store of the whole word, so that a reader never sees half of it.
void memory_wrap::put_value(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const uint64_t width = arg_size(info[2], "width");
  if (width != 1 && width != 2 && width != 4 && width != 8) throw_invalid(info.Env(), "width must be 1, 2, 4 or 8, got " + std::to_string(width));
  const uint64_t offset = aligned_offset_of(memory, info[1], width);
  const uint64_t value = arg_u64(info[3], "value");
  const signal_arguments signal = signal_of(memory, info, 4);
  uint8_t* address = memory.data(peer) + offset;
  if (width == 1) std::atomic_ref<uint8_t>(*address).store(static_cast<uint8_t>(value), std::memory_order_seq_cst);
  if (width == 2) std::atomic_ref<uint16_t>(*reinterpret_cast<uint16_t*>(address)).store(static_cast<uint16_t>(value), std::memory_order_seq_cst);
  if (width == 4) std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(address)).store(static_cast<uint32_t>(value), std::memory_order_seq_cst);
  if (width == 8) std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address)).store(value, std::memory_order_seq_cst);
  if (signal.op == signal_op::none) memory.context().wake_rank(peer);
  else memory.signal_update(peer, signal.slot, signal.op, signal.value);
}

// (peer, srcOffset, destination: HostMemory | SymmetricMemory, dstOffset, byteLength)
void memory_wrap::get(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const uint64_t size = arg_size(info[4], "byteLength");
  const uint64_t offset = offset_of(memory, info[1], size);
  const operand into = operand_near(*this, info, "destination");
  const uint64_t at = arg_size(info[3], "dstOffset");
  if (at > into.byte_length || size > into.byte_length - at) {
    throw_invalid(info.Env(), "destination bytes " + std::to_string(at) + " + " + std::to_string(size) + " exceed " + std::to_string(into.byte_length));
  }
  memory.get(peer, offset, reinterpret_cast<void*>(into.address + at), size);
}

// (peer, srcOffset, into: typed array)
void memory_wrap::get_bytes(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const byte_span into = arg_bytes(info[2], "into");
  const uint64_t offset = offset_of(memory, info[1], into.size);
  memory.get(peer, offset, into.data, into.size);
}

// (peer, op, slot, value)
void memory_wrap::signal(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const signal_arguments signal = signal_of(memory, info, 1);
  memory.signal_update(peer, signal.slot, signal.op, signal.value);
}

// (peer, offset, width, op, operand, expected) -> the value before: a number for 4 bytes, a bigint for 8
Napi::Value memory_wrap::atomic(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const int32_t peer = peer_of(memory, info[0]);
  const uint64_t width = arg_size(info[2], "width");
  if (width != 4 && width != 8) throw_invalid(info.Env(), "an atomic word has 4 or 8 bytes, not " + std::to_string(width));
  const uint64_t offset = aligned_offset_of(memory, info[1], width);
  const uint64_t op = arg_size(info[3], "op");
  if (op > 7) throw_invalid(info.Env(), "atomic op " + std::to_string(op) + " is not one of 0..7");
  const uint64_t before = memory.atomic(peer, offset, static_cast<uint32_t>(width), static_cast<atomic_op>(op), arg_u64(info[4], "operand"),
                                        arg_u64(info[5], "expected"));
  if (width == 4) return Napi::Number::New(info.Env(), static_cast<double>(before));
  return Napi::BigInt::New(info.Env(), before);
}

// (slot, cmp, value, patiently) -> bigint seen, or undefined when it does not hold yet
Napi::Value memory_wrap::wait_try(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const uint64_t slot = slot_of(memory, info[0]);
  const comparison cmp = comparison_of(info[1]);
  const uint64_t value = arg_u64(info[2], "value");
  const std::atomic_ref<uint64_t> word(*memory.signal(memory.context().rank(), slot));
  uint64_t found = 0;
  const auto look = [&] {
    memory.context().progress().run();
    found = word.load(std::memory_order_acquire);
    return comparison_holds(cmp, found, value);
  };
  const auto holds = [&] { return comparison_holds(cmp, word.load(std::memory_order_acquire), value); };
  const rank_context& own = memory.context();
  const bool held = info[3].ToBoolean() ? wait_inline(own.policy(), own.wake(), look, &own.progress(), &own.sleepers(), holds) : look();
  return held ? Napi::Value(Napi::BigInt::New(info.Env(), found)) : info.Env().Undefined();
}

// (slot, cmp, value, timeoutMs, ranks?) -> operation
Napi::Value memory_wrap::wait_watch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = open(env);
  const uint64_t slot = slot_of(memory, info[0]);
  const comparison cmp = comparison_of(info[1]);
  const uint64_t value = arg_u64(info[2], "value");
  const double timeout = arg_double(info[3], "timeoutMs");
  const auto ready = [held = native, word = memory.signal(memory.context().rank(), slot), cmp, value](outcome& end) {
    end.found = std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
    end.expected = value;
    return comparison_holds(cmp, end.found, value);
  };
  rank_wrap& owner = unwrap<rank_wrap>(rank.Value(), "rank");
  return Napi::Number::New(env, static_cast<double>(owner.watch_until(env, timeout, ranks_of(info[4], "ranks"), ready)));
}

// (slots: Float64Array, values: BigUint64Array) -> whether one of the words is not its value, now or within the time for which a thread of JS waits itself
Napi::Value memory_wrap::changed_try(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = open(env);
  const byte_span slots = arg_bytes(info[0], "slots");
  const byte_span values = arg_bytes(info[1], "values");
  if (info[0].As<Napi::TypedArray>().TypedArrayType() != napi_float64_array || info[1].As<Napi::TypedArray>().TypedArrayType() != napi_biguint64_array || slots.size != values.size) {
    throw_invalid(env, "slots must be a Float64Array and values a BigUint64Array, equally long");
  }
  struct seen_word {
    const uint64_t* word;
    uint64_t value;
  };
  std::vector<seen_word> seen(slots.size / sizeof(double));
  for (size_t i = 0; i < seen.size(); ++i) {
    const uint64_t slot = frame_size(env, reinterpret_cast<const double*>(slots.data)[i], "slot");
    if (slot >= memory.signal_slots()) throw_invalid(env, "slot " + std::to_string(slot) + " of a pad with " + std::to_string(memory.signal_slots()) + " slots");
    seen[i] = {memory.signal(memory.context().rank(), slot), reinterpret_cast<const uint64_t*>(values.data)[i]};
  }
  const auto changed = [&] {
    memory.context().progress().run();
    return std::any_of(seen.begin(), seen.end(), [](const seen_word& one) { return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(one.word)).load(std::memory_order_acquire) != one.value; });
  };
  return Napi::Boolean::New(env, wait_inline(memory.context().policy(), memory.context().wake(), changed, &memory.context().progress()));
}

// (words, atLeast, patiently) -> true when that many of the words hold
Napi::Value memory_wrap::words_try(const Napi::CallbackInfo& info) {
  const symmetric_memory& memory = open(info.Env());
  const std::vector<word_test> words = words_of(memory, info[0]);
  const uint64_t at_least = arg_size(info[1], "atLeast");
  const auto look = [&] { return words_holding(words) >= at_least; };
  return Napi::Boolean::New(info.Env(), info[2].ToBoolean() ? wait_inline(memory.context().policy(), memory.context().wake(), look) : look());
}

// (words, atLeast, timeoutMs, ranks?) -> operation
Napi::Value memory_wrap::words_watch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const symmetric_memory& memory = open(env);
  std::vector<word_test> words = words_of(memory, info[0]);
  const uint64_t at_least = arg_size(info[1], "atLeast");
  const double timeout = arg_double(info[2], "timeoutMs");
  const auto ready = [held = native, words = std::move(words), at_least](outcome& end) {
    if (words.size() == 1 && at_least == 1) {
      end.expected = words[0].value;
      end.found = words[0].load();
      return words[0].holds(end.found);
    }
    end.expected = at_least;
    end.found = words_holding(words);
    return end.found >= at_least;
  };
  rank_wrap& owner = unwrap<rank_wrap>(rank.Value(), "rank");
  return Napi::Number::New(env, static_cast<double>(owner.watch_until(env, timeout, ranks_of(info[3], "ranks"), ready)));
}

void memory_wrap::release(const Napi::CallbackInfo&) { native.reset(); }

operand operand_of(Napi::Value value, const char* what) {
  if (value.IsObject()) {
    bool same = false;
    napi_check_object_type_tag(value.Env(), value, &memory_wrap::type_tag, &same);
    if (same) {
      auto* wrap = memory_wrap::Unwrap(value.As<Napi::Object>());
      const symmetric_memory& memory = wrap->open(value.Env());
      return {reinterpret_cast<uint64_t>(memory.data(memory.context().rank())), memory.byte_length(), wrap->native};
    }
    napi_check_object_type_tag(value.Env(), value, &host_memory_wrap::type_tag, &same);
    if (same) {
      const auto& native = host_memory_wrap::Unwrap(value.As<Napi::Object>())->native;
      return {reinterpret_cast<uint64_t>(native->data()), native->byte_length(), native};
    }
  }
  throw_invalid(value.Env(), std::string(what) + " is neither a HostMemory nor a SymmetricMemory");
}

void memory_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["SymmetricMemory"] = DefineClass(
      env, "SymmetricMemory",
      {InstanceMethod<&memory_wrap::handle>("handle"), InstanceMethod<&memory_wrap::connect>("connect"), InstanceMethod<&memory_wrap::replace>("replace"),
       InstanceMethod<&memory_wrap::device_handle>("deviceHandle"), InstanceMethod<&memory_wrap::address>("address"),
       InstanceMethod<&memory_wrap::signal_address>("signalAddress"),
       InstanceMethod<&memory_wrap::window>("window"), InstanceMethod<&memory_wrap::peek>("peek"), InstanceMethod<&memory_wrap::put>("put"),
       InstanceMethod<&memory_wrap::put_bytes>("putBytes"), InstanceMethod<&memory_wrap::put_frame>("putFrame"),
       InstanceMethod<&memory_wrap::signal_frame>("signalFrame"), InstanceMethod<&memory_wrap::put_value>("putValue"),
       InstanceMethod<&memory_wrap::put_signal>("putSignal"), InstanceMethod<&memory_wrap::fence>("fence"),
       InstanceMethod<&memory_wrap::get>("get"), InstanceMethod<&memory_wrap::get_bytes>("getBytes"),
       InstanceMethod<&memory_wrap::signal>("signal"), InstanceMethod<&memory_wrap::atomic>("atomic"),
       InstanceMethod<&memory_wrap::wait_try>("waitTry"), InstanceMethod<&memory_wrap::wait_watch>("waitWatch"),
       InstanceMethod<&memory_wrap::changed_try>("changedTry"), InstanceMethod<&memory_wrap::words_try>("wordsTry"), InstanceMethod<&memory_wrap::words_watch>("wordsWatch"),
       InstanceMethod<&memory_wrap::release>("release")});
}

void bind_memory(Napi::Env env, Napi::Object exports) { memory_wrap::define(env, exports); }

} // namespace ep::binding
