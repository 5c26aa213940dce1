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

/// A function that both have with different signatures. An entry is the name, a space and the signature.
std::optional<Error> changed_signature(const std::string& holder, const std::vector<std::string>& present,
                                       const Register& message) {
  const auto name_of = [](const std::string& entry) { return entry.substr(0, entry.find(' ')); };
  std::map<std::string, std::string> entries;
  for (const std::string& entry : present) entries.emplace(name_of(entry), entry);
  for (const std::string& entry : message.functions) {
    const auto same = entries.find(name_of(entry));
    if (same == entries.end() || same->second == entry) continue;
    return Error(
        ErrorKind::kInvalid,
        fmt::format("the workers' functions named '{}' differ: {} has '{}', {} has '{}'; give the new "
                    "signature a new name, and keep the old function until all workers are updated",
                    same->first, holder, same->second, describe(message.member), entry));
  }
  return std::nullopt;
}

}  // namespace

FunctionTables::Key FunctionTables::key_of(const Member& member) {
  return {member.functions_digest, member.wire.oldest, member.wire.newest, member.wire.features};
}

void FunctionTables::add(const Register& registration) {
  Table& table = tables_[key_of(registration.member)];
  if (table.holders.empty()) {
    table.functions = registration.functions;
    table.wire = registration.member.wire;
  }
  const bool fresh = table.holders.insert(registration.member.rank).second;
  if (fresh && registration.require_same_functions) ++table.require_same;
}

void FunctionTables::remove(const Register& registration) {
  const auto found = tables_.find(key_of(registration.member));
  if (found == tables_.end() || found->second.holders.erase(registration.member.rank) == 0) return;
  if (registration.require_same_functions) --found->second.require_same;
  if (found->second.holders.empty()) tables_.erase(found);
}

std::optional<Error> FunctionTables::difference(const Register& message,
                                                const std::function<std::string(int rank)>& describe) const {
  for (const auto& [key, table] : tables_) {
    const std::string holder = describe(*table.holders.begin());
    if (!common_protocol(table.wire, message.member.wire)) {
      return Error(ErrorKind::kUnsupported,
                   fmt::format("{} speaks {} of the wire format, {} speaks {}: install the same release of "
                               "TorchSpan on all hosts, or two neighboring ones",
                               holder, describe_versions(table.wire), rendezvous::describe(message.member),
                               describe_versions(message.member.wire)));
    }
    if (std::get<0>(key) == message.member.functions_digest) continue;
    if (!message.require_same_functions && table.require_same == 0) {
      if (auto changed = changed_signature(holder, table.functions, message)) return changed;
      continue;
    }
    // A third worker, which is rejected too, must not take itself for one of the two.
    const std::string other = rendezvous::describe(message.member);
    std::string only = only_in(holder, table.functions, message.functions) +
                       only_in(other, message.functions, table.functions);
    if (!only.empty()) only = fmt::format(": of {} and {}, {}", holder, other, only.substr(2));
    return Error(ErrorKind::kInvalid,
                 fmt::format("the workers' function tables differ{}; start the same program everywhere, or "
                             "allow functions that only some have with require_same_functions = false",
                             only));
  }
  return std::nullopt;
}

}  // namespace torchspan::rendezvous
