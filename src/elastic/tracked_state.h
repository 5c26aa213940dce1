#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/core/bytes.h>
#include <torchspan/elastic.h>

namespace torchspan::elastic {

/// What is sent before the tensors of a state: their names, dtypes and shapes, the values and the position.
struct StateListing {
  struct Entry {
    std::string name;
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> shape;
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  ElasticPosition position;
  std::vector<Entry> tensors;
  std::map<std::string, checkpoint::Value> values;
  friend bool operator==(const StateListing&, const StateListing&) = default;

  Bytes encode() const;
  /// Throws Error{kInvalid} for malformed bytes.
  static StateListing decode(BytesView bytes);
};

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

/// The state of a replica: the registered objects, in order, and the position. Copies it between ranks.
class TrackedState {
 public:
  /// Throws Error{kInvalid} if the name is taken, or begins with another object's name and a dot, or the reverse.
  void add(std::string name, checkpoint::SourcePtr source);

  /// Copies the state of rank 0 of the group to its other ranks; `position` is read on rank 0 and written on the
  /// others. Collective. On other ranks, nothing changes before all of it has arrived. Throws Error{kInvalid} naming the
  /// object if it does not fit; what the group throws if a rank dies.
  void copy_from_first(const collective::Group& group, ElasticPosition& position);

 private:
  void send(const collective::Group& group, const ElasticPosition& position) const;
  void receive(const collective::Group& group, ElasticPosition& position);

  std::vector<std::pair<std::string, checkpoint::SourcePtr>> sources_;
};

}  // namespace torchspan::elastic
