#include "pipeline/mailbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torchspan::pipeline {
namespace {

/// The step that a letter belongs to; none: any.
std::optional<std::uint64_t> step_of(const Letter& letter) {
  return std::visit(
      [](const auto& held) -> std::optional<std::uint64_t> {
        if constexpr (requires { held.id.step; }) {
          return held.id.step;
        } else {
          return std::nullopt;
        }
      },
      letter);
}

}  // namespace

void Mailbox::put(Letter letter) {
  std::optional<Promise<void>> waiting;
  {
    MutexLock lock(mutex_);
    letters_.push_back(std::move(letter));
    waiting = std::exchange(waiting_, std::nullopt);
  }
  if (waiting) waiting->set_value();
}

std::deque<Letter> Mailbox::take(std::uint64_t step) {
  std::deque<Letter> here, dropped;  // destroyed after the lock is gone
  {
    MutexLock lock(mutex_);
    std::deque<Letter> all = std::exchange(later_, {});
    std::move(letters_.begin(), letters_.end(), std::back_inserter(all));
    letters_.clear();
    for (Letter& letter : all) {
      const auto of = step_of(letter);
      std::deque<Letter>& place = !of || *of == step ? here : *of > step ? later_ : dropped;
      place.push_back(std::move(letter));
    }
  }
  return here;
}

void Mailbox::put_back(std::deque<Letter> letters) {
  MutexLock lock(mutex_);
  std::move(letters.rbegin(), letters.rend(), std::front_inserter(later_));
}

Future<void> Mailbox::arrival() {
  MutexLock lock(mutex_);
  if (!letters_.empty()) return make_ready_future<void>();
  if (!waiting_) waiting_.emplace(host_);
  return waiting_->future();
}

void Mailbox::set_state(std::uint64_t step, bool in_step, bool busy, std::string doing, TimePoint since) {
  MutexLock lock(mutex_);
  state_.step = step;
  state_.in_step = in_step;
  state_.busy = busy;
  state_.doing = std::move(doing);
  since_ = since;
}

WorkerState Mailbox::state(TimePoint now) const {
  MutexLock lock(mutex_);
  WorkerState state = state_;
  state.seconds = std::chrono::duration<double>(now - since_).count();
  return state;
}

}  // namespace torchspan::pipeline
