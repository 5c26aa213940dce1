#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <tuple>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/data.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/pool.h>

#include "core/api/throw_invalid.h"
#include "data/api/sampler.h"

namespace torchspan::data {
namespace {

/// The threads of a loader, and the steps that they read, in order. Used by one thread.
class ReadAhead {
 public:
  ReadAhead(Loading::Read read, int threads)
      : read_(std::make_shared<const Loading::Read>(std::move(read))),
        pool_(std::make_shared<Pool>(*executor_,
                                     PoolOptions{.name = "data loader",
                                                 .threads = static_cast<std::size_t>(threads),
                                                 .max_threads = static_cast<std::size_t>(threads)})) {}
  ~ReadAhead() {
    abandoned_->store(true);  // what no thread reads yet
    pool_->stop();
  }

  std::size_t size() const { return steps_.size(); }
  void add(DataStep step) {
    Promise<std::shared_ptr<void>> promise{std::weak_ptr<ContinuationExecutor>(pool_)};
    steps_.push_back({step, promise.future()});
    pool_->post([read = read_, abandoned = abandoned_, step = std::move(step),
                 promise = std::move(promise)]() mutable {
      if (abandoned->load()) return;
      try {
        promise.set_value((*read)(step));
      } catch (...) {
        promise.set_error(std::current_exception());
      }
    });
  }
  /// Waits for the first step.
  std::pair<DataStep, std::shared_ptr<void>> take() {
    std::pair<DataStep, std::shared_ptr<void>> taken{std::move(steps_.front().step),
                                                     steps_.front().data.wait()};
    steps_.pop_front();
    return taken;
  }

 private:
  struct Reading {
    DataStep step;
    Future<std::shared_ptr<void>> data;
  };
  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<const Loading::Read> read_;
  const std::shared_ptr<std::atomic<bool>> abandoned_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<Pool> pool_;
  std::deque<Reading> steps_;
};

}  // namespace

class Loading::Impl {
 public:
  Impl(std::int64_t samples, Read read, const DataLoaderOptions& options)
      : read_(std::move(read)),
        options_(options),
        sampler_({.samples = samples,
                  .batch = options.batch,
                  .batch_per_rank = options.batch_per_rank,
                  .shuffle = options.shuffle,
                  .drop_last = options.drop_last,
                  .seed = options.seed}) {}

  Loaded next() {
    Loaded loaded;
    if (options_.threads == 0) {
      loaded.step = sampler_.step(position_, options_.rank, options_.size);
      loaded.data = read_(loaded.step);
    } else {
      std::tie(loaded.step, loaded.data) = take();
    }
    position_ = sampler_.after(position_, options_.size);
    loaded.ends_epoch = position_.next == 0;
    if (ahead_) read_ahead();
    return loaded;
  }
  const DataPosition& position() const { return position_; }
  void move_to(const DataPosition& position) {
    if (position.step < 0 || position.epoch < 0 || position.next < 0 ||
        position.next > sampler_.options().samples) {
      throw_invalid("a DataLoader cannot go to step {}, epoch {}, sample {}: an epoch has {} samples",
                    position.step, position.epoch, position.next, sampler_.options().samples);
    }
    ahead_.reset();
    position_ = sampler_.of_step(position, options_.size);
  }
  /// The same, in the orders of another seed.
  void move_to(const DataPosition& position, std::uint64_t seed) {
    move_to(position);
    SamplerOptions options = sampler_.options();
    options.seed = seed;
    sampler_ = Sampler(options);
  }
  std::int64_t steps_per_epoch() const { return sampler_.steps_per_epoch(options_.size); }
  std::int64_t full_step() const { return sampler_.full_step(options_.size); }
  const SamplerOptions& sampling() const { return sampler_.options(); }

 private:
  std::pair<DataStep, std::shared_ptr<void>> take() {
    // In a forked child, which has no thread to read, what the parent's threads read stays in memory.
    if (ahead_ && !ahead_.get_deleter().process().is_current()) ahead_.reset();
    if (!ahead_) {
      planned_ = position_;
      ahead_ = std::make_unique<ReadAhead>(read_, options_.threads);
      read_ahead();
    }
    try {
      return ahead_->take();
    } catch (...) {
      ahead_.reset();
      throw;
    }
  }

  void read_ahead() {
    while (ahead_->size() < static_cast<std::size_t>(options_.ahead)) {
      ahead_->add(sampler_.step(planned_, options_.rank, options_.size));
      planned_ = sampler_.after(planned_, options_.size);
    }
  }

  const Read read_;
  const DataLoaderOptions options_;
  Sampler sampler_;
  DataPosition position_;
  DataPosition planned_;  ///< of the step that is read ahead next
  ProcessOwned<ReadAhead> ahead_;
};

namespace {

class LoadingSource final : public state::StateSource {
 public:
  explicit LoadingSource(Loading::Impl& loading) : loading_(loading) {}
  void save(state::StateWriter& writer) const override {
    const DataPosition& position = loading_.position();
    writer.add_value("step", position.step);
    writer.add_value("epoch", position.epoch);
    writer.add_value("next", position.next);
    writer.add_value("samples", loading_.sampling().samples);
    writer.add_value("seed", static_cast<std::int64_t>(loading_.sampling().seed));
  }
  void load(const state::StateReader& reader) override {
    const auto number = [&](const char* name) { return state::value_as<std::int64_t>(reader.value(name)); };
    const std::int64_t samples = number("samples");
    if (samples != loading_.sampling().samples) {
      throw_invalid(
          "'{}' was saved by a DataLoader of {} samples, and this one has {}: use the same data set, or do "
          "not register the loader and call move_to()",
          reader.full_name(""), samples, loading_.sampling().samples);
    }
    const DataPosition position{.step = number("step"), .epoch = number("epoch"), .next = number("next")};
    loading_.move_to(position, static_cast<std::uint64_t>(number("seed")));
  }

 private:
  Loading::Impl& loading_;
};

}  // namespace

Loading::Loading(std::int64_t samples, Read read, const DataLoaderOptions& options) {
  options.validate();
  if (samples <= 0) throw_invalid("a DataLoader needs a data set with samples; this one has none");
  impl_ = std::make_unique<Impl>(samples, std::move(read), options);
  if (impl_->steps_per_epoch() == 0) {
    throw_invalid("with DataLoaderOptions::drop_last, {} samples make no step of {}: lower `batch`", samples,
                  impl_->full_step());
  }
}

Loading::~Loading() = default;
Loading::Loading(Loading&&) noexcept = default;
Loading::Loaded Loading::next() { return impl_->next(); }
const DataPosition& Loading::position() const { return impl_->position(); }
void Loading::move_to(const DataPosition& position) { impl_->move_to(position); }
std::int64_t Loading::steps_per_epoch() const { return impl_->steps_per_epoch(); }
state::SourcePtr Loading::state_source() { return std::make_unique<LoadingSource>(*impl_); }

}  // namespace torchspan::data

namespace torchspan {

void DataLoaderOptions::validate() const {
  const auto check = [](bool right, const char* field, auto value, const char* expected) {
    if (right) return;
    throw_invalid("DataLoaderOptions::{} is {}; expected {}", field, value, expected);
  };
  check(batch > 0, "batch", batch, "1 or more samples");
  check(size > 0, "size", size, "the number of ranks that share the samples, such as session.world_size()");
  check(rank >= 0 && rank < size, "rank", rank, "this rank among them, such as session.rank()");
  check(threads >= 0, "threads", threads, "0 or more");
  check(ahead > 0, "ahead", ahead, "1 or more steps");
}

}  // namespace torchspan
