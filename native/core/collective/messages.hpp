// Point to point between members: announced by the sender, granted by the receiver, pulled by the receiver. Sender and receiver write their own segment only.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "board.hpp"

namespace ep {

struct message_send {
  uint64_t operation_id = 0;
  cancel_ref cancel;
  double timeout_ms = -1;
  int64_t deadline_ns = 0; // from the moment at which no earlier one waits for the same peer
  int32_t peer = 0;
  int64_t tag = 0;
  uint32_t dtype = 0;
  uint64_t bytes = 0;
  const uint8_t* data = nullptr;
  uint32_t segment = group_no_segment; // where it lies in group memory
  uint64_t offset = 0;
  std::vector<uint8_t> copy; // of memory that is not
  uint64_t number = 0;       // among the messages to its peer; 0: not announced yet
  uint64_t sent = 0;         // bytes put into chunks
};

struct message_receive {
  uint64_t operation_id = 0;
  cancel_ref cancel;
  double timeout_ms = -1;
  int64_t deadline_ns = 0; // from the moment at which no earlier receive could take the same message
  int32_t peer = any_rank;
  int64_t tag = 0;
  uint32_t dtype = 0;
  uint64_t bytes = 0;
  uint8_t* data = nullptr; // group memory; null: into `copy`
  std::vector<uint8_t> copy;
  int32_t source = -1; // once matched
  uint64_t got = 0;
};

struct message_trace {
  uint64_t calls = 0;
  uint64_t bytes = 0;
  uint64_t writes = 0;
  uint64_t signals = 0;
};

class message_board {
 public:
  // `rank` of the outcome: the peer. `expected`: bytes of what was sent, or room of what receives; `found`: bytes of the message.
  using end_send = std::function<void(uint64_t operation_id, const outcome&)>;
  using end_receive = std::function<void(std::unique_ptr<message_receive>, const outcome&)>;
  message_board(group_board& board, end_send send_ended, end_receive receive_ended);

  void send(std::unique_ptr<message_send> message);
  void receive(std::unique_ptr<message_receive> message);
  // Does what can be done now; true if anything was. `patient`: has waited a while: look at deaths, deadlines and cancellations, too.
  bool pass(bool patient);
  bool idle() const { return pending_ == 0 && !owes(); }
  // Whether peers may yet ask for what is no operation of this rank any more: an announced message that was withdrawn, or the rest of one that was given up half way.
  // HAZARD: nobody else answers. A receive that was matched with such a message would wait for it, past a good message of somebody else.
  bool owes() const { return debts_.load(std::memory_order_acquire) != 0; }
  // Another process has the peer's rank from now on, or the same one after it was taken out: what was under way is lost.
  void begin_anew(int32_t peer);
  // Ends everything as closed.
  void close();

  message_trace sent;
  message_trace received;

 private:
  struct note {
    uint64_t number;
    int64_t tag;
    uint32_t dtype;
    uint32_t segment;
    uint64_t bytes;
    uint64_t offset;
  };
  struct lane {
    bool gone = false; // as it was before the last patient pass
    // To the peer.
    std::deque<std::unique_ptr<message_send>> sends; // announced ones first
    uint64_t announced = 0;
    uint64_t handled = 0; // the last grant that was looked at
    uint64_t filled = 0;
    std::unique_ptr<message_send> active;
    uint64_t withdrawn = 0;    // announced, and not there any more when they are granted
    bool owes_active = false;  // the work of `active` has ended before it
    bool owes_taken = false;   // that of `taken` has
    std::vector<uint32_t> chunks; // of the pool, under way
    uint64_t drained = 0;
    // From the peer.
    std::deque<note> notes; // announced and not taken
    uint64_t seen = 0;
    std::unique_ptr<message_receive> taking;
    note taken{};
    uint64_t taken_chunks = 0; // `taking` null, `taken` not: what nobody wants any more is still read, so that the sender comes to its end
  };

  bool pass_sends(int32_t peer, lane& to);
  bool pass_receives(int32_t peer, lane& from);
  bool match(int32_t peer, lane& from);
  bool take(int32_t peer, lane& from, uint64_t filled);
  bool look_after(bool& made);
  void finish_send(message_send& message, uint32_t status, int32_t rank);
  void finish_receive(std::unique_ptr<message_receive> message, uint32_t status, int32_t rank, uint64_t found);
  void finish_taking(int32_t peer, lane& from, uint32_t status);
  void touch(int32_t peer) const;
  void withdraw(lane& to);
  void owe(bool& owed);
  void settle(bool& owed);
  void forgive(lane& with);

  group_board& board_;
  end_send send_ended_;
  end_receive receive_ended_;
  std::vector<lane> lanes_;
  std::deque<std::unique_ptr<message_receive>> receives_; // not matched, in the order of posting
  std::vector<uint32_t> free_chunks_;
  uint64_t pending_ = 0;
  std::atomic<uint64_t> debts_{0};
};

} // namespace ep
