// Messages between the ranks of a process group, who are threads: sizes, tags, many to one, credits, receivers that leave, beside collectives.
#include <cstring>

#include "group_world.hpp"

namespace {

using namespace ep;
using namespace ep::group_world;

struct receipt {
  uint64_t id;
  memory into;
};

template <class Message> std::unique_ptr<Message> message_with(member& self, int32_t peer, int64_t tag, uint64_t bytes, double timeout_ms) {
  auto message = std::make_unique<Message>();
  message->operation_id = self.next_id++;
  message->timeout_ms = timeout_ms;
  message->peer = peer;
  message->tag = tag;
  message->bytes = bytes;
  return message;
}

uint64_t send_to(member& self, int32_t peer, int64_t tag, uint64_t bytes, double timeout_ms) {
  auto message = message_with<message_send>(self, peer, tag, bytes, timeout_ms);
  message->copy.assign(bytes, static_cast<uint8_t>(0x80 | self.rank)); // nothing that a test sends otherwise
  message->data = message->copy.data();
  const uint64_t id = message->operation_id;
  self.group->send(std::move(message));
  return id;
}

uint64_t receive_from(member& self, int32_t peer, int64_t tag, uint64_t bytes, double timeout_ms) {
  auto message = message_with<message_receive>(self, peer, tag, bytes, timeout_ms);
  const uint64_t id = message->operation_id;
  self.group->receive(std::move(message));
  return id;
}

void messages(int32_t size) {
  run_ranks(size, [&](member& self) {
    const auto send = [&](int32_t peer, int64_t tag, const memory& from, uint64_t bytes) {
      auto message = std::make_unique<message_send>();
      message->operation_id = self.next_id++;
      message->timeout_ms = 20'000;
      message->peer = peer;
      message->tag = tag;
      message->bytes = bytes;
      message->segment = from.segment;
      message->offset = from.offset;
      if (from.segment == group_no_segment) {
        message->copy.assign(from.data, from.data + bytes);
        message->data = message->copy.data();
      } else {
        message->data = from.data;
      }
      const uint64_t id = message->operation_id;
      self.group->send(std::move(message));
      return id;
    };
    const auto receive = [&](int32_t peer, int64_t tag, const memory& into, uint64_t bytes) {
      auto message = std::make_unique<message_receive>();
      message->operation_id = self.next_id++;
      message->timeout_ms = 20'000;
      message->peer = peer;
      message->tag = tag;
      message->bytes = bytes;
      if (into.segment != group_no_segment) message->data = into.data;
      const uint64_t id = message->operation_id;
      self.group->receive(std::move(message));
      return id;
    };
    const auto taken = [&](uint64_t id, const memory& into) {
      const outcome end = self.sink.wait(id);
      EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
      const std::vector<uint8_t> copy = self.group->take_received(id);
      if (!copy.empty()) std::memcpy(into.data, copy.data(), copy.size());
      return end;
    };
    const int32_t right = (self.rank + 1) % size;
    const int32_t left = (self.rank + size - 1) % size;
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1000}, message_chunk_bytes, message_chunk_bytes * 20 + 3}) {
      for (const bool of_group : {false, true}) {
        self.used = 0;
        const memory from = self.make(bytes, of_group);
        const memory into = self.make(bytes, self.rank % 2 == 0);
        for (uint64_t i = 0; i < bytes; ++i) from.data[i] = static_cast<uint8_t>(given(self.rank, 1, i, bytes));
        const uint64_t sent = send(right, 5, from, bytes);
        const uint64_t got = receive(left, 5, into, bytes);
        EP_CHECK_EQ(taken(got, into).rank, left);
        EP_CHECK_EQ(self.sink.wait(sent).status, unsigned{EP_STATUS_OK});
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < bytes; ++i) wrong += into.data[i] != static_cast<uint8_t>(given(left, 1, i, bytes));
        EP_CHECK_EQ(wrong, uint64_t{0});
      }
    }
    // Order within a tag, tags taken in another order than sent, more of them than announcements fit, while collectives go on.
    const memory numbers = self.make(4 * 100, false);
    std::vector<uint64_t> sent;
    for (int32_t i = 0; i < 100; ++i) {
      std::memcpy(numbers.data, &i, 4);
      sent.push_back(send(right, i % 3, numbers, 4));
    }
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0), false).status, unsigned{EP_STATUS_OK});
    for (int32_t tag = 2; tag >= 0; --tag) {
      for (int32_t i = tag; i < 100; i += 3) {
        const memory into = self.make(4, false);
        taken(receive(left, tag, into, 4), into);
        int32_t got = -1;
        std::memcpy(&got, into.data, 4);
        EP_CHECK_EQ(got, i);
      }
    }
    for (const uint64_t id : sent) EP_CHECK_EQ(self.sink.wait(id).status, unsigned{EP_STATUS_OK});
    // Many to one, any source.
    if (self.rank == 0) {
      std::vector<int> counts(static_cast<size_t>(size));
      for (int i = 0; i < 20 * (size - 1); ++i) {
        const memory into = self.make(8, false);
        const outcome end = taken(receive(any_rank, 9, into, 8), into);
        int32_t from = -1;
        std::memcpy(&from, into.data, 4);
        EP_CHECK_EQ(from, end.rank);
        ++counts[static_cast<size_t>(from)];
      }
      for (int32_t r = 1; r < size; ++r) EP_CHECK_EQ(counts[static_cast<size_t>(r)], 20);
    } else {
      const memory from = self.make(8, false);
      std::memcpy(from.data, &self.rank, 4);
      std::vector<uint64_t> ids;
      for (int i = 0; i < 20; ++i) ids.push_back(send(0, 9, from, 8));
      for (const uint64_t id : ids) EP_CHECK_EQ(self.sink.wait(id).status, unsigned{EP_STATUS_OK});
    }
    // Too long for who receives.
    const memory from = self.make(16, false);
    const uint64_t too_long = send(right, 11, from, 16);
    EP_CHECK_EQ(self.sink.wait(receive(left, 11, from, 8)).status, unsigned{EP_STATUS_MISMATCH});
    EP_CHECK_EQ(self.sink.wait(too_long).status, unsigned{EP_STATUS_MISMATCH});
    // A message that was withdrawn before it was received is none.
    EP_CHECK_EQ(self.sink.wait(send_to(self, right, 12, 4, 5)).status, unsigned{EP_STATUS_TIMEOUT});
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0), false).status, unsigned{EP_STATUS_OK});
    const memory second = self.make(4, false);
    std::memset(second.data, 2, 4);
    const memory into = self.make(4, false);
    const uint64_t later = receive(left, 12, into, 4);
    const uint64_t real = send(right, 12, second, 4);
    taken(later, into);
    EP_CHECK_EQ(self.sink.wait(real).status, unsigned{EP_STATUS_OK});
    EP_CHECK_EQ(into.data[0], uint8_t{2});
    EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0), false).status, unsigned{EP_STATUS_OK});
  });
}

