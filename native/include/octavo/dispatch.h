// Which instruction sets were built, which of them this machine runs, and the choice of one.
#pragma once

#include <string>
#include <vector>

#include "octavo/kernels.h"

namespace octavo {

struct Choice {
  std::string name;
  const Kernels* kernels;
};

// The sets that were built and that this machine runs, the quickest first; test doubles come last.
// Asks the system for the use of the matrix unit, which is needed once in each process.
std::vector<std::string> available_sets();

// The set of that name, or the quickest if it is empty.
// Throws std::invalid_argument if it was not built or this machine does not run it.
Choice choose_set(const std::string& name);

}  // namespace octavo
