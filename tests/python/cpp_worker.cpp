// A worker of C++ in one world with workers of Python: serves functions of many types, and calls functions of Python
// (mixed_test.py). Started with RANK, WORLD_SIZE and the others that `torchspan run` sets.
#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;

// Served by workers of Python.
at::Tensor scaled(at::Tensor tensor, double factor);
std::string joined(std::vector<std::string> words, std::optional<std::string> between);
void failing(std::string text);
at::Tensor late(at::Tensor tensor);
inline constexpr ts::Function<scaled> kScaled{"scaled"};
inline constexpr ts::Function<joined> kJoined{"joined"};
inline constexpr ts::Function<failing> kFailing{"failing"};
inline constexpr ts::Function<late> kLate{"late"};

double mean_of(const at::Tensor& tensor, std::optional<std::int64_t> dim) {
  return dim ? tensor.mean(*dim).sum().item<double>() : tensor.mean().item<double>();
}
inline constexpr ts::Function<mean_of> kMeanOf{"mean_of"};

std::vector<std::string> sorted(std::vector<std::string> words) {
  std::sort(words.begin(), words.end());
  return words;
}
inline constexpr ts::Function<sorted> kSorted{"sorted"};

std::map<std::string, double> totals(const std::map<std::string, at::Tensor>& tensors) {
  std::map<std::string, double> sums;
  for (const auto& [name, tensor] : tensors) sums[name] = tensor.sum().item<double>();
  return sums;
}
inline constexpr ts::Function<totals> kTotals{"totals"};

std::tuple<std::string, std::int32_t, bool> swapped(std::pair<std::int32_t, std::string> pair, bool flag,
                                                    float third, std::uint8_t small) {
  return {pair.second + std::to_string(third), pair.first + small, !flag};
}
inline constexpr ts::Function<swapped> kSwapped{"swapped"};

void overloaded(const std::string& text) { throw ts::Error(ts::ErrorKind::kOverloaded, text); }
inline constexpr ts::Function<overloaded> kOverloaded{"overloaded"};

std::int64_t process_of_cpp() { return getpid(); }
inline constexpr ts::Function<process_of_cpp> kProcess{"process_of_cpp"};

at::Tensor cubed(const at::Tensor& tensor) { return tensor.pow(3); }
inline constexpr ts::Function<cubed> kCubed{"cubed"};

/// An object that Python makes and uses through references.
class Counter {
 public:
  explicit Counter(std::int64_t start) : count_(start) {}
  std::int64_t add(std::int64_t number) { return count_ += number; }

 private:
  std::int64_t count_;
};
inline constexpr ts::Class<Counter, std::int64_t> kCounter{"Counter"};
inline constexpr ts::Function<&Counter::add> kAdd{"Counter.add"};
std::int64_t sum_of(const ts::RRef<Counter>& one, const ts::RRef<Counter>& other) {
  return one.local_value().add(0) + other.local_value().add(0);
}
inline constexpr ts::Function<sum_of> kSumOf{"sum_of"};
ts::RRef<Counter> another(ts::Worker& worker) { return ts::RRef<Counter>(worker, Counter(100)); }
inline constexpr ts::Function<another> kAnother{"another"};

/// What the functions of Python on `worker` return and throw.
std::vector<std::string> ask(ts::Worker& worker, const std::string& to) {
  std::vector<std::string> answers;
  answers.push_back(std::to_string(worker.rpc_sync(to, kScaled, at::ones({3}), 2.5).sum().item<double>()));
  answers.push_back(worker.rpc_sync(to, kJoined, std::vector<std::string>{"a", "b"}, std::string("+")));
  answers.push_back(worker.rpc_sync(to, kJoined, std::vector<std::string>{"a", "b"}, std::nullopt));
  answers.push_back(std::to_string(worker.rpc_sync(to, kLate, at::ones({2})).sum().item<double>()));
  answers.push_back(
      std::to_string(worker.remote(to, kScaled, at::ones({4}), 1.5).to_here().sum().item<double>()));
  try {
    worker.rpc_sync(to, kFailing, std::string("refused here"));
    answers.push_back("nothing was thrown");
  } catch (const ts::Error& error) {
    answers.push_back(error.what());
  }
  return answers;
}
inline constexpr ts::Function<ask> kAsk{"ask"};

/// The gradient of a sum of a function of Python of x, through both processes.
at::Tensor gradient_through(ts::Worker& worker, const std::string& to, const at::Tensor& x) {
  const at::Tensor leaf = x.detach().requires_grad_();
  ts::autograd::Context context(worker);
  const at::Tensor loss = worker.rpc_sync(to, kScaled, leaf.pow(2), 3.0).sum();
  context.backward(loss);
  return context.gradient(leaf);
}
inline constexpr ts::Function<gradient_through> kGradientThrough{"gradient_through"};

int main() {
  try {
    ts::FunctionTable functions;
    functions.add(kMeanOf, kSorted, kTotals, kSwapped, kOverloaded, kProcess, kCubed, kCounter, kAdd, kSumOf,
                  kAnother, kAsk, kGradientThrough);
    functions.declare(kScaled, kJoined, kFailing, kLate);
    ts::WorkerOptions options = ts::WorkerOptions::from_env();
    options.require_same_functions = false;
    ts::Session session(options, functions);
    session.shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
