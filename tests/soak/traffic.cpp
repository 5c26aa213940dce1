#include "tests/soak/traffic.h"

#include <fmt/format.h>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace torchspan::soak {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// What futures may need beyond their deadline on a machine that is busy restarting workers.
constexpr Duration kGrace = seconds(30);

std::uint32_t random_rank(Worker& worker, std::uint64_t draw) {
  const auto workers = worker.workers();
  return workers[draw % workers.size()].rank;
}

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
at::Tensor negate(const at::Tensor& x) { return -x; }
void fail(const std::string& text) { throw std::runtime_error(text); }

/// Takes a while, but stops when it is asked to.
void slow(Worker& worker, std::int64_t ms) {
  const auto call = worker.current_call();
  for (std::int64_t slept = 0; slept < ms && !call->stop.stop_requested(); slept += 5)
    worker.runtime().executor.sleep(milliseconds(5));
}

std::int64_t hop(Worker& worker, std::int64_t depth, std::uint64_t draw);
Task<std::int64_t> glide(Worker& worker, std::int64_t depth, std::uint64_t draw);

struct Tally {
  std::int64_t count = 0;
  std::int64_t add(std::int64_t by) { return count += by; }
};
std::int64_t add_through(Worker&, const RRef<Tally>& tally, std::int64_t by);

constexpr Function<add> kAdd{"add"};
constexpr Function<negate> kNegate{"negate"};
constexpr Function<fail> kFail{"fail"};
constexpr Function<slow> kSlow{"slow"};
constexpr Function<hop> kHop{"hop"};
constexpr Function<glide> kGlide{"glide"};
constexpr Class<Tally> kTally{"Tally"};
constexpr Function<&Tally::add> kTallyAdd{"Tally.add"};
constexpr Function<add_through> kAddThrough{"add_through"};

std::uint64_t next_draw(std::uint64_t draw) { return draw * 6364136223846793005u + 1442695040888963407u; }

std::int64_t hop(Worker& worker, std::int64_t depth, std::uint64_t draw) {
  if (depth == 0) return 0;
  return 1 + worker.rpc_sync(random_rank(worker, draw >> 33), kHop, depth - 1, next_draw(draw));
}

Task<std::int64_t> glide(Worker& worker, std::int64_t depth, std::uint64_t draw) {
  if (depth == 0) co_return 0;
  co_return 1 +
      co_await worker.rpc_async(random_rank(worker, draw >> 33), kGlide, depth - 1, next_draw(draw));
}

std::int64_t add_through(Worker&, const RRef<Tally>& tally, std::int64_t by) {
  return tally.rpc_sync(kTallyAdd, by);
}

/// One worker's random calls.
class Traffic {
 public:
  Traffic(Worker& worker, std::uint64_t seed, Outcomes& outcomes)
      : worker_(worker), random_(seed), outcomes_(outcomes) {}

  void one() {
    try {
      switch (draw() % 8) {
        case 0:
          return burst();
        case 1:
          return expect(calls().rpc_async(peer(), kHop, 1 + draw() % 4, draw()),
                        [](auto hops) { return hops > 0; });
        case 2:
          return expect(calls().rpc_async(peer(), kGlide, 1 + draw() % 6, draw()),
                        [](auto hops) { return hops > 0; });
        case 3:
          return references();
        case 4:
          return cancelled();
        case 5:
          return tensors();
        case 6:
          return failure();
        default:
          return expect(calls().rpc_async(peer(), kSlow, draw() % 200));
      }
    } catch (const std::exception&) {
      count(std::current_exception());
    }
  }

 private:
  std::uint64_t draw() { return random_(); }
  std::uint32_t peer() { return random_rank(worker_, draw()); }
  Caller calls() { return worker_.with({.timeout = milliseconds(20 + draw() % 2000)}); }

