#include "rpc/calls/script.h"

#include <sstream>

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>

#include "core/api/throw_invalid.h"

namespace torchspan {
namespace rpc {
namespace {

using Kwargs = std::map<std::string, c10::IValue>;

std::string schema_of(const torch::jit::Function& function) {
  std::ostringstream text;
  text << function.getSchema();
  return text.str();
}

[[noreturn]] void throw_misfit(const torch::jit::Function& function, const std::string& why) {
  throw_invalid("the arguments do not fit {}: {}", schema_of(function), why);
}

/// Runs `function`. `args` begin with self if it is a method.
c10::IValue run(torch::jit::Function& function, std::vector<c10::IValue> args, const Kwargs& kwargs) {
  try {
    function.getSchema().checkAndNormalizeInputs(args, {kwargs.begin(), kwargs.end()});
  } catch (const c10::Error& error) {
    throw_misfit(function, error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw_misfit(function, error.what());
  }
  function.run(args);
  return args.empty() ? c10::IValue() : std::move(args.front());
}

template <class Methods>
[[noreturn]] void throw_unknown(const std::string& method, const std::string& type, const Methods& methods) {
  std::string known;
  for (const torch::jit::Function* one : methods) known += (known.empty() ? "" : ", ") + one->name();
  throw_invalid("{} has no TorchScript method '{}'; it has: {}", type, method, known);
}

c10::IValue run_method(const c10::IValue& self, const std::string& method, std::vector<c10::IValue> args,
                       const Kwargs& kwargs) {
  const auto type = self.toObject()->type();
  torch::jit::Function* function = type->findMethod(method);
  if (function == nullptr) throw_unknown(method, type->name()->qualifiedName(), type->methods());
  std::vector<c10::IValue> all;
  all.reserve(args.size() + 1);
  all.push_back(self);
  for (c10::IValue& arg : args) all.push_back(std::move(arg));
  return run(*function, std::move(all), kwargs);
}

}  // namespace

c10::IValue call_method(Value& object, const std::string& method, std::vector<c10::IValue> args,
                        const Kwargs& kwargs) {
  if (object.type() == typeid(torch::jit::Module)) {
    const auto& module = *static_cast<torch::jit::Module*>(object.address());
    return run_method(module._ivalue(), method, std::move(args), kwargs);
  }
  if (object.type() == typeid(c10::IValue)) {
    const auto& value = *static_cast<c10::IValue*>(object.address());
    if (value.isObject()) return run_method(value, method, std::move(args), kwargs);
    throw_invalid("'{}' was called on a {}, which is not a TorchScript object", method, value.tagKind());
  }
  throw_invalid("'{}' was called on a {}, which has no TorchScript methods", method, object.type_name());
}

}  // namespace rpc

FunctionTable& FunctionTable::add_script(const std::shared_ptr<torch::jit::CompilationUnit>& unit) {
  for (torch::jit::Function* function : unit->get_functions()) {
    // The unit owns its functions.
    insert_script({function->qualname().qualifiedName(), rpc::schema_of(*function),
                   [unit, function](std::vector<c10::IValue> args, const rpc::Kwargs& kwargs) {
                     return rpc::run(*function, std::move(args), kwargs);
                   }});
  }
  return *this;
}

FunctionTable& FunctionTable::add_script(const std::string& name, const torch::jit::Module& module) {
  for (const torch::jit::Method& method : module.get_methods()) {
    insert_script({name + "." + method.name(), rpc::schema_of(method.function()),
                   [self = module._ivalue(), method = method.name()](std::vector<c10::IValue> args,
                                                                     const rpc::Kwargs& kwargs) {
                     return rpc::run_method(self, method, std::move(args), kwargs);
                   }});
  }
  return *this;
}

}  // namespace torchspan
