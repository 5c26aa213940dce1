#include <cstdlib>
#include <cxxabi.h>
#include <fmt/format.h>

#include <torchspan/rpc/worker.h>

#include "core/api/throw_invalid.h"

namespace torchspan {
namespace rpc {

std::string demangle(const std::type_info& type) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(type.name(), nullptr, nullptr, &status),
                                              std::free);
  return status == 0 ? name.get() : type.name();
}

std::uint64_t function_id(std::string_view name, std::string_view signature) {
  return wire::digest(fmt::format("{} {}", name, signature));
}

void throw_wrong_object(const Value& value, const std::type_info& wanted) {
  throw_invalid("the member belongs to {}, but the RRef's value is a {}", demangle(wanted),
                value.type_name());
}

Outcome refuse_declared(Execution& execution) {
  throw Error(ErrorKind::kUnsupported,
              fmt::format("{} declares this function and does not serve it: call a worker that does",
                          execution.worker.name()));
}

ValuePtr decode_object(Execution& invocation) {
  auto reference = std::static_pointer_cast<Reference>(invocation.arguments.reference());
  if (!reference) throw_invalid("a member function was called without its object");
  return reference->value(Deadline::never());  // ready: calls wait for their references before they start
}

}  // namespace rpc

const rpc::FunctionEntry* FunctionTable::find(std::uint64_t id) const {
  auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &it->second;
}

const rpc::FunctionEntry* FunctionTable::find_named(std::string_view name) const {
  auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &by_id_.at(it->second);
}

const rpc::ScriptEntry* FunctionTable::find_script(std::string_view name) const {
  auto it = scripts_.find(name);
  return it == scripts_.end() ? nullptr : &it->second;
}

void FunctionTable::insert_script(rpc::ScriptEntry entry) {
  const std::string name = entry.name;
  if (!scripts_.emplace(name, std::move(entry)).second) {
    throw_invalid("two TorchScript functions are named '{}'; every name may be used once", name);
  }
}

std::vector<std::string> FunctionTable::descriptions() const {
  std::vector<std::string> texts;
  for (const auto& [name, id] : by_name_)
    texts.push_back(fmt::format("{} {}", name, by_id_.at(id).signature));
  for (const auto& [name, entry] : scripts_) texts.push_back(fmt::format("{} {}", name, entry.schema));
  return texts;
}

std::uint64_t FunctionTable::digest() const {
  std::string all;
  for (const std::string& text : descriptions()) all += text + '\n';
  return wire::digest(all);
}

void FunctionTable::insert(rpc::FunctionEntry entry) {
  if (entry.name.empty()) throw_invalid("a function token has an empty name; give it one");
  if (by_name_.contains(entry.name)) {
    throw_invalid("two function tokens are named '{}'; every name may be used once", entry.name);
  }
  entry.id = rpc::function_id(entry.name, entry.signature);
  if (by_id_.contains(entry.id)) {
    throw_invalid("the digest of '{}' equals that of another function; choose another name", entry.name);
  }
  by_name_.emplace(entry.name, entry.id);
  by_id_.emplace(entry.id, std::move(entry));
}

}  // namespace torchspan
