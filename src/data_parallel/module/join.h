#pragma once
#include <string>
#include <vector>

#include <torchspan/collective/group.h>

namespace torchspan::data_parallel {

/// What the ranks of a join() do next, as they agreed before a forward or a reduction.
struct JoinRound {
  std::vector<bool> live;    ///< by rank: it has a batch
  bool synchronize = false;  ///< the forward will be reduced
  bool reduces = false;      ///< a reduction of earlier forwards follows, not a forward

  int live_count() const;
  int first_live() const;
  int last_live() const;
};

/// One rank's part of that agreement.
struct JoinWord {
  bool live = false;
  bool synchronize = false;
  bool reduces = false;
  std::string failure = {};  ///< why the loop ended with an exception
};

/// Collective over the ranks of a join(). Throws Error{kRemoteFailure} that names a rank whose loop threw, and
/// why, on the other ranks; Error{kInvalid} that names two ranks if live ranks disagree about what follows.
JoinRound agree_on_next_round(const collective::Group& group, const JoinWord& mine);

}  // namespace torchspan::data_parallel
