// The program of docs/tutorial.md: a network learns which of three spiral arms a point belongs to, on any number of ranks.
//   torchspan run -n 2 --max-restarts 3 tutorial checkpoints
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <torch/torch.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;

namespace {

struct Points {
  torch::Tensor places, arms;  // [n, 2], [n]
};

Points make_points(std::int64_t count) {
  const auto arms = torch::randint(3, {count}), radius = torch::rand({count});
  const auto angle = 4 * radius + arms * 2.094 + 0.15 * torch::randn({count});
  return {torch::stack({radius * torch::cos(angle), radius * torch::sin(angle)}, 1), arms};
}

torch::nn::Sequential make_network() {
  return torch::nn::Sequential(torch::nn::Linear(2, 64), torch::nn::ReLU(), torch::nn::Linear(64, 64),
                               torch::nn::ReLU(), torch::nn::Linear(64, 3));
}

void train(ts::Session& session, const char* checkpoints, std::int64_t steps) {
  torch::manual_seed(1);  // the same points and the same network on every rank
  const Points points = make_points(12000), unseen = make_points(2000);
  torch::nn::Sequential network = make_network();
  ts::DistributedDataParallel model(network, session.group());
  torch::optim::Adam optimizer(network->parameters(), 0.01);

  ts::CheckpointManager manager(session, {.directory = checkpoints});
  manager.add("network", model);
  manager.add("optimizer", optimizer);
  const std::int64_t first = manager.restore_or(0);
  if (first > 0 && session.rank() == 0) std::printf("resumed after step %ld\n", first);
  std::fflush(stdout);  // standard output is a pipe to the launcher

  const std::int64_t ranks = session.world_size(), rank = session.rank(), batch = 240;
  ts::Progress progress(session);
  ts::ProgressReport report;
  report.steps = steps;
  for (std::int64_t step = first; step < steps; ++step) {
    const std::int64_t begin = step * batch % points.arms.size(0);
    const auto mine = torch::arange(begin + rank, begin + batch, ranks);  // every rank takes other points
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(model(points.places.index_select(0, mine)),
                                                           points.arms.index_select(0, mine));
    loss.backward();  // averages the gradients of all ranks
    optimizer.step();
    report.step = step + 1;
    report.loss = loss.item<double>();
    progress.report(report);
    if ((step + 1) % 500 == 0) manager.save(step + 1);
  }
  progress.finish();
  manager.wait();

  const torch::NoGradGuard no_grad;
  const auto right = network->forward(unseen.places).argmax(1).eq(unseen.arms).to(torch::kDouble).mean();
  if (rank == 0) std::printf("%ld ranks: %.1f %% right\n", ranks, 100 * right.item<double>());
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t steps = argc > 2 ? std::atoll(argv[2]) : 5000;
  if (argc < 2 || argv[1][0] == '-' || steps < 1) {
    std::fprintf(stderr, "usage: tutorial CHECKPOINTS [STEPS]\n");
    return 2;
  }
  try {
    torch::set_num_threads(1);  // the ranks share the cores
    ts::Session session(ts::WorkerOptions::from_env());
    train(session, argv[1], steps);
    session.shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tutorial: %s\n", error.what());
    return 1;
  }
}
