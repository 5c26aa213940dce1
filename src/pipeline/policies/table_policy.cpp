#include <algorithm>
#include <set>
#include <utility>

#include "pipeline/policies/policy.h"

namespace torchspan::pipeline {
namespace {

using schedule::Action;
using schedule::ActionKind;

class TablePolicy final : public Policy {
 public:
  explicit TablePolicy(std::vector<Action> row) : row_(std::move(row)) {}

  void became_ready(const Action& action) override { ready_.insert(action); }
  std::optional<Action> next() override {
    if (cursor_ == row_.size() || ready_.erase(row_[cursor_]) == 0) return std::nullopt;
    return row_[cursor_++];
  }
  std::optional<Action> next_backward() const override {
    const auto found = std::find_if(
        row_.begin() + static_cast<std::ptrdiff_t>(cursor_), row_.end(), [](const Action& action) {
          return action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGradient;
        });
    return found == row_.end() ? std::nullopt : std::optional<Action>(*found);
  }

 private:
  const std::vector<Action> row_;
  std::size_t cursor_ = 0;
  std::set<Action> ready_;
};

}  // namespace

std::unique_ptr<Policy> make_table_policy(std::vector<Action> row) {
  return std::make_unique<TablePolicy>(std::move(row));
}

}  // namespace torchspan::pipeline
