#include "rendezvous/store/function_tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::rendezvous {
namespace {

/// The entries that only `left` has, shortened.
std::string only_in(const std::string& holder, const std::vector<std::string>& left,
                    const std::vector<std::string>& right) {
  constexpr std::size_t kMost = 8;
  const std::set<std::string> others(right.begin(), right.end());
  std::vector<std::string> extra;
  for (const auto& name : std::set<std::string>(left.begin(), left.end())) {
    if (!others.contains(name)) extra.push_back(name);
  }
  if (extra.empty()) return "";
  const std::size_t more = extra.size() > kMost ? extra.size() - kMost : 0;
  extra.resize(extra.size() - more);
  return fmt::format("; only {} has {}{}", holder, fmt::join(extra, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
}

}  // namespace

void FunctionTables::add(const Register& registration) {
  Table& table = tables_[registration.member.functions_digest];
  if (table.holders.empty()) table.functions = registration.functions;
  const bool fresh = table.holders.insert(registration.member.rank).second;
  if (fresh && registration.require_same_functions) ++table.require_same;
}

void FunctionTables::remove(const Register& registration) {
  const auto found = tables_.find(registration.member.functions_digest);
  if (found == tables_.end() || found->second.holders.erase(registration.member.rank) == 0) return;
  if (registration.require_same_functions) --found->second.require_same;
  if (found->second.holders.empty()) tables_.erase(found);
}

std::optional<Error> FunctionTables::difference(const Register& message,
                                                const std::function<std::string(int rank)>& describe) const {
  for (const auto& [digest, table] : tables_) {
    if (digest == message.member.functions_digest) continue;
    if (!message.require_same_functions && table.require_same == 0) continue;
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the workers' function tables differ{}{}; start the same program everywhere, or "
                    "allow the difference with require_same_functions = false",
                    only_in(describe(*table.holders.begin()), table.functions, message.functions),
                    only_in(rendezvous::describe(message.member), message.functions, table.functions)));
  }
  return std::nullopt;
}

}  // namespace torchspan::rendezvous
