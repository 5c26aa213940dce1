#include <cstdlib>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan::schedule;

/// Anything that parses is written as a text that parses to the same; a table is valid and comes back.
void check(std::string_view text) {
  const Sheet sheet = parse_csv(text);
  const std::string written = to_csv(sheet);
  if (parse_csv(written).rows != sheet.rows) std::abort();
  const Table table = to_table(sheet, "fuzz");
  validate(table);
  const Table back = to_table(parse_csv(to_csv(to_sheet(table))), "fuzz");
  if (back.actions != table.actions || back.rank_of_stage != table.rank_of_stage) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    check({reinterpret_cast<const char*>(data), size});
  } catch (const torchspan::Error&) {
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    std::vector<torchspan::Bytes> seeds;
    const auto add = [&](std::string_view text) {
      const auto bytes = std::as_bytes(std::span(text));
      seeds.emplace_back(bytes.begin(), bytes.end());
    };
    const Shape two{.ranks = 2, .micro_batches = 4, .stages_per_rank = 2};
    add(to_csv(to_sheet(zero_bubble_v(two))));
    add(to_csv(to_sheet(interleaved(two))));
    add("0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0I0,0W0,0REDUCE_GRAD,0RESHARD\r\n"
        ",1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0,1WAIT_SEND_B0\r\n");
    add("\"\"\n\n0F0\n");
    return seeds;
  });
}
