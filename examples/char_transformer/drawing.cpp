#include "char_transformer/drawing.h"

#include <fmt/format.h>
#include <fstream>
#include <vector>

#include <torchspan/core/error.h>

namespace char_transformer {
namespace {

namespace ts = torchspan;

void expect_written(const std::ofstream& stream, const std::string& file) {
  if (!stream)
    throw ts::Error(ts::ErrorKind::kInvalid, fmt::format("--draw {}: this file cannot be written", file));
}

}  // namespace

void check_drawing(const std::string& file) { expect_written(std::ofstream(file, std::ios::app), file); }

void draw_last_step(const ts::Pipeline& pipe, const std::string& file) {
  const auto& report = pipe.last_step();
  std::vector<ts::schedule::Timeline> timelines;
  if (!report.table.actions.empty())
    timelines.push_back(ts::schedule::simulate(
        report.table, ts::schedule::mean_costs(report.measured, report.table.stages())));
  timelines.push_back(report.measured);
  std::ofstream stream(file);
  stream << ts::schedule::draw_svg(timelines);
  stream.close();
  expect_written(stream, file);
  fmt::print("drew {}\n", file);
}

}  // namespace char_transformer
