#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace torchspan::pipeline {

/// The rows of a step's batch that each micro-batch gets.
class RowSplit {
 public:
  /// `rows` has one entry per micro-batch.
  explicit RowSplit(std::vector<std::int64_t> rows) : rows_(std::move(rows)) {
    for (const std::int64_t rows_here : rows_) {
      first_.push_back(total_);
      total_ += rows_here;
    }
  }

  int micro_batches() const { return static_cast<int>(rows_.size()); }
  std::int64_t first(int micro_batch) const { return first_[static_cast<std::size_t>(micro_batch)]; }
  std::int64_t rows(int micro_batch) const { return rows_[static_cast<std::size_t>(micro_batch)]; }
  /// The micro-batch's part of all rows, between 0 and 1.
  double share(int micro_batch) const {
    return static_cast<double>(rows(micro_batch)) / static_cast<double>(total_);
  }

 private:
  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> first_;
  std::int64_t total_ = 0;
};

}  // namespace torchspan::pipeline
