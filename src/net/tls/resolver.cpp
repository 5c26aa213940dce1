#include "net/tls/resolver.h"

namespace torchspan::net {

void Resolver::look_up(TlsPlace place, std::function<void(Answer)> done) {
  MutexLock lock(mutex_);
  running_.remove_if([](const LookUp& one) { return one.finished.load(std::memory_order_acquire); });
  LookUp& one = running_.emplace_back();
  try {
    one.thread = executor_.spawn("look-up", [&one, place = std::move(place), done = std::move(done)] {
      Answer answer;
      try {
        answer.addresses = net::look_up(place);
      } catch (const Error& error) {
        answer.failure = error;
      }
      done(std::move(answer));
      one.finished.store(true, std::memory_order_release);
    });
  } catch (...) {
    running_.pop_back();
    throw;
  }
}

}  // namespace torchspan::net
