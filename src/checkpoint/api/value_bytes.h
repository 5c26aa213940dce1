#pragma once
#include <torchspan/checkpoint/value.h>
#include <torchspan/core/bytes.h>

namespace torchspan::checkpoint {

/// Appends the type and the content of a value.
void put_value(ByteWriter& out, const Value& value);
/// Reads what put_value() wrote; throws Error{kInvalid} for malformed bytes.
Value get_value(ByteReader& in);

}  // namespace torchspan::checkpoint
