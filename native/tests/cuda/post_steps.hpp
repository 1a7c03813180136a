// What is posted: lists of steps from seeds.
#pragma once

#include "post_nic.hpp"

namespace ep::test {

template <class Step> std::vector<uint8_t> as_bytes(const std::vector<Step>& steps) {
  const auto* begin = reinterpret_cast<const uint8_t*>(steps.data());
  return {begin, begin + steps.size() * sizeof(Step)};
}

// Every kind of request alone and in batches, then any; WQEs enough for some rounds of the ring.
inline std::vector<mlx5_step> mlx5_posts_of(const post_shape& shape, bool whole, bool named) {
  ep::random_source random(shape.seed * 977 + 1);
  std::vector<mlx5_step> steps;
  const auto add = [&](mlx5_op op, uint32_t count) {
    mlx5_step step{};
    step.op = op;
    step.count = count;
    step.bytes = 1 + random.below(200);
    step.from = random.below(2048);
    step.to = steps.size() << 12;
    step.value = random.next();
    if (op == mlx5_op::long_inline) {
      step.bytes = EP_IBGDA_MAX_INLINE + 1 + random.below(EP_IBGDA_MAX_LONG_INLINE - EP_IBGDA_MAX_INLINE);
      step.count = ep::mlx5_inline_blocks(static_cast<uint32_t>(step.bytes)) + 1;
    }
    if (op == mlx5_op::masked_swap) step.count = ep::mlx5_masked_swap_blocks + 1;
    steps.push_back(step);
  };
  const auto ops = static_cast<uint32_t>(whole ? mlx5_op::masked_swap : mlx5_op::mixed) + 1;
  for (uint32_t i = 0; i < 3 * ops + 60; ++i) {
    const auto op = static_cast<mlx5_op>(i < 3 * ops ? i % ops : random.below(ops));
    if (named && (op == mlx5_op::nop || op >= mlx5_op::mixed)) continue;
    add(op, i < ops ? 1 : 1 + static_cast<uint32_t>(random.below(i % 7 == 0 ? shape.depth : shape.depth / 2)));
  }
  return steps;
}

inline std::vector<mlx5_step> mlx5_puts_of(const post_shape& shape, bool whole) {
  ep::random_source random(shape.seed * 991 + 2);
  std::vector<mlx5_step> steps;
  for (uint32_t i = 0; i < 100; ++i) {
    mlx5_step step{};
    step.value = random.below(1000);
    step.slot = random.below(4) == 0 ? EP_NO_SLOT : random.below(16);
    step.to = random.below(1 << 20);
    step.from = random.below(64);
    step.bytes = 1 + random.below(i % 3 == 0 ? EP_IBGDA_MAX_INLINE : 150);
    step.rows = random.below(8);
    step.stride = step.bytes + (i % 2 == 0 ? 0 : random.below(20));
    step.op = mlx5_op::put_rows;
    if (i % 5 == 1) {
      step.op = mlx5_op::signal;
      step.peer = static_cast<int32_t>(i / 5 % 2);
      step.slot = random.below(16);
    } else if (i % 5 == 2 && whole) {
      step.op = mlx5_op::put_loose;
      step.rows = 1;
      step.stride = step.bytes = EP_IBGDA_MAX_INLINE + 1 + random.below(EP_IBGDA_MAX_LONG_INLINE - EP_IBGDA_MAX_INLINE);
    }
    steps.push_back(step);
  }
  return steps;
}

inline std::vector<ep_gin_step> gin_steps_of(const post_shape& shape) {
  ep::random_source random(shape.seed * 1009 + 3);
  const bool pr = shape.way == post_way::pr;
  const uint32_t ours[] = {EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_PUT, EP_GIN_GET, EP_GIN_SIGNAL, EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_READ_COUNTER, EP_GIN_PUT_VALUE, EP_GIN_FLUSH, EP_GIN_LOOK_COUNTER, EP_GIN_RESET_COUNTER};
  const uint32_t theirs[] = {EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_SIGNAL, EP_GIN_PUT, EP_GIN_PUT_VALUE, EP_GIN_PUT, EP_GIN_FLUSH};
  std::vector<ep_gin_step> steps;
  for (uint32_t i = 0; i < 160; ++i) {
    ep_gin_step step{};
    step.op = pr ? theirs[random.below(std::size(theirs))] : ours[random.below(std::size(ours))];
    step.peer = 1;
    step.bytes = step.op == EP_GIN_PUT_VALUE ? (pr ? (i % 2 == 0 ? 8 : 2) : 1u << random.below(4)) : 1 + random.below(std::min<uint64_t>(2000, i % 8 == 0 ? 3 * shape.max_message : shape.max_message));
    if (step.op == EP_GIN_PUT && random.below(10) == 0) step.bytes = 0;
    step.to = random.below(2048);
    step.from = random.below(2048);
    step.value = random.next();
    step.signal = static_cast<uint32_t>(random.below(2));
    step.add = static_cast<uint32_t>(random.below(3) == 0 ? random.below(6) : random.below(2));
    step.counter = static_cast<uint32_t>(random.below(2));
    step.flags = (random.below(3) != 0 ? EP_GIN_AGGREGATE : 0u) | (random.below(3) == 0 ? EP_GIN_COUNTED : 0u);
    steps.push_back(step);
  }
  steps.push_back({EP_GIN_FLUSH, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  return steps;
}

inline std::vector<ep_gin_step> lane_steps_of(const post_shape& shape) {
  ep::random_source random(shape.seed * 1013 + 4);
  std::vector<ep_gin_step> steps;
  for (uint32_t i = 0; i < 40; ++i) {
    ep_gin_step step{};
    step.op = i % 9 == 8 ? EP_GIN_FLUSH : EP_GIN_PUT;
    step.bytes = 1 + random.below(std::min<uint64_t>(shape.max_message, 64));
    step.to = random.below(1024);
    step.from = random.below(1024);
    step.value = i % 3 == 0 ? UINT32_MAX : random.next() & random.next();
    step.signal = static_cast<uint32_t>(random.below(2));
    step.add = static_cast<uint32_t>(random.below(2));
    step.counter = static_cast<uint32_t>(random.below(2));
    step.flags = (random.below(2) != 0 ? EP_GIN_AGGREGATE : 0u) | (random.below(2) == 0 ? EP_GIN_COUNTED : 0u);
    steps.push_back(step);
  }
  steps.push_back({EP_GIN_FLUSH, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  return steps;
}

inline std::vector<ep_gin_step> efa_rows_of(const post_shape& shape) {
  ep::random_source random(shape.seed * 1019 + 5);
  std::vector<ep_gin_step> steps;
  for (uint32_t i = 0; i < 100; ++i) {
    ep_gin_step step{};
    step.op = i % 5 == 1 ? EP_GIN_SIGNAL : EP_GIN_PUT;
    step.to = random.below(1024);
    step.from = random.below(64);
    step.bytes = 1 + random.below(150);
    step.value = random.below(8);
    step.found = step.bytes + (i % 2 == 0 ? 0 : random.below(20));
    step.signal = static_cast<uint32_t>(random.below(3)); // 2: none
    step.add = static_cast<uint32_t>(random.below(i % 8 == 0 ? 20 : 3));
    steps.push_back(step);
  }
  return steps;
}

} // namespace ep::test
