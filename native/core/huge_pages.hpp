// Large mappings in 2 MiB pages. Rows of a dispatch land all over a receive tensor; with 4 KiB pages every row costs a walk of the page table, and a
// non-temporal store waits for it (measured: 15 against 30 GB/s of one copying thread).
#pragma once

#include <cstdint>

namespace ep {

constexpr uint64_t huge_page_bytes = 2u << 20;

// MADV_POPULATE_WRITE, Linux 5.14: takes all pages of a range now, and fails where a store would be a signal. Older headers do not name it.
constexpr int advice_populate_write = 23;

// mmap of the whole file, or of private memory for fd -1, readable and writable, at an address where huge pages fit. Null: errno says why.
uint8_t* map_for_huge_pages(int fd, uint64_t byte_length);

// Puts whatever whole huge pages fit under a fresh mapping. Needs no reserved pages and no setting of the machine: shared memory gets none by default
// (`shmem_enabled` is `never`), but a process may ask for its own (MADV_COLLAPSE, Linux 6.1). Best effort: where the kernel cannot, small pages remain.
// HAZARD: call it while the mapping is still empty. Collapsing pages that exist already copies them, and takes 50 times as long (measured).
// Returns how many bytes have huge pages now.
uint64_t huge_pages_fill(uint8_t* base, uint64_t byte_length);

} // namespace ep
