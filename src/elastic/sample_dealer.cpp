#include "elastic/sample_dealer.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>
#include <random>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::elastic {
namespace {

/// A number that differs for different arguments with overwhelming probability.
std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t value = a + 0x9e3779b97f4a7c15u * (b + 1);
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

SampleDealer::SampleDealer(const ElasticOptions& options)
    : samples_(options.samples),
      batch_(options.batch),
      per_rank_(options.batch_per_rank),
      seed_(options.seed) {}

std::int64_t SampleDealer::count(const ElasticPosition& at, int size) const {
  return std::min(samples_ - at.next, per_rank_ ? batch_ * size : batch_);
}

/// Fisher and Yates, with a generator and a reduction that every standard library computes alike.
void SampleDealer::shuffle(std::int64_t epoch) {
  if (epoch_ == epoch) return;
  epoch_ = epoch;
  order_.resize(static_cast<std::size_t>(samples_));
  std::iota(order_.begin(), order_.end(), 0);
  std::mt19937_64 random(mixed(seed_, static_cast<std::uint64_t>(epoch)));
  for (std::size_t left = order_.size(); left > 1; --left)
    std::swap(order_[left - 1], order_[random() % left]);
}

ElasticStep SampleDealer::deal(const ElasticPosition& at, int rank, int size) {
  shuffle(at.epoch);
  const std::int64_t all = count(at, size);
  const auto begin = order_.begin() + at.next;
  ElasticStep step{.number = at.step, .epoch = at.epoch, .rank = rank, .size = size, .samples = {}};
  step.samples.assign(begin + all * rank / size, begin + all * (rank + 1) / size);
  step.weight = step.samples.empty() ? 0 : static_cast<double>(size) / static_cast<double>(all);
  if (step.samples.empty()) step.samples.push_back(*begin);
  step.seed = mixed(mixed(seed_ + 1, static_cast<std::uint64_t>(at.step)), static_cast<std::uint64_t>(rank));
  return step;
}

ElasticPosition SampleDealer::after(const ElasticPosition& at, int size) const {
  ElasticPosition next{.step = at.step + 1, .epoch = at.epoch, .next = at.next + count(at, size)};
  if (next.next == samples_) next = {.step = next.step, .epoch = at.epoch + 1, .next = 0};
  return next;
}

}  // namespace torchspan::elastic

namespace torchspan {

void ElasticOptions::validate() const {
  const auto check = [](bool right, const char* field, auto value, const char* expected) {
    if (right) return;
    throw_invalid(fmt::format("ElasticOptions::{} is {}; expected {}", field, value, expected));
  };
  check(samples > 0, "samples", samples, "the size of the data set, 1 or more");
  check(batch > 0, "batch", batch, "1 or more samples");
  check(min_ranks > 0, "min_ranks", min_ranks, "1 or more");
  check(too_few_limit > Duration::zero(), "too_few_limit", to_seconds(too_few_limit), "more than 0 seconds");
  check(step_timeout > Duration::zero(), "step_timeout", to_seconds(step_timeout), "more than 0 seconds");
  check(start.step >= 0 && start.epoch >= 0, "start", start.step, "a step and an epoch of 0 or more");
  check(start.next >= 0 && start.next < samples, "start.next", start.next, "0 or more, less than `samples`");
  check(group.ranks.empty(), "group.ranks", group.ranks.size(), "no ranks: all workers take part");
  data_parallel.validate();
}

std::vector<std::vector<std::int64_t>> ElasticStep::micro_batches(std::int64_t most) const {
  if (most <= 0) throw_invalid(fmt::format("the size of a micro-batch is {}; expected 1 or more", most));
  std::vector<std::vector<std::int64_t>> parts;
  const auto count = static_cast<std::int64_t>(samples.size());
  for (std::int64_t from = 0; from < count; from += most)
    parts.emplace_back(samples.begin() + from, samples.begin() + std::min(from + most, count));
  return parts;
}

}  // namespace torchspan

namespace torchspan::elastic {

const ElasticStep& StepCursor::begin(int rank, int size, std::uint64_t generation) {
  step_ = dealer_.deal(position_, rank, size);
  step_->generation = generation;
  after_ = dealer_.after(position_, size);
  return *step_;
}

}  // namespace torchspan::elastic