// What a rank has withdrawn keeps no peer: a receive ends by its own time, and one that takes any message takes another one, since a sender that does nothing else says that its own is gone.
void withdrawn() {
  run_ranks(3, [](member& self) {
    const auto meet = [&] { EP_CHECK_EQ(self.run(self.call(op_kind::barrier, element_type::u8, 0), false).status, unsigned{EP_STATUS_OK}); };
    const auto status_of = [&](uint64_t id) { return self.sink.wait(id).status; };
    if (self.rank == 1) {
      EP_CHECK_EQ(status_of(send_to(self, 0, 1, 4, 5)), unsigned{EP_STATUS_TIMEOUT});
      EP_CHECK_EQ(status_of(send_to(self, 0, 2, 4, 5)), unsigned{EP_STATUS_TIMEOUT});
    }
    meet();
    if (self.rank == 0) {
      EP_CHECK_EQ(status_of(receive_from(self, 1, 1, 4, 100)), unsigned{EP_STATUS_TIMEOUT});
      const outcome end = self.sink.wait(receive_from(self, any_rank, 2, 4, 20'000));
      EP_CHECK_EQ(end.status, unsigned{EP_STATUS_OK});
      EP_CHECK_EQ(end.rank, 2);
    } else if (self.rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300)); // taken for that of rank 1 first
      EP_CHECK_EQ(status_of(send_to(self, 0, 2, 4, 20'000)), unsigned{EP_STATUS_OK});
    }
    meet();
  });
}

// Whoever has taken a message may leave at once: it was sent all the same.
void receivers_leave(int32_t size) {
  run_ranks(size, [size](member& self) {
    if (self.rank != 0) {
      auto message = std::make_unique<message_receive>();
      const uint64_t id = message->operation_id = self.next_id++;
      message->timeout_ms = 20'000;
      message->peer = 0;
      message->bytes = 4;
      // Late ones find a sender that already looks for deaths.
      std::this_thread::sleep_for(std::chrono::microseconds(100 * self.rank));
      self.group->receive(std::move(message));
      EP_CHECK_EQ(self.sink.wait(id).status, unsigned{EP_STATUS_OK});
      return;
    }
    std::vector<uint64_t> sends;
    for (int32_t peer = 1; peer < size; ++peer) {
      auto message = std::make_unique<message_send>();
      sends.push_back(message->operation_id = self.next_id++);
      message->timeout_ms = 20'000;
      message->peer = peer;
      message->bytes = 4;
      message->copy = {1, 2, 3, 4};
      message->data = message->copy.data();
      self.group->send(std::move(message));
    }
    for (const uint64_t id : sends) EP_CHECK_EQ(self.sink.wait(id).status, unsigned{EP_STATUS_OK});
  });
}

} // namespace

int main() {
  for (const int32_t size : {1, 2, 4}) messages(size);
  withdrawn();
  for (int i = 0; i < 100; ++i) receivers_leave(8);
  return ep::check::finish();
}
