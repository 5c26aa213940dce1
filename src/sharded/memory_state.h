#pragma once
// A checkpoint in memory, for tests: what all ranks save, put together. The same box of several ranks is a replica.
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/state/source.h>

namespace torchspan::sharded::testing {

class MemoryState final : public state::StateReader {
 public:
  /// Puts together what the ranks' writers have. Fails the test if shards overlap, leave gaps, or replicas differ, except
  /// those of `first_counts`, of which the first is taken, as a checkpoint does.
  explicit MemoryState(const std::vector<state::StateWriter>& writers, const std::string& first_counts = "") {
    std::map<std::string, at::Tensor> covered;
    std::map<std::tuple<std::string, std::vector<std::int64_t>, std::vector<std::int64_t>>,
             const state::StateWriter*>
        writer_of;  // of each box
    for (const auto& writer : writers) {
      for (const auto& [name, value] : writer.values()) values_.emplace(name, value);
      for (const state::StateTensor& part : writer.tensors()) {
        at::Tensor& whole = tensors_[part.name];
        at::Tensor& count = covered[part.name];
        if (!whole.defined()) {
          whole = at::zeros(part.shape, part.tensor.options());
          count = at::zeros(part.shape, at::kInt);
        }
        const auto [first, is_new] =
            writer_of.emplace(std::tuple(part.name, part.offset, part.tensor.sizes().vec()), &writer);
        const bool replica = !is_new && first->second != &writer;  // the same box of another rank
        const at::Tensor box = box_of(whole, part.tensor.sizes(), part.offset);
        if (replica && part.name == first_counts) continue;
        if (replica) EXPECT_TRUE(at::equal(box, part.tensor)) << part.name << ": replicas differ";
        box.copy_(part.tensor);
        if (!replica) box_of(count, part.tensor.sizes(), part.offset).add_(1);
      }
    }
    for (const auto& [name, count] : covered)
      EXPECT_TRUE(count.eq(1).all().item<bool>()) << name << "\n" << count;
  }

  std::int64_t step() const override { return 0; }
  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }

 protected:
  std::vector<std::string> all_names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }
  bool contains(const std::string& name) const override { return tensors_.contains(name); }
  at::Tensor read_tensor(const std::string& name) const override { return find(name); }
  std::vector<std::int64_t> shape_of(const std::string& name) const override {
    return find(name).sizes().vec();
  }
  at::ScalarType dtype_of(const std::string& name) const override { return find(name).scalar_type(); }
  void read_box(const std::string& name, const at::Tensor& target,
                const std::vector<std::int64_t>& offset) const override {
    target.copy_(box_of(find(name), target.sizes(), offset));
  }
  const state::Value* find_value(const std::string& name) const override {
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : &found->second;
  }
  void read_on_owner(const std::string&, const state::RemoteValue&) const override {}
  std::string describe() const override { return "the state in memory"; }

 private:
  static at::Tensor box_of(const at::Tensor& whole, at::IntArrayRef sizes,
                           const std::vector<std::int64_t>& offset) {
    at::Tensor box = whole;
    for (std::size_t i = 0; i < offset.size(); ++i)
      box = box.narrow(static_cast<std::int64_t>(i), offset[i], sizes[i]);
    return box;
  }
  const at::Tensor& find(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw_invalid("the state has no '" + name + "'");
    return found->second;
  }

  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, state::Value> values_;
};

}  // namespace torchspan::sharded::testing
