#include "fashion_mnist/team_report.h"

#include <cmath>
#include <fmt/format.h>
#include <iterator>

#include <torchspan/core/error.h>

namespace fashion_mnist {

TeamReport::TeamReport(torchspan::Session& session, const Team& team, const TrainingOptions& options,
                       std::int64_t images)
    : session_(session), team_(team), options_(options), images_(images) {}

void TeamReport::begin(const torchspan::DataPosition& position) {
  team_.wait_for_each_other();  // so that reading the data is not measured
  result_.first_epoch = position.epoch + 1;
  if (team_.rank != 0) return;
  if (position.step > 0) fmt::print("resumed after step {}\n", position.step);
  meter_.emplace(session_, options_, images_, team_.name());
  meter_->continue_after(position.step);
}

void TeamReport::end_epoch(double loss) {
  const double mean = team_.sum(loss) / static_cast<double>(images_);
  if (!std::isfinite(mean)) {
    throw torchspan::Error(torchspan::ErrorKind::kInvalid,
                           fmt::format("{}: the loss is not a finite number after epoch {}: lower --lr",
                                       team_.name(), result_.first_epoch + std::ssize(result_.losses)));
  }
  result_.losses.push_back(mean);
}

void TeamReport::step(std::int64_t epoch, double loss, std::int64_t images) {
  if (meter_) meter_->step(epoch, loss, images);
}

void TeamReport::finish() {
  if (meter_) meter_->finish();
}

TeamResult TeamReport::tested(double accuracy, std::int64_t images) {
  result_.accuracy = accuracy;
  if (!meter_) return result_;
  result_.images_per_second = meter_->images_per_second();
  std::int64_t epoch = result_.first_epoch;
  for (const double loss : result_.losses)
    fmt::print("{}: epoch {}, mean loss {:.6f}\n", team_.name(), epoch++, loss);
  fmt::print("{}: {}\n", team_.name(), meter_->summary());
  fmt::print("{}: test accuracy {:.2f} % on {} images\n", team_.name(), 100 * accuracy, images);
  return result_;
}

TeamResult TeamReport::preempted(std::int64_t step, std::int64_t steps) {
  if (meter_) fmt::print("preempted: the state after step {} of {} is saved\n", step, steps);
  result_.preempted = true;
  return result_;
}

}  // namespace fashion_mnist
