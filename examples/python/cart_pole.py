"""Learns to balance poles on carts that workers of C++ simulate: rank 0 runs this program, all others cart_pole_simulator.

    torchspan run -n 3 sh -c 'if [ $RANK = 0 ]; then exec python examples/python/cart_pole.py; else exec cart_pole_simulator; fi'

The simulator of each worker is an object of C++, which this program makes and uses through a reference; its functions are
found by their names and types. The carts of all workers move at the same time.
"""

import argparse

import torch
from torch import nn

from torchspan import rpc

# As examples/cart_pole_simulator.cpp declares them.
SIMULATOR = "cart_pole::Simulator"
Simulator = rpc.typed(name="Simulator", signature=f"new (int64, int64) -> {SIMULATOR}")(lambda carts, seed: None)
states_of = rpc.typed(name="Simulator.states", signature=f"{SIMULATOR}::() -> Tensor")(lambda simulator: None)
push = rpc.typed(name="Simulator.push", signature=f"{SIMULATOR}::(Tensor) -> tuple<Tensor, Tensor, Tensor>")(
    lambda simulator, actions: None
)


def main():
    parser = argparse.ArgumentParser(description="Rank 0 learns; the other ranks simulate.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200, help="time steps of a round")
    parser.add_argument("--carts", type=int, default=16, help="of each worker")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rpc.init_rpc("learner", rpc_backend_options=rpc.Options(init_method="torchspan://"))
    workers = [info.name for info in rpc.get_worker_infos()][1:]
    simulators = [rpc.remote(worker, Simulator, args=(arguments.carts, seed)) for seed, worker in enumerate(workers)]
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)

    def on_all(function, *arguments_of_each):
        calls = [
            rpc.rpc_async(worker, function, args=(simulator, *mine))
            for worker, simulator, *mine in zip(workers, simulators, *arguments_of_each)
        ]
        return [call.wait() for call in calls]

    lengths = []
    for _ in range(arguments.rounds):
        states, log_probabilities, alive, over = torch.cat(on_all(states_of)), [], [], []
        for _ in range(arguments.steps):
            choice = torch.distributions.Categorical(logits=policy(states))
            actions = choice.sample()
            log_probabilities.append(choice.log_prob(actions))
            moved = on_all(push, actions.chunk(len(workers)))
            states, failed, ended = (torch.cat(parts) for parts in zip(*moved))
            alive.append((~failed).float())
            over.append(ended)
        # REINFORCE: the return of a step is what its episode earns from there.
        value, returns = torch.zeros(len(states)), []
        for reward, ended in zip(reversed(alive), reversed(over)):
            value = reward + 0.99 * value * (~ended)
            returns.append(value)
        returns = torch.stack(returns[::-1])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        optimizer.zero_grad()
        (-torch.stack(log_probabilities) * advantages).mean().backward()
        optimizer.step()
        lengths.append(arguments.steps * len(states) / max(1, int(torch.stack(over).sum())))
    tenth = max(1, len(lengths) // 10)
    first, last = sum(lengths[:tenth]) / tenth, sum(lengths[-tenth:]) / tenth
    print(f"{len(states)} carts on {len(workers)} workers: episodes of {first:.0f} steps at first, {last:.0f} at last", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
