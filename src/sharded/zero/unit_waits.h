#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/sharded/unit_forward.h>

namespace torch::nn {
class Module;
}

namespace torchspan::sharded {

/// While it lives, each ts::Sharded module in a replicated module waits for the buckets of its parameters when its
/// forward begins. Use it from the training thread; the module outlives it.
class UnitWaits {
 public:
  using BucketOf =
      std::map<const c10::TensorImpl*, std::size_t>;  ///< by parameter; those that never arrive are not in it

  UnitWaits(torch::nn::Module& module, const BucketOf& bucket_of,
            const std::function<void(std::size_t)>& wait);
  ~UnitWaits();
  UnitWaits(const UnitWaits&) = delete;
  UnitWaits& operator=(const UnitWaits&) = delete;

  /// Buckets with parameters that are in no such module, or in several: the forward of the whole module waits for them.
  const std::set<std::size_t>& others() const { return others_; }

 private:
  void visit(torch::nn::Module& module, UnitModule* unit);

  std::vector<UnitModule*> units_;
  std::map<const c10::TensorImpl*, UnitModule*> unit_of_;  ///< null: the whole module
  std::set<std::size_t> others_;
};

}  // namespace torchspan::sharded
