// Starting threads: a machine that is out of them must give a failure, not an exception that ends the process.
#pragma once

#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>
#include <sys/prctl.h>

#include "status.hpp"

namespace ep {

// `name`: as debuggers, profilers and `top -H` show it, at most 15 bytes. `about` says what the thread is for and which knob needs fewer of them.
template <size_t length, class Body> result<std::thread> thread_start(const char (&name)[length], Body&& body, const std::string& about) {
  static_assert(length <= 16, "the kernel refuses longer names");
  try {
    return std::thread([&name, body = std::forward<Body>(body)]() mutable {
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error& error) {
    return failure_errno("pthread_create", error.code().value(), about);
  } catch (const std::bad_alloc&) {
    return failure_errno("pthread_create", ENOMEM, about);
  }
}

// For a thread that sleeps microseconds at a time: Linux may let it sleep 50 us longer than it asked for, unless it says so.
inline void thread_sleeps_exactly() { prctl(PR_SET_TIMERSLACK, 1'000UL, 0, 0, 0); }

} // namespace ep
