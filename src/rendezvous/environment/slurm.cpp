#include "rendezvous/environment/slurm.h"

#include <charconv>
#include <optional>
#include <string_view>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::rendezvous {
namespace {

constexpr int kMostTasks = 1 << 20;

/// Removes a positive number from the front of `text`.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || number < 1 || number > kMostTasks) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(result.ptr - text.data()));
  return number;
}

bool take(std::string_view& text, std::string_view what) {
  if (!text.starts_with(what)) return false;
  text.remove_prefix(what.size());
  return true;
}

}  // namespace

std::string first_slurm_host(const std::string& list) {
  std::string host;
  bool in_brackets = false, skipping = false;
  for (const char c : list) {
    if (c == '[' && !in_brackets) {
      in_brackets = true;
      skipping = false;
    } else if (c == ']' && in_brackets) {
      in_brackets = skipping = false;
    } else if (c == ',' && !in_brackets) {
      break;
    } else if (in_brackets && (c == ',' || c == '-')) {
      skipping = true;
    } else if (!skipping && c != ' ') {
      host += c;
    }
  }
  if (host.empty() || in_brackets || host.find_first_of("[]") != std::string::npos) {
    throw_invalid("'{}' is not a Slurm node list; expected something like node[1-3,5],other", list);
  }
  return host;
}

int slurm_tasks_of_node(const std::string& list, int node, const std::string& variable) {
  std::string_view rest = list;
  int before = 0;
  while (true) {
    const auto tasks = take_number(rest);
    std::optional<int> times = 1;
    if (tasks && take(rest, "(x")) {
      times = take_number(rest);
      if (!take(rest, ")")) times.reset();
    }
    const bool more = take(rest, ",");
    if (!tasks || !times || (!more && !rest.empty())) {
      throw_invalid("{} is '{}'; expected a list like 2(x3),1", variable, list);
    }
    before += *times;
    if (node < before) return *tasks;
    if (!more) {
      throw_invalid("{} is '{}', which has {} nodes, but SLURM_NODEID is {}", variable, list, before, node);
    }
  }
}

}  // namespace torchspan::rendezvous
