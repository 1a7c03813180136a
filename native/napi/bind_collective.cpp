#include "wraps.hpp"

#include <bit>
#include <cstring>
#include <utility>

#include "collective/group.hpp"

namespace ep::binding {
namespace {

// Of `call` (the frame) and `callLists` (its arguments from the third on). As CALL_FRAME in js/frame.ts.
enum frame_word : size_t { word_kind = 0, word_dtype, word_op, word_factor, word_root, word_bytes, word_sequence, word_timeout, word_in_segment, word_in_offset, word_out_segment, word_out_offset, word_epoch };

constexpr double no_place = -1;

// Of `repeat`, in a frame of the group's own. As REPEAT_FRAME in js/frame.ts.
enum repeat_word : size_t { repeat_sequence = 0, repeat_operation, repeat_epoch, repeat_words };

} // namespace

struct group_wrap : Napi::ObjectWrap<group_wrap> {
  static constexpr napi_type_tag type_tag{0x657067726f757031ull, 20};
  static constexpr const char* type_name = "CollectiveGroup";
  static void define(Napi::Env env, Napi::Object exports);

  static std::vector<int32_t> arg_ranks(Napi::Value value, const char* what) {
    const byte_span bytes = arg_bytes(value, what);
    if (value.As<Napi::TypedArray>().TypedArrayType() != napi_int32_array) throw_invalid(value.Env(), std::string(what) + " is no Int32Array");
    const auto* ranks = reinterpret_cast<const int32_t*>(bytes.data);
    return {ranks, ranks + bytes.size / sizeof(int32_t)};
  }

  explicit group_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
    env_state& state = state_of(info.Env());
    group_options options;
    options.rank = arg_int(info[0], "rank");
    options.size = arg_int(info[1], "size");
    options.capacity = arg_int(info[2], "capacity");
    options.nonce = arg_u64(info[3], "nonce");
    options.ranks_on_host = arg_int(info[4], "ranksOnHost");
    options.active = arg_ranks(info[5], "active");
    options.joins = info[6].ToBoolean();
    options.incarnation = static_cast<uint32_t>(arg_size(info[7], "incarnation"));
    if (info.Length() > 9 && !info[9].IsUndefined()) {
      collective_group& previous = *unwrap<group_wrap>(info[9], "previous").native;
      options.allocations = previous.own_memory();
      options.former = previous.peers();
    }
    if (info.Length() > 10 && !info[10].IsUndefined()) options.cores_on_host = unwrap<group_wrap>(info[10], "beside").native->cores_on_host();
    auto made = collective_group::create(state, options, info[8].ToBoolean());
    native = value_or_throw(info.Env(), made);
    end_key = state.at_end([held = native] { held->close(false); });
    auto self = info.This().As<Napi::Object>();
    tag<group_wrap>(self);
    auto buffer = Napi::ArrayBuffer::New(info.Env(), repeat_words * sizeof(double));
    repeat_frame = static_cast<double*>(buffer.Data());
    auto repeated = Napi::Function::New<&group_wrap::repeat>(info.Env(), "repeat", this);
    // HAZARD: what it points to and writes to must live as long as it: it holds both.
    repeated.Set("group", self);
    repeated.Set("frame", buffer);
    self.Set("repeat", repeated);
  }

  // The last call, which must have ended at once, with another number. HAZARD: on the same memory, unlooked at: whoever calls it holds the arrays.
  static void repeat(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    group_wrap& self = *static_cast<group_wrap*>(info.Data());
    self.open(env);
    if (!self.spare || !self.spare->begun) throw_invalid(env, "there is no call that could be repeated");
    double* frame = self.repeat_frame;
    self.spare->begun = false;
    self.spare->call.sequence = frame_size(env, frame[repeat_sequence], "sequence");
    const uint64_t id = self.attempt_or_submit(env, true);
    frame[repeat_operation] = static_cast<double>(id);
    if (id == 0) frame[repeat_epoch] = static_cast<double>(self.native->epoch());
  }

  collective_group& open(Napi::Env env) const {
    if (end_key == 0) throw_failure(env, {EP_STATUS_CLOSED, 0, "the group was closed"});
    return *native;
  }

  int32_t member(Napi::Value value, const char* what) const {
    const int32_t rank = arg_int(value, what);
    if (rank < 0 || rank >= native->size()) throw_invalid(value.Env(), std::string(what) + " " + std::to_string(rank) + " is not in a group of " + std::to_string(native->size()));
    return rank;
  }

