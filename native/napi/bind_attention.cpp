#include "attention_call.hpp"

namespace ep::binding {
namespace {

uint32_t status_of(attention::status value) {
  switch (value) {
    case attention::status::ok: return EP_STATUS_OK;
    case attention::status::cancelled: return EP_STATUS_ABORTED;
    case attention::status::out_of_memory: return EP_STATUS_MEMORY_LIMIT;
    case attention::status::no_threads: return EP_STATUS_SYSTEM;
    case attention::status::bad_argument:
    case attention::status::bad_shard:
    case attention::status::bad_piece:
    case attention::status::shards_overlap:
    case attention::status::unsupported_isa: return EP_STATUS_INVALID;
  }
  return EP_STATUS_SYSTEM;
}

outcome outcome_of(attention::status value, std::string why) {
  outcome end;
  end.status = status_of(value);
  end.message = std::move(why);
  return end;
}

Napi::Object description_of(const Napi::CallbackInfo& info, const char* call) {
  if (!info[0].IsObject()) throw_invalid(info.Env(), std::string(call) + " takes a description");
  return info[0].As<Napi::Object>();
}

rows_operand rows_of(const Napi::Object& description, const char* name, uint64_t rows, uint64_t row_bytes) {
  return rows_within(description, name, rows, row_bytes, [](Napi::Value value, const char* what) { return operand_of(value, what); });
}

} // namespace

// ({dtype, qRows, kvRows, qHeads, kvHeads, headDim, scale, threads, shards, pieces, q, k, v, o, lse}) -> operation
Napi::Value stream_wrap::attention_forward(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const Napi::Object description = description_of(info, "attentionForward");
  struct forward_job : attention_job {
    rows_operand q, k, v, o, lse;
  };
  auto job = std::make_shared<forward_job>();
  read_problem(*job, description);
  const auto q_rows = static_cast<uint64_t>(job->what.q_rows);
  const auto kv_rows = static_cast<uint64_t>(job->what.kv_rows);
  job->q = rows_of(description, "q", q_rows, job->q_row_bytes);
  job->k = rows_of(description, "k", kv_rows, job->kv_row_bytes);
  job->v = rows_of(description, "v", kv_rows, job->kv_row_bytes);
  job->o = rows_of(description, "o", q_rows, job->q_row_bytes);
  job->lse = rows_of(description, "lse", q_rows, job->lse_row_bytes);
  check_disjoint(env, {&job->q, &job->k, &job->v}, {&job->o, &job->lse});
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) {
                             job->what.cancel = &cancel;
                             const attention::forward_args args{job->what, job->q.input(), job->k.input(), job->v.input(), job->o.output(), job->lse.output()};
                             std::string why;
                             const attention::status end = attention::forward(args, &why);
                             return outcome_of(end, std::move(why));
                           })));
}

// ({as attentionForward, with q, k, v, o, lse as inputs, and dO, dQ, dK, dV}) -> operation
Napi::Value stream_wrap::attention_backward(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const Napi::Object description = description_of(info, "attentionBackward");
  struct backward_job : attention_job {
    rows_operand d_o, q, k, v, o, lse, d_q, d_k, d_v;
  };
  auto job = std::make_shared<backward_job>();
  read_problem(*job, description);
  const auto q_rows = static_cast<uint64_t>(job->what.q_rows);
  const auto kv_rows = static_cast<uint64_t>(job->what.kv_rows);
  job->d_o = rows_of(description, "dO", q_rows, job->q_row_bytes);
  job->q = rows_of(description, "q", q_rows, job->q_row_bytes);
  job->k = rows_of(description, "k", kv_rows, job->kv_row_bytes);
  job->v = rows_of(description, "v", kv_rows, job->kv_row_bytes);
  job->o = rows_of(description, "o", q_rows, job->q_row_bytes);
  job->lse = rows_of(description, "lse", q_rows, job->lse_row_bytes);
  job->d_q = rows_of(description, "dQ", q_rows, job->q_row_bytes);
  job->d_k = rows_of(description, "dK", kv_rows, job->kv_row_bytes);
  job->d_v = rows_of(description, "dV", kv_rows, job->kv_row_bytes);
  check_disjoint(env, {&job->d_o, &job->q, &job->k, &job->v, &job->o, &job->lse}, {&job->d_q, &job->d_k, &job->d_v});
  return Napi::Number::New(env, static_cast<double>(launch(env, [job](const std::atomic<uint32_t>& cancel) {
                             job->what.cancel = &cancel;
                             const attention::backward_args args{job->what,        job->d_o.input(), job->q.input(),
                                                                 job->k.input(),   job->v.input(),   job->lse.input(),
                                                                 job->o.input(),   {nullptr, 0},     job->d_q.output(),
                                                                 job->d_k.output(), job->d_v.output()};
                             std::string why;
                             const attention::status end = attention::backward(args, &why);
                             return outcome_of(end, std::move(why));
                           })));
}

} // namespace ep::binding
