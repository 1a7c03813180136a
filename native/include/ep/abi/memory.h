/* A symmetric memory as kernels see it. */
#ifndef EP_ABI_MEMORY_H
#define EP_ABI_MEMORY_H

#include "version.h"

/* ep_handle_header.kind of an ep_memory_handle: how kernels reach peers. */
#define EP_MEMORY_LOAD_STORE 1u /* peers' memory is mapped: plain stores, then a release signal */
#define EP_MEMORY_PROXY 2u      /* requests go through ep_proxy_ring; an engine on the host executes them */
#define EP_MEMORY_IBGDA 3u      /* kernels post WQEs to the queue pairs of ep_ibgda_device (ibgda.h) */
#define EP_MEMORY_EFA 4u        /* kernels post WQEs to the queue pairs of ep_efa_device (efa_gda.h) */
/* Peers that are mapped are stored to, as is the rank itself; all others are reached as above, over the same memory and signal words. */
#define EP_MEMORY_MIXED_IBGDA 5u
#define EP_MEMORY_MIXED_EFA 6u
#define EP_MEMORY_MIXED_PROXY 7u

/* Addresses, in the process of the reader, of one rank's parts. 0 where a peer is not mapped (EP_MEMORY_PROXY,
 * EP_MEMORY_IBGDA and EP_MEMORY_EFA: all but one's own; EP_MEMORY_MIXED_*: those that the NIC or the engine reaches). */
typedef struct ep_peer_view {
  uint64_t data;    /* first byte of the peer's part */
  uint64_t signals; /* uint64_t[signal_slots] */
  uint64_t wake;    /* ep_wake_word of the rank */
  uint64_t life;    /* ep_life_word of the rank */
} ep_peer_view;
EP_STATIC_ASSERT(sizeof(ep_peer_view) == 32, "indexed by rank");

typedef struct ep_memory_handle {
  ep_handle_header header; /* EP_MAGIC_MEMORY */
  int32_t rank;
  int32_t world_size;
  uint64_t byte_length;  /* of each rank's part */
  uint64_t signal_slots; /* of each rank's part */
  uint64_t peers;        /* address of ep_peer_view[world_size] */
  uint64_t proxy;        /* address of ep_proxy_ring (EP_MEMORY_PROXY, _MIXED_PROXY), ep_ibgda_memory (_IBGDA, _MIXED_IBGDA) or ep_efa_memory (_EFA, _MIXED_EFA), or 0 */
  uint64_t memory_id;    /* names this memory to the proxy engine */
} ep_memory_handle;
EP_STATIC_ASSERT(sizeof(ep_memory_handle) == 64, "one cache line, handed to kernels by value");

/* One request of a kernel to the engine behind EP_MEMORY_PROXY. Rows may be strided at the source and are packed at the destination. */
#define EP_PROXY_PUT 1u
#define EP_PROXY_SIGNAL 2u

typedef struct ep_proxy_request {
  uint64_t turn;       /* published last with release: sequence + 1; the engine waits for it */
  uint32_t op;         /* EP_PROXY_* */
  int32_t peer;
  uint64_t memory_id;
  uint64_t src;        /* address of the first row */
  uint64_t src_stride; /* bytes between rows */
  uint64_t row_bytes;
  uint64_t rows;
  uint64_t dst_offset; /* bytes into the peer's part */
  uint64_t slot;       /* signal slot at the peer, or EP_NO_SLOT */
  uint64_t add;        /* added to the slot once this request's bytes have landed ('bundled') */
  uint64_t reserved[6];
} ep_proxy_request;
EP_STATIC_ASSERT(sizeof(ep_proxy_request) == 128, "two cache lines; a ring index is a multiplication by 128");

#define EP_NO_SLOT UINT64_MAX

/* Set in `tail` by an engine that stops. A producer meets it before it takes a number, or loses its compare-exchange to it, so that no request is accepted
 * any more: EP_STATUS_CLOSED. Numbers are below it. If requests that were accepted before are lost, `completed` becomes EP_PROXY_LOST, which ends all waits
 * for it. Hazard: `reserve` is of device scope, so a host must not stop an engine under a running kernel of a GPU. */
#define EP_PROXY_STOPPED 0x8000000000000000u
#define EP_PROXY_LOST UINT64_MAX

/* Multi-producer ring: a producer waits until `head` shows room for the number that `tail` gives next, takes that number by compare-exchange (or
 * starts again), writes, then publishes `turn`.
 * Hazard: every number taken must be published, or the engine waits for it for ever; so nothing that may fail comes after the reservation. */
typedef struct ep_proxy_ring {
  uint64_t tail; /* next number to be taken by a producer */
  uint8_t pad0[56];
  uint64_t head; /* taken over by the engine: entries below it may be reused */
  uint8_t pad1[56];
  uint64_t completed; /* requests whose bytes and signals have landed */
  uint8_t pad2[56];
  uint64_t entries; /* address of ep_proxy_request[capacity] */
  uint64_t capacity; /* power of two */
  uint64_t wake;     /* address of the engine's ep_wake_word */
  uint8_t pad3[40];
} ep_proxy_ring;
EP_STATIC_ASSERT(sizeof(ep_proxy_ring) == 256, "producers, engine and readers do not share a line");

#endif
