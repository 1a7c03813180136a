/* Collective calls of a process group on tensors of a device: arguments of one launch, by value, so that nothing has to be copied to the device before it. */
#ifndef EP_ABI_GROUP_H
#define EP_ABI_GROUP_H

#include "dispatch.h"

/* Ranks of a group whose calls run on a device: their pieces are kernel arguments, of which there are 4 KiB. */
#define EP_GROUP_MOST_RANKS 64

/* Blocks of one rank: each has a signal word for every source. */
#define EP_GROUP_MOST_BLOCKS 128

/* What an element is: numbers as in core/collective/reduce.hpp. */
#define EP_ELEMENT_F64 0u
#define EP_ELEMENT_F32 1u
#define EP_ELEMENT_F16 2u
#define EP_ELEMENT_BF16 3u
#define EP_ELEMENT_I64 4u
#define EP_ELEMENT_U64 5u
#define EP_ELEMENT_I32 6u
#define EP_ELEMENT_U32 7u
#define EP_ELEMENT_I16 8u
#define EP_ELEMENT_U16 9u
#define EP_ELEMENT_I8 10u
#define EP_ELEMENT_U8 11u

/* How elements are folded: likewise. */
#define EP_FOLD_SUM 0u
#define EP_FOLD_AVG 1u
#define EP_FOLD_PRODUCT 2u
#define EP_FOLD_MIN 3u
#define EP_FOLD_MAX 4u
#define EP_FOLD_BAND 5u
#define EP_FOLD_BOR 6u
#define EP_FOLD_BXOR 7u
#define EP_FOLD_PREMUL_SUM 8u

/* ep_group_args.mode */
#define EP_GROUP_EXCHANGE 0u /* sends[p] becomes takes[self] of p */
#define EP_GROUP_FOLD 1u     /* out becomes the fold of what all have sent here; out.bytes is 0 where nothing is folded */
#define EP_GROUP_FOLD_ALL 2u /* out becomes, on all, the fold of every rank's sends[0]; sends and takes are not used otherwise */

typedef struct ep_group_piece {
  uint64_t address;
  uint64_t bytes; /* 0: nothing; then there is no address either */
} ep_group_piece;
EP_STATIC_ASSERT(sizeof(ep_group_piece) == 16, "an array, by rank");

/* Begins each message of a call's first round. */
typedef struct ep_group_head {
  uint64_t signature; /* of the call: the same on all ranks */
  uint64_t bytes;     /* of this pair */
  uint64_t chunks;    /* that the sender's longest pair is cut into */
  uint64_t reserved[5];
} ep_group_head;
EP_STATIC_ASSERT(sizeof(ep_group_head) == 64, "what follows it is aligned as it is");

typedef struct ep_group_args {
  ep_memory_handle memory; /* slots: [bank of 2][block][source] of slot_bytes, an ep_group_head and its payload */
  uint64_t status;         /* address of ep_kernel_status */
  uint64_t rounds;         /* address of uint64_t[blocks] on the device: rounds that each block has gone through in all calls so far */
  uint64_t slot_bytes;     /* a multiple of 64 */
  uint64_t signature;
  uint64_t factor_bits;    /* of the double of EP_FOLD_PREMUL_SUM */
  uint32_t mode;           /* EP_GROUP_* */
  uint32_t element;        /* EP_ELEMENT_*; of an exchange, any */
  uint32_t fold;           /* EP_FOLD_* */
  uint32_t blocks;         /* that the slots are laid out for; a call may be launched with fewer */
  ep_group_piece out;
  ep_group_piece sends[EP_GROUP_MOST_RANKS]; /* by receiver; one's own is folded or copied where it lies */
  ep_group_piece takes[EP_GROUP_MOST_RANKS]; /* by source; of a fold, only how much */
} ep_group_args;
EP_STATIC_ASSERT(sizeof(ep_group_args) == 2184, "handed to kernels by value");

/* A rank that gives a call up adds this to its word at every peer. In bits 48 to 55 stands the rank that it blames, plus one (0: it gave up of itself), in bits 56 to 61
 * its EP_STATUS_*; counts of rounds stay far below. Behind it goes a note, which every wait looks at: 1 to the peer's word of itself, EP_GROUP_OWN_NOTE to its own for
 * each of its blocks. */
#define EP_GROUP_GIVEN_UP 0x4000000000000000ull
#define EP_GROUP_OWN_NOTE 0x100000000ull
#define EP_GROUP_COUNT_END 0x1000000000000ull
#define EP_GROUP_GIVEN_UP_RANK 48
#define EP_GROUP_GIVEN_UP_STATUS 56

#endif
