#pragma once
#include <cstddef>
#include <string>

#include <torchspan/checkpoint.h>
#include <torchspan/core/bytes.h>

namespace torchspan::checkpoint {

/// Throws Error{kInvalid} naming both if one of these objects owns the names below its own name
/// (StateSource::owns_names()) and the other one's name is one of them.
void require_separate_names(const std::string& name, const StateSource& source, const std::string& other_name,
                            const StateSource& other);

/// "name.rank3".
std::string name_of_rank(const std::string& name, std::size_t rank);
/// Under which name a checkpoint has the state of rank `rank` of an object whose name is the reader's prefix and whose state is
/// that of each rank: the rank's own name, else the name itself (of a single rank, or of an earlier release), else the name
/// of another rank that saved it.
std::string name_for_rank(const StateReader& reader, std::size_t rank);

/// Appends the type and the content of a value.
void put_value(ByteWriter& out, const Value& value);
/// Reads what put_value() wrote; throws Error{kInvalid} for malformed bytes.
Value get_value(ByteReader& in);

}  // namespace torchspan::checkpoint
