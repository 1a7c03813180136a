// Part of the tests that TSan does not run, because they have one thread (EP_ONE_THREAD_TESTS): it ends one that starts another, so that the list stays true.
#include <cstdio>
#include <cstdlib>

#include <pthread.h>

extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept {
  std::fputs("a test of EP_ONE_THREAD_TESTS starts a thread: take it out of that list, so that TSan looks at it\n", stderr);
  std::abort();
}
