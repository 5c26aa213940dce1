#pragma once
#include <string>
#include <vector>

#include "fashion_mnist/model.h"

namespace fashion_mnist {

/// A part of a training, the worker that it ran on, and what it computed there.
struct Placed {
  std::string worker, part;
  WorkReport report;
};

/// Prints a table of what ran where.
void print_placement(const std::vector<Placed>& parts);

}  // namespace fashion_mnist