  void count(const std::exception_ptr& error) {
    const Error outcome = to_error(error);
    outcomes_.failed[static_cast<std::size_t>(outcome.kind()) % outcomes_.failed.size()].fetch_add(1);
    const bool possible = outcome.kind() == ErrorKind::kDisconnected ||
                          outcome.kind() == ErrorKind::kTimedOut || outcome.kind() == ErrorKind::kCancelled ||
                          outcome.kind() == ErrorKind::kRemoteFailure ||
                          outcome.message().find("in this world") != std::string::npos;
    if (possible) return;
    outcomes_.wrong.fetch_add(1);
    worker_.runtime().log.error(fmt::format("an impossible error: {}", outcome.what()));
  }

  /// Whether the future has completed, as every future must.
  template <class T>
  bool ended(const Future<T>& future) {
    try {
      future.wait(kGrace);
    } catch (...) {
    }
    if (future.done()) return true;
    outcomes_.stuck.fetch_add(1);
    worker_.runtime().log.error("a future never completed:\n" + worker_.debug().str());
    return false;
  }

  template <class T, class Check>
  void expect(const Future<T>& future, Check check) {
    if (!ended(future)) return;
    if (future.error()) return count(future.error());
    if (check(future.wait())) {
      outcomes_.good.fetch_add(1);
    } else {
      outcomes_.wrong.fetch_add(1);
    }
  }
  void expect(const Future<void>& future) {
    if (!ended(future)) return;
    if (future.error()) return count(future.error());
    outcomes_.good.fetch_add(1);
  }

  void burst() {
    std::vector<std::pair<std::int64_t, Future<std::int64_t>>> sums;
    const Caller caller = calls();
    for (std::int64_t i = 0; i < 64; ++i) sums.emplace_back(i, caller.rpc_async(peer(), kAdd, i, 1000));
    for (auto& sum : sums) expect(sum.second, [&](auto value) { return value == sum.first + 1000; });
  }

  void tensors() {
    const at::Tensor x = at::rand({static_cast<std::int64_t>(1 + draw() % 50'000)});
    expect(calls().rpc_async(peer(), kNegate, x), [&](const at::Tensor& y) { return at::equal(y, -x); });
  }

  void references() {
    const Caller caller = calls();
    auto tally = caller.remote(peer(), kTally);
    expect(caller.call_on(tally, kTallyAdd, 7), [](auto count) { return count == 7; });
    expect(caller.rpc_async(peer(), kAddThrough, tally, 5),
           [](auto count) { return count == 12 || count == 5; });
  }

  void cancelled() {
    std::stop_source source;
    auto call =
        worker_.with({.timeout = seconds(5), .stop = source.get_token()}).rpc_async(peer(), kSlow, 1000);
    worker_.runtime().executor.sleep(milliseconds(draw() % 20));
    source.request_stop();
    expect(call);
  }

  void failure() {
    auto call = calls().rpc_async(peer(), kFail, std::string("on purpose"));
    if (!ended(call)) return;
    if (call.error()) return count(call.error());
    outcomes_.wrong.fetch_add(1);
  }

  Worker& worker_;
  std::mt19937_64 random_;
  Outcomes& outcomes_;
};

}  // namespace

FunctionTable functions() {
  return FunctionTable().add(kAdd, kNegate, kFail, kSlow, kHop, kGlide, kTally, kTallyAdd, kAddThrough,
                             kFinish);
}

void finish(Worker& worker) { worker.extension<Finish>().asked.store(true); }

std::string Outcomes::str() const {
  std::string text = fmt::format("{} good", good.load());
  for (std::size_t kind = 1; kind < failed.size(); ++kind) {
    if (failed[kind].load() != 0)
      text += fmt::format(", {} {}", failed[kind].load(), to_string(static_cast<ErrorKind>(kind)));
  }
  return text + fmt::format(", {} wrong, {} stuck", wrong.load(), stuck.load());
}

void make_traffic(Worker& worker, std::uint64_t seed, Deadline until, Outcomes& outcomes) {
  Traffic traffic(worker, seed, outcomes);
  while (!until.passed(worker.runtime().executor.now()) && !worker.extension<Finish>().asked.load())
    traffic.one();
}

}  // namespace torchspan::soak
