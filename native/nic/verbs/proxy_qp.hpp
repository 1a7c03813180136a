// One queue pair of the proxy: an mlx5 ring in front, a plain RC queue pair behind.
#pragma once

#include <memory>
#include <span>

#include "dl/verbs_context.hpp"
#include "nic/mlx5/queues.hpp"

namespace ep::nic {

class proxy_qp {
 public:
  // `in`: CREATE_QP. `sq` and `dbr` are the umem places that it names.
  static result<std::unique_ptr<proxy_qp>> create(std::shared_ptr<const dl::rc_symbols> verbs, dl::verbs_context& device, dl::verbs::pd* pd, std::span<const uint8_t> in, uint8_t* sq,
                                                  uint8_t* dbr, completion_queue* cq);
  ~proxy_qp();
  proxy_qp(const proxy_qp&) = delete;

  uint32_t qpn() const { return qp_->qp_num; }
  uint8_t state() const { return state_; }
  completion_queue* cq() const { return cq_; }
  // A transition, as the command has it.
  result<nothing> modify(uint32_t opcode, std::span<const uint8_t> in, dl::mlx5_link link);
  // The number of the packet that it awaits.
  result<uint32_t> next_psn() const;
  // Posts what the doorbell record tells of, and passes completions on. False: there was nothing to do.
  bool progress();

 private:
  proxy_qp(std::shared_ptr<const dl::rc_symbols> verbs, dl::verbs_context& device) : verbs_(std::move(verbs)), device_(device) {}
  bool post_next(uint16_t producer);
  bool post(const work_request& request, const uint8_t* wqe);
  bool complete();
  void refuse(const work_request& request, uint8_t syndrome);
  void fail();

  std::shared_ptr<const dl::rc_symbols> verbs_;
  dl::verbs_context& device_;
  dl::verbs::cq* verbs_cq_ = nullptr;
  dl::verbs::qp* qp_ = nullptr;
  completion_queue* cq_ = nullptr;
  uint8_t* sq_ = nullptr;
  uint8_t* dbr_ = nullptr;
  uint32_t log_depth_ = 0;
  uint32_t user_index_ = 0;
  uint64_t max_message_ = 0;
  uint16_t consumer_ = 0;
  uint8_t state_ = EP_MLX5_QP_STATE_RST;
};

} // namespace ep::nic
