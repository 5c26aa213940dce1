#include <algorithm>
#include <fmt/format.h>
#include <map>

#include <torchspan/core/error.h>

#include "schedule/csv/cells.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

/// Collects the computations of a sheet. Memory depends on the number of cells, not on the numbers in them.
class SheetReader {
 public:
  explicit SheetReader(const Sheet& sheet, std::string name) : sheet_(sheet) {
    table_.name = std::move(name);
    table_.actions.resize(sheet.rows.size());
  }

  Table read() {
    for_each([this](const Cell& cell) { add(cell); });
    place_stages();
    for_each([this](const Cell& cell) { check_communication(cell); });
    validate(table_);
    return std::move(table_);
  }

 private:
  template <class Visit>
  void for_each(Visit visit) {
    for (row_ = 0; row_ < sheet_.rows.size(); ++row_) {
      const auto& row = sheet_.rows[row_];
      for (column_ = 0; column_ < row.size(); ++column_) {
        if (row[column_].kind != CellKind::kOverlap) {
          visit(row[column_]);
          continue;
        }
        for (const Cell& part : row[column_].parts) visit(part);
      }
    }
  }

  void add(const Cell& cell) {
    const auto kind = computation(cell.kind);
    if (!kind) return;
    const int micro_batch = cell.micro_batch.value_or(-1);
    if (cell.stage < 0 || micro_batch < 0) fail("stage and micro-batch must be at least 0");
    const int rank = static_cast<int>(row_);
    const auto [known, is_new] = rank_of_stage_.emplace(cell.stage, rank);
    if (!is_new && known->second != rank) {
      fail(fmt::format("stage {} is also in row {}; a stage belongs to one rank", cell.stage,
                       known->second + 1));
    }
    micro_batches_ = std::max(micro_batches_, std::int64_t{micro_batch} + 1);
    if (*kind == ActionKind::kForward) ++forwards_;
    table_.actions[row_].push_back({*kind, cell.stage, micro_batch});
  }

  void place_stages() {
    if (rank_of_stage_.empty()) {
      throw Error(ErrorKind::kInvalid,
                  fmt::format("schedule '{}': the sheet has no forward (cells such as 0F0)", table_.name));
    }
    for (const auto& [stage, rank] : rank_of_stage_) {
      const int expected = table_.stages();
      if (stage != expected) {
        throw Error(ErrorKind::kInvalid,
                    fmt::format("schedule '{}': no row has stage {}, but row {} has stage {}", table_.name,
                                expected, rank + 1, stage));
      }
      table_.rank_of_stage.push_back(rank);
    }
    // Stops numbers that would make the checks of the table large.
    if (forwards_ < micro_batches_ * table_.stages()) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("schedule '{}': {} forwards for {} stages and {} micro-batches; each stage needs "
                      "a forward of each micro-batch from 0 on",
                      table_.name, forwards_, table_.stages(), micro_batches_));
    }
    table_.micro_batches = static_cast<int>(micro_batches_);
  }

  void check_communication(const Cell& cell) const {
    if (cell.kind == CellKind::kIdle) return;
    const auto known = rank_of_stage_.find(cell.stage);
    if (known == rank_of_stage_.end()) {
      fail(fmt::format("there is no stage {}; there are {}", cell.stage, table_.stages()));
    }
    if (known->second != static_cast<int>(row_)) {
      fail(fmt::format("stage {} belongs to row {}", cell.stage, known->second + 1));
    }
    if (cell.micro_batch && (*cell.micro_batch < 0 || *cell.micro_batch >= table_.micro_batches)) {
      fail(fmt::format("there is no micro-batch {}; there are {}", *cell.micro_batch, table_.micro_batches));
    }
  }

  [[noreturn]] void fail(const std::string& text) const {
    throw Error(ErrorKind::kInvalid, fmt::format("schedule '{}': row {}, column {}: {}", table_.name,
                                                 row_ + 1, column_ + 1, text));
  }

  const Sheet& sheet_;
  std::size_t row_ = 0;
  std::size_t column_ = 0;
  Table table_;
  std::map<int, int> rank_of_stage_;
  std::int64_t micro_batches_ = 0;
  std::int64_t forwards_ = 0;
};

}  // namespace

Table to_table(const Sheet& sheet, std::string name) { return SheetReader(sheet, std::move(name)).read(); }

}  // namespace torchspan::schedule
