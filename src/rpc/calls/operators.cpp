#include "rpc/calls/operators.h"

#include <fmt/format.h>
#include <sstream>

#include <torch/csrc/jit/runtime/operator.h>

#include <torchspan/core/error.h>

namespace torchspan::rpc {
namespace {

std::vector<std::shared_ptr<torch::jit::Operator>> overloads_of(const std::string& name) {
  const auto dot = name.find('.');
  const std::string base = name.substr(0, dot);
  if (base.find("::") == std::string::npos) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format(
            "'{}' is neither a TorchScript function of this worker's table (FunctionTable::add_script) "
            "nor an operator; those are written with their namespace, like aten::add",
            name));
  }
  auto all = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(base));
  if (dot != std::string::npos) {
    const std::string overload = name.substr(dot + 1);
    std::erase_if(all, [&](const auto& op) { return op->schema().overload_name() != overload; });
  }
  if (all.empty())
    throw Error(ErrorKind::kInvalid, fmt::format("there is no operator '{}' in this LibTorch", name));
  return all;
}

/// Fills `stack` with the schema's arguments. Returns false if they do not fit.
bool match(const c10::FunctionSchema& schema, std::vector<c10::IValue> args,
           const std::unordered_map<std::string, c10::IValue>& kwargs, std::vector<c10::IValue>& stack) {
  try {
    schema.checkAndNormalizeInputs(args, kwargs);
  } catch (const std::exception&) {
    return false;
  }
  stack = std::move(args);
  return true;
}

}  // namespace

c10::IValue call_operator(const std::string& name, std::vector<c10::IValue> args,
                          const std::map<std::string, c10::IValue>& kwargs) {
  const std::unordered_map<std::string, c10::IValue> named(kwargs.begin(), kwargs.end());
  const auto overloads = overloads_of(name);
  for (const auto& op : overloads) {
    std::vector<c10::IValue> stack;
    if (!match(op->schema(), args, named, stack)) continue;
    op->getOperation()(stack);
    if (stack.empty()) return {};
    if (stack.size() == 1) return std::move(stack.front());
    return c10::ivalue::Tuple::create(std::move(stack));
  }
  std::ostringstream schemas;
  for (const auto& op : overloads) schemas << "\n  " << op->schema();
  std::string given;
  for (const auto& arg : args) given += (given.empty() ? "" : ", ") + arg.tagKind();
  for (const auto& [key, arg] : kwargs)
    given += fmt::format("{}{}={}", given.empty() ? "" : ", ", key, arg.tagKind());
  throw Error(ErrorKind::kInvalid,
              fmt::format("no overload of '{}' takes ({}); there are:{}", name, given, schemas.str()));
}

}  // namespace torchspan::rpc
