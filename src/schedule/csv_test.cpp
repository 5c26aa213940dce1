#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "schedule/test_tables.h"
#include "tests/support/environment.h"

namespace torchspan::schedule::csv_test {
namespace {

using ::testing::HasSubstr;
using torchspan::testing::number_from;

/// The error text of reading a file as a table; empty if it is one.
std::string error_of(std::string_view text) {
  try {
    to_table(parse_csv(text), "mine");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.message();
  }
  return "";
}

Table read(std::string_view text) { return to_table(parse_csv(text), "mine"); }

// peer: pipelining action_parse: same
TEST(Csv, UnderstandsEachOfThePeersCells) {
  const std::string line =
      "0F0,1B12,2I3,3W4,,1UNSHARD,3RESHARD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0SEND_F0,1RECV_F0,1SEND_B2,"
      "0RECV_B2,0WAIT_SEND_F0,1WAIT_SEND_B2,(0F8;7B0)OVERLAP_F_B\r\n";
  const std::vector<Cell> expected = {
      {CellKind::kForward, 0, 0},
      {CellKind::kBackward, 1, 12},
      {CellKind::kInputGradient, 2, 3},
      {CellKind::kWeightGradient, 3, 4},
      {},
      {CellKind::kUnshard, 1},
      {CellKind::kReshard, 3},
      {CellKind::kReduceGradient, 0},
      {CellKind::kWaitReduceGradient, 0},
      {CellKind::kSendForward, 0, 0},
      {CellKind::kReceiveForward, 1, 0},
      {CellKind::kSendBackward, 1, 2},
      {CellKind::kReceiveBackward, 0, 2},
      {CellKind::kWaitSendForward, 0, 0},
      {CellKind::kWaitSendBackward, 1, 2},
      {CellKind::kOverlap, 0, std::nullopt, {{CellKind::kForward, 0, 8}, {CellKind::kBackward, 7, 0}}},
  };
  const Sheet sheet = parse_csv(line);
  ASSERT_EQ(sheet.rows.size(), 1u);
  EXPECT_EQ(sheet.rows[0], expected);
  EXPECT_EQ(to_csv(sheet), line);
}

TEST(Csv, KeepsIdleCellsEmptyRowsAndLineEnds) {
  for (const std::string text :
       {"0F0,,0B0\r\n,1F0,1B0\r\n", "0F0,0B0\n,1F0,,1B0\n", "\"\"\r\n\r\n0F0\r\n", "\n\n", ""}) {
    EXPECT_EQ(to_csv(parse_csv(text)), text);
  }
  EXPECT_EQ(parse_csv("\"\"\n\n,\n").rows, (std::vector<std::vector<Cell>>{{Cell{}}, {}, {Cell{}, Cell{}}}));
  EXPECT_EQ(to_csv(parse_csv(" 0F0 , \"0B0\"")), "0F0,0B0\r\n");
  EXPECT_EQ(parse_csv("( 0F8 ; 7B0 )OVERLAP_F_B"), parse_csv("(0F8;7B0)OVERLAP_F_B"));
}

TEST(Csv, ATableHasTheComputationsOfAFileWithCommunication) {
  const Table table = read(
      "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,,0RECV_B0,0I0,0RECV_B1,0W0,0B1,0REDUCE_GRAD,0RESHARD\r\n"
      ",1UNSHARD,1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,1RESHARD\r\n");
  EXPECT_EQ(table.name, "mine");
  EXPECT_EQ(table.rank_of_stage, (std::vector<int>{0, 1}));
  EXPECT_EQ(table.micro_batches, 2);
  EXPECT_EQ(line_of(table.actions[0]), "0F0 0F1 0I0 0W0 0B1");
  EXPECT_EQ(line_of(table.actions[1]), "1F0 1F1 1B0 1B1");
}

TEST(Csv, PlacesStagesWhereTheirRowsAre) {
  EXPECT_EQ(read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n").rank_of_stage, (std::vector<int>{0, 1, 1, 0}));
}

TEST(Csv, NamesRowAndColumnOfTheFirstWrongCell) {
  struct Row {
    std::string text;
    std::string error_text;
  };
  const std::vector<Row> rows = {
      {"0F0,0B0\n1F0,what", "parse_csv: row 2, column 2 ('what'): expected a stage before 'what'"},
      {"0X0", "row 1, column 1 ('0X0'): 'X' is not an action; the actions are F, B, I, W, UNSHARD"},
      {"0f0", "row 1, column 1 ('0f0'): '' is not an action"},
      {"0F", "row 1, column 1 ('0F'): expected a micro-batch before ''"},
      {"0F-1", "expected a micro-batch before '-1'"},
      {"-1F0", "expected a stage before '-1F0'"},
      {"0F0 0F1", "unexpected '0F1' after the action"},
      {"0UNSHARD3", "unexpected '3' after the action"},
      {"0F99999999999", "a micro-batch is too large"},
      {"0F0;0B0", "unexpected ';0B0' after the action"},
      {"(0F0;0B0", "expected ')OVERLAP_F_B' after the overlapping actions"},
      {"(0F0;0B0)OVERLAP", "expected ')OVERLAP_F_B'"},
      {"()OVERLAP_F_B", "expected a stage before ')OVERLAP_F_B'"},
      {"((0F0)OVERLAP_F_B)OVERLAP_F_B", "expected a stage before '(0F0)"},
      {"0OVERLAP_F_B", "'OVERLAP_F_B' is not an action"},
      {"\"0F0", "a quoted cell has no end"},
      {"\"", "a quoted cell has no end"},
      {std::string("0F0\0", 4), "unexpected '?' after the action"},
      {"0F0\r0B0", "unexpected '?0B0' after the action"},
      {"0F0\n0B0", "row 2, column 1: stage 0 is also in row 1; a stage belongs to one rank"},
      {"0F0,0B0,1SEND_F0", "row 1, column 3: there is no stage 1; there are 1"},
      {"0F0,0B0,1RECV_F0\n1F0,1B0", "row 1, column 3: stage 1 belongs to row 2"},
      {"0F0,0B0,0SEND_F1", "row 1, column 3: there is no micro-batch 1; there are 1"},
      {"1F0", "no row has stage 0, but row 1 has stage 1"},
      {"", "the sheet has no forward"},
      {"0UNSHARD", "the sheet has no forward"},
      {"0F2147483647", "1 forwards for 1 stages and 2147483648 micro-batches"},
      {"0F0,0F2", "2 forwards for 1 stages and 3 micro-batches"},
      {"0F0,0F0", "rank 0 runs 0F0 twice"},
      {"0B0,0F0", "a rank waits for itself; rank 0 at 0B0"},
  };
  for (const Row& row : rows) EXPECT_THAT(error_of(row.text), HasSubstr(row.error_text)) << row.text;
}

TEST(Csv, RefusesPartsThatAProgramMadeWrong) {
  const auto error_of_cell = [](const Cell& cell) {
    try {
      to_table(Sheet{.rows = {{cell}}}, "mine");
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("accepted");
  };
  EXPECT_THAT(error_of_cell({CellKind::kForward, 0}),
              HasSubstr("row 1, column 1: stage and micro-batch must be"));
  EXPECT_THAT(error_of_cell({CellKind::kForward, -1, 0}),
              HasSubstr("row 1, column 1: stage and micro-batch"));
}

TEST(Csv, SkipsAByteOrderMark) {
  const std::string text = "0F0,0B0\r\n";
  EXPECT_EQ(parse_csv("\xEF\xBB\xBF" + text), parse_csv(text));
  EXPECT_EQ(parse_csv("\xEF\xBB\xBF"), parse_csv(""));
  EXPECT_THAT(error_of(text + "\xEF\xBB\xBF"), HasSubstr("row 2, column 1"));
}

// peer: pipelining csv, csv_compare: same; `tools/compare-schedules` reads and writes the peer's files
TEST(Csv, EveryScheduleSurvivesARoundTrip) {
  const Shape one{.ranks = 4, .micro_batches = 8}, two{.ranks = 4, .micro_batches = 8, .stages_per_rank = 2};
  for (const Table& table :
       {gpipe(looped(two)), one_forward_one_backward(one), interleaved(two), looped_breadth_first(two),
        forward_only(looped(two)), zero_bubble_h1(one), zero_bubble_h2(one), interleaved_zero_bubble(two),
        zero_bubble_v(two), dual_pipe_v(two)}) {
    const Table back = to_table(parse_csv(to_csv(to_sheet(table))), table.name);
    EXPECT_EQ(back.rank_of_stage, table.rank_of_stage) << table.name;
    EXPECT_EQ(back.micro_batches, table.micro_batches) << table.name;
    EXPECT_EQ(back.actions, table.actions) << table.name;
  }
}

class CsvSeed : public ::testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, CsvSeed,
                         ::testing::Range<std::uint64_t>(1, 1 + number_from("TORCHSPAN_CASES",
                                                                            std::uint64_t{40})));

/// A random table whose placement may leave ranks without stages.
Table random_table(std::mt19937_64& random) {
  const Placement placement = random_placement(random);
  switch (random() % 3) {
    case 0:
      return gpipe(placement);
    case 1:
      return one_forward_one_backward(placement);
    default:
      return zero_bubble(placement, {Costs{}});
  }
}

TEST_P(CsvSeed, ARandomTableSurvivesARoundTripWithCommunicationBetweenItsActions) {
  std::mt19937_64 random(GetParam());
  const Table table = random_table(random);
  Sheet sheet = to_sheet(table);
  EXPECT_EQ(parse_csv(to_csv(sheet)), sheet);
  sheet.line_end = random() % 2 == 0 ? "\n" : "\r\n";
  for (std::size_t rank = 0; rank < sheet.rows.size(); ++rank) {
    auto& row = sheet.rows[rank];
    for (std::size_t added = random() % 4; added > 0 && !row.empty(); --added) {
      const std::size_t at = random() % (row.size() + 1);
      const int stage = table.actions[rank].front().stage;
      const int i = static_cast<int>(random() % static_cast<unsigned>(table.micro_batches));
      const std::vector<Cell> noise = {{},
                                       {CellKind::kUnshard, stage},
                                       {CellKind::kSendForward, stage, i},
                                       {CellKind::kReceiveBackward, stage, i}};
      row.insert(row.begin() + static_cast<std::ptrdiff_t>(at), noise[random() % noise.size()]);
    }
  }
  const std::string text = to_csv(sheet);
  // A sheet without rows has no line end to read.
  ASSERT_FALSE(sheet.rows.empty());
  EXPECT_EQ(parse_csv(text), sheet) << text;
  const Table back = to_table(parse_csv(text), table.name);
  EXPECT_EQ(back.actions, table.actions);
  EXPECT_EQ(back.rank_of_stage, table.rank_of_stage);
  EXPECT_EQ(back.micro_batches, table.micro_batches);
}

TEST_P(CsvSeed, AnyDamageGivesATableOrAnErrorOfItsKind) {
  std::mt19937_64 random(GetParam());
  std::string text = to_csv(to_sheet(random_table(random)));
  const std::string letters = "0123456789FBIW_SENDRCV,;()\"\r\n \x01\xff";
  for (std::size_t changes = 1 + random() % 4; changes > 0; --changes) {
    text[random() % text.size()] = letters[random() % letters.size()];
  }
  try {
    const Sheet sheet = parse_csv(text);
    EXPECT_EQ(parse_csv(to_csv(sheet)).rows, sheet.rows) << text;
    validate(to_table(sheet, "damaged"));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << text;
    EXPECT_FALSE(error.message().empty());
  }
}

}  // namespace
}  // namespace torchspan::schedule::csv_test
