#pragma once
#include <string>
#include <vector>

#include <torchspan/collective/group.h>

namespace torchspan::data_parallel {

/// What the ranks of a join say to each other before every forward.
struct JoinRound {
  std::vector<bool> live;    ///< by rank: it has a batch
  bool synchronize = false;  ///< the forward is to be reduced
  int failed = -1;           ///< a rank whose loop threw

  int live_count() const;
  int first_live() const;
  int last_live() const;
};

struct JoinWord {
  bool live = false;
  bool synchronize = false;
  bool failed = false;
};

/// Collective over the ranks of a join. Throws Error{kRemoteFailure} naming a rank whose loop threw, on the
/// others; Error{kInvalid} naming two ranks when the live ones disagree whether to reduce.
JoinRound tell(const collective::Group& group, const JoinWord& mine);

}  // namespace torchspan::data_parallel
