/* What a rank shares with its peers about itself: is it alive, does it sleep. One per rank and transport, in its control segment. */
#ifndef EP_ABI_RANK_H
#define EP_ABI_RANK_H

#include "version.h"

/* An eventcount: those who sleep count themselves in `waiters`, those who make progress visible bump `epoch` and wake them.
 * Hazard: the signaller's update and its load of `waiters` must be sequentially consistent (or have such a fence between them), likewise the
 * waiter's increment and its re-check; otherwise both can miss each other and the waiter sleeps until its slice ends.
 * A word that only one process uses may have a sleeper who awaits descriptors, too (core/wake_descriptor.hpp): then `waiters` is EP_WAKE_BY_DESCRIPTOR and the
 * number of an eventfd, and whoever makes progress visible writes to that instead, and counts itself in `epoch` meanwhile. */
#define EP_WAKE_BY_DESCRIPTOR 0x80000000u
typedef struct ep_wake_word {
  uint32_t epoch; /* the futex */
  uint32_t waiters;
} ep_wake_word;
EP_STATIC_ASSERT(sizeof(ep_wake_word) == 8, "the futex word is at offset 0");

#define EP_LIFE_STARTING 0u
#define EP_LIFE_ALIVE 1u
#define EP_LIFE_CLOSED 2u /* orderly */
#define EP_LIFE_DEAD 3u   /* its environment was torn down without close(), or its thread died */
#define EP_LIFE_ABSENT 4u /* nobody is in this place; somebody may come */

/* `mutex` holds a robust, process-shared pthread mutex that the rank's thread owns for life: the kernel marks it when the thread dies. */
typedef struct ep_life_word {
  uint32_t state; /* EP_LIFE_* */
  uint32_t pid;
  uint64_t mutex[7];
} ep_life_word;
EP_STATIC_ASSERT(sizeof(ep_life_word) == 64, "one cache line; pthread_mutex_t has 40 bytes on glibc x86-64, 48 on aarch64");

/* Cores that a rank's thread may run on: a bit for each, by its number modulo EP_CORES, so that two may look like one, never one like two. None: it has not said. */
#define EP_CORES 448u
typedef struct ep_core_set {
  uint64_t words[7];
} ep_core_set;
EP_STATIC_ASSERT(sizeof(ep_core_set) * 8 == EP_CORES, "and fills the line of a wake word");

typedef struct ep_rank_control {
  ep_handle_header header; /* EP_MAGIC_RANK */
  int32_t rank;
  int32_t world_size;
  uint8_t pad0[40];
  ep_life_word life;
  ep_wake_word wake;
  ep_core_set cores; /* as it began */
} ep_rank_control;
EP_STATIC_ASSERT(sizeof(ep_rank_control) == 192, "life and wake each begin a cache line");

/* A team's own segment, made by its first member: a central counting barrier and two sets of exchange slots. A new team gets a new segment, so
 * no word is ever reused under a rank that still waits on it.
 * ep_team_control is followed by uint64_t entered[size] (barriers each member has entered: names the missing on a timeout), padded to 64 bytes,
 * then by 2 x size slots of EP_TEAM_EXCHANGE_BYTES. */
typedef struct ep_team_control {
  ep_handle_header header; /* EP_MAGIC_TEAM */
  int32_t size;
  uint8_t pad0[44];
  uint64_t arrived; /* running count of arrivals */
  uint8_t pad1[56];
  uint64_t released; /* running count of completed barriers; whoever arrives last raises it and wakes every member */
  uint8_t pad2[56];
} ep_team_control;
EP_STATIC_ASSERT(sizeof(ep_team_control) == 192, "arrivals and the polled word do not share a line");

#define EP_TEAM_EXCHANGE_BYTES 1024 /* largest blob of one all-gather */

#endif
