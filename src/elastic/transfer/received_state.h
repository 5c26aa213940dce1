#pragma once
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint/state.h>

#include "elastic/transfer/state_listing.h"

namespace torchspan::elastic {

/// A state that another rank sent, as objects read it.
class ReceivedState final : public checkpoint::StateReader {
 public:
  /// `tensors` in the order of the listing.
  ReceivedState(StateListing listing, std::vector<at::Tensor> tensors);
  std::int64_t step() const override { return listing_.position.step; }

 protected:
  std::vector<std::string> all_names() const override;
  bool contains(const std::string& full_name) const override { return tensors_.contains(full_name); }
  at::Tensor read_tensor(const std::string& full_name) const override { return get(full_name); }
  std::vector<std::int64_t> shape_of(const std::string& full_name) const override {
    return get(full_name).sizes().vec();
  }
  at::ScalarType dtype_of(const std::string& full_name) const override {
    return get(full_name).scalar_type();
  }
  void read_box(const std::string& full_name, const at::Tensor& target,
                const std::vector<std::int64_t>& offset) const override;
  const checkpoint::Value* find_value(const std::string& full_name) const override;
  void read_on_owner(const std::string& full_name, const checkpoint::RemoteValue& value) const override;
  std::string describe() const override { return "the state of the rank that this one joined"; }

 private:
  const at::Tensor& get(const std::string& full_name) const;

  const StateListing listing_;
  std::map<std::string, at::Tensor> tensors_;
};

}  // namespace torchspan::elastic
