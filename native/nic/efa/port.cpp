#include "port.hpp"

#include <string>

#include <sys/random.h>
#include <unistd.h>

namespace ep::nic::efa {
namespace {

uint64_t process_nonce() {
  static const uint64_t nonce = [] {
    uint64_t drawn = 0;
    // Without randomness the pid alone has to do: never 0, or a port that was not filled in would look like one's own.
    if (getrandom(&drawn, sizeof drawn, 0) != static_cast<ssize_t>(sizeof drawn)) drawn = static_cast<uint64_t>(getpid());
    return drawn | 1;
  }();
  return nonce;
}

} // namespace

result<port_view> port_view::create() {
  auto made = segment::create(port_bytes);
  if (!made.ok()) return made.why();
  port_view view;
  view.mapping_ = std::move(made.value());
  port_header& header = view.header();
  header.pid = static_cast<uint32_t>(getpid());
  header.process_nonce = process_nonce();
  header.link_up = 1;
  header.life.state = EP_LIFE_STARTING;
  header.header = {port_magic, EP_ABI_MAJOR, EP_ABI_MINOR, port_version, static_cast<uint32_t>(port_bytes)};
  return view;
}

result<port_view> port_view::open(const ep_segment_handle& handle) {
  auto opened = segment::open(handle);
  if (!opened.ok()) return opened.why();
  port_view view;
  view.mapping_ = std::move(opened.value());
  if (view.mapping_->data_bytes() < sizeof(port_header) || view.header().header.magic != port_magic) {
    return failure{EP_STATUS_INVALID, 0, "a segment that the directory names as the port of a software EFA is none"};
  }
  if (view.header().header.kind != port_version || view.header().header.byte_length != port_bytes) {
    return failure{EP_STATUS_ABI_MISMATCH, 0,
                   "the software EFA of process " + std::to_string(view.header().pid) + " has port layout " + std::to_string(view.header().header.kind) +
                       ", this build has " + std::to_string(port_version)};
  }
  return view;
}

bool port_view::same_process() const { return header().process_nonce == process_nonce() && header().pid == static_cast<uint32_t>(getpid()); }

uint8_t* port_view::map(const port_place& place, std::shared_ptr<segment>& held) const {
  if (place.memory.pid == 0) return same_process() ? reinterpret_cast<uint8_t*>(place.offset) : nullptr;
  auto opened = segment::open(place.memory);
  if (!opened.ok()) return nullptr;
  held = std::move(opened.value());
  return held->data() + place.offset;
}

bool visitor_gone(uint64_t active) {
  auto found = directory_find(static_cast<uint32_t>(active >> 32) & 0xffff);
  return !found.ok() || (found.value().nonce & 0x7fff) != (active >> 48 & 0x7fff);
}

port_place place_of(const void* address, uint64_t bytes, std::shared_ptr<segment>& held) {
  held = segment::containing(address, bytes);
  if (!held) return {reinterpret_cast<uint64_t>(address), {}};
  return {static_cast<uint64_t>(static_cast<const uint8_t*>(address) - held->data()), held->handle()};
}

} // namespace ep::nic::efa
