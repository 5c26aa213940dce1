"""PyTorch's reinforcement learning over RPC: observers play, and an agent on rank 0 chooses all actions and learns.

    torchrun --nproc-per-node 3 examples/python/reinforcement.py
    torchspan run -n 3 python examples/python/reinforcement.py --batch

With --batch, the agent chooses the actions of all observers at once, which PyTorch's tutorial of batched calls does: the
function that they call returns a future, so that no thread waits for the other observers.
"""

import argparse
import os
import threading

import torch
from torch import nn

from torchspan import rpc

STEPS = 30  # of an episode


class World:
    """A ball on a line; the player pushes it left or right, and gets more reward the nearer it is to the middle."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def start(self):
        self.place, self.speed = torch.rand(2, generator=self.generator).mul(2).sub(1).tolist()
        return self.state()

    def step(self, action):
        self.speed = 0.8 * self.speed + (0.2 if action == 1 else -0.2)
        self.place += 0.3 * self.speed
        return self.state(), -abs(self.place)

    def state(self):
        return torch.tensor([self.place, self.speed])


class Observer:
    def __init__(self, number):
        self.number, self.world = number, World(number)

    def play(self, agent, batch):
        """An episode; returns the rewards."""
        state, rewards = self.world.start(), []
        for _ in range(STEPS):
            choose = agent.rpc_sync().choose_together if batch else agent.rpc_sync().choose
            state, reward = self.world.step(choose(self.number, state))
            rewards.append(reward)
        return rewards


class Agent:
    def __init__(self, observers):
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.observers, self.lock = observers, threading.Lock()
        self.chosen = {number: [] for number in range(observers)}
        self.waiting, self.actions = {}, torch.futures.Future()

    def choose(self, number, state):
        return self.act([number], state.unsqueeze(0))[number]

    @rpc.functions.async_execution
    def choose_together(self, number, state):
        """The same, once all observers have asked."""
        with self.lock:
            self.waiting[number], actions = state, self.actions
            everyone = self.waiting if len(self.waiting) == self.observers else None
            if everyone is not None:
                self.waiting, self.actions = {}, torch.futures.Future()
        if everyone is not None:
            actions.set_result(self.act(list(everyone), torch.stack(list(everyone.values()))))
        return actions.then(lambda done: done.value()[number])

    def act(self, numbers, states):
        choice = torch.distributions.Categorical(logits=self.policy(states))
        actions = choice.sample()
        for number, log_probability in zip(numbers, choice.log_prob(actions)):
            self.chosen[number].append(log_probability)
        return dict(zip(numbers, actions.tolist()))

    def learn(self, rewards):
        """A step of REINFORCE; the mean of the returns is the baseline."""
        returns = torch.tensor(rewards).flip(1).cumsum(1).flip(1)
        advantages = (returns - returns.mean(0)) if len(rewards) > 1 else returns
        probabilities = torch.stack([torch.stack(self.chosen[number]) for number in range(self.observers)])
        self.optimizer.zero_grad()
        (-probabilities * advantages).mean().backward()
        self.optimizer.step()
        self.chosen = {number: [] for number in range(self.observers)}
        return sum(map(sum, rewards)) / len(rewards)


def main():
    parser = argparse.ArgumentParser(description="Observers on the other ranks play; rank 0 learns.")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--batch", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=size)
    if rank == 0:
        agent = rpc.RRef(learner := Agent(2 * (size - 1)))
        observers = [rpc.remote(1 + number % (size - 1), Observer, args=(number,)) for number in range(2 * (size - 1))]
        scores = []
        for _ in range(arguments.episodes):
            played = [observer.rpc_async().play(agent, arguments.batch) for observer in observers]
            scores.append(learner.learn(torch.futures.wait_all(played)))
        tenth = max(1, len(scores) // 10)
        first, last = sum(scores[:tenth]) / tenth, sum(scores[-tenth:]) / tenth
        print(f"{len(observers)} observers: reward {first:.1f} in the first episodes, {last:.1f} in the last", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
