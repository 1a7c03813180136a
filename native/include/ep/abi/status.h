/* Outcome of every native operation. The numbers cross into JS (abi.gen.ts), so they never change their meaning. */
#ifndef EP_ABI_STATUS_H
#define EP_ABI_STATUS_H

#define EP_STATUS_OK 0
#define EP_STATUS_PENDING 1
#define EP_STATUS_TIMEOUT 2      /* deadline passed; `rank` was awaited */
#define EP_STATUS_ABORTED 3      /* cancelled by its caller or by close() */
#define EP_STATUS_PEER_LOST 4    /* `rank` died or closed while it was awaited */
#define EP_STATUS_CLOSED 5       /* the object was closed */
#define EP_STATUS_INVALID 6      /* argument outside of what the call documents */
#define EP_STATUS_MEMORY_LIMIT 7 /* refused before allocation */
#define EP_STATUS_SYSTEM 8       /* a system call failed; errno kept */
#define EP_STATUS_ABI_MISMATCH 9 /* handle of another version */
#define EP_STATUS_STALE_HANDLE 10 /* the process or segment that a handle named is gone */
#define EP_STATUS_BUSY 11        /* queue or lease full */
#define EP_STATUS_MISMATCH 12    /* ranks disagree on the arguments of a collective call */
#define EP_STATUS_EVICTED 13     /* the others went on without this rank */
#define EP_STATUS_CAPACITY 14    /* `rank` has room for fewer rows than were to go there; nothing has moved */

#endif
