#pragma once
// A checkpoint in memory, for tests: what all ranks save, put together. The same box of several ranks is a replica.
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/state/source.h>

#include "state/api/memory_reader.h"

namespace torchspan::sharded::testing {

class MemoryState final : public state::MemoryReader {
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
        const at::Tensor box = state::box_of(whole, part.tensor.sizes(), part.offset);
        if (replica && part.name == first_counts) continue;
        if (replica) EXPECT_TRUE(at::equal(box, part.tensor)) << part.name << ": replicas differ";
        box.copy_(part.tensor);
        if (!replica) state::box_of(count, part.tensor.sizes(), part.offset).add_(1);
      }
    }
    for (const auto& [name, count] : covered)
      EXPECT_TRUE(count.eq(1).all().item<bool>()) << name << "\n" << count;
  }

  std::int64_t step() const override { return 0; }

 protected:
  void read_on_owner(const std::string&, const state::RemoteValue&) const override {}
  std::string describe() const override { return "the state in memory"; }
};

}  // namespace torchspan::sharded::testing
