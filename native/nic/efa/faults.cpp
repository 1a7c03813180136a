#include "faults.hpp"

#include <array>
#include <charconv>
#include <string>
#include <utility>

namespace ep::nic::efa {
namespace {

constexpr std::array<std::pair<std::string_view, fault_kind>, 7> kinds{{
    {"hold", fault_kind::hold},
    {"delay", fault_kind::delay},
    {"fail", fault_kind::fail},
    {"cut", fault_kind::cut},
    {"lose-doorbell", fault_kind::lose_doorbell},
    {"repeat-doorbell", fault_kind::repeat_doorbell},
    {"drop-fence", fault_kind::drop_fence},
}};

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

bool of_request(fault_kind kind) { return kind == fault_kind::hold || kind == fault_kind::delay || kind == fault_kind::fail || kind == fault_kind::cut; }

bool parse_stage(fault_rule& rule, std::string_view text) {
  if (rule.kind != fault_kind::hold && rule.kind != fault_kind::delay) return false;
  for (uint32_t i = static_cast<uint32_t>(stage::fetch); i < stages; ++i) {
    if (text != stage_name(static_cast<stage>(i))) continue;
    rule.at = static_cast<stage>(i);
    // A queue pair whose fetching is delayed is one that is held for a while: release() says how long.
    return rule.kind == fault_kind::hold || rule.at != stage::fetch;
  }
  return false;
}

// What a kind of fault cannot do without.
const char* missing(const fault_rule& rule, bool staged) {
  if ((rule.kind == fault_kind::hold || rule.kind == fault_kind::delay) && !staged) return "needs stage=S";
  if (rule.kind == fault_kind::delay && rule.value == 0) return "needs ns=N, N > 0";
  if (rule.kind == fault_kind::fail && rule.value == 0) return "needs status=N, N > 0";
  if (rule.kind == fault_kind::cut && rule.value == 0) return "needs bytes=N, a multiple of 8";
  return nullptr;
}

bool apply(fault_rule& rule, std::string_view key, std::string_view text) {
  if (key == "stage") return parse_stage(rule, text);
  uint64_t value = 0;
  if (!parse_number(text, value)) return false;
  if (key == "qpn" && value <= 0xffff && rule.kind != fault_kind::drop_fence) {
    rule.any_qpn = false;
    rule.qpn = static_cast<uint32_t>(value);
  } else if (key == "opcode" && value <= 0xf && of_request(rule.kind)) {
    rule.any_opcode = false;
    rule.opcode = static_cast<uint8_t>(value);
  } else if (key == "writer" && rule.kind == fault_kind::drop_fence) {
    rule.any_writer = false;
    rule.writer = value;
  } else if (key == "skip") {
    rule.skip = value;
  } else if (key == "count") {
    rule.count = value;
  } else if ((key == "ns" && rule.kind == fault_kind::delay && value <= INT64_MAX / 2) || (key == "status" && rule.kind == fault_kind::fail && value <= 0xff) ||
             (key == "bytes" && rule.kind == fault_kind::cut && value % 8 == 0)) {
    rule.value = value;
  } else {
    return false;
  }
  return true;
}

} // namespace

const char* stage_name(stage what) {
  static constexpr std::array<const char*, stages> names{"line", "doorbell", "fetch", "payload", "land", "tick", "ack", "cqe", "count"};
  return names[static_cast<size_t>(what)];
}

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
    if (!known) return refuse(name, "is no fault: hold, delay, fail, cut, lose-doorbell, repeat-doorbell or drop-fence");
    bool staged = false;
    for (std::string_view word = next_word(line); !word.empty(); word = next_word(line)) {
      const size_t equals = word.find('=');
      if (equals == std::string_view::npos || !apply(rule, word.substr(0, equals), word.substr(equals + 1))) {
        return refuse(word, "does not apply to this fault, or its number is out of range");
      }
      staged = staged || word.substr(0, equals) == "stage";
    }
    if (const char* why = missing(rule, staged)) return refuse(name, why);
    script.rules_.push_back(rule);
  }
  return script;
}

template <class Also> const fault_rule* fault_script::find(fault_kind kind, uint32_t qpn, uint8_t opcode, const Also& also) {
  for (fault_rule& rule : rules_) {
    if (rule.kind != kind || rule.count == 0 || !also(rule)) continue;
    if (!rule.any_qpn && rule.qpn != qpn) continue;
    if (!rule.any_opcode && rule.opcode != opcode) continue;
    if (rule.skip > 0) {
      --rule.skip;
      continue;
    }
    if (rule.count != UINT64_MAX) --rule.count;
    return &rule;
  }
  return nullptr;
}

const fault_rule* fault_script::hit(fault_kind kind, uint32_t qpn, uint8_t opcode, uint64_t writer) {
  return find(kind, qpn, opcode, [&](const fault_rule& rule) { return rule.any_writer || rule.writer == writer; });
}

const fault_rule* fault_script::hit(fault_kind kind, stage at, uint32_t qpn, uint8_t opcode) {
  return find(kind, qpn, opcode, [&](const fault_rule& rule) { return rule.at == at; });
}

} // namespace ep::nic::efa
