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

  static StateListing of(const checkpoint::StateWriter& writer, const ElasticPosition& position);
  Bytes encode() const;
  /// Throws Error{kInvalid} for malformed bytes.
  static StateListing decode(BytesView bytes);
  static StateListing decode(const at::Tensor& bytes) {
    return decode({static_cast<const std::byte*>(bytes.data_ptr()), bytes.nbytes()});
  }
};

/// Registered objects with their names.
using NamedSources = std::vector<std::pair<std::string, checkpoint::SourcePtr>>;

/// What the objects save.
checkpoint::StateWriter saved(const NamedSources& sources);
/// Loads the objects from the state of another rank; `tensors` in the order of the listing.
void load(const NamedSources& sources, StateListing listing, std::vector<at::Tensor> tensors);

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

  NamedSources sources_;
};

}  // namespace torchspan::elastic
