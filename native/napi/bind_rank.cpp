#include "wraps.hpp"

#include <cstring>

namespace ep::binding {

std::vector<ep_segment_handle> segment_handles(Napi::Value value, const char* what) {
  const byte_span bytes = arg_bytes(value, what);
  if (bytes.size % sizeof(ep_segment_handle) != 0) {
    throw_invalid(value.Env(), std::string(what) + " has " + std::to_string(bytes.size) + " bytes, not a multiple of " + std::to_string(sizeof(ep_segment_handle)));
  }
  std::vector<ep_segment_handle> handles(bytes.size / sizeof(ep_segment_handle));
  if (bytes.size != 0) std::memcpy(handles.data(), bytes.data, bytes.size);
  return handles;
}

std::vector<int32_t> ranks_of(Napi::Value value, const char* what) {
  if (value.IsUndefined() || value.IsNull()) return {};
  const byte_span bytes = arg_bytes(value, what);
  if (value.As<Napi::TypedArray>().TypedArrayType() != napi_int32_array) throw_invalid(value.Env(), std::string(what) + " must be an Int32Array");
  std::vector<int32_t> ranks(bytes.size / sizeof(int32_t));
  if (bytes.size != 0) std::memcpy(ranks.data(), bytes.data, bytes.size);
  return ranks;
}

rank_wrap::rank_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  auto made = rank_context::create(arg_int(info[0], "rank"), arg_int(info[1], "worldSize"), arg_int(info[2], "ranksOnHost"));
  native = std::make_shared<state>();
  native->context = value_or_throw(info.Env(), made);
  tag<rank_wrap>(info.This().As<Napi::Object>());
  end_key = state_of(info.Env()).at_end([held = native] { held->stop(false); });
}

void rank_wrap::state::stop(bool orderly) {
  context->leave(orderly);
  watches.reset();
}

void rank_wrap::close(const Napi::CallbackInfo& info) {
  if (end_key == 0) return;
  state_of(info.Env()).forget(end_key);
  end_key = 0;
  native->stop(true);
  native->context.reset();
  team_segments.clear();
}

rank_context& rank_wrap::open(Napi::Env env) const {
  if (end_key == 0) throw_failure(env, {EP_STATUS_CLOSED, 0, "the rank was closed"});
  return *native->context;
}

uint64_t rank_wrap::watch_until(Napi::Env env, double timeout_ms, std::vector<int32_t> awaited, std::function<bool(outcome&)> ready) {
  open(env);
  if (!native->watches) native->watches = std::make_unique<watcher>(native->context, state_of(env));
  auto cancel = std::make_shared<cancel_flag>();
  const uint64_t id = state_of(env).begin(env, cancel, [held = native] {
    if (held->watches) held->watches->nudge();
  });
  native->watches->submit({id, std::move(cancel), deadline_after(timeout_ms), std::move(awaited), std::move(ready)});
  return id;
}

Napi::Value rank_wrap::handle(const Napi::CallbackInfo& info) { return bytes_copy(info.Env(), &open(info.Env()).handle(), sizeof(ep_segment_handle)); }

// (handles, elsewhere?: Int32Array)
void rank_wrap::connect(const Napi::CallbackInfo& info) {
  auto done = open(info.Env()).connect(segment_handles(info[0], "handles"), ranks_of(info[1], "elsewhere"));
  value_or_throw(info.Env(), done);
}

// (rank context of another transport)
void rank_wrap::inform(const Napi::CallbackInfo& info) {
  rank_wrap& other = unwrap<rank_wrap>(info[0], "rank");
  other.open(info.Env());
  rank_context& own = open(info.Env());
  auto done = own.inform(other.native->context);
  value_or_throw(info.Env(), done);
}

// (rank, ep_segment_handle)
void rank_wrap::replace(const Napi::CallbackInfo& info) {
  const std::vector<ep_segment_handle> handles = segment_handles(info[1], "handle");
  if (handles.size() != 1) throw_invalid(info.Env(), "a rank has one control segment, got " + std::to_string(handles.size()) + " handles");
  auto done = open(info.Env()).replace(arg_int(info[0], "rank"), handles[0]);
  value_or_throw(info.Env(), done);
}

