#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/collective/group.h>
#include <torchspan/elastic/options.h>

namespace torchspan::elastic {

/// The state of a replica: the registered objects, in order, and the position. Copies it between ranks.
class TrackedState {
 public:
  /// Throws Error{kInvalid} if the name is taken, or begins with another object's name and a dot, or the reverse.
  void add(std::string name, checkpoint::SourcePtr source);

  /// Copies the state of rank 0 of the group to its other ranks; `position` is read on rank 0 and written on the
  /// others. Collective. On other ranks, nothing changes before all of it has arrived. Throws Error{kInvalid} naming the
  /// object if it does not fit; what the group throws if a rank dies.
  void copy_from_first(const collective::Group& group, ElasticPosition& position);

 private:
  void send(const collective::Group& group, const ElasticPosition& position) const;
  void receive(const collective::Group& group, ElasticPosition& position);

  std::vector<std::pair<std::string, checkpoint::SourcePtr>> sources_;
};

}  // namespace torchspan::elastic
