#include "sharded/units/pass_agreement.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {
namespace {

constexpr std::int64_t kKinds = 8;

}  // namespace

Future<at::Tensor> PassAgreement::send(Word mine) const {
  const at::Tensor words = at::zeros({group_.size()}, at::kLong);
  words.data_ptr<std::int64_t>()[group_.rank()] = mine.number * kKinds + static_cast<std::int64_t>(mine.kind);
  return group_.all_reduce(words, collective::kMax);
}

std::vector<PassAgreement::Word> PassAgreement::exchange(Word mine) const {
  const at::Tensor received = send(mine).wait();
  const auto* codes = received.data_ptr<std::int64_t>();
  std::vector<Word> words;
  for (int rank = 0; rank < group_.size(); ++rank)
    words.push_back({static_cast<Kind>(codes[rank] % kKinds), codes[rank] / kKinds});
  return words;
}

std::optional<Error> PassAgreement::begin_pass(std::int64_t number) {
  if (number <= skipped_) {
    return Error(
        ErrorKind::kInvalid,
        "a backward pass goes through outputs of a step that the ranks skip, because agree() returned "
        "false; run the next step's forward");
  }
  for (;;) {
    std::size_t passes = 0;
    const std::vector<Word> words = exchange({Kind::kPass, number});
    for (std::size_t rank = 0; rank < words.size(); ++rank) {
      const Word& word = words[rank];
      if (word.kind == Kind::kPass) ++passes;
      if (word.kind == Kind::kPass || (word.kind == Kind::kNoPass && word.number < number)) continue;
      const int global = group_.ranks()[rank];
      return Error(ErrorKind::kRemoteFailure,
                   fmt::format(
                       "rank {} runs no backward pass for this forward, so it fails on the other ranks: {}",
                       global,
                       word.kind == Kind::kNoPass ? "an exception ended its step between forward and backward"
                                                  : "it called agree()"))
          .with_worker(fmt::format("rank {}", global));
    }
    if (passes == words.size()) return std::nullopt;  // else all ranks have skipped the forward of a word
  }
}

void PassAgreement::announce_no_pass(std::int64_t number) {
  static_cast<void>(send({Kind::kNoPass, number}));
}

bool PassAgreement::agree(bool ok, std::int64_t number) {
  const auto answers = [](const Word& word) {
    return word.kind == Kind::kAgrees || word.kind == Kind::kDisagrees;
  };
  std::vector<Word> words;
  do {
    words = exchange({ok ? Kind::kAgrees : Kind::kDisagrees, number});
  } while (!std::all_of(words.begin(), words.end(), answers));
  const bool all =
      std::all_of(words.begin(), words.end(), [](const Word& word) { return word.kind == Kind::kAgrees; });
  if (!all) skipped_ = number;
  return all;
}

}  // namespace torchspan::sharded
