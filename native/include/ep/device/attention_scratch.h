/* Scratch of one block of core attention, in floats: of macros, since host code that launches for a GPU reckons with them as kernels do. */
#ifndef EP_DEVICE_ATTENTION_SCRATCH_H
#define EP_DEVICE_ATTENTION_SCRATCH_H

#include "ep/abi/core_attention.h"

#define EP_ATTENTION_SLICES 8u /* partial sums of a row's product of O and dO */

#define EP_ATTENTION_PITCH(head_dim) ((head_dim) | 1u)
#define EP_ATTENTION_FORWARD_FLOATS(head_dim) (EP_ATTENTION_TILE * (4u * EP_ATTENTION_PITCH(head_dim) + EP_ATTENTION_TILE + 4u))
#define EP_ATTENTION_BACKWARD_FLOATS(head_dim) (EP_ATTENTION_TILE * (6u * EP_ATTENTION_PITCH(head_dim) + 2u * EP_ATTENTION_TILE + 4u + EP_ATTENTION_SLICES))

#endif
