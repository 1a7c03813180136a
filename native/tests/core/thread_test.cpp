// A machine on which threads cannot be started: everything that needs one says so, and nothing that was started stays behind.
#include <atomic>
#include <cerrno>

#include <dlfcn.h>
#include <pthread.h>

#include "check.hpp"
#include "hostile/engine.hpp"
#include "launch.hpp"
#include "stream.hpp"
#include "watcher.hpp"

namespace {

// Threads that may still be started; negative: as many as there are.
std::atomic<int> allowed{-1};
std::atomic<int> started{0};

} // namespace

// Comes before libc's (and a sanitizer's), which it calls.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
  using create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (allowed.load() == 0) return EAGAIN;
  if (allowed.load() > 0) allowed.fetch_sub(1);
  started.fetch_add(1);
  return real(thread, attributes, body, argument);
}

namespace {

using namespace ep;

class recording_sink final : public completion_sink {
 public:
  void complete(uint64_t, const outcome& end) override { ends.push_back(end); }
  std::vector<outcome> ends;
};

bool says_why(const std::string& message) {
  return message.find("pthread_create failed") != std::string::npos && message.find("errno " + std::to_string(EAGAIN)) != std::string::npos;
}

// No block runs: the first ones would meet the others at the grid's barrier, and they are not coming.
void a_kernel_runs_whole_or_not_at_all() {
  for (const int threads : {0, 1, 2}) {
    allowed = threads;
    started = 0;
    std::atomic<int> ran{0};
    const result<nothing> end = fast_run(4, kernel_environment{}, [&](fast_context& context) {
      ran.fetch_add(1);
      context.sync_grid();
      return true;
    });
    EP_CHECK(!end.ok());
    EP_CHECK_EQ(end.why().status, unsigned{EP_STATUS_SYSTEM});
    EP_CHECK_EQ(end.why().sys_errno, EAGAIN);
    EP_CHECK(says_why(end.why().message));
    EP_CHECK_EQ(started.load(), threads);
    EP_CHECK_EQ(ran.load(), 0);
  }
  allowed = 3;
  std::atomic<int> ran{0};
  EP_CHECK(fast_run(4, kernel_environment{}, [&](fast_context& context) {
             context.sync_grid();
             ran.fetch_add(1);
             return true;
           }).ok());
  EP_CHECK_EQ(ran.load(), 4);
  allowed = -1;
}

void a_stream_is_refused() {
  recording_sink sink;
  allowed = 0;
  auto refused = host_stream::create(sink, 0);
  allowed = -1;
  EP_CHECK(!refused.ok());
  EP_CHECK(says_why(refused.why().message));
  EP_CHECK_EQ(refused.why().sys_errno, EAGAIN);
}

void an_engine_is_refused() {
  auto context = rank_context::create(0, 1, 1).value();
  EP_CHECK(context->connect({context->handle()}).ok());
  recording_sink sink;
  allowed = 0;
  auto refused = hostile_engine::create(context, sink, {});
  allowed = -1;
  EP_CHECK(!refused.ok());
  EP_CHECK(says_why(refused.why().message));
  context->leave(true);
}

// Told like any other end of a watch; the next watch tries again.
void a_watch_ends() {
  auto context = rank_context::create(0, 1, 1).value();
  EP_CHECK(context->connect({context->handle()}).ok());
  recording_sink sink;
  {
    watcher watches(context, sink);
    const auto submit = [&](uint64_t id) {
      watches.submit({id, std::make_shared<cancel_flag>(), no_deadline, {}, [](outcome&) { return false; }});
    };
    allowed = 0;
    submit(1);
    EP_CHECK_EQ(sink.ends.size(), size_t{1});
    allowed = -1;
    submit(2);
  }
  EP_CHECK_EQ(sink.ends.size(), size_t{2});
  EP_CHECK_EQ(sink.ends.front().status, unsigned{EP_STATUS_SYSTEM});
  EP_CHECK(says_why(sink.ends.front().message));
  EP_CHECK_EQ(sink.ends.back().status, unsigned{EP_STATUS_CLOSED});
  context->leave(true);
}

} // namespace

int main() {
  a_kernel_runs_whole_or_not_at_all();
  a_stream_is_refused();
  an_engine_is_refused();
  a_watch_ends();
  return ep::check::finish();
}
