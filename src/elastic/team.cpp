#include "elastic/team.h"

#include <algorithm>
#include <fmt/format.h>
#include <xxhash.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/wire/codec.h>

#include "core/api/agreement.h"
#include "core/api/throw_invalid.h"
#include "elastic/tracked_state.h"
#include "state/api/place.h"

namespace torchspan::elastic {
namespace {

collective::Group make_team_group(const Training::MakeGroup& make_group, const ElasticOptions& options,
                                  const quorum::Generation& generation) {
  collective::GroupOptions group = options.group;
  group.ranks = generation.ranks;
  group.timeout = options.step_timeout;
  // Ranks that did not make the groups of all generations are not out of step.
  const std::string name =
      group.name.empty() ? fmt::format("elastic.{:016x}", wire::digest(options.name)) : group.name;
  group.name = fmt::format("{}.{}", name, generation.number);
  return make_group(group);
}

using Tensors = std::vector<at::Tensor>;

/// By tensor: whether each rank has a value of its own.
std::vector<std::uint8_t> own_of(const Tensors& tensors) {
  std::vector<std::uint8_t> own;
  for (const at::Tensor& tensor : tensors) {
    const state::PlacePtr place = state::place_of(tensor);
    own.push_back(place && place->own ? 1 : 0);
  }
  return own;
}

std::uint64_t digest_of(const Tensors& tensors) {
  std::uint64_t digest = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    digest = XXH3_64bits_withSeed(bytes.data_ptr(), bytes.nbytes(), digest);
  }
  return digest;
}

}  // namespace

Team::Team(const Training::MakeGroup& make_group, const ElasticOptions& options,
           quorum::Generation generation)
    : generation_(std::move(generation)), group_(make_team_group(make_group, options, generation_)) {}

bool Team::holds(int rank) const {
  return std::binary_search(generation_.holders.begin(), generation_.holders.end(), rank);
}

int Team::donor() const {
  const auto place =
      std::lower_bound(generation_.ranks.begin(), generation_.ranks.end(), generation_.holders.back());
  return static_cast<int>(place - generation_.ranks.begin());
}

void Team::copy_state(TrackedState& state, DataPosition& position) const {
  if (generation_.holders == generation_.ranks) return;
  const int place = group_.rank();
  const bool takes_part = place == donor() || !holds(generation_.ranks[static_cast<std::size_t>(place)]);
  // The donor is rank 0 of its part.
  const collective::Group part = group_.split(takes_part ? 0 : 1, place == donor() ? 0 : 1);
  if (takes_part) state.copy_from_first(part, position);
}

/// The donor knows: a new process has no places, because it has not wrapped the module yet.
std::vector<at::Tensor> Team::shared(const Tensors& tensors) const {
  std::vector<std::uint8_t> own = own_of(tensors);
  if (own.empty()) return {};
  const auto size = static_cast<std::int64_t>(own.size());
  at::Tensor flags = at::from_blob(own.data(), {size}, at::kByte).clone();
  group_.broadcast(flags, donor()).wait();
  Tensors all;
  for (std::int64_t i = 0; i < size; ++i) {
    if (flags.data_ptr<std::uint8_t>()[i] == 0) all.push_back(tensors[static_cast<std::size_t>(i)]);
  }
  return all;
}

void Team::compare(const torch::nn::Module& module, const std::vector<at::Tensor>& buffers,
                   const DataPosition& position) const {
  const at::NoGradGuard no_grad;
  const Tensors parameters = shared(module.parameters());
  for (const at::Tensor& buffer : shared(buffers)) {
    at::Tensor copy = buffer.detach().contiguous();
    if (copy.numel() == 0) continue;
    group_.broadcast(copy, donor()).wait();
    if (!copy.is_same(buffer)) at::Tensor(buffer).copy_(copy);
  }
  ByteWriter mine;
  mine.put(digest_of(parameters));
  for (const std::int64_t number : {position.step, position.epoch, position.next}) mine.put(number);
  const std::vector<Bytes> all = group_.all_gather_bytes(mine.bytes());
  if (const auto other = first_difference(all)) {
    throw_invalid(
        "the parameters or positions of ranks {} and {} differ after step {}: change parameters only in "
        "`apply`, which must do the same on all ranks, and register every object that it uses with add()",
        generation_.ranks[0], generation_.ranks[*other], position.step);
  }
}

Team::Vote Team::vote(const Vote& mine) const {
  at::Tensor ballot = at::empty({4}, at::kLong);
  auto* numbers = ballot.data_ptr<std::int64_t>();
  numbers[0] = mine.failed ? 1 : 0;
  numbers[1] = mine.regroup ? 1 : 0;
  numbers[2] = mine.step;
  numbers[3] = -mine.step;
  group_.all_reduce(ballot, collective::kMax).wait();
  if (numbers[2] != -numbers[3]) {
    throw_invalid(
        "the ranks of an elastic trainer voted for the steps {} to {} at once: run the same program on all "
        "ranks, and give trainers different names",
        -numbers[3], numbers[2]);
  }
  return {.failed = numbers[0] != 0, .regroup = numbers[1] != 0, .step = mine.step};
}

}  // namespace torchspan::elastic