  int32_t any_member(Napi::Value value, const char* what) const {
    const int32_t rank = arg_int(value, what);
    if (rank < 0 || rank >= native->capacity()) throw_invalid(value.Env(), std::string(what) + " " + std::to_string(rank) + " is not in a group of at most " + std::to_string(native->capacity()));
    return rank;
  }

  Napi::Value handle(const Napi::CallbackInfo& info) { return bytes_copy(info.Env(), &open(info.Env()).handle(), sizeof(ep_segment_handle)); }

  void attach(const Napi::CallbackInfo& info) {
    collective_group& group = open(info.Env());
    const byte_span bytes = arg_bytes(info[1], "handle");
    if (bytes.size != sizeof(ep_segment_handle)) throw_invalid(info.Env(), "a handle has " + std::to_string(sizeof(ep_segment_handle)) + " bytes, got " + std::to_string(bytes.size));
    ep_segment_handle handle;
    std::memcpy(&handle, bytes.data, sizeof handle);
    auto done = group.attach(any_member(info[0], "rank"), handle, static_cast<uint32_t>(arg_size(info[2], "incarnation")));
    value_or_throw(info.Env(), done);
  }

  void lose(const Napi::CallbackInfo& info) { open(info.Env()).lose(any_member(info[0], "rank"), static_cast<uint32_t>(arg_size(info[1], "incarnation"))); }

  Napi::Value allocate(const Napi::CallbackInfo& info) {
    auto made = open(info.Env()).allocate(arg_size(info[0], "byteLength"));
    return Napi::Number::New(info.Env(), value_or_throw(info.Env(), made));
  }

  Napi::Value window(const Napi::CallbackInfo& info) {
    const uint64_t index = arg_size(info[0], "allocation");
    if (index >= native->allocations()) throw_invalid(info.Env(), "there is no allocation " + std::to_string(index));
    const auto& memory = native->allocation(static_cast<uint32_t>(index));
    return window_over(info.Env(), memory->data(), memory->data_bytes(), memory);
  }

  // A block of `bytes` at (segment, offset) of this rank's group memory, or, for segment -1, in the typed array.
  call_block block_of(Napi::Env env, double segment, double offset, uint64_t bytes, Napi::Value array) const {
    if (segment == no_place) {
      if (bytes == 0) return {};
      const byte_span span = arg_bytes(array, "array");
      if (span.size < bytes) throw_invalid(env, "an array of " + std::to_string(span.size) + " bytes for a block of " + std::to_string(bytes));
      return {span.data, bytes, group_no_segment, 0};
    }
    const uint64_t index = frame_size(env, segment, "segment");
    const uint64_t at = frame_size(env, offset, "offset");
    if (index >= native->allocations()) throw_invalid(env, "there is no allocation " + std::to_string(index));
    const segment_ref& memory = native->allocation(static_cast<uint32_t>(index));
    if (at > memory->data_bytes() || bytes > memory->data_bytes() - at) throw_invalid(env, "a block ends behind its allocation");
    return {memory->data() + at, bytes, static_cast<uint32_t>(index), at};
  }

  queued_call& begin_call(Napi::Env env) {
    open(env);
    if (!spare) spare = std::make_unique<queued_call>();
    const double* frame = state_of(env).frame();
    queued_call& queued = *spare;
    queued.begun = false;
    collective_call& call = queued.call;
    const uint64_t kind = frame_size(env, frame[word_kind], "kind");
    const uint64_t dtype = frame_size(env, frame[word_dtype], "dtype");
    const uint64_t op = frame_size(env, frame[word_op], "op");
    if (kind >= static_cast<uint64_t>(op_kind::membership) || dtype > static_cast<uint64_t>(element_type::ue8m0) || op > static_cast<uint64_t>(reduce_op::premul_sum)) {
      throw_invalid(env, "no such kind, dtype or reduction");
    }
    call.kind = static_cast<op_kind>(kind);
    call.dtype = static_cast<element_type>(dtype);
    call.op = static_cast<reduce_op>(op);
    const bool reducing = call.kind == op_kind::all_reduce || call.kind == op_kind::reduce || call.kind == op_kind::reduce_scatter;
    if (reducing && !reduces(call.op, call.dtype)) throw_invalid(env, "the reduction does not take this dtype");
    call.factor = frame[word_factor];
    call.root = static_cast<int32_t>(frame[word_root]);
    if (call.root < -1 || call.root >= native->size()) throw_invalid(env, "the root is not in the group");
    call.bytes = frame_size(env, frame[word_bytes], "bytes");
    if (call.bytes % element_bytes(call.dtype) != 0) throw_invalid(env, "bytes are no whole elements");
    call.sequence = frame_size(env, frame[word_sequence], "sequence");
    queued.timeout_ms = frame[word_timeout];
    call.inputs.clear();
    call.outputs.clear();
    return queued;
  }

