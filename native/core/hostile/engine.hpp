// The engine of the hostile transport: it keeps the promises of a 'bundled' transport and no others. A put lands in pieces in any order; puts overtake
// each other; a signal follows the bytes of its own put and nothing else; requests lie around until a random moment or a flush. All by seed.
//
// It exists so that an algorithm which assumes more than it was promised fails on any machine. Kernels post through ep_proxy_ring, JS through post().
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../memory.hpp"
#include "../operation.hpp"
#include "random.hpp"

namespace ep {

struct hostile_options {
  uint64_t seed = 1;
  int64_t max_delay_ns = 500'000; // a request begins at a random moment before this, or at a flush
  uint32_t max_pieces = 6;        // per put
  uint64_t ring_capacity = 64;    // power of two: small, so that kernels meet a full ring
};

// One put, word or signal. Rows may be strided at the source and are packed at the destination.
struct hostile_request {
  uint64_t operation_id = 0; // 0: a kernel's, which has no call to complete
  std::shared_ptr<symmetric_memory> memory;
  std::shared_ptr<const void> keep; // owner of the source
  int32_t peer = 0;
  uint64_t src = 0;
  uint64_t src_stride = 0;
  uint64_t row_bytes = 0;
  uint64_t rows = 0;
  uint64_t dst_offset = 0;
  uint32_t word_bytes = 0; // not 0: `word` is stored whole instead of rows
  uint64_t word = 0;
  uint64_t slot = EP_NO_SLOT;
  uint64_t add = 0;
};

struct hostile_counts {
  uint64_t landed = 0;
  uint64_t overtakes = 0; // requests that landed before an older one to the same peer
  uint64_t pieces = 0;
};

class hostile_engine {
 public:
  // The sink must outlive the engine. Fails where no thread can be started.
  static result<std::unique_ptr<hostile_engine>> create(std::shared_ptr<rank_context> context, completion_sink& sink, const hostile_options& options);
  ~hostile_engine(); // what is under way ends with EP_STATUS_CLOSED

  // Kernels that use this memory post into this engine's ring and see no peer's address.
  void attach(symmetric_memory& memory) const;
  void post(hostile_request request);
  // Completes when everything posted before, by JS or by kernels, to this peer has landed; releases what was held back.
  void flush(uint64_t operation_id, cancel_ref cancel, int32_t peer, int64_t deadline_ns);
  // After a cancel flag was set: look at once.
  void nudge();
  hostile_counts counts() const;
  // What a kernel's request did wrong first; empty if none did.
  std::string violation() const;

 private:
  struct piece {
    uint64_t begin;
    uint64_t end; // of the packed bytes
  };
  struct flight {
    hostile_request request;
    uint64_t number;        // in the order of posting
    uint64_t ring_sequence; // UINT64_MAX for JS
    int64_t due_ns;
    std::vector<piece> pieces;
  };
  struct pending_flush {
    uint64_t operation_id;
    cancel_ref cancel;
    int32_t peer;
    int64_t deadline_ns;
    uint64_t number;
    uint64_t ring_tail;
  };
  struct ring_storage {
    ep_proxy_ring ring{};
    std::vector<ep_proxy_request> entries;
    ep_wake_word wake{};
  };

  hostile_engine(std::shared_ptr<rank_context> context, completion_sink& sink, const hostile_options& options);
  void run();
  bool take();
  bool take_ring();
  void begin(hostile_request request, uint64_t ring_sequence);
  void step(size_t index);
  void land(size_t index);
  void ring_landed(uint64_t sequence);
  void look_at_flushes();
  bool covered(const pending_flush& flush, const flight& one) const;
  const char* refusal(const hostile_request& request) const;

  std::shared_ptr<rank_context> context_;
  completion_sink& sink_;
  const hostile_options options_;
  std::shared_ptr<ring_storage> ring_;

  // The engine's thread only.
  random_source random_;
  std::vector<flight> flights_;
  std::vector<pending_flush> flushes_;
  uint64_t next_number_ = 0;
  std::vector<uint64_t> ring_ahead_; // landed, but behind one that has not

  mutable std::mutex mutex_;
  std::deque<hostile_request> posted_;
  std::vector<pending_flush> flushes_posted_;
  hostile_counts counts_;
  std::string violation_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

} // namespace ep
