/* What one rank tells the others so that they can connect their queue pairs to its. Exchanged as bytes, through the Store or by the user. */
#ifndef EP_ABI_IBGDA_PEER_H
#define EP_ABI_IBGDA_PEER_H

#include "version.h"

#define EP_IBGDA_LINK_INFINIBAND 1u
#define EP_IBGDA_LINK_ETHERNET 2u

/* Followed by uint32_t qpn[world_size * qps_per_peer], those to rank 0 first, then as many uint32_t starting_psn: 24 bits, the number of the first packet that the queue
 * pair awaits. Queue pair k of rank a to rank b meets queue pair k of rank b to rank a.
 * HAZARD: nothing but that number keeps what a process in a rank's place sent before it died apart from what its successor sends: a packet names the queue pair that it goes to,
 * not the one that it is from. */
typedef struct ep_ibgda_peer {
  ep_handle_header header; /* EP_MAGIC_IBGDA_PEER; byte_length includes the numbers that follow */
  int32_t rank;
  int32_t world_size;
  uint32_t qps_per_peer;
  uint32_t reserved0;
  uint8_t gid[16];         /* of its port, as on the wire */
  uint16_t lid;            /* of its port; 0 on Ethernet */
  uint8_t link;            /* EP_IBGDA_LINK_* */
  uint8_t mtu;             /* 1 to 5: 256 to 4096 bytes; both ends use the smaller one */
  uint8_t log_max_message; /* both ends use the smaller one */
  uint8_t log_outstanding; /* of atomics and reads under way on a queue pair; both ends use the smaller one */
  uint8_t roce_version;    /* 1 or 2; 0 on InfiniBand */
  uint8_t reserved[9];
} ep_ibgda_peer;
EP_STATIC_ASSERT(sizeof(ep_ibgda_peer) == 64, "the numbers follow");

#endif
