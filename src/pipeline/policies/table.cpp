#include <algorithm>
#include <set>
#include <utility>

#include "pipeline/policy.h"

namespace torchspan::pipeline {
namespace {

using schedule::Task;
using schedule::TaskKind;

class TablePolicy final : public Policy {
 public:
  explicit TablePolicy(std::vector<Task> row) : row_(std::move(row)) {}

  void became_ready(const Task& task) override { ready_.insert(task); }
  std::optional<Task> next() override {
    if (cursor_ == row_.size() || ready_.erase(row_[cursor_]) == 0) return std::nullopt;
    return row_[cursor_++];
  }
  std::optional<Task> next_backward() const override {
    const auto found = std::find_if(row_.begin() + static_cast<std::ptrdiff_t>(cursor_), row_.end(),
                                    [](const Task& task) { return task.kind != TaskKind::kForward; });
    return found == row_.end() ? std::nullopt : std::optional<Task>(*found);
  }

 private:
  const std::vector<Task> row_;
  std::size_t cursor_ = 0;
  std::set<Task> ready_;
};

}  // namespace

std::unique_ptr<Policy> make_table_policy(std::vector<Task> row) {
  return std::make_unique<TablePolicy>(std::move(row));
}

}  // namespace torchspan::pipeline
