/* What a rank shares with its peers about itself: is it alive, does it sleep. One per rank and transport, in its control segment. */
#ifndef EP_ABI_RANK_H
#define EP_ABI_RANK_H

#include "version.h"

/* An eventcount: those who sleep count themselves in `waiters`, those who make progress visible bump `epoch` and wake them.
 * Hazard: the signaller's update and its load of `waiters` must be sequentially consistent, likewise the waiter's increment and its
 * re-check; otherwise both can miss each other and the waiter sleeps until its slice ends. */
typedef struct ep_wake_word {
  uint32_t epoch; /* the futex */
  uint32_t waiters;
} ep_wake_word;
EP_STATIC_ASSERT(sizeof(ep_wake_word) == 8, "the futex word is at offset 0");

#define EP_LIFE_STARTING 0u
#define EP_LIFE_ALIVE 1u
#define EP_LIFE_CLOSED 2u /* orderly */
#define EP_LIFE_DEAD 3u   /* its environment was torn down without close(), or its thread died */

/* `mutex` holds a robust, process-shared pthread mutex that the rank's thread owns for life: the kernel marks it when the thread dies. */
typedef struct ep_life_word {
  uint32_t state; /* EP_LIFE_* */
  uint32_t pid;
  uint64_t mutex[7];
} ep_life_word;
EP_STATIC_ASSERT(sizeof(ep_life_word) == 64, "one cache line; pthread_mutex_t has 40 bytes on glibc x86-64, 48 on aarch64");

/* Central counting barrier of a team; lives in the control segment of the team's first rank. */
typedef struct ep_barrier_word {
  uint64_t arrived;  /* running count of arrivals */
  uint8_t pad0[56];
  uint64_t released; /* running count of completed barriers */
  uint8_t pad1[56];
  ep_wake_word wake;
  uint8_t pad2[56];
} ep_barrier_word;
EP_STATIC_ASSERT(sizeof(ep_barrier_word) == 192, "arrivals and the polled word do not share a line");

#define EP_RANK_BARRIERS 64 /* teams whose root a rank may be at one time */

typedef struct ep_rank_control {
  ep_handle_header header; /* EP_MAGIC_RANK */
  int32_t rank;
  int32_t world_size;
  uint8_t pad0[40];
  ep_life_word life;
  ep_wake_word wake;
  uint8_t pad1[56];
  ep_barrier_word barriers[EP_RANK_BARRIERS];
} ep_rank_control;
EP_STATIC_ASSERT(sizeof(ep_rank_control) == 192 + 192 * EP_RANK_BARRIERS, "life, wake and barriers each begin a cache line");

#endif
