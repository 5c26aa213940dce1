#include "recommender/report.h"

#include <fmt/format.h>
#include <utility>

#include <ATen/ATen.h>

#include "recommender/model.h"

namespace recommender {

Display::Display(torchspan::Worker& worker, torchspan::ProgressReport line, bool shown)
    : progress_(worker), line_(std::move(line)), shown_(shown) {
  line_.unit = "ratings";
}

void Display::step(std::int64_t epoch, double loss, std::int64_t ratings) {
  report_.ratings += ratings;
  report_.seconds = torchspan::to_seconds(progress_.elapsed());
  line_.step = epoch == line_.epoch ? line_.step + 1 : 1;
  line_.epoch = epoch;
  line_.loss = loss;
  line_.rate = static_cast<double>(report_.ratings) / report_.seconds;
  if (shown_) progress_.report(line_);
}

Report Display::finish() {
  if (shown_) progress_.finish();
  return report_;
}

void print_errors(const Split& data, double error) {
  const Priors priors;
  fmt::print("root mean square error on {} held-out ratings\n", data.held_out.size());
  fmt::print("  the mean of all ratings             {:.4f}\n",
             root_mean_square(data.held_out.values - data.train.values.mean()));
  fmt::print("  biases of students and lecturers    {:.4f}\n",
             bias_only_error(data, priors.student, priors.lecturer));
  fmt::print("  this model                          {:.4f}\n", error);
}

}  // namespace recommender
