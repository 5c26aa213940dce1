#pragma once
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <torchspan/rpc/function.h>

namespace torchspan::rpc {

/// Runs a method of a TorchScript object or module. Throws Error{kInvalid} with the object's methods if the
/// method does not exist, or with the schema that the arguments do not fit.
c10::IValue call_method(Value& object, const std::string& method, std::vector<c10::IValue> args,
                        const std::map<std::string, c10::IValue>& kwargs);

}  // namespace torchspan::rpc
