#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torchspan::autograd {

/// The tensors of one message that carry gradients, as the worker sees them that sent it; or a loss.
struct GraphPart {
  std::uint64_t message = 0;           ///< unique in the world; 0: a loss of the worker that asked
  std::string call;                    ///< the function's or operator's name
  std::string site;                    ///< where the program made the call ("train.cpp:41"), if it is known
  bool reply = false;                  ///< the call's result; else its arguments
  std::uint32_t to = 0;                ///< rank of the receiver
  std::uint32_t tensors = 0;           ///< how many of the message's tensors carry gradients
  std::vector<std::uint64_t> sources;  ///< messages that they were computed from, here
  std::uint64_t nodes = 0;             ///< of this worker's graph behind them
  std::uint64_t parameters = 0;        ///< leaves among those
};

struct WorkerGraph {
  std::string worker;
  std::uint32_t rank = 0;
  bool silent = false;  ///< it did not answer: its part and those behind it are missing
  std::vector<GraphPart> parts;
};

/// The graph of a context over all workers that take part, by rank.
struct ContextGraph {
  std::uint64_t context = 0;
  std::vector<WorkerGraph> workers;

  /// Graphviz DOT: a cluster a worker, an edge from each send to its receive, labelled with the call.
  std::string dot() const;
};

}  // namespace torchspan::autograd
