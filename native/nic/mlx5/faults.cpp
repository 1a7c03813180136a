#include "faults.hpp"

#include <array>
#include <charconv>
#include <string>
#include <utility>

#include "ep/abi/mlx5_wqe.h"

namespace ep::nic {
namespace {

constexpr std::array<std::pair<std::string_view, fault_kind>, 10> kinds{{
    {"drop", fault_kind::drop},
    {"drop-ack", fault_kind::drop_ack},
    {"delay", fault_kind::delay},
    {"hold", fault_kind::hold},
    {"torn", fault_kind::torn},
    {"partial", fault_kind::partial},
    {"lose-doorbell", fault_kind::lose_doorbell},
    {"repeat-doorbell", fault_kind::repeat_doorbell},
    {"link-down", fault_kind::link_down},
    {"reorder", fault_kind::reorder},
}};

bool is_atomic(uint8_t opcode) {
  return opcode == EP_MLX5_OPCODE_ATOMIC_CS || opcode == EP_MLX5_OPCODE_ATOMIC_FA || opcode == EP_MLX5_OPCODE_ATOMIC_MASKED_CS ||
         opcode == EP_MLX5_OPCODE_ATOMIC_MASKED_FA;
}

bool parse_number(std::string_view text, uint64_t& value) {
  const bool hex = text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
  if (hex) text.remove_prefix(2);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, hex ? 16 : 10);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

std::string_view next_word(std::string_view& line) {
  const size_t begin = line.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  const size_t end = std::min(line.find_first_of(" \t\r", begin), line.size());
  const std::string_view word = line.substr(begin, end - begin);
  line.remove_prefix(end);
  return word;
}

bool apply(fault_rule& rule, std::string_view key, std::string_view text) {
  if (key == "opcode" && text == "atomic") {
    rule.any_opcode = false;
    rule.atomics = true;
    return true;
  }
  uint64_t value = 0;
  if (!parse_number(text, value)) return false;
  const bool doorbell = rule.kind == fault_kind::lose_doorbell || rule.kind == fault_kind::repeat_doorbell;
  if (key == "qpn" && value <= 0xffffff) {
    rule.any_qpn = false;
    rule.qpn = static_cast<uint32_t>(value);
  } else if (key == "opcode" && value <= 0xff && !doorbell) {
    rule.any_opcode = false;
    rule.opcode = static_cast<uint8_t>(value);
  } else if (key == "skip") {
    rule.skip = value;
  } else if (key == "count") {
    rule.count = value;
  } else if ((key == "ns" && (rule.kind == fault_kind::delay || rule.kind == fault_kind::torn || rule.kind == fault_kind::link_down) && value <= INT64_MAX / 2) ||
             (key == "pieces" && rule.kind == fault_kind::partial && value >= 1 && value <= 4096)) {
    rule.value = value;
  } else {
    return false;
  }
  return true;
}

} // namespace

result<fault_script> fault_script::parse(std::string_view text) {
  fault_script script;
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    const auto refuse = [&](std::string_view word, const char* why) {
      return failure{EP_STATUS_INVALID, 0, "line " + std::to_string(number) + " of a fault script: '" + std::string(word) + "' " + why};
    };
    const std::string_view name = next_word(line);
    if (name.empty() || name[0] == '#') continue;
    fault_rule rule;
    bool known = false;
    for (const auto& [text_of, kind] : kinds) {
      if (text_of != name) continue;
      rule.kind = kind;
      known = true;
    }
    if (!known) return refuse(name, "is no fault: drop, drop-ack, delay, hold, torn, partial, lose-doorbell, repeat-doorbell, link-down or reorder");
    rule.value = rule.kind == fault_kind::partial ? 4 : 0;
    if (rule.kind == fault_kind::link_down) rule.count = 1; // a link that is up again may stay so
    for (std::string_view word = next_word(line); !word.empty(); word = next_word(line)) {
      const size_t equals = word.find('=');
      if (equals == std::string_view::npos || !apply(rule, word.substr(0, equals), word.substr(equals + 1))) {
        return refuse(word, "does not apply to this fault, or its number is out of range");
      }
    }
    if (rule.kind == fault_kind::delay && rule.value == 0) return refuse(name, "needs ns=N, N > 0");
    script.rules_.push_back(rule);
  }
  return script;
}

bool fault_script::has(fault_kind kind) const {
  for (const fault_rule& rule : rules_) {
    if (rule.kind == kind) return true;
  }
  return false;
}

const fault_rule* fault_script::hit(fault_kind kind, uint32_t qpn, uint8_t opcode) {
  for (fault_rule& rule : rules_) {
    if (rule.kind != kind || rule.count == 0) continue;
    if (!rule.any_qpn && rule.qpn != qpn) continue;
    if (!rule.any_opcode && !(rule.atomics ? is_atomic(opcode) : rule.opcode == opcode)) continue;
    if (rule.skip > 0) {
      --rule.skip;
      continue;
    }
    if (rule.count != UINT64_MAX) --rule.count;
    return &rule;
  }
  return nullptr;
}

} // namespace ep::nic
