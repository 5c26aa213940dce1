#pragma once
#include <cstdint>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace recommender {

inline constexpr char kDefaultFile[] = "build/data/insteval.csv";

/// Students' ratings of lecturers, one per row: student, lecturer, circumstances and rating.
struct Ratings {
  at::Tensor students, lecturers;  ///< int64 [n], counted from 0
  at::Tensor profiles;             ///< int64 [n]: equal where all circumstances are
  at::Tensor circumstances;        ///< float [n, c]: a one in each column's place for its category
  at::Tensor values;               ///< float [n]
  std::int64_t student_count = 0, lecturer_count = 0, profile_count = 0;

  std::int64_t size() const { return values.size(0); }
  std::int64_t circumstance_count() const { return circumstances.size(1); }
  Ratings at(const at::Tensor& positions) const;
};

/// Reads a CSV file with a header: s (student), d (lecturer), y (rating), and any other columns, which are
/// circumstances. Throws torchspan::Error{kInvalid} naming file, line and what to do.
Ratings load(const std::string& file);

struct Split {
  Ratings train, held_out;
};
/// Every tenth rating of an order drawn from `seed` is held out. The same on all workers.
Split split(const Ratings& ratings, std::uint64_t seed);

/// How often each of `count` things occurs, as float.
at::Tensor occurrences(const at::Tensor& things, std::int64_t count);

double root_mean_square(const at::Tensor& errors);

/// What a model without interactions comes to on the held-out ratings: the mean plus what a student and a
/// lecturer add to it, shrunk as if each had `prior` ratings more at the mean.
double bias_only_error(const Split& data, double student_prior, double lecturer_prior);

}  // namespace recommender
