#pragma once
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <sys/prctl.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <vector>

#include <torchspan/detail/core/executor.h>

namespace torchspan::bench {

/// Returns the quantile `share` of the values, rounded down to one of them. `values` must not be empty.
inline double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

/// How often a section measures everything: TORCHSPAN_BENCH_ROUNDS, which `make bench ARGS=--quick` sets to 1; otherwise
/// `usual`.
inline int rounds_or(int usual) {
  const char* rounds = std::getenv("TORCHSPAN_BENCH_ROUNDS");
  return rounds == nullptr ? usual : std::max(1, std::atoi(rounds));
}

/// Whether this is a quick, rough run.
inline bool is_quick() { return rounds_or(2) == 1; }

/// What a figure is compared with: names of figures of the same run.
struct Against {
  std::string limit = {};  ///< the physical limit of the machine
  std::string peer =
      {};  ///< the same work by another library; the ratio of times is reported, lower is better
};

/// Measures pieces of work in turns, round after round, so that changes of the machine's speed affect all
/// figures of a run alike. Reports medians and 99th percentiles in microseconds, in the format of the section
/// files.
class Bench {
 public:
  explicit Bench(Executor& executor) : executor_(executor) {}

  /// Runs `once` `repeats` times in every round, after one run that does not count.
  void add(std::string name, int repeats, std::function<void()> once, Against against = {}) {
    figures_.push_back({std::move(name), repeats, std::move(once), std::move(against), {}});
  }

  void run(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (Figure& figure : figures_) {
        figure.once();
        for (int i = 0; i < figure.repeats; ++i) {
          const TimePoint begin = executor_.now();
          figure.once();
          const auto took = executor_.now() - begin;
          figure.samples.push_back(std::chrono::duration<double, std::micro>(took).count());
        }
      }
    }
  }

  nlohmann::json metrics() const {
    std::map<std::string, double> medians;
    for (const Figure& figure : figures_) medians[figure.name] = percentile(figure.samples, 0.5);
    nlohmann::json list = nlohmann::json::array();
    for (const Figure& figure : figures_) {
      nlohmann::json metric{{"name", figure.name},
                            {"unit", "us"},
                            {"value", medians.at(figure.name)},
                            {"p99", percentile(figure.samples, 0.99)}};
      if (!figure.against.limit.empty()) {
        metric["limit"] = figure.against.limit;
        metric["limit_value"] = medians.at(figure.against.limit);
      }
      if (!figure.against.peer.empty()) {
        metric["peer"] = figure.against.peer;
        metric["peer_value"] = medians.at(figure.against.peer);
        metric["ratio"] = medians.at(figure.name) / medians.at(figure.against.peer);
      }
      list.push_back(std::move(metric));
    }
    return list;
  }

 private:
  struct Figure {
    std::string name;
    int repeats;
    std::function<void()> once;
    Against against;
    std::vector<double> samples;
  };

  Executor& executor_;
  std::vector<Figure> figures_;
};

/// Makes a started process end with its parent, however the parent ends.
inline void end_with_parent() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* parent = std::getenv("TORCHSPAN_BENCH_PARENT");  // none: a tracer started it, say
  if (parent != nullptr && std::to_string(getppid()) != parent) _exit(1);
}

/// "AMD EPYC, "; empty if the system does not tell.
inline std::string processor_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2) + ", ";
  }
  return {};
}

/// Prints a section's file: the machine, whether the run was a quick one, and the metrics.
inline void print_section(const nlohmann::json& metrics) {
  utsname name{};
  uname(&name);
  const std::string machine = processor_model() + name.machine + ", " +
                              std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " cores, Linux " +
                              std::string(name.release).substr(0, std::string(name.release).find('-'));
  const nlohmann::json section{{"machine", machine}, {"quick", is_quick()}, {"metrics", metrics}};
  std::printf("%s\n", section.dump(2).c_str());
}

}  // namespace torchspan::bench
