#include "data_parallel/rounds/empty_rounds.h"

#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "engine/api/grad_field_sink.h"

namespace torchspan::data_parallel {

std::unique_ptr<Round> EmptyRounds::begin(const RoundOptions& options) {
  engine::GradFieldSink between_passes(0);
  move_out_of_buckets(parts_.slots, *parts_.plan.buckets(), between_passes, /*keep_values=*/true);
  return std::make_unique<Round>(parts_, options);
}

void EmptyRounds::finish(Round& round) {
  try {
    round.conclude_with_zeros();
  } catch (...) {
    const collective::Group& group = parts_.group;
    group.abort(Error(ErrorKind::kCancelled, fmt::format("rank {} cannot continue its reduction: {}",
                                                         group.ranks()[group.rank()], round.reason())));
    return;
  }
  parts_.undefined.restore();
  parts_.meter.count_given_up();
  MutexLock lock(mutex_);
  given_up_ = round.finished();
  reason_ = round.reason();
}

void EmptyRounds::shadow(RoundOptions options) {
  options.shadow = true;
  const std::unique_ptr<Round> round = begin(options);
  round->conclude_with_zeros();
  round->finished().wait();
  round->install_rebuilt();
}

void EmptyRounds::refuse(const RoundOptions& options, const std::string& reason) {
  const std::unique_ptr<Round> round = begin(options);
  if (!reason.empty()) round->give_up(reason);
  finish(*round);
}

Future<void> EmptyRounds::given_up() {
  MutexLock lock(mutex_);
  return given_up_;
}

bool EmptyRounds::settle_for(Duration limit) {
  const Future<void> given_up = this->given_up();
  try {
    return !given_up.valid() || given_up.wait_for(limit);
  } catch (const Error&) {  // its host has ended
    return true;
  }
}

std::string EmptyRounds::reason() {
  MutexLock lock(mutex_);
  return reason_;
}

std::optional<Error> EmptyRounds::settle() {
  const Future<void> given_up = this->given_up();
  std::optional<Error> late;
  if (!given_up.valid()) return late;
  try {
    given_up.wait();
  } catch (const Error& error) {  // reported when it happened; the next operation of a broken group fails too
    const collective::Group& group = parts_.group;
    if (error.kind() == ErrorKind::kTimedOut) {
      late.emplace(error.kind(),
                   fmt::format("rank {} gave up its backward pass, because {}, and other ranks did not "
                               "begin theirs: {}",
                               group.ranks()[group.rank()], reason(), error.message()));
    }
  }
  MutexLock lock(mutex_);
  given_up_ = {};
  return late;
}

}  // namespace torchspan::data_parallel