void rank_wrap::vacate(const Napi::CallbackInfo& info) {
  auto done = open(info.Env()).vacate(arg_int(info[0], "rank"));
  value_or_throw(info.Env(), done);
}

Napi::Value rank_wrap::gone(const Napi::CallbackInfo& info) {
  const int32_t rank = arg_int(info[0], "rank");
  const rank_context& context = open(info.Env());
  if (rank < 0 || rank >= context.world_size() || !context.connected()) throw_invalid(info.Env(), "rank " + std::to_string(rank) + " is not connected");
  return Napi::Boolean::New(info.Env(), context.gone(rank));
}

Napi::Value rank_wrap::ended(const Napi::CallbackInfo& info) {
  const int32_t rank = arg_int(info[0], "rank");
  const rank_context& context = open(info.Env());
  if (rank < 0 || rank >= context.world_size() || !context.connected()) throw_invalid(info.Env(), "rank " + std::to_string(rank) + " is not connected");
  return Napi::Boolean::New(info.Env(), context.ended(rank));
}

Napi::Value rank_wrap::life(const Napi::CallbackInfo& info) {
  const int32_t rank = arg_int(info[0], "rank");
  const rank_context& context = open(info.Env());
  if (rank < 0 || rank >= context.world_size() || !context.connected()) throw_invalid(info.Env(), "rank " + std::to_string(rank) + " is not connected");
  return Napi::Number::New(info.Env(), context.life(rank));
}

Napi::Value rank_wrap::team_segment(const Napi::CallbackInfo& info) {
  open(info.Env());
  auto made = team::segment_create(arg_int(info[0], "size"));
  team_segments.push_back(value_or_throw(info.Env(), made));
  return bytes_copy(info.Env(), &made.value()->handle(), sizeof(ep_segment_handle));
}

void rank_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["RankContext"] = DefineClass(env, "RankContext",
                                       {InstanceMethod<&rank_wrap::handle>("handle"), InstanceMethod<&rank_wrap::connect>("connect"),
                                        InstanceMethod<&rank_wrap::inform>("inform"),
                                        InstanceMethod<&rank_wrap::life>("life"),
                                        InstanceMethod<&rank_wrap::replace>("replace"), InstanceMethod<&rank_wrap::vacate>("vacate"), InstanceMethod<&rank_wrap::gone>("gone"), InstanceMethod<&rank_wrap::ended>("ended"),
                                        InstanceMethod<&rank_wrap::team_segment>("createTeamSegment"), InstanceMethod<&rank_wrap::close>("close")});
}

team_wrap::team_wrap(const Napi::CallbackInfo& info) : ObjectWrap(info) {
  const Napi::Env env = info.Env();
  rank_wrap& owner = unwrap<rank_wrap>(info[0], "rank");
  owner.open(env);
  const std::vector<ep_segment_handle> handles = segment_handles(info[1], "handle");
  if (handles.size() != 1) throw_invalid(env, "a team has one segment handle, got " + std::to_string(handles.size()));
  auto opened = segment::open(handles[0]);
  auto joined = team::join(owner.native->context, value_or_throw(env, opened), ranks_of(info[2], "ranks"));
  native = value_or_throw(env, joined);
  std::erase_if(owner.team_segments, [&](const auto& kept) { return kept == opened.value(); });
  rank = Napi::Persistent(info[0].As<Napi::Object>());
  tag<team_wrap>(info.This().As<Napi::Object>());
}

team& team_wrap::open(Napi::Env env) const {
  if (!native) throw_failure(env, {EP_STATUS_CLOSED, 0, "the team was closed"});
  return *native;
}

void team_wrap::release(const Napi::CallbackInfo&) { native.reset(); }