  // Which blocks a kind has: engine.ts of @ep/collectives. HAZARD: peers read as many blocks as the kind has, whatever a caller hands over.
  void check_blocks(Napi::Env env, const collective_call& call) const {
    const auto ranks = static_cast<size_t>(native->size());
    const bool root = call.root == native->rank();
    size_t inputs = 1;
    size_t outputs = 1;
    bool rooted = false;
    switch (call.kind) {
      case op_kind::barrier:
      case op_kind::membership: inputs = outputs = 0; break;
      case op_kind::broadcast:
        rooted = true;
        inputs = root ? 1 : 0;
        outputs = root ? 0 : 1;
        break;
      case op_kind::all_reduce: break;
      case op_kind::reduce:
        rooted = true;
        outputs = root ? 1 : 0;
        break;
      case op_kind::all_gather: outputs = ranks; break;
      case op_kind::gather:
        rooted = true;
        outputs = root ? ranks : 0;
        break;
      case op_kind::scatter:
        rooted = true;
        inputs = root ? ranks : 0;
        break;
      case op_kind::reduce_scatter: inputs = ranks; break;
      case op_kind::all_to_all: inputs = outputs = ranks; break;
    }
    const bool fits = call.inputs.size() == inputs && call.outputs.size() == outputs && rooted == (call.root >= 0);
    if (!fits) throw_invalid(env, "the call has other blocks, or another root, than its kind");
    if (call.kind == op_kind::all_to_all) return;
    for (const auto& block : call.inputs) {
      if (block.bytes != call.bytes) throw_invalid(env, "a block has another length than the call");
    }
    for (const auto& block : call.outputs) {
      if (block.bytes != call.bytes) throw_invalid(env, "a block has another length than the call");
    }
  }

  // 0: it has ended, and well.
  Napi::Value start(Napi::Env env, bool borrowed, bool attempt) {
    check_blocks(env, spare->call);
    spare->borrowed = borrowed;
    const uint64_t id = attempt_or_submit(env, attempt);
    if (id == 0) state_of(env).frame()[word_epoch] = static_cast<double>(native->epoch());
    return Napi::Number::New(env, static_cast<double>(id));
  }

  // 0: it has ended, and well; `spare` still describes it.
  uint64_t attempt_or_submit(Napi::Env env, bool attempt) {
    queued_call& queued = *spare;
    if (attempt && native->try_now(queued)) return 0;
    queued.cancel = std::make_shared<cancel_flag>();
    queued.operation_id = state_of(env).begin(env, queued.cancel, [held = native] { held->nudge(); });
    const uint64_t id = queued.operation_id;
    native->submit(std::move(spare));
    return id;
  }

  // (attempt, input?, output?): calls with at most one block on each side; arrays where the frame says that a block is not in group memory. An output that
  // is absent is the input.
  Napi::Value call(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    queued_call& queued = begin_call(env);
    const double* frame = state_of(env).frame();
    const bool root = queued.call.root == native->rank();
    const op_kind kind = queued.call.kind;
    const bool gives = kind != op_kind::barrier && (kind != op_kind::broadcast || root);
    const bool takes = kind == op_kind::broadcast ? !root : kind == op_kind::reduce ? root : kind == op_kind::all_reduce;
    bool borrowed = false;
    if (gives) {
      queued.call.inputs.push_back(block_of(env, frame[word_in_segment], frame[word_in_offset], queued.call.bytes, info[1]));
      borrowed = frame[word_in_segment] == no_place;
    }
    if (takes) {
      const bool same = gives && info.Length() < 3 && frame[word_out_segment] == frame[word_in_segment] && frame[word_out_offset] == frame[word_in_offset];
      queued.call.outputs.push_back(same ? queued.call.inputs.front() : block_of(env, frame[word_out_segment], frame[word_out_offset], queued.call.bytes, info[2]));
      borrowed = borrowed || frame[word_out_segment] == no_place;
    }
    return start(env, borrowed, info[0].ToBoolean());
  }

