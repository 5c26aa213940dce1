#include "elastic/transfer/state_listing.h"

#include <fmt/format.h>

#include "checkpoint/api/value_bytes.h"

namespace torchspan::elastic {

Bytes StateListing::encode() const {
  ByteWriter out;
  for (const std::int64_t number : {position.step, position.epoch, position.next}) out.put(number);
  out.put(static_cast<std::uint32_t>(tensors.size()));
  for (const Entry& entry : tensors) {
    out.put_string(entry.name);
    out.put(static_cast<std::int8_t>(entry.dtype));
    out.put(static_cast<std::uint32_t>(entry.shape.size()));
    for (const std::int64_t size : entry.shape) out.put(size);
  }
  out.put(static_cast<std::uint32_t>(values.size()));
  for (const auto& [name, value] : values) {
    out.put_string(name);
    checkpoint::put_value(out, value);
  }
  return out.take();
}

StateListing StateListing::decode(BytesView bytes) {
  ByteReader in(bytes);
  StateListing listing;
  for (std::int64_t* number : {&listing.position.step, &listing.position.epoch, &listing.position.next})
    *number = in.get<std::int64_t>();
  listing.tensors.resize(in.get_count(9));
  for (Entry& entry : listing.tensors) {
    entry.name = in.get_string();
    const auto dtype = in.get<std::int8_t>();
    if (dtype < 0 || dtype >= static_cast<std::int8_t>(at::ScalarType::Undefined))
      throw_invalid(fmt::format("the tensor '{}' of a state has the unknown dtype {}", entry.name, dtype));
    entry.dtype = static_cast<at::ScalarType>(dtype);
    entry.shape.resize(in.get_count(sizeof(std::int64_t)));
    for (std::int64_t& size : entry.shape) {
      size = in.get<std::int64_t>();
      if (size < 0)
        throw_invalid(fmt::format("the tensor '{}' of a state has the size {}", entry.name, size));
    }
  }
  for (std::size_t left = in.get_count(5); left > 0; --left) {
    std::string name = in.get_string();
    listing.values.insert_or_assign(std::move(name), checkpoint::get_value(in));
  }
  in.expect_end();
  return listing;
}

}  // namespace torchspan::elastic
