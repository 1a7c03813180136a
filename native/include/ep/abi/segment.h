/* Shared segments: memfds without a name, opened by peers through /proc/<pid>/fd/<fd>. */
#ifndef EP_ABI_SEGMENT_H
#define EP_ABI_SEGMENT_H

#include "version.h"

/* The first page of a segment describes it; user bytes start at EP_SEGMENT_DATA_OFFSET. */
#define EP_SEGMENT_DATA_OFFSET 4096

/* At offset 0 of every segment. Written once by the creator before the handle leaves it. */
typedef struct ep_segment_header {
  ep_handle_header header; /* EP_MAGIC_SEGMENT */
  uint64_t nonce;          /* random; a handle with another nonce is stale: fd numbers and pids are reused */
  uint64_t data_bytes;     /* bytes behind EP_SEGMENT_DATA_OFFSET */
} ep_segment_header;
EP_STATIC_ASSERT(sizeof(ep_segment_header) == 32, "peers read this before they know anything else");

/* What a rank publishes so that peers can map its segment. */
typedef struct ep_segment_handle {
  ep_handle_header header; /* EP_MAGIC_SEGMENT */
  int32_t pid;             /* in the creator's pid namespace */
  int32_t fd;              /* in the creator */
  uint64_t inode;          /* st_ino of the memfd: verified after open */
  uint64_t device;         /* st_dev */
  uint64_t nonce;          /* equals ep_segment_header.nonce */
  uint64_t data_bytes;
} ep_segment_handle;
EP_STATIC_ASSERT(sizeof(ep_segment_handle) == 56, "published through the store as raw bytes");

#endif
