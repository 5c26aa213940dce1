#include "data/api/sampler.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::data {
namespace {

/// A number that differs for different arguments with overwhelming probability.
std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t value = a + 0x9e3779b97f4a7c15u * (b + 1);
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

std::int64_t Sampler::full_step(int size) const {
  return options_.batch_per_rank ? options_.batch * size : options_.batch;
}

std::int64_t Sampler::steps_per_epoch(int size) const {
  const std::int64_t full = full_step(size);
  return (options_.samples + (options_.drop_last ? 0 : full - 1)) / full;
}

std::int64_t Sampler::count(const DataPosition& at, int size) const {
  return std::min(options_.samples - at.next, full_step(size));
}

/// Fisher and Yates, with a generator and a reduction that every standard library computes alike.
void Sampler::shuffle(std::int64_t epoch) {
  if (epoch_ == epoch) return;
  epoch_ = -1;  // a child that is forked meanwhile begins again
  order_.resize(static_cast<std::size_t>(options_.samples));
  std::iota(order_.begin(), order_.end(), 0);
  std::mt19937_64 random(mixed(options_.seed, static_cast<std::uint64_t>(epoch)));
  for (std::size_t left = order_.size(); left > 1; --left)
    std::swap(order_[left - 1], order_[random() % left]);
  epoch_ = epoch;
}

DataStep Sampler::step(const DataPosition& at, int rank, int size) {
  const std::int64_t all = count(at, size), begin = all * rank / size, end = all * (rank + 1) / size;
  DataStep step{
      .number = at.step, .epoch = at.epoch, .rank = rank, .size = size, .batch = all, .samples = {}};
  step.weight = begin == end ? 0 : static_cast<double>(size) / static_cast<double>(all);
  step.samples.resize(static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 1)));
  std::iota(step.samples.begin(), step.samples.end(), at.next + (begin == end ? 0 : begin));
  if (options_.shuffle) {
    shuffle(at.epoch);
    for (std::int64_t& sample : step.samples) sample = order_[static_cast<std::size_t>(sample)];
  }
  step.seed =
      mixed(mixed(options_.seed + 1, static_cast<std::uint64_t>(at.step)), static_cast<std::uint64_t>(rank));
  return step;
}

DataPosition Sampler::of_step(const DataPosition& at, int size) const {
  const std::int64_t left = options_.samples - at.next;
  if (left > 0 && (!options_.drop_last || left >= full_step(size))) return at;
  return {.step = at.step, .epoch = at.epoch + 1, .next = 0};
}

DataPosition Sampler::after(const DataPosition& at, int size) const {
  return of_step({.step = at.step + 1, .epoch = at.epoch, .next = at.next + count(at, size)}, size);
}

}  // namespace torchspan::data

namespace torchspan {

std::vector<std::vector<std::int64_t>> DataStep::micro_batches(std::int64_t most) const {
  if (most <= 0) throw_invalid("the size of a micro-batch is {}; expected 1 or more", most);
  std::vector<std::vector<std::int64_t>> parts;
  const auto count = static_cast<std::int64_t>(samples.size());
  for (std::int64_t from = 0; from < count; from += most)
    parts.emplace_back(samples.begin() + from, samples.begin() + std::min(from + most, count));
  return parts;
}

}  // namespace torchspan
