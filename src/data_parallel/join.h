#pragma once
#include <string>
#include <vector>

#include <torchspan/collective/group.h>

namespace torchspan::data_parallel {

/// What the ranks of a join say to each other before every forward and every reduction.
struct JoinRound {
  std::vector<bool> live;    ///< by rank: it has a batch
  bool synchronize = false;  ///< the forward is to be reduced
  bool reduces = false;      ///< no forward comes next, but the reduction of earlier ones

  int live_count() const;
  int first_live() const;
  int last_live() const;
};

struct JoinWord {
  bool live = false;
  bool synchronize = false;
  bool reduces = false;
  std::string failure = {};  ///< why the loop ended with an exception
};

/// Collective over the ranks of a join. Throws Error{kRemoteFailure} naming a rank whose loop threw and why,
/// on the others; Error{kInvalid} naming two ranks when the live ones disagree about what comes next.
JoinRound tell(const collective::Group& group, const JoinWord& mine);

}  // namespace torchspan::data_parallel
