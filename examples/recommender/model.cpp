#include "recommender/model.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace recommender {
TableImpl::TableImpl(std::int64_t count, std::int64_t width)
    : rows_(register_module(
          "rows",
          torch::nn::Embedding(
              torch::nn::EmbeddingOptions(count, width).sparse(true)._weight(at::zeros({count, width}))))) {}

at::Tensor TableImpl::forward(const at::Tensor& things) {
  const c10::AutoGradMode mode(is_training());
  return rows_(things);
}

Model::Prediction Model::predict(const Ratings& ratings) const {
  const auto student_rows = students.rpc_async(kLookUp, ratings.students);
  const auto lecturer_rows = lecturers.rpc_async(kLookUp, ratings.lecturers);
  const auto profile_rows = profiles.rpc_async(kLookUp, ratings.profiles);
  const at::Tensor student = student_rows.wait(), lecturer = lecturer_rows.wait();
  const at::Tensor profile = profile_rows.wait();
  const at::Tensor together = (lecturer.slice(1, 1) * ratings.circumstances).sum(1);
  const at::Tensor values =
      student.select(1, 0) + lecturer.select(1, 0) + profile.select(1, 0) + together + mean;
  return {values, student, lecturer, profile};
}

void Model::set_training(bool on) const {
  for (const auto& table : {students, lecturers, profiles}) table.rpc_sync(kSetTraining, on);
}

Occurrences::Occurrences(const Ratings& ratings)
    : students(occurrences(ratings.students, ratings.student_count)),
      lecturers(occurrences(ratings.lecturers, ratings.lecturer_count)),
      profiles(occurrences(ratings.profiles, ratings.profile_count)) {}

at::Tensor loss_of(const Model::Prediction& prediction, const Ratings& batch, const Occurrences& all,
                   const Priors& priors) {
  const auto penalty = [](const at::Tensor& squares, double prior, const at::Tensor& often,
                          const at::Tensor& who) { return squares * prior / often.index_select(0, who); };
  const at::Tensor students = prediction.students.select(1, 0).pow(2);
  const at::Tensor lecturers = prediction.lecturers.select(1, 0).pow(2);
  const at::Tensor together = prediction.lecturers.slice(1, 1).pow(2).sum(1);
  const at::Tensor profiles = prediction.profiles.select(1, 0).pow(2);
  return ((prediction.values - batch.values).pow(2) +
          penalty(students, priors.student, all.students, batch.students) +
          penalty(lecturers, priors.lecturer, all.lecturers, batch.lecturers) +
          penalty(together, priors.interaction, all.lecturers, batch.lecturers) +
          penalty(profiles, priors.profile, all.profiles, batch.profiles))
      .mean();
}

}  // namespace recommender