  bool add_blocks(Napi::Env env, Napi::Value places, Napi::Value arrays, std::vector<call_block>& blocks) const {
    const byte_span bytes = arg_bytes(places, "places");
    const auto list = arrays.As<Napi::Array>();
    if (!arrays.IsArray() || places.As<Napi::TypedArray>().TypedArrayType() != napi_float64_array || bytes.size != list.Length() * 3 * sizeof(double)) {
      throw_invalid(env, "three numbers are needed for each block: allocation, offset, bytes");
    }
    const auto* numbers = reinterpret_cast<const double*>(bytes.data);
    bool borrowed = false;
    for (uint32_t i = 0; i < list.Length(); ++i, numbers += 3) {
      blocks.push_back(block_of(env, numbers[0], numbers[1], frame_size(env, numbers[2], "bytes"), list.Get(i)));
      borrowed = borrowed || numbers[0] == no_place;
    }
    return borrowed;
  }

  // (attempt, inputPlaces, inputs, outputPlaces, outputs): any call.
  Napi::Value call_lists(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    queued_call& queued = begin_call(env);
    const bool in = add_blocks(env, info[1], info[2], queued.call.inputs);
    const bool out = add_blocks(env, info[3], info[4], queued.call.outputs);
    return start(env, in || out, info[0].ToBoolean());
  }

  // (operation, outputs): after an operation of ordinary arrays has ended well.
  void collect(const Napi::CallbackInfo& info) {
    std::vector<call_block> targets;
    const auto list = info[1].As<Napi::Array>();
    for (uint32_t i = 0; i < list.Length(); ++i) {
      const Napi::Value array = list.Get(i);
      if (array.IsUndefined()) {
        targets.push_back({});
        continue;
      }
      const byte_span span = arg_bytes(array, "output");
      targets.push_back({span.data, span.size, group_no_segment, 0});
    }
    if (!native->collect(arg_size(info[0], "operation"), targets)) throw_invalid(info.Env(), "an output has been resized since the call");
  }

  // (peer, tag, dtype, byteLength, timeoutMs, segment, offset, array?)
  Napi::Value send(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    collective_group& group = open(env);
    auto message = std::make_unique<message_send>();
    message->peer = member(info[0], "peer");
    message->tag = static_cast<int64_t>(arg_double(info[1], "tag"));
    message->dtype = static_cast<uint32_t>(arg_size(info[2], "dtype"));
    message->bytes = arg_size(info[3], "byteLength");
    message->timeout_ms = arg_double(info[4], "timeoutMs");
    const call_block block = block_of(env, arg_double(info[5], "segment"), arg_double(info[6], "offset"), message->bytes, info[7]);
    message->segment = block.segment;
    message->offset = block.offset;
    message->data = block.data;
    if (block.segment == group_no_segment) {
      if (message->bytes != 0) message->copy.assign(block.data, block.data + message->bytes);
      message->data = message->copy.data();
    }
    message->cancel = std::make_shared<cancel_flag>();
    message->operation_id = state_of(env).begin(env, message->cancel, [held = native] { held->nudge(); });
    const auto id = static_cast<double>(message->operation_id);
    group.send(std::move(message));
    return Napi::Number::New(env, id);
  }

  // (peer or -1, tag, dtype, byteLength, timeoutMs, segment, offset)
  Napi::Value receive(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    collective_group& group = open(env);
    auto message = std::make_unique<message_receive>();
    message->peer = arg_int(info[0], "peer") == any_rank ? any_rank : member(info[0], "peer");
    message->tag = static_cast<int64_t>(arg_double(info[1], "tag"));
    message->dtype = static_cast<uint32_t>(arg_size(info[2], "dtype"));
    message->bytes = arg_size(info[3], "byteLength");
    message->timeout_ms = arg_double(info[4], "timeoutMs");
    const double segment = arg_double(info[5], "segment");
    if (segment != no_place) message->data = block_of(env, segment, arg_double(info[6], "offset"), message->bytes, env.Undefined()).data;
    message->cancel = std::make_shared<cancel_flag>();
    message->operation_id = state_of(env).begin(env, message->cancel, [held = native] { held->nudge(); });
    const auto id = static_cast<double>(message->operation_id);
    group.receive(std::move(message));
    return Napi::Number::New(env, id);
  }

