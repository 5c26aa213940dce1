#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/core/preemption.h>

#include "core/api/descriptor.h"
#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"
#include "core/api/timeout_notice.h"

namespace torchspan {
namespace {

constexpr std::string_view kNoticePrefix = "torchspan-preempted 1 signal=";

/// What the handler uses. Complete before it is published, and unpublished before it is destroyed.
struct Target {
  std::atomic<int> first_signal{0};
  pid_t process = getpid();  ///< not a child that inherits the handlers
  Descriptor event;
  int launcher = -1;
  std::array<std::string, NSIG> notices;  ///< by signal
};

/// A signal handler takes no argument, so the process has one place where it finds its target.
struct Published {
  std::atomic<Target*> target{nullptr};
  std::atomic<int> running{0};  ///< handlers that may use the target
};
static_assert(std::atomic<Target*>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

Published& published() {
  static Published only;
  return only;
}

/// What the process would do without a handler.
void act_by_default(int signal) {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  raise(signal);  // pending until the handler returns
}

/// Only async-signal-safe functions are allowed here.
void on_signal(int signal) {
  const int error_before = errno;
  Published& place = published();
  ++place.running;
  if (Target* target = place.target.load(); target != nullptr && target->process != getpid()) {
    act_by_default(signal);
  } else if (target != nullptr) {
    int none = 0;
    if (target->first_signal.compare_exchange_strong(none, signal)) {
      const std::uint64_t one = 1;
      [[maybe_unused]] auto written = write(target->event.get(), &one, sizeof one);
      const std::string& notice = target->notices[static_cast<std::size_t>(signal)];
      if (target->launcher >= 0) written = write(target->launcher, notice.data(), notice.size());
    }
  }
  --place.running;
  errno = error_before;
}

/// Returns the number of a signal; nullopt for other texts.
std::optional<int> parse_signal(std::string_view text) {
  const auto number = parse_number<int>(text);
  return number && *number >= 1 && *number < NSIG ? number : std::nullopt;
}

}  // namespace

std::string encode_preemption(int signal) { return fmt::format("{}{}\n", kNoticePrefix, signal); }

std::optional<int> decode_preemption(std::string_view line) {
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.remove_suffix(1);
  return line.starts_with(kNoticePrefix) ? parse_signal(line.substr(kNoticePrefix.size())) : std::nullopt;
}

PreemptionOptions PreemptionOptions::from_process() {
  PreemptionOptions options;
  if (const char* text = std::getenv("TORCHSPAN_PREEMPT_SIGNAL"); text != nullptr && *text != '\0') {
    const auto signal = parse_signal(text);
    if (!signal) throw_invalid("TORCHSPAN_PREEMPT_SIGNAL is '{}'; expected the number of a signal", text);
    options.signals = {*signal};
    if (*signal != SIGTERM) options.signals.push_back(SIGTERM);
  }
  options.launcher_descriptor = launcher_pipe();
  return options;
}

/// The handlers in force, and those before them.
class Preemption::Handlers {
 public:
  explicit Handlers(PreemptionOptions options) : signals_(std::move(options.signals)) {
    if (signals_.empty()) signals_ = {SIGUSR1, SIGTERM};
    std::sort(signals_.begin(), signals_.end());
    signals_.erase(std::unique(signals_.begin(), signals_.end()), signals_.end());
    target_.launcher = options.launcher_descriptor;
    target_.event = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!target_.event)
      throw Error(ErrorKind::kOverloaded, "no descriptor is left for Preemption; see ulimit -n");
    for (const int signal : signals_) {
      // The C library refuses SIGKILL, SIGSTOP and the signals that it uses itself.
      if (signal < 1 || signal >= NSIG ||
          sigaction(signal, nullptr, &before_[static_cast<std::size_t>(signal)]) != 0 || signal == SIGKILL ||
          signal == SIGSTOP) {
        throw_invalid("signal {} cannot be handled: remove it from PreemptionOptions::signals", signal);
      }
      target_.notices[static_cast<std::size_t>(signal)] = encode_preemption(signal);
    }
    Target* none = nullptr;
    if (!published().target.compare_exchange_strong(none, &target_)) {
      throw_invalid(
          "this process already has a Preemption: construct one in main() and pass it by reference");
    }
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (const int signal : signals_) sigaction(signal, &action, &before_[static_cast<std::size_t>(signal)]);
    sigset_t all;
    sigemptyset(&all);
    for (const int signal : signals_) sigaddset(&all, signal);
    pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
  }
  ~Handlers() {
    struct sigaction ignore {};
    ignore.sa_handler = SIG_IGN;
    const bool requested = target_.first_signal.load() != 0;
    for (const int signal : signals_) {
      sigaction(signal, requested ? &ignore : &before_[static_cast<std::size_t>(signal)], nullptr);
    }
    published().target.store(nullptr);
    while (getpid() == target_.process && published().running.load() != 0)
      sched_yield();  // handlers of other threads, for microseconds
  }
  Handlers(const Handlers&) = delete;

  const Target& target() const { return target_; }

 private:
  std::vector<int> signals_;
  std::array<struct sigaction, NSIG> before_{};
  Target target_;
};

Preemption::Preemption(PreemptionOptions options)
    : handlers_(std::make_unique<Handlers>(std::move(options))) {}
Preemption::~Preemption() = default;

int Preemption::signal() const { return handlers_->target().first_signal.load(std::memory_order_acquire); }
int Preemption::descriptor() const { return handlers_->target().event.get(); }

}  // namespace torchspan
