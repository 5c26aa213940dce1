#include "optim/distributed/replicas.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <limits>

#include "core/api/saturated_time.h"

namespace torchspan::optim {
namespace {

constexpr std::string_view kClipGradNorm = "clip_grad_norm";

/// What a replica sends to the others.
struct ReplicaNorm {
  double norm = 0;
  double max_norm = 0;
  double norm_type = 0;
  std::string failure;  ///< why it has no norm

  Bytes to_bytes() const {
    ByteWriter writer;
    writer.put(norm);
    writer.put(max_norm);
    writer.put(norm_type);
    writer.put_string(failure);
    return writer.take();
  }
  static ReplicaNorm from_bytes(BytesView bytes) {
    ByteReader reader(bytes);
    ReplicaNorm norm;
    norm.norm = reader.get<double>();
    norm.max_norm = reader.get<double>();
    norm.norm_type = reader.get<double>();
    norm.failure = reader.get_string();
    return norm;
  }
};

void check(const ReplicaNorm& mine, const ReplicaNorm& theirs, const std::string& name, const char* verb) {
  if (!theirs.failure.empty()) {
    throw Error(ErrorKind::kRemoteFailure,
                fmt::format("{}(): replica '{}' could not compute its norm: {}", verb, name, theirs.failure))
        .with_worker(name);
  }
  if (mine.max_norm == theirs.max_norm && mine.norm_type == theirs.norm_type) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("{}(): replica '{}' uses {} = {} and norm_type = {}, this one {} and {}; use the same "
                  "on all replicas",
                  verb, name, std::string_view(verb) == kClipGradNorm ? "max_norm" : "factor",
                  theirs.max_norm, theirs.norm_type, mine.max_norm, mine.norm_type));
}

}  // namespace

double largest_norm(const Worker& worker, const ClipOptions& options, const char* verb,
                    const std::function<double()>& norm_here) {
  std::vector<std::string> names;
  const auto self = static_cast<int>(worker.rank());
  if (std::find(options.replicas.begin(), options.replicas.end(), self) == options.replicas.end()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{}(): this worker, rank {}, is not among the replicas", verb, self));
  }
  for (const int rank : options.replicas) names.push_back(worker.info(rank).name);
  ReplicaNorm mine{0, options.max_norm, options.norm_type, ""};
  std::exception_ptr failure;
  try {
    mine.norm = norm_here();
  } catch (...) {
    failure = std::current_exception();
    mine.failure = to_error(failure).message();
  }
  std::vector<Bytes> all;
  try {
    all = worker.endpoint()->all_gather_bytes(
        std::string("optim.") + verb, mine.to_bytes(), names,
        worker.runtime().executor.deadline_in(no_limit_if_zero(options.timeout)));
  } catch (...) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
  double largest = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const ReplicaNorm theirs = ReplicaNorm::from_bytes(all[i]);
    check(mine, theirs, names[i], verb);
    const bool number = !std::isnan(theirs.norm) && !std::isnan(largest);
    largest = number ? std::max(largest, theirs.norm) : std::numeric_limits<double>::quiet_NaN();
  }
  return largest;
}

void refuse_local_norm(const std::string& averaged, const std::string& own, const char* verb) {
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("{}(): the gradient of {} is an average over replicas, and that of {} is not. Each replica "
                  "would decide by different gradients, and their parameters would diverge without an error: "
                  "name the replicas ({}) on all of them, or use a separate optimizer for the averaged "
                  "parameters",
                  verb, averaged, own,
                  std::string_view(verb) == kClipGradNorm
                      ? "clip_grad_norm(context, {.max_norm = …, .replicas = group.ranks()})"
                      : "GradScalerOptions::replicas = group.ranks()"));
}

}  // namespace torchspan::optim
