#pragma once
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace torchspan::rpc {

/// Runs the overload of an ATen operator that accepts the arguments. `name` is "aten::add", or
/// "aten::add.Tensor" for one overload. Returns several results as a tuple, and none as None. Throws
/// Error{kInvalid} with the schemas if the operator is unknown or no overload fits; passes on what the
/// operator throws.
c10::IValue call_operator(const std::string& name, std::vector<c10::IValue> args,
                          const std::map<std::string, c10::IValue>& kwargs);

}  // namespace torchspan::rpc
