/* Finds the key of registered memory. */
#ifndef EP_DEVICE_RANGES_H
#define EP_DEVICE_RANGES_H

#include "ep/abi/ibgda.h"
#include "order.h"

EP_MACHINE_BEGIN

/* The registered range that holds all of these bytes; *lkey is its key. `table_address` is the word that is replaced with each new table. */
template <class Ctx> EP_HD bool range_key(Ctx& ctx, const uint64_t* table_address, uint64_t address, uint64_t bytes, uint32_t* lkey) {
  const auto* table = reinterpret_cast<const ep_ibgda_range_table*>(load_acquire(ctx, table_address));
  const auto* ranges = reinterpret_cast<const ep_ibgda_range*>(table + 1);
  uint64_t low = 0;
  uint64_t high = table->count;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (ranges[middle].end <= address) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == table->count || address < ranges[low].begin || bytes > ranges[low].end - address) return false;
  *lkey = ranges[low].lkey;
  return true;
}

EP_MACHINE_END

#endif
