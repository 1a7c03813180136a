// The host build alone, linked from two units.
#include "host_kernels.hpp"

int main() {
  const auto first = compile_test::first_view();
  const auto second = compile_test::second_view();
  const bool same = first.fast[0] == second.fast[0] && first.simt[1] == second.simt[1];
  const bool right = first.bf16_of_third == 0x3eab && second.bf16_of_third == 0x3eab && first.f16_of_third == 0x3555;
  return same && right ? 0 : 1;
}
