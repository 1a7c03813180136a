// What goes wrong, by script. A script is text, one rule a line:
//
//   hold      stage=S [match]                  that stage of a request (payload, land, tick, ack, cqe, count; fetch: of a queue pair) waits until release()
//   delay     stage=S ns=N [match]             it comes that much later
//   fail      status=N [match]                 the request ends with this status and nothing of it lands
//   cut       bytes=N [match]                  its fragments are that large, a multiple of 8
//   lose-doorbell   [qpn=N] [count=N] [skip=N] a doorbell that the NIC never sees; the next one must catch up
//   repeat-doorbell [qpn=N] ...                a doorbell that arrives twice
//   drop-fence      [writer=N] ...             a poster's fence that does nothing, of a device that watches stores
//
// match: qpn=N, opcode=N. The first `skip` matches pass, then `count` are hit (default: all). Lines may be empty or begin with #.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "events.hpp"
#include "status.hpp"

namespace ep::nic::efa {

enum class fault_kind : uint8_t { hold, delay, fail, cut, lose_doorbell, repeat_doorbell, drop_fence };

struct fault_rule {
  fault_kind kind = fault_kind::hold;
  stage at = stage::fetch; // of hold and delay
  bool any_qpn = true;
  bool any_opcode = true;
  bool any_writer = true;
  uint8_t opcode = 0;
  uint32_t qpn = 0;
  uint64_t writer = 0;
  uint64_t skip = 0;
  uint64_t count = UINT64_MAX;
  uint64_t value = 0; // ns of delay, status of fail, bytes of cut
};

class fault_script {
 public:
  // EP_STATUS_INVALID names line and word.
  static result<fault_script> parse(std::string_view text);
  bool empty() const { return rules_.empty(); }
  // The first rule of this kind that matches and has not run out; counts the match. Whoever has no opcode or writer gives 0.
  const fault_rule* hit(fault_kind kind, uint32_t qpn, uint8_t opcode, uint64_t writer = 0);
  const fault_rule* hit(fault_kind kind, stage at, uint32_t qpn, uint8_t opcode);

 private:
  template <class Also> const fault_rule* find(fault_kind kind, uint32_t qpn, uint8_t opcode, const Also& also);
  std::vector<fault_rule> rules_;
};

} // namespace ep::nic::efa