// Enters (or goes on with) the next barrier; true when it is passed within the inline budget.
Napi::Value team_wrap::barrier_try(const Napi::CallbackInfo& info) {
  team& joined = open(info.Env());
  const uint64_t target = joined.barrier_enter();
  const std::atomic_ref<uint64_t> word(*const_cast<uint64_t*>(joined.barrier_word()));
  const auto there = [&] { return word.load(std::memory_order_acquire) >= target; };
  const bool passed = wait_inline(joined.context().policy(), joined.context().wake(), there, nullptr, &joined.context().sleepers(), there);
  if (passed) joined.barrier_leave();
  return Napi::Boolean::New(info.Env(), passed);
}

Napi::Value team_wrap::barrier_watch(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  if (!open(env).barrier_under_way()) throw_invalid(env, "no barrier is under way");
  rank_wrap& owner = unwrap<rank_wrap>(rank.Value(), "rank");
  const double timeout = arg_double(info[0], "timeoutMs");
  // Only members that have not entered yet are awaited: one that entered and then left has done its part. An empty list would mean every rank
  // of the world, members or not.
  std::vector<int32_t> awaited = native->barrier_missing();
  if (awaited.empty()) awaited = native->ranks();
  const auto passed = [held = native, target = native->barrier_target()](outcome& end) {
    end.expected = target;
    end.found = held->barrier_passed();
    return end.found >= target;
  };
  return Napi::Number::New(env, static_cast<double>(owner.watch_until(env, timeout, std::move(awaited), passed)));
}

void team_wrap::barrier_leave(const Napi::CallbackInfo& info) { open(info.Env()).barrier_leave(); }

Napi::Value team_wrap::missing(const Napi::CallbackInfo& info) {
  const std::vector<int32_t> ranks = open(info.Env()).barrier_missing();
  auto out = Napi::Int32Array::New(info.Env(), ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) out[i] = ranks[i];
  return out;
}

void team_wrap::exchange_put(const Napi::CallbackInfo& info) {
  const byte_span bytes = arg_bytes(info[0], "bytes");
  if (bytes.size > EP_TEAM_EXCHANGE_BYTES) {
    throw_invalid(info.Env(), std::to_string(bytes.size) + " bytes: an exchange carries at most " + std::to_string(EP_TEAM_EXCHANGE_BYTES));
  }
  open(info.Env()).exchange_put(bytes.data, static_cast<uint32_t>(bytes.size));
}

Napi::Value team_wrap::exchange_get(const Napi::CallbackInfo& info) {
  const int32_t position = arg_int(info[0], "position");
  const uint64_t size = arg_size(info[1], "byteLength");
  const team& joined = open(info.Env());
  if (position < 0 || position >= joined.size() || size > EP_TEAM_EXCHANGE_BYTES) throw_invalid(info.Env(), "no such exchange slot");
  return bytes_copy(info.Env(), joined.exchange_get(position), size);
}

void team_wrap::define(Napi::Env env, Napi::Object exports) {
  exports["Team"] = DefineClass(env, "Team",
                                {InstanceMethod<&team_wrap::barrier_try>("barrierTry"), InstanceMethod<&team_wrap::barrier_watch>("barrierWatch"),
                                 InstanceMethod<&team_wrap::barrier_leave>("barrierLeave"), InstanceMethod<&team_wrap::missing>("missing"),
                                 InstanceMethod<&team_wrap::exchange_put>("exchangePut"), InstanceMethod<&team_wrap::exchange_get>("exchangeGet"),
                                 InstanceMethod<&team_wrap::release>("release")});
}

namespace {

// (ep_segment_handle) -> EP_LIFE_* of the rank whose control segment it names
Napi::Value life_behind(const Napi::CallbackInfo& info) {
  const std::vector<ep_segment_handle> handles = segment_handles(info[0], "handle");
  if (handles.size() != 1) throw_invalid(info.Env(), "expected one segment handle, got " + std::to_string(handles.size()));
  return Napi::Number::New(info.Env(), rank_context::life_behind(handles[0]));
}

} // namespace

void bind_rank(Napi::Env env, Napi::Object exports) {
  exports["lifeBehind"] = Napi::Function::New(env, life_behind);
  rank_wrap::define(env, exports);
  team_wrap::define(env, exports);
}

} // namespace ep::binding
