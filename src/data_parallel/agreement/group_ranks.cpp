#include "data_parallel/api/group_ranks.h"

#include <cmath>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>

namespace torchspan::data_parallel {
namespace {

class GroupRanks final : public state::Ranks {
 public:
  GroupRanks(collective::Group group, int level, std::function<void()> check)
      : group_(std::move(group)), level_(level), check_(std::move(check)) {}

  const void* identity() const override { return group_.backend().get(); }
  int level() const override { return level_; }
  int rank() const override { return group_.rank(); }

  /// Backends may lose a NaN in a maximum, so which numbers are NaN is reduced, too.
  void reduce(std::vector<double>& numbers, bool maximum) const override {
    if (check_) check_();
    const auto count = static_cast<std::int64_t>(numbers.size());
    const at::Tensor all = at::zeros({2 * count}, at::kDouble);
    auto* values = all.data_ptr<double>();
    for (std::int64_t i = 0; i < count; ++i) {
      const double number = numbers[static_cast<std::size_t>(i)];
      (std::isnan(number) ? values[count + i] : values[i]) = std::isnan(number) ? 1 : number;
    }
    group_.all_reduce(all, maximum ? collective::kMax : collective::kSum).wait();
    for (std::int64_t i = 0; i < count; ++i)
      numbers[static_cast<std::size_t>(i)] = values[count + i] > 0 ? std::nan("") : values[i];
  }

 private:
  const collective::Group group_;
  const int level_;
  const std::function<void()> check_;
};

}  // namespace

state::RanksPtr ranks_of(const collective::Group& group, int level, std::function<void()> check) {
  return std::make_shared<GroupRanks>(group, level, std::move(check));
}

}  // namespace torchspan::data_parallel
