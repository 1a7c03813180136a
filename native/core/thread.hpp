// Starting threads: a machine that is out of them must give a failure, not an exception that ends the process.
#pragma once

#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "status.hpp"

namespace ep {

// `about` says what the thread is for and which knob needs fewer of them.
template <class Body> result<std::thread> thread_start(Body&& body, const std::string& about) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    return failure_errno("pthread_create", error.code().value(), about);
  } catch (const std::bad_alloc&) {
    return failure_errno("pthread_create", ENOMEM, about);
  }
}

} // namespace ep
