/* How a rank's device memory is found by the others. */
#ifndef EP_ABI_GPU_H
#define EP_ABI_GPU_H

#include "version.h"

#define EP_GPU_IPC_BYTES 64

typedef struct ep_gpu_memory_handle {
  ep_handle_header header; /* EP_MAGIC_GPU_MEMORY */
  uint64_t process[2];     /* random, of the creator's process: within one process parts are found by `block` */
  uint64_t block;
  uint64_t byte_length;
  uint64_t signal_slots;
  int32_t device;     /* ordinal in the creator's process; others see it under `pci` */
  uint32_t shareable; /* `ipc` holds a handle for other processes */
  uint8_t pci[32];
  uint8_t ipc[EP_GPU_IPC_BYTES];
  int32_t lock_pid; /* /proc/<lock_pid>/fd/<lock_fd> is the file on which other processes hold a shared lock for as long as they map the memory */
  int32_t lock_fd;
  uint64_t lock_device; /* of that file, to recognise it by */
  uint64_t lock_inode;
} ep_gpu_memory_handle;
EP_STATIC_ASSERT(sizeof(ep_gpu_memory_handle) == 184, "exchanged between ranks as raw bytes");

#endif
