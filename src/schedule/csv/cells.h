#pragma once
#include <optional>
#include <string>
#include <string_view>

#include <torchspan/schedule/csv.h>

/// The names of cells in PyTorch's files.
namespace torchspan::schedule {

/// "F", "SEND_F", "OVERLAP_F_B"; empty for kIdle.
std::string_view cell_name(CellKind kind);
/// The kind that a name stands for; nullopt for an unknown name, "" and OVERLAP_F_B.
std::optional<CellKind> cell_kind(std::string_view name);
/// All names, for an error message.
std::string cell_names();
bool has_micro_batch(CellKind kind);
/// The computation that a kind stands for.
std::optional<ActionKind> computation(CellKind kind);
CellKind cell_of(ActionKind kind);

/// The start of a text with its unprintable characters replaced, for an error message.
std::string printable(std::string_view text);

}  // namespace torchspan::schedule
