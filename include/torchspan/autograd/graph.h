#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torchspan::autograd {

/// The tensors of one message that carry gradients, as recorded by the sending worker; or a loss.
struct GraphPart {
  std::uint64_t message = 0;           ///< globally unique; 0: a loss on the worker that collects the graph
  std::string call;                    ///< function or operator name
  std::string site;                    ///< call site ("train.cpp:41"), if known
  bool reply = false;                  ///< true: a result; false: arguments
  std::uint32_t to = 0;                ///< rank of the receiver
  std::uint32_t tensors = 0;           ///< number of tensors that carry gradients
  std::vector<std::uint64_t> sources;  ///< local messages they were computed from
  std::uint64_t nodes = 0;             ///< nodes of this worker's graph behind them
  std::uint64_t parameters = 0;        ///< leaves among those nodes
};

struct WorkerGraph {
  std::string worker;
  std::uint32_t rank = 0;
  bool silent = false;  ///< no answer: its part, and parts reached only through it, are missing
  std::vector<GraphPart> parts;
};

/// The graph of a context over all participating workers, by rank.
struct ContextGraph {
  std::uint64_t context = 0;
  std::vector<WorkerGraph> workers;

  /// Graphviz DOT: one cluster per worker, one edge per send to its receive, labeled with the call.
  std::string dot() const;
};

}  // namespace torchspan::autograd
