#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace recommender {

inline constexpr char kDefaultFile[] = "build/data/insteval.csv";

/// Students' ratings of lecturers, one per row: student, lecturer, circumstances and rating.
struct Ratings {
  at::Tensor students, lecturers;  ///< int64 [n], counted from 0
  at::Tensor profiles;             ///< int64 [n]: equal where all circumstances are
  at::Tensor circumstances;        ///< float [n, c]: one-hot columns, one per category of each circumstance
  at::Tensor values;               ///< float [n]
  std::int64_t student_count = 0, lecturer_count = 0, profile_count = 0;

  std::int64_t size() const { return values.size(0); }
  std::int64_t circumstance_count() const { return circumstances.size(1); }
  Ratings at(const at::Tensor& positions) const;
};

/// Reads a CSV file with a header: s (student), d (lecturer), y (rating), and any other columns, which are
/// circumstances. Throws torchspan::Error{kInvalid} with the file, the line and a remedy.
Ratings load(const std::string& file);

struct Split {
  Ratings train, held_out;
};
/// Holds out every tenth rating of an order drawn from `seed`. The same on all workers.
Split split(const Ratings& ratings, std::uint64_t seed);

/// Returns the positions 0 … count - 1 in batches of `batch` (the last may be smaller), shuffled by the seed.
std::vector<at::Tensor> shuffled_batches(std::int64_t count, std::int64_t batch, std::uint64_t seed);

/// Returns how often each of `count` items occurs, as float.
at::Tensor occurrences(const at::Tensor& things, std::int64_t count);

double root_mean_square(const at::Tensor& errors);

/// Returns the error on held-out ratings of a model without interactions: the mean plus biases of student and
/// lecturer, shrunk as if each had `prior` more ratings at the mean.
double bias_only_error(const Split& data, double student_prior, double lecturer_prior);

}  // namespace recommender
