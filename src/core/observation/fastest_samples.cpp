#include "core/observation/fastest_samples.h"

namespace torchspan {
namespace {

/// How long the request and its answer were under way.
Duration delay_of(const ClockSample& sample) {
  return (sample.arrived - sample.sent) - (sample.answered - sample.received);
}

}  // namespace

void FastestSamples::add(const std::vector<ClockSample>& samples) {
  for (const ClockSample& sample : samples) {
    const auto [place, is_first] = fastest_.try_emplace(sample.rank, sample);
    if (!is_first && delay_of(sample) < delay_of(place->second)) place->second = sample;
  }
}

std::vector<ClockSample> FastestSamples::take(TimePoint now) {
  std::vector<ClockSample> samples;
  for (const auto& [rank, sample] : fastest_) {
    known_.insert(rank);
    samples.push_back(sample);
  }
  fastest_.clear();
  begun_ = now;
  return samples;
}

std::vector<ClockSample> FastestSamples::take_if_due(TimePoint now, Duration length) {
  if (now - begun_ >= length) return take(now);
  std::vector<ClockSample> first;
  std::erase_if(fastest_, [&](const auto& entry) {
    const bool is_new = known_.insert(entry.first).second;
    if (is_new) first.push_back(entry.second);
    return is_new;
  });
  return first;
}

}  // namespace torchspan
