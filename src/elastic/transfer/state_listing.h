#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <torchspan/checkpoint/value.h>
#include <torchspan/core/bytes.h>
#include <torchspan/elastic/options.h>

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

}  // namespace torchspan::elastic
