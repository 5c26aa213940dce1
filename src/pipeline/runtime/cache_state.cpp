#include "pipeline/runtime/cache_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::pipeline {

Cache::Cache() : state_(std::make_unique<State>()) {}
Cache::~Cache() = default;

void Cache::State::belong_to(std::uint64_t pipeline, std::int64_t& next_number) {
  if (pipeline_ && *pipeline_ != pipeline)
    throw Error(ErrorKind::kInvalid,
                "this Cache belongs to another pipeline, which used it first; make one for each pipeline");
  if (pipeline_) return;
  pipeline_ = pipeline;
  number_ = next_number++;
}

void Cache::State::check_rows(const std::vector<std::int64_t>& rows) const {
  if (rows_.empty() || rows == rows_) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format(
          "the calls with one Cache have different rows: micro-batches of [{}] rows before, of [{}] now; "
          "pass as many rows as in the first call, or use a new Cache",
          fmt::join(rows_, ", "), fmt::join(rows, ", ")));
}

void Cache::State::commit(CacheTensors tensors, std::vector<std::int64_t> rows) {
  tensors_ = std::move(tensors);
  rows_ = std::move(rows);
}

}  // namespace torchspan::pipeline
