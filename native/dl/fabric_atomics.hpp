// Whether a port's atomics do what its provider says: tried on words of this process, which are reached through the provider as those of others are.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "fabric.hpp"

namespace ep::dl {

class atomics_trial {
 public:
  // Empty: they do. Otherwise what is wrong. HAZARD: the port may write here until it is closed: where something is wrong, it goes first.
  std::string run(fabric_port& port, int64_t within_ns);

 private:
  static constexpr size_t additions = 8;
  struct operation {
    fabric_context context{}; // HAZARD: the first member: events give its address
    uint64_t operand = 0;
    uint64_t compare = 0;
    uint64_t old = 0;
    bool under_way = false;
  };
  template <class Post> std::string post(fabric_port& port, operation& one, Post&& attempt);
  std::string end_all(fabric_port& port);
  std::string look(fabric_port& port);
  std::string add(fabric_port& port, uint64_t to, const fabric_region& region);
  std::string swap(fabric_port& port, uint64_t to, const fabric_region& region, uint64_t compare, uint64_t wanted, uint64_t expected);
  uint64_t word(size_t index) const;

  int64_t end_ns_ = 0;
  std::array<uint64_t, 3> words_{}; // nobody touches the first and the last
  std::array<operation, additions> operations_{};
  std::vector<fabric_event> events_;
};

} // namespace ep::dl