  // (operation, array): after a receive into an ordinary array has ended well.
  void take_received(const Napi::CallbackInfo& info) {
    const std::vector<uint8_t> bytes = native->take_received(arg_size(info[0], "operation"));
    const byte_span to = arg_bytes(info[1], "array");
    if (bytes.size() > to.size) throw_invalid(info.Env(), "the array has been resized since the call");
    if (!bytes.empty()) std::memcpy(to.data, bytes.data(), bytes.size());
  }

  static Napi::Value ranks_value(Napi::Env env, const std::vector<int32_t>& ranks) {
    auto out = Napi::Int32Array::New(env, ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) out[i] = ranks[i];
    return out;
  }

  Napi::Value failure_value(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    const call_failure why = native->failure_of(arg_size(info[0], "operation"));
    auto out = Napi::Object::New(env);
    out["active"] = ranks_value(env, why.active);
    out["missing"] = ranks_value(env, why.missing);
    out["lost"] = ranks_value(env, why.lost);
    constexpr size_t fields = 7;
    auto calls = Napi::Float64Array::New(env, why.calls.size() * fields);
    for (size_t i = 0; i < why.calls.size(); ++i) {
      const group_call& call = why.calls[i];
      const double numbers[fields] = {static_cast<double>(call.sequence), static_cast<double>(call.kind),      static_cast<double>(call.dtype), static_cast<double>(call.reduce_op),
                                      static_cast<double>(call.root),     static_cast<double>(call.bytes), std::bit_cast<double>(call.factor)};
      for (size_t k = 0; k < fields; ++k) calls[i * fields + k] = numbers[k];
    }
    out["calls"] = calls;
    return out;
  }

