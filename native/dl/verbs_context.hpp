// An opened RDMA device of any vendor: what both backings over libibverbs (mlx5 hardware, and plain queue pairs) have in common.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "mlx5.hpp"
#include "verbs_symbols.hpp"

namespace ep::dl {

class verbs_context {
 public:
  verbs_context(std::shared_ptr<const ibverbs_symbols> verbs, verbs::context* context, std::string name);
  ~verbs_context() { (void)close(); }
  verbs_context(const verbs_context&) = delete;
  verbs_context& operator=(const verbs_context&) = delete;

  const std::string& name() const { return name_; }
  verbs::context* raw() const { return context_; }

  // The calls of the table of the same names.
  result<mlx5_port> query_port(uint8_t port) const;
  result<mlx5_gid> query_gid(uint8_t port, uint32_t index) const;
  result<verbs::pd*> alloc_pd();
  result<nothing> dealloc_pd(verbs::pd* pd);
  result<mlx5_mr> reg_mr(verbs::pd* pd, const mlx5_memory& memory, uint32_t access);
  result<nothing> dereg_mr(verbs::mr* mr);
  // Of ports and of the device as a whole.
  result<std::optional<mlx5_event>> poll_event() const;
  // 0, or the error number. Later calls do nothing.
  int close();

  failure fail(const char* call, int error, const std::string& about) const;
  // Objects that live: made, and not given back.
  std::atomic<int64_t> alive{0};
  result<nothing> given_back(const char* call, int error);

 private:
  std::shared_ptr<const ibverbs_symbols> verbs_;
  verbs::context* context_;
  std::string name_;
};

// Text that says what an error number of the kernel means for whoever runs a job; "" if nothing can be said.
const char* verbs_hint(int error);
// HAZARD: reading events blocks where there are none, unless the descriptor is told not to.
void never_block(int fd);

// Calls `visit(device, name)` for each device until it returns true. ENOSYS: the kernel has no RDMA.
template <class Visit> result<nothing> verbs_each_device(const ibverbs_symbols& verbs, Visit visit);
result<verbs::device**> verbs_list(const ibverbs_symbols& verbs, int* count);

template <class Visit> result<nothing> verbs_each_device(const ibverbs_symbols& verbs, Visit visit) {
  int count = 0;
  auto list = verbs_list(verbs, &count);
  if (!list.ok()) return list.why();
  for (int i = 0; i < count; ++i) {
    if (visit(list.value()[i], std::string(verbs.ibv_get_device_name(list.value()[i])))) break;
  }
  verbs.ibv_free_device_list(list.value());
  return nothing{};
}

} // namespace ep::dl
