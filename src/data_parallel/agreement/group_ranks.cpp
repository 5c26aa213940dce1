#include "data_parallel/api/group_ranks.h"

#include <algorithm>
#include <fmt/format.h>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

namespace torchspan::data_parallel {
namespace {

class GroupRanks final : public state::Ranks {
 public:
  GroupRanks(collective::Group group, int level, std::function<void()> check)
      : group_(std::move(group)), level_(level), check_(std::move(check)) {}

  const std::string& identity() const override { return identity_; }
  int level() const override { return level_; }
  int rank() const override { return group_.rank(); }

  void reduce(std::vector<double>& numbers, bool maximum) const override {
    if (check_) check_();
    const at::Tensor all = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kDouble);
    std::copy(numbers.begin(), numbers.end(), all.data_ptr<double>());
    group_.all_reduce(all, maximum ? collective::kMax : collective::kSum).wait();
    std::copy_n(all.data_ptr<double>(), numbers.size(), numbers.begin());
  }

 private:
  const collective::Group group_;
  const std::string identity_ = fmt::format("group {}", fmt::ptr(group_.backend().get()));
  const int level_;
  const std::function<void()> check_;
};

}  // namespace

state::RanksPtr ranks_of(const collective::Group& group, int level, std::function<void()> check) {
  return std::make_shared<GroupRanks>(group, level, std::move(check));
}

}  // namespace torchspan::data_parallel