  Napi::Value epoch(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), static_cast<double>(native->epoch())); }
  Napi::Value active(const Napi::CallbackInfo& info) { return ranks_value(info.Env(), native->active_in(arg_size(info[0], "epoch"))); }

  // Four numbers for each kind, then for sends, then for receives: calls, bytes, writes, signals.
  Napi::Value trace(const Napi::CallbackInfo& info) {
    auto out = Napi::Float64Array::New(info.Env(), (op_kinds + 2) * 4);
    for (uint32_t kind = 0; kind < op_kinds + 2; ++kind) {
      const op_trace one = native->trace(kind);
      const uint64_t numbers[4] = {one.calls, one.bytes, one.writes, one.signals};
      for (size_t k = 0; k < 4; ++k) out[kind * 4 + k] = static_cast<double>(numbers[k]);
    }
    return out;
  }

  static Napi::Value states_value(Napi::Env env, const std::vector<group_peer>& peers) {
    auto out = Napi::Uint8Array::New(env, peers.size());
    for (size_t i = 0; i < peers.size(); ++i) out[i] = static_cast<uint8_t>(peers[i].state);
    return out;
  }

  Napi::Value survey(const Napi::CallbackInfo& info) { return states_value(info.Env(), native->survey()); }
  Napi::Value size(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), native->size()); }
  void fence(const Napi::CallbackInfo& info) {
    auto done = open(info.Env()).fence();
    value_or_throw(info.Env(), done);
  }

  // (sequence, timeoutMs, evicted, admitted, size, repairs)
  Napi::Value membership(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    collective_group& group = open(env);
    auto queued = std::make_unique<queued_call>();
    queued->call.kind = op_kind::membership;
    queued->call.sequence = arg_size(info[0], "sequence");
    queued->timeout_ms = arg_double(info[1], "timeoutMs");
    auto change = std::make_unique<membership_change>();
    change->evicted = arg_ranks(info[2], "evicted");
    change->admitted = arg_ranks(info[3], "admitted");
    for (const auto* ranks : {&change->evicted, &change->admitted}) {
      for (const int32_t rank : *ranks) {
        if (rank < 0 || rank >= group.capacity()) throw_invalid(env, "rank " + std::to_string(rank) + " is not in a group of at most " + std::to_string(group.capacity()));
      }
    }
    change->size = arg_int(info[4], "size");
    if (change->size > group.capacity()) throw_invalid(env, "the group grows to " + std::to_string(group.capacity()) + " ranks at most");
    change->repairs = info[5].ToBoolean();
    queued->call.change = std::move(change);
    queued->cancel = std::make_shared<cancel_flag>();
    queued->operation_id = state_of(env).begin(env, queued->cancel, [held = native] { held->nudge(); });
    const auto id = static_cast<double>(queued->operation_id);
    group.submit(std::move(queued));
    return Napi::Number::New(env, id);
  }

  Napi::Value membership_end_value(const Napi::CallbackInfo& info) {
    const membership_end end = native->membership_of(arg_size(info[0], "operation"));
    auto out = Napi::Object::New(info.Env());
    out["admitted"] = Napi::Boolean::New(info.Env(), end.admitted);
    out["states"] = states_value(info.Env(), end.peers);
    return out;
  }

  // (timeoutMs)
  Napi::Value join(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    collective_group& group = open(env);
    const double timeout_ms = arg_double(info[0], "timeoutMs");
    auto cancel = std::make_shared<cancel_flag>();
    const uint64_t id = state_of(env).begin(env, cancel, [held = native] { held->nudge(); });
    group.join(id, std::move(cancel), timeout_ms);
    return Napi::Number::New(env, static_cast<double>(id));
  }

  // (0: all-reduces, 1: barriers, 2: bare exchanges, firstSequence, rounds) -> ns of each round
  Napi::Value measure(const Napi::CallbackInfo& info) {
    std::vector<double> samples(arg_size(info[2], "rounds"));
    const uint64_t what = arg_size(info[0], "what");
    if (what > static_cast<uint64_t>(measured::exchange)) throw_invalid(info.Env(), "there is nothing of that number to measure");
    const uint64_t done = open(info.Env()).measure(static_cast<measured>(what), arg_size(info[1], "firstSequence"), samples.size(), samples.data());
    if (done != samples.size()) throw_failure(info.Env(), {EP_STATUS_TIMEOUT, 0, "round " + std::to_string(done) + " did not end, or gave a wrong sum"});
    auto out = Napi::Float64Array::New(info.Env(), samples.size());
    for (size_t i = 0; i < samples.size(); ++i) out[i] = samples[i];
    return out;
  }

  void close(const Napi::CallbackInfo& info) {
    if (end_key == 0) return;
    state_of(info.Env()).forget(end_key);
    end_key = 0;
    native->close(true);
  }

  using segment_ref = std::shared_ptr<segment>;
  std::shared_ptr<collective_group> native;
  std::unique_ptr<queued_call> spare; // of the last call that ended at once
  double* repeat_frame = nullptr;
  uint64_t end_key = 0;
};

void group_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["CollectiveGroup"] = DefineClass(
      env, "CollectiveGroup",
      {InstanceMethod<&group_wrap::handle>("handle"), InstanceMethod<&group_wrap::attach>("attach"), InstanceMethod<&group_wrap::lose>("lose"),
       InstanceMethod<&group_wrap::allocate>("allocate"), InstanceMethod<&group_wrap::window>("window"), InstanceMethod<&group_wrap::call>("call"),
       InstanceMethod<&group_wrap::call_lists>("callLists"), InstanceMethod<&group_wrap::collect>("collect"), InstanceMethod<&group_wrap::send>("send"),
       InstanceMethod<&group_wrap::receive>("receive"), InstanceMethod<&group_wrap::take_received>("takeReceived"),
       InstanceMethod<&group_wrap::failure_value>("failure"), InstanceMethod<&group_wrap::epoch>("epoch"), InstanceMethod<&group_wrap::active>("active"),
       InstanceMethod<&group_wrap::trace>("trace"), InstanceMethod<&group_wrap::survey>("survey"), InstanceMethod<&group_wrap::size>("size"), InstanceMethod<&group_wrap::fence>("fence"),
       InstanceMethod<&group_wrap::membership>("membership"), InstanceMethod<&group_wrap::membership_end_value>("membershipEnd"), InstanceMethod<&group_wrap::join>("join"), InstanceMethod<&group_wrap::measure>("measure"),
       InstanceMethod<&group_wrap::close>("close")});
}

void bind_collective(Napi::Env env, Napi::Object exports) { group_wrap::define(env, exports); }

} // namespace ep::binding
